"""Routing of tokens to experts."""

from __future__ import annotations

import torch
from torch import Tensor

from . import opcode, store, vjp


def _scores(logits: Tensor, scores: int) -> Tensor:
    """Returns what the experts are ranked by."""
    if scores == 0:
        return logits.softmax(1)
    return logits.sigmoid() if scores == 1 else logits


def _weights(logits: Tensor, chosen: Tensor, scores: int, renormalize: bool, eps: float, scale: float) -> Tensor:
    """Returns the weights of the chosen experts."""
    weights = _scores(logits, scores).gather(1, chosen)
    if scores == 2:
        weights = weights.softmax(1)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + eps)
    return weights * (scale or 1)


@opcode
def route(
    weights: Tensor, experts: Tensor, places: Tensor, ends: Tensor, logits: Tensor, correction: Tensor | None, *, top: int,
    scores: int, renormalize: bool, eps: float, scale: float, groups: int, top_groups: int,
) -> None:
    wide = logits.float()
    ranked = _scores(wide, scores)
    if correction is not None:
        ranked = ranked + correction
    if groups:
        grouped = ranked.view(len(ranked), groups, -1)
        of_group = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        best = of_group.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
        ranked = torch.where(allowed[:, :, None], grouped, -torch.inf).view_as(ranked)
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top]
    store(experts, chosen)
    store(weights, _weights(wide, chosen, scores, renormalize, eps, scale))
    order = chosen.flatten().sort(stable=True).indices
    store(places, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)))
    numbers = torch.arange(logits.shape[1], device=order.device)
    store(ends, (chosen.flatten()[None] <= numbers[:, None]).sum(1))


@opcode
def route_grad(
    dlogits: Tensor, dy: Tensor, logits: Tensor, experts: Tensor, *, top: int, scores: int, renormalize: bool, eps: float,
    scale: float,
) -> None:
    chosen = experts.long()
    store(dlogits, vjp(lambda x: _weights(x, chosen, scores, renormalize, eps, scale), [logits], dy)[0])


@opcode
def expert_counts(counts: Tensor, logits: Tensor, *, top: int, batch: int, accumulate: bool) -> None:
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, :top]
    hits = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, chosen, 1)
    store(counts, hits.view(-1, *counts.shape).sum(0), accumulate)


@opcode
def router_loss_grad(
    dlogits: Tensor, logits: Tensor, counts: Tensor | None, *, scores: int, batch: int, z: float, balance: float
) -> None:
    def losses(x: Tensor) -> Tensor:
        loss = z / 2 * x.logsumexp(1).square().sum()
        if counts is not None:
            p = x.sigmoid() if scores == 1 else x.softmax(1)
            p = p / p.sum(1, keepdim=True)
            loss = loss + balance * (p.view(-1, *counts.shape) * counts).sum()
        return loss

    store(dlogits, vjp(losses, [logits], torch.ones((), device=logits.device))[0])


def _ordered_sum(rows: Tensor) -> Tensor:
    """Sums over the second dimension, in its order."""
    total = rows[:, 0]
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k]
    return total


@opcode
def permute(y: Tensor, x: Tensor, places: Tensor, *, top: int) -> None:
    y[places.flatten().long()] = x.repeat_interleave(top, 0)


@opcode
def permute_grad(dx: Tensor, dy: Tensor, places: Tensor, *, top: int) -> None:
    store(dx, _ordered_sum(dy[places.long()].float()))


@opcode
def unpermute(y: Tensor, x: Tensor, places: Tensor, weights: Tensor, *, top: int) -> None:
    store(y, _ordered_sum(x[places.long()].float() * weights[:, :, None]))


@opcode
def unpermute_grad(dx: Tensor, dweights: Tensor, dy: Tensor, x: Tensor, places: Tensor, weights: Tensor, *, top: int) -> None:
    rows = dy.float()[:, None]
    store(dweights, (rows * x[places.long()].float()).sum(2))
    dx[places.flatten().long()] = (rows * weights[:, :, None]).flatten(0, 1).to(dx.dtype)
