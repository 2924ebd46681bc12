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
    group_scores: int, first: int,
) -> None:
    wide = logits.float()
    ranked = _scores(wide, scores)
    if correction is not None:
        ranked = ranked + correction
    if groups:
        grouped = ranked.view(len(ranked), groups, -1)
        of_group = grouped.topk(1 if group_scores == 1 else 2, dim=2).values.sum(2)
        best = of_group.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
        allowed = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, best, True)
        ranked = torch.where(allowed[:, :, None], grouped, -torch.inf).view_as(ranked)
    chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, :top]
    store(experts, chosen)
    store(weights, _weights(wide, chosen, scores, renormalize, eps, scale))
    numbers = torch.arange(len(ends), device=chosen.device)
    local = chosen.flatten() - first
    ours = (local >= 0) & (local < len(ends))
    order = torch.where(ours, local, len(ends)).sort(stable=True).indices  # those of other experts come last
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    store(places, torch.where(ours, place, -1))
    store(ends, (ours & (local <= numbers[:, None])).sum(1))


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


@opcode
def expert_load(load: Tensor, experts: Tensor, *, accumulate: bool) -> None:
    store(load, experts.flatten().long().bincount(minlength=len(load)).float(), accumulate)


@opcode
def expert_bias(w: Tensor, load: Tensor, norm: Tensor, *, rate: float) -> None:
    wide = load.double()
    direction = (wide.sum() - wide * len(load)).sign().float()
    w.copy_(torch.where(norm[1] < 0, w, w + rate * direction))


def _ordered_sum(rows: Tensor) -> Tensor:
    """Sums over the second dimension, in its order."""
    total = rows[:, 0]
    for k in range(1, rows.shape[1]):
        total = total + rows[:, k]
    return total


def _placed(rows: Tensor, places: Tensor) -> Tensor:
    """Returns the rows at places in f32, with rows of 0 for those without a place."""
    return torch.where(places[:, :, None] >= 0, rows[places.clamp(min=0).long()].float(), 0)


def _put(rows: Tensor, values: Tensor, places: Tensor) -> None:
    """Copies values, one for each place, to the rows at these places."""
    places = places.flatten().long()
    rows[places[places >= 0]] = values[places >= 0].to(rows.dtype)


@opcode
def permute(y: Tensor, x: Tensor, places: Tensor, *, top: int, share: float) -> None:
    _put(y, x.repeat_interleave(top, 0), places)


@opcode
def permute_grad(dx: Tensor, dy: Tensor, places: Tensor, *, top: int, share: float) -> None:
    store(dx, _ordered_sum(_placed(dy, places)))


@opcode
def unpermute(y: Tensor, x: Tensor, places: Tensor, weights: Tensor, *, top: int, share: float) -> None:
    store(y, _ordered_sum(_placed(x, places) * weights[:, :, None]))


@opcode
def unpermute_grad(
    dx: Tensor, dweights: Tensor, dy: Tensor, x: Tensor, places: Tensor, weights: Tensor, *, top: int, share: float
) -> None:
    rows = dy.float()[:, None]
    store(dweights, (rows * _placed(x, places)).sum(2))
    _put(dx, (rows * weights[:, :, None]).flatten(0, 1), places)
