"""Attention over all keys or a block of them: by flash kernels where they can, otherwise with the scores of a block of queries stored
at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

from . import fused, opcode, store, zigzag_rows

# At most this many scores are stored at once, if one query of every head needs no more.
SCORES = 1 << 24


@dataclass
class _Shape:
    """The sizes of an attention instruction, and which keys a query sees."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    prefix: int
    zigzag: int
    window: int
    chunks: int
    member: int
    softcap: float
    positions: Tensor | None

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Returns an operand as [batch, kv_heads, heads / kv_heads, rows, head_dim], in f32."""
        wide = x.float().view(-1, self.batch, self.kv_heads, heads // self.kv_heads, x.shape[1] // heads)
        return wide.permute(1, 2, 3, 0, 4)

    def join(self, x: Tensor) -> Tensor:
        """Undoes split."""
        return x.permute(3, 0, 1, 2, 4).reshape(x.shape[3] * self.batch, -1)

    def blocks(self, n: int, keys: int) -> Iterator[slice]:
        size = max(1, SCORES // (self.batch * self.heads * keys))
        return (slice(i, min(n, i + size)) for i in range(0, n, size))

    def visible(self, n: int, keys: int, rows: slice, device: torch.device) -> Tensor:
        """Reports which keys the queries of a block see, as [batch or 1, 1, 1, rows, keys]."""
        key = torch.arange(keys, device=device)
        local = torch.arange(n, device=device)[rows, None]
        query = zigzag_rows(n, self.chunks, self.member, device)[rows, None]
        if self.zigzag == 0:
            seen = key <= self.prefix + query
        elif self.zigzag == 1:
            seen = (key < self.prefix + (keys - self.prefix) // 2).expand(len(query), keys)
        else:
            seen = (key < self.prefix) | (local >= n // 2)
        if self.window:
            seen = seen & (key > self.prefix + query - self.window)
        if self.positions is None:
            return seen[None, None, None]
        position = self.positions.view(-1, self.batch)[query[:, 0]].T[:, :, None]
        return (seen & (key >= self.prefix + query - position))[:, None, None]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the scores before masking. q is [batch, kv_heads, group, rows, dim], k has 1 in place of group."""
        flat = q.flatten(2, 3) @ k[:, :, 0].transpose(2, 3) / math.sqrt(self.head_dim)
        if self.softcap:
            flat = self.softcap * (flat / self.softcap).tanh()
        return flat.view(*q.shape[:4], -1)


def _weighted(p: Tensor, x: Tensor) -> Tensor:
    """Returns p x for p [batch, kv_heads, group, rows, keys] and x [batch, kv_heads, 1, keys, dim]."""
    return (p.flatten(2, 3) @ x[:, :, 0]).view(*p.shape[:4], -1)


def _share(lse: Tensor, total: Tensor) -> Tensor:
    """Returns exp(lse - total), 0 if there are no keys at all."""
    return torch.where(total == -torch.inf, 0.0, (lse - total).exp())


