"""Attention by torch's flash kernels, where they compute exactly the same function.

A flash kernel lets a block of queries see all keys of a block, or, of equally many keys, those up to its own place. The keys that an
instruction shows to its queries are divided into such blocks; the results are merged in f32 by their log-sum-exp. Windows, documents
and caps cannot be expressed, and neither can f32 on CUDA: the plain path computes those.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

# Whether attention uses these kernels; the command sets it.
enabled = False


class Part(NamedTuple):
    """A block of queries that see a block of keys: all of them, or, if it is causal, those up to their own place."""

    rows: slice
    keys: slice
    causal: bool


def usable(
    o: Tensor | None, q: Tensor, v: Tensor, kv_heads: int, head_dim: int, window: int, softcap: float, positions: Tensor | None
) -> bool:
    """Reports whether the kernels can compute an instruction. They round the output like the operands, and gradients need it."""
    if not enabled or window or softcap or positions is not None or o is None or o.dtype != q.dtype or v.shape[1] != kv_heads * head_dim:
        return False
    return not q.is_cuda or q.dtype == torch.bfloat16 and head_dim % 8 == 0 and head_dim <= 256


def parts(n: int, keys: int, prefix: int, zigzag: int, chunks: int, member: int) -> list[Part]:
    """Returns the blocks that together are what n queries see of the keys. Each query sees a key in at most one of them."""
    half = n // 2
    if zigzag == 1:
        found = [Part(slice(0, n), slice(0, prefix + (keys - prefix) // 2), False)]
    elif zigzag == 2:
        found = [Part(slice(half, n), slice(0, keys), False), Part(slice(0, half), slice(0, prefix), False)]
    elif chunks:
        found = _runs(keys, slice(0, half), prefix + member * half)
        found += _runs(keys, slice(half, n), prefix + (chunks - 1 - member) * half)
    else:
        found = _runs(keys, slice(0, n), prefix)
    return [p for p in found if p.rows.start < p.rows.stop and p.keys.start < p.keys.stop]


def _runs(keys: int, rows: slice, first: int) -> list[Part]:
    """Returns the blocks of adjacent queries, the first of which is at the place of key `first`."""
    own = min(keys - first, rows.stop - rows.start)  # queries whose own keys are among the keys
    if own <= 0:
        return [Part(rows, slice(0, keys), False)]
    middle = rows.start + own
    return [
        Part(rows, slice(0, first), False),
        Part(slice(rows.start, middle), slice(first, first + own), True),
        Part(slice(middle, rows.stop), slice(first, first + own), False),
    ]


def _heads(x: Tensor, batch: int, heads: int) -> Tensor:
    """Returns an operand as [batch, heads, rows, head_dim]."""
    return x.view(-1, batch, heads, x.shape[1] // heads).permute(1, 2, 0, 3)


def _joined(x: Tensor) -> Tensor:
    """Undoes _heads."""
    return x.permute(2, 0, 1, 3).reshape(x.shape[2] * x.shape[0], -1)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    return op(q, k, v, 0.0, causal)[:2]


def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused
    )


def _shared(x: Tensor, heads: int) -> Tensor:
    """Repeats key heads for the query heads that share them, where the kernel does not do that."""
    return x if x.is_cuda else x.repeat_interleave(heads // x.shape[1], 1)


def forward(q: Tensor, k: Tensor, v: Tensor, blocks: list[Part], batch: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Returns o and lse, in f32, as [rows*batch, heads*head_dim] and [rows*batch, heads]."""
    q, k, v = _heads(q, batch, heads), _shared(_heads(k, batch, kv_heads), heads), _shared(_heads(v, batch, kv_heads), heads)
    outputs = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    totals = torch.full((*q.shape[:3], 1), -torch.inf, device=q.device)
    for rows, keys, causal in blocks:
        o, lse = _forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)
        before, lse = totals[:, :, rows], lse[..., None]
        both = torch.logaddexp(before, lse)
        outputs[:, :, rows] = outputs[:, :, rows] * (before - both).exp() + o.float() * (lse - both).exp()
        totals[:, :, rows] = both
    return _joined(outputs), _joined(totals)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, blocks: list[Part], batch: int, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv, in f32 and the shapes of the operands. o and lse are over all keys that a query sees."""
    do, q, o = (_heads(x, batch, heads) for x in (do, q, o))
    lse = _heads(lse, batch, heads)[..., 0]
    k, v = _heads(k, batch, kv_heads), _heads(v, batch, kv_heads)
    of: list[Tensor] = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
    for rows, keys, causal in blocks:
        ours, theirs = [_shared(x[:, :, keys], heads) for x in (k, v)], [x[:, :, rows] for x in (do, q, o)]
        grads = _backward(theirs[0], theirs[1], *ours, theirs[2], lse[:, :, rows].contiguous(), causal)
        of[0][:, :, rows] += grads[0]
        for total, grad in zip(of[1:], grads[1:]):
            total[:, :, keys] += grad.float().unflatten(1, (kv_heads, -1)).sum(2)
    return _joined(of[0]), _joined(of[1]), _joined(of[2])

