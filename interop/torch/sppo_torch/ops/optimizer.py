"""Updates of weights. A negative factor, which marks a step that is skipped, leaves everything as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from . import opcode, store


@opcode
def adamw(
    w: Tensor, m: Tensor, v: Tensor, copy: Tensor | None, grad: Tensor, step: Tensor, norm: Tensor, *, beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> None:
    lr, c1, c2 = step.unbind()
    factor = norm[1]
    g = factor * grad
    first = m.float() * beta1 + g * (1 - beta1)
    second = v.float() * beta2 + g.square() * (1 - beta2)
    moved = w - lr * (first * c1 / ((second * c2).sqrt() + eps) + w * weight_decay)
    skip = factor < 0
    for state, value in ((w, moved), (m, first), (v, second)):
        store(state, torch.where(skip, state.float(), value))
    if copy is not None:
        copy.copy_(w)


@opcode
def sgd(
    w: Tensor, m: Tensor | None, copy: Tensor | None, grad: Tensor, step: Tensor, norm: Tensor | None, *, momentum: float,
    weight_decay: float, scale: float, row: int, scaled: int,
) -> None:
    columns = grad.shape[-1] if grad.dim() > 1 else 1
    rows = w.view(-1, columns).shape[0]
    grad = grad.view(-1, columns)[row : row + rows].float()
    real = w.view(-1, columns)[: grad.shape[0]]  # the rows after these are padding
    factor = norm[1] if norm is not None else torch.ones((), device=w.device)
    g = grad if scaled else grad * factor
    skip = factor < 0
    if m is not None:
        state = m.view(-1, columns)[: grad.shape[0]]
        g = state.float() * momentum + g
        store(state, torch.where(skip, state.float(), g))
    moved = real - step[0] * (g * scale + real * weight_decay)
    store(real, torch.where(skip, real, moved))
    if copy is not None:
        copy.view(-1, columns)[: grad.shape[0]].copy_(real)
        copy.view(-1, columns)[grad.shape[0] :].zero_()


@opcode
def nesterov(y: Tensor, m: Tensor, grad: Tensor, norm: Tensor, *, momentum: float) -> None:
    factor = norm[1]
    g = grad * factor
    state = m.float() * momentum + g
    skip = factor < 0
    store(m, torch.where(skip, m.float(), state))
    store(y, torch.where(skip, 0.0, g + state * momentum))
