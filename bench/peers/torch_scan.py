#!/usr/bin/env python3
"""Computes gated delta rules as transformers does on the CPU, for tests and benchmarks of the scan in internal/vm/cpu/simd.

The first argument is the number of threads. Every line of standard input is JSON, and so is the line that answers it:

    {"time": [tokens, heads, shared, dim]}    seconds of a forward pass, and of a forward and backward pass, on random values
    {"tokens": ..., "heads": ..., ...}        results and gradients for the given values, as lists in row-major order

Heads of q and k come first in the sizes, then the number of heads of v for each. The initial state is a part of the values."""

import json
import sys
import time

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule


def run(q, k, v, decay, beta, state):
    return torch_chunk_gated_delta_rule(q, k, v, decay, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)


def timed(tokens, heads, shared, dim):
    q, k = (torch.randn(1, tokens, heads, dim) for _ in range(2))
    v = torch.randn(1, tokens, heads * shared, dim)
    decay, beta = -torch.rand(1, tokens, heads * shared), torch.rand(1, tokens, heads * shared)
    state = torch.zeros(1, heads * shared, dim, dim)
    with torch.no_grad():
        start = time.perf_counter()
        run(q, k, v, decay, beta, state)
        forward = time.perf_counter() - start
    for x in (q, k, v, decay, beta, state):
        x.requires_grad_()
    dout = torch.randn(1, tokens, heads * shared, dim)
    start = time.perf_counter()
    out, _ = run(q, k, v, decay, beta, state)
    out.backward(dout)
    return [forward, time.perf_counter() - start]


def results(x):
    def tensor(name, *shape):
        return torch.tensor(x[name], dtype=torch.float32).reshape(shape)

    tokens, batch, heads, values = x["tokens"], x["batch"], x["heads"], x["heads"] * x["shared"]
    shapes = {"q": (heads, x["key_dim"]), "k": (heads, x["key_dim"]), "v": (values, x["value_dim"]), "decay": (values,), "beta": (values,)}
    # Sequences are interleaved in our rows.
    inputs = {name: tensor(name, tokens, batch, *shape).transpose(0, 1).contiguous() for name, shape in shapes.items()}
    inputs["state"] = tensor("state", batch, values, x["key_dim"], x["value_dim"])
    for value in inputs.values():
        value.requires_grad_()
    out, state = run(*inputs.values())
    dout = tensor("dout", tokens, batch, values, x["value_dim"]).transpose(0, 1)
    dnext = tensor("dnext", batch, values, x["key_dim"], x["value_dim"])
    torch.autograd.backward([out, state], [dout, dnext])
    rows = {"o": out, **{"d" + name: inputs[name].grad for name in shapes}}
    answer = {name: value.transpose(0, 1).flatten().tolist() for name, value in rows.items()}
    return answer | {"next": state.flatten().tolist(), "dstate": inputs["state"].grad.flatten().tolist()}


torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(1)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps(timed(*request["time"]) if "time" in request else results(request)), flush=True)
