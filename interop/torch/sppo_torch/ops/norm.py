"""Layernorm and rmsnorm."""

from __future__ import annotations

import torch
from torch import Tensor

from . import opcode, store


@opcode
def layernorm(y: Tensor, stats: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, *, eps: float, offset: float) -> None:
    wide = x.float()
    mean = wide.mean(1, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    store(y, centred * rstd * (offset + gamma.float()) + beta.float())
    store(stats, torch.cat([mean, rstd], 1))


@opcode
def layernorm_grad(
    dx: Tensor, dgamma: Tensor | None, dbeta: Tensor | None, dy: Tensor, x: Tensor, stats: Tensor, gamma: Tensor,
    residual: Tensor | None, *, accumulate: bool, offset: float,
) -> None:
    mean, rstd = stats.split(1, dim=1)
    normal = (x.float() - mean) * rstd
    _grad(dx, dgamma, dy, normal, rstd, gamma, residual, accumulate, offset, centred=True)
    if dbeta is not None:
        store(dbeta, dy.float().sum(0), accumulate)


@opcode
def rmsnorm(y: Tensor, stats: Tensor, x: Tensor, gamma: Tensor, *, eps: float, offset: float) -> None:
    wide = x.float()
    rstd = (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    store(y, wide * rstd * (offset + gamma.float()))
    store(stats, rstd)


@opcode
def rmsnorm_grad(
    dx: Tensor, dgamma: Tensor | None, dy: Tensor, x: Tensor, stats: Tensor, gamma: Tensor, residual: Tensor | None, *,
    accumulate: bool, offset: float,
) -> None:
    _grad(dx, dgamma, dy, x.float() * stats, stats, gamma, residual, accumulate, offset, centred=False)


def _grad(
    dx: Tensor, dgamma: Tensor | None, dy: Tensor, normal: Tensor, rstd: Tensor, gamma: Tensor, residual: Tensor | None,
    accumulate: bool, offset: float, centred: bool,
) -> None:
    """Writes dx and dgamma; `normal` is x, normalised."""
    wide = dy.float()
    g = wide * (offset + gamma.float())
    value = g - normal * (g * normal).mean(1, keepdim=True)
    if centred:
        value = value - g.mean(1, keepdim=True)
    value = value * rstd
    if dgamma is not None:
        store(dgamma, (wide * normal).sum(0), accumulate)
    store(dx, value if residual is None else value + residual.float())
