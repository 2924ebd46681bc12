"""The random numbers of docs/bytecode.md: 64-bit numbers of a counter. Tensors of 64-bit numbers are int64, whose sums and
products wrap around; scalars are Python's, reduced explicitly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model, as instructions name it: its name and shape, and the seed of the run."""

    name: str
    rows: int
    columns: int
    seed: int


def _signed(n: int) -> int:
    return n - (1 << 64) if n >> 63 else n


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * _M1 & _MASK
    z = (z ^ z >> 27) * _M2 & _MASK
    return z ^ z >> 31


def key(seed: int, name: str, *numbers: int) -> int:
    """Returns the key of a purpose."""
    k = _mix(seed + _GOLDEN & _MASK)
    for c in name.encode():
        k = _mix(k ^ c)
    for n in numbers:
        k = _mix((k + _GOLDEN & _MASK) ^ n)
    return k


def value(k: int, i: int) -> int:
    return _mix(k + (i + 1) * _GOLDEN & _MASK)


def below(k: int, i: int, n: int) -> int:
    """Returns a number from 0 to n-1."""
    return value(k, i) * n >> 64


def _shift(z: Tensor, n: int) -> Tensor:
    """Shifts to the right, filling with zeros."""
    return z >> n & ((1 << 64 - n) - 1)


def _mixes(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_M1)
    z = (z ^ _shift(z, 27)) * _signed(_M2)
    return z ^ _shift(z, 31)


def values(k: Tensor | int, i: Tensor) -> Tensor:
    """Returns the numbers i of a key, or of several that broadcast with i."""
    k = _signed(k) if isinstance(k, int) else k
    return _mixes(k + (i + 1) * _signed(_GOLDEN))


def below_all(k: int, i: Tensor, n: int) -> Tensor:
    """Returns numbers from 0 to n-1, for n below 2^31."""
    v = values(k, i)
    high, low = _shift(v, 32), v & 0xFFFFFFFF
    return high * n + _shift(low * n, 32) >> 32


def normal(k: int, i: Tensor, std: float) -> Tensor:
    """Returns the normal numbers i of a key, in f64."""
    pair = i & ~1
    uniform = [(_shift(values(k, pair + n), 11) + 1).double() * 2.0**-53 for n in (0, 1)]
    radius = (-2 * uniform[0].log()).sqrt() * std
    angle = 2 * math.pi * uniform[1]
    return radius * torch.where(i & 1 == 1, angle.sin(), angle.cos())


def kept(step_key: Tensor, tensor: str, rate: float, sequences: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Reports for every position, sequence and column, in this order, whether dropout keeps the element. step_key has the halves
    of the step's key, the lower first."""
    low, high = step_key.long().unbind()
    k = (high << 32 | low & 0xFFFFFFFF) ^ _signed(key(0, "dropout " + tensor))
    of_token = values(values(k, sequences)[None, :], positions[:, None])
    both = values(of_token[:, :, None], columns // 2)
    half = torch.where(columns & 1 == 1, _shift(both, 32), both & 0xFFFFFFFF)
    return half >= min(round(rate * 2**32), 2**32 - 1)
