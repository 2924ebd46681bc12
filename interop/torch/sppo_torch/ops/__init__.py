"""What opcodes compute: one function for each, named like its opcode.

A function gets its operands in the order of the table, None for an absent one, and its attributes by name. Operands have the shapes
of the table; where the table gives none, that of the program. Results are written to the operands in place. Arithmetic is in f32;
a value is rounded where it is stored. A function marked as differentiable gets only what its opcode reads, and returns the results:
its gradient needs no function.

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

from functools import wraps
from typing import Any, Callable

import torch
from torch import Tensor

from ..table import TABLE

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


def _wide(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.is_floating_point() else x


def _up_to(operands: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Returns the rows of operands up to the last of the operand ends, if there is one."""
    ends = operands.get("ends")
    if ends is None:
        return operands
    last = int(ends[-1])
    if last < 0 or any(x is not None and last > len(x) for name, x in operands.items() if name != "ends"):
        raise ValueError(f"the last of ends is {last}, which is no number of rows")
    return {name: x if x is None or name == "ends" else x[:last] for name, x in operands.items()}


def differentiable(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Registers the functions of an opcode and of its gradient, NAME_grad, which autograd computes. The function gets what the opcode
    reads, numbers in f32, and returns the results in the order of the table. For an absent operand it gets None, or in the
    gradient, if there is one of that operand, zeros."""
    op, grad = TABLE.opcode(function.__name__), TABLE.opcode(function.__name__ + "_grad")
    reads, results = [o.name for o in op.operands if o.dir == "in"], [o.name for o in op.operands if o.dir != "in"]

    @wraps(function)
    def forward(*operands: Tensor | None, **attributes: Any) -> None:
        of = _up_to({o.name: x for o, x in zip(op.operands, operands)})
        for name, value in zip(results, function(*(_wide(of[n]) for n in reads), **attributes)):
            if of[name] is not None:
                store(of[name], value)

    @wraps(function)
    def backward(*operands: Tensor | None, **attributes: Any) -> None:
        of = _up_to({o.name: x for o, x in zip(grad.operands, operands)})
        inputs = {n: _wide(of[n]) for n in reads}
        outs = {o.name[1:]: o for o in grad.operands if o.dir != "in" and of[o.name] is not None}
        with torch.enable_grad():
            for name, out in outs.items():
                x = torch.zeros_like(of[out.name], dtype=torch.float32) if inputs[name] is None else inputs[name]
                inputs[name] = x.detach().requires_grad_()
            values = function(*inputs.values(), **{a.argument: attributes[a.argument] for a in op.attributes})
            given = [(y, of["d" + n]) for y, n in zip(values, results) if of["d" + n] is not None]
            grads = torch.autograd.grad(
                [y for y, _ in given], [inputs[n] for n in outs], [g.float().view(y.shape) for y, g in given],
                allow_unused=True, materialize_grads=True,
            )
        for out, value in zip(outs.values(), grads):
            store(of[out.name], value, attributes.get(out.adds, False))

    KERNELS[op.name], KERNELS[grad.name] = forward, backward
    return function


def zigzag_rows(n: int, chunks: int, member: int, device: torch.device) -> Tensor:
    """Returns which token each of a member's n tokens is, counted from the first token of all members: those of the chunk with
    the member's number, and those of the chunk at the same distance from the end. Without chunks, the tokens are in order."""
    rows = torch.arange(n, device=device)
    if not chunks:
        return rows
    size = n // 2
    return torch.where(rows < size, member * size + rows, (chunks - 1 - member) * size + rows - size)


from . import attention, elementwise, embed, experts, loss, matmul, move, norm, optimizer, scan  # noqa: E402,F401
