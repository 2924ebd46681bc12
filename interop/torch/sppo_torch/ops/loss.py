"""Cross entropy over a divided vocabulary, and the norm of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from . import opcode, store


def _capped(logits: Tensor, softcap: float) -> Tensor:
    wide = logits.float()
    return softcap * (wide / softcap).tanh() if softcap else wide


def _label(labels: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Returns the column of each label, and whether it is on this rank; column 0 if it is not."""
    local = labels.long() - first
    here = (local >= 0) & (local < valid) & (labels >= 0)
    return torch.where(here, local, 0), here


@opcode
def cross_entropy_stats(stats: Tensor, logits: Tensor, labels: Tensor, *, first: int, valid: int, softcap: float) -> None:
    columns = torch.arange(logits.shape[1], device=logits.device)
    capped = torch.where(columns < valid, _capped(logits, softcap), -torch.inf)
    top = capped.amax(1)
    total = (capped - top.nan_to_num(neginf=0.0)[:, None]).exp().sum(1)
    local, here = _label(labels, first, valid)
    label = torch.where(here, capped.gather(1, local[:, None])[:, 0], 0.0)
    store(stats, torch.stack([top, total, label], 1))


def _combined(stats: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the maximum, the sum of exponentials and the label's logit of each row, over all parts of the vocabulary."""
    top = stats[:, :, 0].amax(0)
    total = (stats[:, :, 1] * (stats[:, :, 0] - top).exp()).sum(0)
    return top, total, stats[:, :, 2].sum(0)


@opcode
def cross_entropy(
    loss: Tensor, losses: Tensor | None, stats: Tensor, labels: Tensor | None, weight: Tensor | None, *, scale: float,
) -> None:
    top, total, label = _combined(stats)
    rows = total.log() + top - label
    counts = torch.ones_like(rows, dtype=torch.bool) if labels is None else labels >= 0
    mean = torch.where(counts, rows, 0.0).double().sum() * scale
    loss.add_((mean if weight is None else mean * weight).float())
    if losses is not None:
        store(losses, torch.where(counts, rows, torch.nan))


@opcode
def cross_entropy_grad(
    dlogits: Tensor, logits: Tensor, stats: Tensor, labels: Tensor, weight: Tensor | None, *, scale: float, first: int,
    valid: int, softcap: float,
) -> None:
    top, total, _ = _combined(stats)
    capped = _capped(logits, softcap)
    value = (capped - top[:, None]).exp() / total[:, None]
    local, here = _label(labels, first, valid)
    value.scatter_add_(1, local[:, None], -here.float()[:, None])
    value = value * (scale if weight is None else scale * weight)
    if softcap:
        value = value * (1 - (capped / softcap).square())
    columns = torch.arange(logits.shape[1], device=logits.device)
    store(dlogits, torch.where((columns < valid) & (labels >= 0)[:, None], value, 0.0))


@opcode
def sumsq(y: Tensor, x: Tensor, *, weight: float) -> None:
    store(y, x.double().square().sum() * weight)


@opcode
def grad_norm(y: Tensor, sums: Tensor, limit: Tensor | None, *, max_norm: float) -> None:
    norm = sums.double().sum().sqrt()
    factor = (max_norm / norm).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    skipped = ~norm.isfinite()
    if limit is not None:
        skipped = skipped | (norm > limit[0])
    store(y, torch.stack([norm, torch.where(skipped, -1.0, factor)]))