def _forward(shape: _Shape, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns o and lse over the keys of an instruction, split."""
    queries, keys, values = shape.split(q, shape.heads), shape.split(k, shape.kv_heads), shape.split(v, shape.kv_heads)
    n, m = queries.shape[3], keys.shape[3]
    outputs, totals = queries.new_empty(*queries.shape[:4], values.shape[4]), torch.empty_like(queries[..., :1])
    for rows in shape.blocks(n, m):
        seen = shape.visible(n, m, rows, q.device)
        scores = torch.where(seen, shape.scores(queries[:, :, :, rows], keys), -torch.inf)
        top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        p = (scores - top).exp()
        z = p.sum(-1, keepdim=True)
        outputs[:, :, :, rows] = _weighted(p, values) / torch.where(z == 0, 1.0, z)
        totals[:, :, :, rows] = z.log() + top
    return outputs, totals


@opcode
def attention(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, *, heads: int, kv_heads: int,
    head_dim: int, batch: int, prefix: int, accumulate: bool, zigzag: int, window: int, chunks: int, member: int, softcap: float,
) -> None:
    shape = _Shape(heads, kv_heads, head_dim, batch, prefix, zigzag, window, chunks, member, softcap, positions)
    if fused.usable(o, q, v, kv_heads, head_dim, window, softcap, positions):
        blocks = fused.parts(len(q) // batch, len(k) // batch, prefix, zigzag, chunks, member)
        outputs, totals = fused.forward(q, k, v, blocks, batch, heads, kv_heads)
        outputs, totals = shape.split(outputs, heads), shape.split(totals, heads)
    else:
        outputs, totals = _forward(shape, q, k, v)
    if accumulate:
        before, before_lse = shape.split(o, heads), shape.split(lse, heads)
        both = torch.logaddexp(before_lse, totals)
        outputs = before * _share(before_lse, both) + outputs * _share(totals, both)
        totals = both
    store(o, shape.join(outputs))
    store(lse, shape.join(totals))


@opcode
def attention_grad(
    dq: Tensor, dk: Tensor, dv: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, lse: Tensor,
    delta: Tensor | None, positions: Tensor | None, *, heads: int, kv_heads: int, head_dim: int, batch: int, prefix: int,
    accumulate: bool, accumulate_q: bool, zigzag: int, window: int, chunks: int, member: int, softcap: float,
) -> None:
    shape = _Shape(heads, kv_heads, head_dim, batch, prefix, zigzag, window, chunks, member, softcap, positions)
    if fused.usable(o, q, v, kv_heads, head_dim, window, softcap, positions):
        blocks = fused.parts(len(q) // batch, len(k) // batch, prefix, zigzag, chunks, member)
        grads = fused.backward(do, q, k, v, o, lse, blocks, batch, heads, kv_heads)
        for out, grad, add in zip((dq, dk, dv), grads, (accumulate_q, accumulate, accumulate)):
            store(out, grad, add)
        return
    queries, grads, totals = shape.split(q, heads), shape.split(do, heads), shape.split(lse, heads)
    keys, values = shape.split(k, kv_heads), shape.split(v, kv_heads)
    if delta is not None:
        deltas = shape.split(delta, heads)
    else:
        deltas = (grads * shape.split(o, heads)).sum(-1, keepdim=True)
    n, m = queries.shape[3], keys.shape[3]
    of_queries, of_keys, of_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for rows in shape.blocks(n, m):
        block, g = queries[:, :, :, rows], grads[:, :, :, rows]
        scores = shape.scores(block, keys)
        seen = shape.visible(n, m, rows, q.device)
        p = torch.where(seen, (scores - totals[:, :, :, rows]).exp(), 0.0)
        ds = p * (_weighted(g, values.transpose(3, 4)) - deltas[:, :, :, rows])
        if softcap:
            ds = ds * (1 - (scores / softcap).square())
        ds = ds / math.sqrt(head_dim)
        of_queries[:, :, :, rows] = _weighted(ds, keys)
        of_values[:, :, 0] += p.flatten(2, 3).transpose(2, 3) @ g.flatten(2, 3)
        of_keys[:, :, 0] += ds.flatten(2, 3).transpose(2, 3) @ block.flatten(2, 3)
    store(dq, shape.join(of_queries), accumulate_q)
    store(dk, shape.join(of_keys), accumulate)
    store(dv, shape.join(of_values), accumulate)


@opcode
def attention_merge(o: Tensor, lse: Tensor, parts: Tensor, lses: Tensor, *, heads: int, head_dim: int) -> None:
    total = lses.logsumexp(0)
    value = torch.zeros(total.shape + (head_dim,), device=o.device)
    for part, of_part in zip(parts, lses):
        value = value + part.float().view_as(value) * _share(of_part, total)[..., None]
    store(o, value)
    store(lse, total)


@opcode
def attention_delta(delta: Tensor, do: Tensor, o: Tensor, *, heads: int, head_dim: int) -> None:
    store(delta, _per_head(do, o, heads))


def _per_head(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Returns the inner products of the heads of two matrices, [rows, heads]."""
    return (a.float() * b.float()).view(len(a), heads, -1).sum(2)


@opcode
def attention_sink(o: Tensor, lse: Tensor, sink: Tensor, *, heads: int, head_dim: int) -> None:
    total = torch.logaddexp(lse, sink.float().expand_as(lse))
    store(o, o.float().view(len(o), heads, head_dim) * _share(lse, total)[..., None])
    store(lse, total)


@opcode
def attention_sink_grad(
    dsink: Tensor, do: Tensor, o: Tensor, lse: Tensor, sink: Tensor, *, heads: int, head_dim: int, accumulate: bool,
) -> None:
    store(dsink, -((sink.float() - lse).exp() * _per_head(do, o, heads)).sum(0), accumulate)


@opcode
def concat_heads(y: Tensor, shared: Tensor, x: Tensor, *, heads: int, head_dim: int) -> None:
    own = x.view(len(x), heads, -1)
    store(y, torch.cat([shared[:, None].expand(-1, heads, -1), own], 2).flatten(1))


@opcode
def concat_heads_grad(dshared: Tensor, dx: Tensor, dy: Tensor, *, heads: int, head_dim: int) -> None:
    of_shared, own = dy.float().view(len(dy), heads, head_dim).split([dshared.shape[1], head_dim - dshared.shape[1]], 2)
    store(dshared, of_shared.sum(1))
    store(dx, own.flatten(1))
