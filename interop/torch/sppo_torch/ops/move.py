"""Copies; and collectives, as functions of what every member of the group gives."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from . import opcode, store

# A collective gets its result, what every member gives in group order, the number of this member, and its attributes.
Collective = Callable[..., None]
COLLECTIVES: dict[str, Collective] = {}


def collective(function: Collective) -> Collective:
    """Registers the function of a collective."""
    COLLECTIVES[function.__name__] = function
    return function


@opcode
def d2h(y: Tensor, x: Tensor) -> None:
    y.copy_(x, non_blocking=True)


@opcode
def h2d(y: Tensor, x: Tensor) -> None:
    y.copy_(x, non_blocking=True)


@opcode
def d2d(y: Tensor, x: Tensor) -> None:
    y.copy_(x)


def _ordered_sum(parts: list[Tensor]) -> Tensor:
    """Sums in f32, in the order of the list."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


@collective
def all_gather(y: Tensor, gifts: list[Tensor], member: int) -> None:
    torch.cat([g.flatten() for g in gifts], out=y.flatten())


@collective
def reduce_scatter(y: Tensor, gifts: list[Tensor], member: int) -> None:
    size = y.numel()
    store(y, _ordered_sum([g.flatten()[member * size : (member + 1) * size] for g in gifts]))


@collective
def all_reduce(x: Tensor, gifts: list[Tensor], member: int) -> None:
    store(x, _ordered_sum(gifts))


@collective
def rotate(y: Tensor, gifts: list[Tensor], member: int) -> None:
    store(y, gifts[member - 1])


@collective
def all_to_all(y: Tensor, gifts: list[Tensor], member: int, *, copies: int, inverse: bool) -> None:
    t = len(gifts)
    gifts = [g.flatten(0, -2) for g in gifts]
    if not inverse:
        width = gifts[0].shape[1] * copies // t
        column = member // copies * width
        store(y, torch.cat([g[:, column : column + width] for g in gifts]))
        return
    rows = gifts[0].shape[0] // t
    blocks = [g[member * rows : (member + 1) * rows] for g in gifts]
    store(y, torch.cat([_ordered_sum(blocks[i : i + copies]) for i in range(0, t, copies)], 1))
