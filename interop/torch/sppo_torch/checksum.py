"""CRC-32C (Castagnoli), which neither Python nor numpy has. Long inputs are cut into lanes, which advance side by side."""

from __future__ import annotations

from functools import reduce
from operator import xor

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected
_LANES = 4096


def _byte_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1).astype(np.uint32)
    return table


_TABLE = _byte_table()


def crc32c(data: bytes | memoryview | np.ndarray) -> int:
    """Returns the CRC-32C of the bytes."""
    text = np.frombuffer(data, np.uint8)
    length = len(text) // _LANES
    head, tail = text[: length * _LANES].reshape(_LANES, length), text[length * _LANES :]
    # The remainders of the lanes, each with 0 before its first byte, and what becomes of each bit of a remainder past a lane of zeros.
    states = np.concatenate([np.zeros(_LANES, np.uint32), np.uint32(1) << np.arange(32, dtype=np.uint32)])
    for column in head.T:
        states[:_LANES] ^= column
        states = _TABLE[states & 0xFF] ^ (states >> 8)
    lanes, bits = states[:_LANES].tolist(), states[_LANES:].tolist()
    state = 0xFFFFFFFF
    for lane in lanes:
        state = reduce(xor, (b for i, b in enumerate(bits) if state >> i & 1), lane)
    table = _TABLE.tolist()
    for byte in tail.tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF
