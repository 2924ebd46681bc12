#!/usr/bin/env python3
"""Trains the same GPT-2 models with sppovm and with PyTorch on the CPU, in turns, and compares speed, losses and memory.

    make build
    python3 -m venv venv && venv/bin/pip install torch numpy
    venv/bin/python bench/peers/torch_cpu.py                                  # all shapes, f32 and bf16: an hour or two
    venv/bin/python bench/peers/torch_cpu.py --shape 6x384 --dtype bf16

Both start from the same weights and read the same tokens, and both train with AdamW and clip gradients. Every contestant is a
separate process with --threads threads, by default one per processor. One runs at a time, for --seconds and whole steps, while
the others are suspended with SIGSTOP. The ratio of a round is our tokens per second divided by theirs, so that
a machine that slows down between rounds changes no ratio. On a machine that other programs use as well, threads wait for each
other, and elapsed time partly measures those programs. There, use --threads 1 --clock cpu, which counts processor time instead.

Standard output has a line of JSON for each shape and type: the median, lowest and highest ratio for each mode of training with
PyTorch, and peaks of resident memory, for PyTorch also the memory after importing it. The shapes of a type are followed by the
geometric mean over the fastest mode of each. The exit status is 1 if losses of the first steps differ by more than rounding explains.

bf16 compares training of equal precision: arithmetic in bf16, with weights and both moments of AdamW in f32, as in our programs.
PyTorch has two such modes: autocast, which converts f32 weights in each step, and "masters", with bf16 parameters and f32 copies
that AdamW updates. The mode "pure" has no f32 at all, so rounding loses updates smaller than 1/512 of a weight. It is measured, too,
but its ratio is not used. Each mode runs eagerly and, if PyTorch finds a C++ compiler, with torch.compile."""

import argparse
import json
import math
import os
import pathlib
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

# Name: layers, hidden, heads, sequence, batch, vocabulary, tied head.
SHAPES = {
    "4x128": (4, 128, 4, 256, 4, 256, False),
    "6x384": (6, 384, 6, 256, 4, 256, False),
    "12x768": (12, 768, 12, 64, 4, 50257, True),
    "4x128-8k": (4, 128, 4, 8192, 1, 256, False),
    "4x128-32k": (4, 128, 4, 32768, 1, 256, False),
}
WAYS = {"f32": ["f32"], "bf16": ["autocast", "masters", "pure"]}
UNEQUAL = "pure"  # has less precision than ours
LEARNING_RATE, BETAS, EPSILON, CLIP = 3e-4, (0.9, 0.95), 1e-8, 1.0
LOSS_TOLERANCE = {"f32": 2e-5, "bf16": 2e-3}  # relative

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--shape", action="append", choices=SHAPES, help="only this shape; may be repeated")
PARSER.add_argument("--dtype", action="append", choices=WAYS, help="only this type; may be repeated")
PARSER.add_argument("--way", action="append", help="only this way of PyTorch, such as masters or masters,compiled; may be repeated")
PARSER.add_argument("--rounds", type=int, default=7, help="rounds (default 7)")
PARSER.add_argument("--seconds", type=float, default=4, help="length of a turn, rounded up to whole steps (default 4)")
PARSER.add_argument("--compared", type=int, default=3, metavar="STEPS", help="first steps, whose losses must be the same (default 3)")
PARSER.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each contestant (default: processors)")
PARSER.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="seconds that count: elapsed or of the processor (default wall)")
PARSER.add_argument("--bin", default="bin", help="folder of sppoc and sppovm (default bin)")
PARSER.add_argument("--worker", nargs=4, metavar=("SHAPE", "WAY", "TOKENS", "THREADS"), help=argparse.SUPPRESS)


def spec(name, dtype, tokens):
    layers, hidden, heads, sequence, batch, vocab, tied = SHAPES[name]
    return f"""import "clusters/local.sppo"
model peer {{
  family = gpt2
  layers = {layers}
  hidden = {hidden}
  heads = {heads}
  vocab = {vocab}
  tied = {str(tied).lower()}
  dtype = {dtype}
}}
cluster one = local(ranks = 1)
train {{
  sequence = {sequence}
  batch = {batch}
  steps = 1000000
  optimizer = adamw(lr = {LEARNING_RATE}, betas = [{BETAS[0]}, {BETAS[1]}], eps = {EPSILON}, weight_decay = 0)
  lr_schedule = constant
  grad_clip = {CLIP}
  data = tokens("{tokens}", shuffle = off)
}}
schedule whole {{
  sp = 1
  pp = 1
  dp = 1
  microbatch = {batch}
  subsequences = 1
  offload = none
  recompute = none
  mux = off
}}
"""


def write_weights(folder, name, model):
    """Writes a folder as transformers would. Its matrices are transposed: [in, out]."""
    layers, hidden, heads, sequence, _, vocab, tied = SHAPES[name]
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": hidden, "n_layer": layers, "n_head": heads,
        "n_positions": sequence, "vocab_size": vocab, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": tied, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}))
    tensors, header, at = {}, {}, 0
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and tied:
            continue
        if ".c_" in key and key.endswith("weight"):
            value = value.T
        tensors[key] = value.contiguous().numpy().tobytes()
        header[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + len(tensors[key])]}
        at += len(tensors[key])
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in tensors.values():
            file.write(data)


def make_model(name):
    import torch
    from torch import nn
    from torch.nn import functional as F
    layers, hidden, heads, sequence, _, vocab, tied = SHAPES[name]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(hidden, 3 * hidden), c_proj=nn.Linear(hidden, hidden)))
            self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(hidden, 4 * hidden), c_proj=nn.Linear(4 * hidden, hidden)))

        def forward(self, x):
            b, n, _ = x.shape
            q, k, v = (t.view(b, n, heads, -1).transpose(1, 2) for t in self.attn["c_attn"](self.ln_1(x)).split(hidden, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(b, n, -1))
            return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer = nn.ModuleDict(dict(
                wte=nn.Embedding(vocab, hidden), wpe=nn.Embedding(sequence, hidden),
                h=nn.ModuleList(Layer() for _ in range(layers)), ln_f=nn.LayerNorm(hidden)))
            self.lm_head = nn.Linear(hidden, vocab, bias=False)
            if tied:
                self.lm_head.weight = self.transformer["wte"].weight

        def forward(self, tokens, labels):
            t = self.transformer
            x = t["wte"](tokens) + t["wpe"].weight
            for layer in t["h"]:
                x = layer(x)
            return F.cross_entropy(self.lm_head(t["ln_f"](x)).float().flatten(0, 1), labels.flatten())

    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(0, 0.02)
            elif key.endswith("bias"):
                p.zero_()
    return model


def resident(pid, field):
    """Returns the memory of a process in MiB: VmRSS is the current value, VmHWM the peak."""
    for line in open(f"/proc/{pid}/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no {field}")


def make_optimizer(parameters):
    import torch
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=0, fused=True)


