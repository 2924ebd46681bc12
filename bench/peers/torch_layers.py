#!/usr/bin/env python3
"""Measures the models of bench/gpu in PyTorch on one GPU: the same layers, lengths and batch, bf16 arithmetic on f32 weights, attention
with PyTorch's flash kernels or cuDNN's, AdamW. Prints a line of JSON for each model and configuration as soon as it is measured: its
step time, or why it did not run. If each call has little time, run one configuration per call."""

import argparse
import gc
import itertools
import json
import statistics
import time

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--only", metavar="NAME", help="only the run with this name, such as 7b-128k")
PARSER.add_argument("--way", metavar="WAY", help="of the ways of fitting a model the one of this name, such as plain")
PARSER.add_argument("--attention", choices=["flash", "cudnn"], help="of the two kernels of attention this one")
PARSER.add_argument("--steps", type=int, default=3, help="steps that are timed, after one that warms up")
OPTIONS = PARSER.parse_args()  # before importing PyTorch, which is slow

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# Name of our run, family, layers, tokens. Shapes are those of 7b.sppo and 8b.sppo.
RUNS = [
    ("7b-32k-none", "gpt", 4, 32 << 10),
    ("7b-32k-full", "gpt", 4, 32 << 10),
    ("7b-128k", "gpt", 4, 128 << 10),
    ("7b-512k", "gpt", 1, 512 << 10),
    ("8b-128k", "llama", 4, 128 << 10),
]
SHAPES = {
    "gpt": dict(hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=32000),
    "llama": dict(hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256),
}
WAYS = ["plain", "checkpointing", "save_on_cpu", "checkpointing and save_on_cpu"]
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
LOSS_TOKENS = 8192  # number of tokens whose logits are computed at a time


def rope(x, base=10000.0):
    """Rotates pairs of every head by their position; x is [batch, heads, tokens, dim]."""
    n, half = x.shape[-2], x.shape[-1] // 2
    rate = base ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(n, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def norm(layer, x):
    """A norm in the type of x, like ours. Autocast would make it f32, and mixed types prevent fused kernels."""
    with torch.autocast("cuda", enabled=False):
        weight, shape = layer.weight.to(x.dtype), layer.weight.shape
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(x, shape, weight, layer.bias.to(x.dtype), 1e-5)
        return F.rms_norm(x, shape, weight, 1e-5)


def attention(q, k, v, kernel):
    """Causal attention with one of KERNELS. Releases before 2.5 do not support grouped queries."""
    groups = q.shape[1] // k.shape[1]
    with sdpa_kernel(KERNELS[kernel]):
        if groups == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        try:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        except TypeError:
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Layer(nn.Module):
    def __init__(self, family, kernel, hidden, heads, kv_heads, ffn, vocab):
        super().__init__()
        self.kernel, self.family, self.heads, self.kv_heads = kernel, family, heads, kv_heads
        gpt = family == "gpt"
        kv = hidden // heads * kv_heads
        kind = nn.LayerNorm if gpt else nn.RMSNorm
        self.norm1, self.norm2 = kind(hidden), kind(hidden)
        self.qkv = nn.Linear(hidden, hidden + 2 * kv, bias=gpt)
        self.out = nn.Linear(hidden, hidden, bias=gpt)
        self.up = nn.Linear(hidden, ffn if gpt else 2 * ffn, bias=gpt)
        self.down = nn.Linear(ffn, hidden, bias=gpt)
        self.split = (hidden, kv, kv)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(norm(self.norm1, x)).split(self.split, -1)
        q, k, v = (t.view(b, n, h, -1).transpose(1, 2) for t, h in ((q, self.heads), (k, self.kv_heads), (v, self.kv_heads)))
        if self.family == "llama":
            q, k = rope(q), rope(k)
        x = x + self.out(attention(q, k, v, self.kernel).transpose(1, 2).reshape(b, n, -1))
        h = self.up(norm(self.norm2, x))
        if self.family == "gpt":
            return x + self.down(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, family, kernel, layers, tokens):
        super().__init__()
        shape = SHAPES[family]
        self.embed = nn.Embedding(shape["vocab"], shape["hidden"])
        self.positions = nn.Embedding(tokens, shape["hidden"]) if family == "gpt" else None
        self.layers = nn.ModuleList(Layer(family, kernel, **shape) for _ in range(layers))
        self.norm = (nn.LayerNorm if family == "gpt" else nn.RMSNorm)(shape["hidden"])
        self.head = nn.Linear(shape["hidden"], shape["vocab"], bias=False)

    def part(self, x, labels):
        return F.cross_entropy(self.head(norm(self.norm, x)).float().flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(self, tokens, labels, way):
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = x.bfloat16()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if "checkpointing" in way else layer(x)
        parts = [checkpoint(self.part, a, b, use_reentrant=False) for a, b in zip(x.split(LOSS_TOKENS, 1), labels.split(LOSS_TOKENS, 1))]
        return torch.stack(parts).sum() / labels.numel()


def step_seconds(family, kernel, layers, tokens, way):
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = Model(family, kernel, layers, tokens)
        data = torch.randint(SHAPES[family]["vocab"], (1, tokens + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    took = []
    for _ in range(OPTIONS.steps + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        saving = torch.autograd.graph.save_on_cpu(pin_memory=True) if "save_on_cpu" in way else torch.enable_grad()
        with torch.autocast("cuda", torch.bfloat16), saving:
            loss = model(data[:, :-1], data[:, 1:], way)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss).item():
            raise RuntimeError(f"the loss is {loss.item()}")
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def main():
    for name, family, layers, tokens in RUNS:
        if OPTIONS.only not in (None, name):
            continue
        for way, kernel in itertools.product(WAYS, KERNELS):
            if OPTIONS.way not in (None, way) or OPTIONS.attention not in (None, kernel):
                continue
            line = {"name": name, "by": "PyTorch " + torch.__version__, "way": way, "attention": kernel}
            try:
                line["step_s"] = step_seconds(family, kernel, layers, tokens, way)
            except (RuntimeError, MemoryError) as e:  # includes running out of memory
                line["error"] = str(e).splitlines()[0][:200]
            print(json.dumps(line), flush=True)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
