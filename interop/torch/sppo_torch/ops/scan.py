"""Scans, token by token, and the convolutions before them. Gradients are those of autograd."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from . import opcode, store

Results = tuple[Tensor, Tensor]


def gradients(function: Callable[..., Results], inputs: list[Tensor], grads: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Returns the gradients of a function's inputs, all in f32, given those of its results, of which one may be missing."""
    with torch.enable_grad():
        leaves = [x.float().detach().requires_grad_() for x in inputs]
        given = [(y, g.float().reshape(y.shape)) for y, g in zip(function(*leaves), grads) if g is not None]
        return torch.autograd.grad([y for y, _ in given], leaves, [g for _, g in given], allow_unused=True, materialize_grads=True)


def _scan(positions: Tensor | None, heads: int, shared: int, batch: int, delta: bool, norm: float, scale: float):
    """Returns the function of q, k, v, decay, beta and the state that a scan computes."""

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Results:
        def heads_of(x: Tensor, number: int) -> Tensor:
            return x.reshape(len(x) // batch, batch, number, -1)

        def normal(x: Tensor) -> Tensor:
            x = heads_of(x, heads)
            if norm:
                x = x / (x.square().sum(-1, keepdim=True) + norm).sqrt()
            return x.repeat_interleave(shared, 2)

        q, k = normal(q) * (scale or 1), normal(k)
        v, kept, beta = heads_of(v, heads * shared), heads_of(decay, heads * shared).exp(), heads_of(beta, heads * shared)
        if positions is not None:
            kept = kept * (positions.reshape(-1, batch, 1, 1) != 0)
        out = []
        for t in range(len(q)):
            state = kept[t][..., None] * state
            error = v[t] - torch.einsum("bhkv,bhk->bhv", state, k[t]) if delta else v[t]
            state = state + k[t][..., None] * (beta[t] * error)[..., None, :]
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[t]))
        return torch.stack(out), state

    return run


def _zeros(like: Tensor, batch: int, heads: int, key_dim: int, value_dim: int) -> Tensor:
    return torch.zeros(batch, heads, key_dim, value_dim, device=like.device)


@opcode
def scan(
    o: Tensor,
    next: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    *,
    heads: int,
    shared: int,
    key_dim: int,
    value_dim: int,
    batch: int,
    channels: int,
    delta: bool,
    norm: float,
    scale: float,
) -> None:
    if state is None:
        state = _zeros(q, batch, heads * shared, key_dim, value_dim)
    run = _scan(positions, heads, shared, batch, delta, norm, scale)
    out, after = run(*(x.float() for x in (q, k, v, decay, beta, state)))
    store(o, out)
    store(next, after)


@opcode
def scan_grad(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    ddecay: Tensor,
    dbeta: Tensor,
    dstate: Tensor,
    do: Tensor,
    dnext: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    positions: Tensor | None,
    *,
    heads: int,
    shared: int,
    key_dim: int,
    value_dim: int,
    batch: int,
    channels: int,
    delta: bool,
    norm: float,
    scale: float,
) -> None:
    if state is None:
        state = _zeros(q, batch, heads * shared, key_dim, value_dim)
    run = _scan(positions, heads, shared, batch, delta, norm, scale)
    grads = gradients(run, [q, k, v, decay, beta, state], [do, dnext])
    for out, grad in zip((dq, dk, dv, ddecay, dbeta, dstate), grads):
        store(out, grad)


def _conv(positions: Tensor | None, width: int, batch: int):
    """Returns the function of x, w, bias and tail that a convolution computes."""

    def run(x: Tensor, w: Tensor, bias: Tensor, tail: Tensor) -> Results:
        rows = torch.cat([tail, x])
        total = bias.expand(x.shape)
        for j in range(width):
            term = w[:, width - 1 - j] * rows[(width - j) * batch :][: len(x)]
            if positions is not None:
                term = torch.where((positions >= j)[:, None], term, 0)
            total = total + term
        return total * total.sigmoid(), rows[len(rows) - len(tail) :]

    return run


@opcode
def conv(
    y: Tensor,
    next: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    positions: Tensor | None,
    *,
    width: int,
    batch: int,
) -> None:
    bias = torch.zeros_like(x[0]) if bias is None else bias
    tail = x.new_zeros(width * batch, x.shape[1]) if tail is None else tail
    out, rows = _conv(positions, width, batch)(*(v.float() for v in (x, w, bias, tail)))
    store(y, out)
    store(next, rows)


@opcode
def conv_grad(
    dx: Tensor,
    dw: Tensor | None,
    dbias: Tensor | None,
    dtail: Tensor,
    dy: Tensor,
    dnext: Tensor | None,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    tail: Tensor | None,
    positions: Tensor | None,
    *,
    width: int,
    batch: int,
    accumulate: bool,
) -> None:
    bias = torch.zeros_like(x[0]) if bias is None else bias
    tail = x.new_zeros(width * batch, x.shape[1]) if tail is None else tail
    grads = gradients(_conv(positions, width, batch), [x, w, bias, tail], [dy, dnext])
    store(dx, grads[0])
    store(dtail, grads[3])
    if dw is not None:
        store(dw, grads[1], accumulate)
    if dbias is not None:
        store(dbias, grads[2], accumulate)


def _decay(head_dim: int):
    """Returns the function of x, rate and bias that a decay computes: y and step."""

    def run(x: Tensor, rate: Tensor, bias: Tensor) -> Results:
        step = torch.logaddexp(x + bias, torch.zeros_like(x))
        return -rate.exp().repeat_interleave(head_dim) * step, step

    return run


@opcode
def decay(y: Tensor, step: Tensor | None, x: Tensor, rate: Tensor, bias: Tensor, *, heads: int, head_dim: int) -> None:
    out, steps = _decay(head_dim)(x.float(), rate.float(), bias.float())
    store(y, out)
    if step is not None:
        store(step, steps)


@opcode
def decay_grad(
    dx: Tensor,
    drate: Tensor | None,
    dbias: Tensor | None,
    dy: Tensor,
    dstep: Tensor | None,
    x: Tensor,
    rate: Tensor,
    bias: Tensor,
    *,
    heads: int,
    head_dim: int,
    accumulate: bool,
) -> None:
    grads = gradients(_decay(head_dim), [x, rate, bias], [dy, dstep])
    store(dx, grads[0])
    if drate is not None:
        store(drate, grads[1], accumulate)
    if dbias is not None:
        store(dbias, grads[2], accumulate)
