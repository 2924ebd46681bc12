"""Activations, sums, casts, dropout."""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import randoms
from . import differentiable, opcode, store, zigzag_rows

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "clamped_silu": lambda x: x.clamp(max=7) * torch.sigmoid(1.702 * x.clamp(max=7)),
}


@differentiable
def activation(x: Tensor, ends: Tensor | None, *, function: str, share: float) -> tuple[Tensor]:
    return (FUNCTIONS[function](x),)


@differentiable
def glu(gate: Tensor, up: Tensor, ends: Tensor | None, *, function: str, share: float) -> tuple[Tensor]:
    if function == "clamped_silu":
        up = up.clamp(-7, 7) + 1
    return (FUNCTIONS[function](gate) * up,)


@opcode
def add(y: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    value = a.float() + b.float()
    store(y, value if bias is None else value + bias.float())


@opcode
def cast(y: Tensor, x: Tensor) -> None:
    y.copy_(x)


@opcode
def fill(y: Tensor, *, value: float) -> None:
    y.fill_(value)


@opcode
def axpby(y: Tensor, a: Tensor, b: Tensor | None, *, alpha: float, beta: float) -> None:
    value = a.float() * alpha
    store(y, value if b is None else value + b.float() * beta)


@opcode
def normalize(y: Tensor, x: Tensor, sum: Tensor, *, eps: float) -> None:
    store(y, x.float() / (sum.sqrt() + eps))


@opcode
def dropout(
    y: Tensor, x: Tensor, key: Tensor, *, tensor: randoms.Parameter, rate: float, col: int, first: int, replica: int,
    position: int, batch: int, chunks: int, member: int,
) -> None:
    rows, columns = x.shape
    tokens = rows // batch
    at = position + zigzag_rows(tokens, chunks, member, x.device)
    if not chunks:
        at = at + member * tokens
    sequences = replica + first + torch.arange(batch, device=x.device)
    kept = randoms.kept(key, tensor.name, rate, sequences, at, torch.arange(col, col + columns, device=x.device))
    scale = torch.tensor(1 / (1 - rate), dtype=torch.float32).item()
    store(y, torch.where(kept.reshape(rows, columns), x.float() * scale, 0.0))