def stepper(model, way):
    """Returns a function that performs a step on tokens and labels and returns the loss."""
    import torch
    clip, parameters = torch.nn.utils.clip_grad_norm_, list(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in parameters] if way.startswith("masters") else parameters
    if not way.startswith(("f32", "autocast")):
        model.bfloat16()
    optimizer = make_optimizer(masters)
    call = torch.compile(model) if way.endswith(",compiled") else model
    autocast = way.startswith("autocast")

    def step(tokens, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(tokens, labels)
        loss.backward()
        if masters is not parameters:
            for p, master in zip(parameters, masters):
                master.grad, p.grad = p.grad.float(), None
        clip(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters is not parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        return loss.item()

    return step


def work(name, way, tokens, threads):
    """Trains with PyTorch until it is killed, and writes the loss of each step."""
    import numpy
    import torch
    torch.set_num_threads(int(threads))
    imported = resident("self", "VmRSS")
    _, _, _, sequence, batch, _, _ = SHAPES[name]
    data = numpy.fromfile(tokens, numpy.uint16)
    step, sequences = stepper(make_model(name), way), (len(data) - 1) // sequence
    for i in range(10**9):
        rows = [data[g % sequences * sequence:][:sequence + 1] for g in range(i * batch, (i + 1) * batch)]
        x = torch.from_numpy(numpy.stack(rows).astype(numpy.int64))
        print(json.dumps({"loss": step(x[:, :-1].contiguous(), x[:, 1:].contiguous()), "imported": imported}), flush=True)


class Contestant:
    """A training process, suspended except during its turn."""

    def __init__(self, options, label, command, folder):
        self.options, self.label, self.losses, self.rates, self.imported, self.spent = options, label, [], [], 0, 0
        self.log = open(folder / (label + ".log"), "wb")
        threads = {name: str(options.threads) for name in ("GOMAXPROCS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, stdin=subprocess.DEVNULL,
                                        env=dict(os.environ, **threads))

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.label} ended early; its messages are in {self.log.name}")
        record = json.loads(line)
        if "loss" in record:
            self.losses.append(record["loss"])
            self.imported = record.get("imported", 0)
        return "loss" in record

    def now(self):
        """Returns the clock. A suspended process uses no processor time, so a turn continues where the previous one ended."""
        if self.options.clock == "wall":
            return time.perf_counter()
        fields = open(f"/proc/{self.process.pid}/stat").read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def turn(self, seconds, tokens, least=1):
        """Trains for a while and returns tokens per second."""
        began = self.spent if self.options.clock == "cpu" else self.now()
        self.process.send_signal(signal.SIGCONT)
        steps, self.spent = 0, began
        while self.spent - began < seconds or steps < least:
            steps += self.line()
            self.spent = self.now()
        self.process.send_signal(signal.SIGSTOP)
        return steps * tokens / (self.spent - began)

    def end(self):
        self.peak = resident(self.process.pid, "VmHWM")
        self.process.kill()
        self.process.wait()
        self.log.close()


def can_compile():
    """Reports whether torch.compile finds a C++ compiler."""
    code = "import torch; torch.compile(lambda x: x.sin() + 1)(torch.ones(64))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def contestants(options, name, dtype, folder, ways):
    """Returns our process, then one for each mode of PyTorch."""
    import torch
    layers, hidden, heads, sequence, batch, vocab, tied = SHAPES[name]
    tokens = folder / "tokens.bin"
    torch.manual_seed(2)
    count = sequence * max(64, 4 * batch) + 1
    torch.randint(vocab, (count,)).to(torch.int32).numpy().astype("uint16").tofile(tokens)
    (folder / "weights").mkdir()
    write_weights(folder / "weights", name, make_model(name))
    (folder / "peer.sppo").write_text(spec(name, dtype, tokens))
    built = pathlib.Path(options.bin)
    # The state fits in memory, so nothing is moved between arenas.
    subprocess.run([built / "sppoc", "build", folder / "peer.sppo", "--set", "cluster.device_memory=16GiB", "-o", folder / "peer.sppb"],
                   check=True, stdout=subprocess.DEVNULL)
    threads = str(options.threads)
    flags = ["--json", "--quiet", "--threads", threads, "--weights", folder / "weights"]
    yield Contestant(options, "sppovm", [built / "sppovm", "run", folder / "peer.sppb"] + flags, folder)
    for way in ways:
        yield Contestant(options, way, [sys.executable, __file__, "--worker", name, way, tokens, threads], folder)


def compare(options, name, dtype, ways):
    _, _, _, sequence, batch, _, _ = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="sppo-peers") as text:
        all = []
        try:
            for c in contestants(options, name, dtype, pathlib.Path(text), ways):
                all.append(c)
                c.turn(0, 1, options.compared)  # also compiles and touches all memory
            for _ in range(options.rounds):
                for c in all:
                    c.rates.append(c.turn(options.seconds, sequence * batch))
        finally:
            for c in all:
                c.end()
    return result(options, name, dtype, all[0], all[1:])


def result(options, name, dtype, ours, others):
    line = {"shape": name, "dtype": dtype, "tokens_per_s": round(statistics.median(ours.rates), 1), "peak_mib": round(ours.peak),
            "losses": ours.losses[:options.compared], "pytorch": {}}
    for c in others:
        ratios = sorted(a / b for a, b in zip(ours.rates, c.rates))
        off = max(abs(a / b - 1) for a, b in zip(ours.losses[:options.compared], c.losses))
        line["pytorch"][c.label] = {
            "tokens_per_s": round(statistics.median(c.rates), 1), "ratio": round(statistics.median(ratios), 3),
            "lowest": round(ratios[0], 3), "highest": round(ratios[-1], 3), "peak_mib": round(c.peak), "imported_mib": round(c.imported),
            "loss_off": float(f"{off:.2g}"), "same_losses": off <= LOSS_TOLERANCE[dtype]}
    return line


def main():
    options = PARSER.parse_args()
    if options.worker:
        return work(*options.worker)
    for name in "sppoc", "sppovm":
        if not (pathlib.Path(options.bin) / name).is_file():
            PARSER.error(f"there is no {name} in {options.bin}; make build writes it to bin")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends stopped processes, too
    compiled, failed = not options.way and can_compile(), False
    if not compiled and not options.way:
        print("PyTorch finds no C++ compiler: ways run eagerly only", file=sys.stderr)
    for dtype in options.dtype or WAYS:
        ways = options.way or [w + c for w in WAYS[dtype] for c in (["", ",compiled"] if compiled else [""])]
        equal, ratios = [w for w in ways if not w.startswith(UNEQUAL)], []
        for name in options.shape or SHAPES:
            line = compare(options, name, dtype, ways)
            print(json.dumps(line), flush=True)
            failed = failed or not all(line["pytorch"][w]["same_losses"] for w in equal)
            if equal:
                ratios.append(min(line["pytorch"][w]["ratio"] for w in equal))
        if ratios:
            mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
            print(json.dumps({"dtype": dtype, "ratios": ratios, "geometric_mean": round(mean, 3), "least": min(ratios)}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
