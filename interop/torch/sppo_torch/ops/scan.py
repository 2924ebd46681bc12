"""Scans, token by token, and the convolutions before them. Gradients are those of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from . import differentiable


@differentiable
def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None, positions: Tensor | None, *, heads: int,
    shared: int, key_dim: int, value_dim: int, batch: int, channels: int, delta: bool, norm: float, scale: float,
) -> tuple[Tensor, Tensor]:
    def heads_of(x: Tensor, number: int) -> Tensor:
        return x.reshape(len(x) // batch, batch, number, -1)

    def normal(x: Tensor) -> Tensor:
        x = heads_of(x, heads)
        if norm:
            x = x / (x.square().sum(-1, keepdim=True) + norm).sqrt()
        return x.repeat_interleave(shared, 2)

    q, k, v = normal(q) * (scale or 1), normal(k), heads_of(v, heads * shared)
    kept, beta = heads_of(decay, heads * shared).exp(), heads_of(beta, heads * shared)
    if positions is not None:
        kept = kept * (positions.reshape(-1, batch, 1, 1) != 0)
    if state is None:
        state = q.new_zeros(batch, heads * shared, key_dim, value_dim)
    out = []
    for t in range(len(q)):
        state = kept[t][..., None] * state
        error = v[t] - torch.einsum("bhkv,bhk->bhv", state, k[t]) if delta else v[t]
        state = state + k[t][..., None] * (beta[t] * error)[..., None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[t]))
    return torch.stack(out), state


@differentiable
def conv(
    x: Tensor, w: Tensor, bias: Tensor | None, tail: Tensor | None, positions: Tensor | None, *, width: int, batch: int
) -> tuple[Tensor, Tensor]:
    rows = torch.cat([x.new_zeros(width * batch, x.shape[1]) if tail is None else tail, x])
    total = x.new_zeros(x.shape) if bias is None else bias.expand(x.shape)
    for j in range(width):
        term = w[:, width - 1 - j] * rows[(width - j) * batch :][: len(x)]
        if positions is not None:
            term = torch.where((positions >= j)[:, None], term, 0)
        total = total + term
    return total * total.sigmoid(), rows[len(x) :]


@differentiable
def decay(x: Tensor, rate: Tensor, bias: Tensor, *, heads: int, head_dim: int, least: float) -> tuple[Tensor, Tensor]:
    step = torch.logaddexp(x + bias, torch.zeros_like(x))
    step = torch.where(step < least, least, step)
    return -rate.exp().repeat_interleave(head_dim) * step, step


@differentiable
def scale_columns(x: Tensor, factor: Tensor, *, heads: int, head_dim: int) -> tuple[Tensor]:
    return (x * factor.repeat_interleave(head_dim),)
