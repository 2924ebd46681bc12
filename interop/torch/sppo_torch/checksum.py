"""CRC-32C (Castagnoli), which neither Python nor numpy has. Long inputs are cut into lanes, which advance side by side."""

from __future__ import annotations

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected
_LANES = 4096


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE = _byte_table()


def _zeros_operator(length: int) -> np.ndarray:
    """Returns four tables of 256 that together move a remainder past `length` zero bytes."""
    # columns[i] is what becomes of bit i. Start with one zero byte, then square and multiply.
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    step = _TABLE[bits & 0xFF] ^ (bits >> 8)
    result = bits.copy()
    while length:
        if length & 1:
            result = _apply(_tables(step), result)
        step = _apply(_tables(step), step)
        length >>= 1
    return _tables(result)


def _tables(columns: np.ndarray) -> np.ndarray:
    values = np.arange(256, dtype=np.uint32)
    tables = np.zeros((4, 256), np.uint32)
    for i in range(32):
        tables[i // 8] ^= np.where(values >> (i % 8) & 1, columns[i], np.uint32(0)).astype(np.uint32)
    return tables


def _apply(tables: np.ndarray, values: np.ndarray) -> np.ndarray:
    return tables[0][values & 0xFF] ^ tables[1][values >> 8 & 0xFF] ^ tables[2][values >> 16 & 0xFF] ^ tables[3][values >> 24]


def crc32c(data: bytes | memoryview | np.ndarray) -> int:
    """Returns the CRC-32C of the bytes."""
    text = np.frombuffer(data, np.uint8)
    length = len(text) // _LANES
    head = text[: length * _LANES].reshape(_LANES, length)
    # Each lane's remainder, with 0 before its first byte; the first lane starts with all ones, as the checksum does.
    lanes = np.zeros(_LANES, np.uint32)
    lanes[0] = 0xFFFFFFFF
    for column in head.T:
        lanes = _TABLE[(lanes ^ column) & 0xFF] ^ (lanes >> 8)
    while len(lanes) > 1:
        lanes = _apply(_zeros_operator(length), lanes[0::2]) ^ lanes[1::2]
        length *= 2
    state = int(lanes[0])
    table = _TABLE.tolist()
    for byte in text[len(head.reshape(-1)) :].tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF
