"""Matrix products, also for experts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import opcode, store


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a b in f32, however the matrices are stored."""
    if a.dtype == torch.bfloat16 and a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


@opcode
def matmul(c: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, *, trans_a: bool, trans_b: bool, accumulate: bool) -> None:
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    a, b = a.T if trans_a else a, b.T if trans_b else b
    if bias is None and c.dtype == a.dtype and (c.dtype == torch.float32 or c.is_cuda and not accumulate):
        torch.addmm(c, a, b, beta=1 if accumulate else 0, out=c)  # with beta 0, what was there does not matter
        return
    value = product(a, b)
    store(c, value if bias is None else value + bias.float(), accumulate)


@opcode
def bias_grad(db: Tensor, dy: Tensor, *, accumulate: bool) -> None:
    store(db, dy.float().sum(0), accumulate)


def _rows(ends: Tensor, n: int) -> list[slice]:
    """Returns the rows of each expert. Reading the ends waits for the device."""
    to = ends.tolist()
    if to != sorted(to) or to[-1] > n or to[0] < 0:
        raise ValueError(f"the rows of experts end at {to}, of {n}")
    return [slice(a, b) for a, b in zip([0, *to[:-1]], to)]


@opcode
def matmul_grouped(
    c: Tensor, a: Tensor, ends: Tensor, b: Tensor, bias: Tensor | None, *, trans_b: bool, accumulate: bool, share: float
) -> None:
    for e, rows in enumerate(_rows(ends, a.shape[0])):
        value = product(a[rows], b[e].T if trans_b else b[e])
        store(c[rows], value if bias is None else value + bias[e].float(), accumulate)


@opcode
def matmul_grouped_weight_grad(
    db: Tensor | None, dbias: Tensor | None, dy: Tensor, ends: Tensor, a: Tensor | None, *, trans_b: bool, accumulate: bool,
    accumulate_bias: bool, share: float,
) -> None:
    for e, rows in enumerate(_rows(ends, dy.shape[0])):
        if db is not None and a is not None:
            store(db[e], product(dy[rows].T, a[rows]) if trans_b else product(a[rows].T, dy[rows]), accumulate)
        if dbias is not None:
            store(dbias[e], dy[rows].float().sum(0), accumulate_bias)
