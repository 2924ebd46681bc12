"""Embeddings, rotary positions, initial values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import randoms
from . import opcode, store, zigzag_rows


@opcode
def init_normal(w: Tensor, *, tensor: randoms.Parameter, row: int, col: int, std: float, end: int) -> None:
    rows = torch.arange(row, row + w.shape[0], device=w.device)[:, None]
    columns = torch.arange(col, col + w.shape[1], device=w.device)
    values = randoms.normal(randoms.key(tensor.seed, "init " + tensor.name), rows * tensor.columns + columns, std)
    inside = (rows < (end or tensor.rows)) & (columns < tensor.columns)
    store(w, torch.where(inside, values.float(), 0.0))


@opcode
def embed(y: Tensor, tokens: Tensor, table: Tensor, *, first: int, scale: float) -> None:
    local, here = _local(tokens, first, table)
    store(y, torch.where(here[:, None], table[local].float() * (scale or 1), 0.0))


@opcode
def embed_grad(dtable: Tensor, tokens: Tensor, dy: Tensor, *, first: int, accumulate: bool, scale: float) -> None:
    if not accumulate:
        dtable.zero_()
    local, here = _local(tokens, first, dtable)
    # Rows of tokens on other ranks are added as zeros, so that no number of rows has to be known here.
    dtable.index_add_(0, local, torch.where(here[:, None], dy.float() * (scale or 1), 0.0))


def _local(tokens: Tensor, first: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the table row of each token, and whether it is on this rank; row 0 if it is not."""
    local = tokens.long() - first
    here = (local >= 0) & (local < table.shape[0])
    return torch.where(here, local, 0), here


@opcode
def position_embed(y: Tensor, x: Tensor, table: Tensor, *, batch: int) -> None:
    store(y, x.float().view(-1, batch, x.shape[1]) + table.float()[:, None])


@opcode
def position_embed_grad(dtable: Tensor, dy: Tensor, *, batch: int, accumulate: bool) -> None:
    store(dtable, dy.float().view(-1, batch, dy.shape[1]).sum(1), accumulate)


@opcode
def rope(
    y: Tensor, x: Tensor, positions: Tensor | None, *, heads: int, head_dim: int, batch: int, position: int, theta: float,
    inverse: bool, chunks: int, member: int, rotation: dict[str, Any] | None,
) -> None:
    rows = zigzag_rows(x.shape[0] // batch, chunks, member, x.device)
    if positions is not None:
        at = positions.view(-1, batch)[rows]
    else:
        at = (position + rows)[:, None].expand(-1, batch)
    growth = torch.ones((), dtype=torch.float64, device=x.device)
    if rotation is None:
        rates = theta ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64, device=x.device) / head_dim)
        scale, rest = 1.0, 1.0
    else:
        rates = torch.tensor(rotation["rates"], dtype=torch.float64, device=x.device)
        scale, rest = rotation.get("scale", 1.0), rotation.get("rest", 1.0)
        if beta := rotation.get("beta", 0.0):
            growth = 1 + beta * torch.log1p((at // rotation["period"]).double())[:, :, None, None]
    pairs = len(rates)
    angle = at.double()[:, :, None, None] * rates
    scale = scale * growth
    cos, sin = (angle.cos() * scale).float(), (angle.sin() * (-scale if inverse else scale)).float()
    a, b, others = x.float().view(-1, batch, heads, head_dim).split([pairs, pairs, head_dim - 2 * pairs], dim=3)
    store(y, torch.cat([a * cos - b * sin, b * cos + a * sin, others * (rest * growth).float()], dim=3))
