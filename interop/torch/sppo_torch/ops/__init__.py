"""What opcodes compute: one function for each, named like its opcode.

A function gets its operands in the order of the table, None for an absent one, and its attributes by name. Operands have the shapes
of the table; where the table gives none, that of the program. Results are written to the operands in place. Arithmetic is in f32;
a value is rounded where it is stored.

    elementwise.py  activations, sums, casts, dropout
    embed.py        embeddings, rope, initial values
    norm.py         layernorm, rmsnorm
    matmul.py       products, also for experts
    attention.py    attention over all keys or a block of them, its merge, sinks
    loss.py         cross entropy, gradient norm
    optimizer.py    updates
    experts.py      routing
    scan.py         linear attention and the convolution before it
    move.py         copies; collectives, as functions of what every member gives
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

KERNELS: dict[str, Callable[..., None]] = {}


def opcode(function: Callable[..., None]) -> Callable[..., None]:
    """Registers the function of an opcode."""
    KERNELS[function.__name__] = function
    return function


def store(out: Tensor, value: Tensor, add: bool = False) -> None:
    """Writes a value to an operand, rounded to its type, or adds it to what is there."""
    value = value.reshape(out.shape)
    out.copy_(out.float() + value if add else value)


def vjp(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of a function's inputs, all in f32."""
    with torch.enable_grad():
        leaves = [x.float().detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad.float())


def zigzag_rows(n: int, chunks: int, member: int, device: torch.device) -> Tensor:
    """Returns which token each of a member's n tokens is, counted from the first token of all members: those of the chunk with
    the member's number, and those of the chunk at the same distance from the end. Without chunks, the tokens are in order."""
    rows = torch.arange(n, device=device)
    if not chunks:
        return rows
    size = n // 2
    return torch.where(rows < size, member * size + rows, (chunks - 1 - member) * size + rows - size)


from . import attention, elementwise, embed, experts, loss, matmul, move, norm, optimizer, scan  # noqa: E402,F401
