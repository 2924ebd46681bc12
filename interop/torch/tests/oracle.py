"""Draws random instructions, executes them, and compares the results with those of another machine, which reads an instruction in
each line of standard output and answers in a line of standard input. oracle_test.go is that machine."""

import argparse
import base64
import json
import random
import sys

import torch

from sppo_torch.links import Local
from sppo_torch.machine import TYPES, Rank, run
from sppo_torch.ops import fused
from sppo_torch.program import SIZES, Buffer, Code, Instr, Program, RankInfo, View
from sppo_torch.table import TABLE

BYTES = 1 << 22
# Attributes that are factors of dimensions.
SIZED = "batch heads kv_heads head_dim top shared key_dim value_dim channels width".split()
# Opcodes whose first operand may be the same view as another.
IN_PLACE = "position_embed rope activation activation_grad glu glu_grad add cross_entropy_grad axpby normalize dropout".split()
F32, BF16, I32 = 0, 1, 2
OPCODES = {op.name: (i, op) for i, op in enumerate(TABLE.opcodes)}
TENSORS = [("matrix", 37, 19), ("vector", 53, 1)]
ROTATIONS = [{"rates": [1, 0.3, 0.01], "scale": 1.25, "rest": 0.5}, {"rates": [0.7], "scale": 1, "rest": 1}]
HEADER = {
    "run": {"seed": 5, "rotations": ROTATIONS},
    "tensors": [{"name": n, "shape": [r, c]} for n, r, c in TENSORS],
}
RANKS = 4


class Case:
    """A random instruction. A rule of its opcode sets what is special: sizes, attributes, shapes and values of operands."""

    def __init__(self, name: str, draw: random.Random):
        self.number, self.op = OPCODES[name]
        self.draw, self.ranks = draw, 1
        self.sizes = {n: draw.randint(1, 12) for n in "r n m e k o c h v p".split()}
        self.types = {"T": draw.choice([F32, BF16]), "F": draw.choice([F32, BF16])}
        self.attributes = {a.name: 0 for a in self.op.attributes}
        self.shapes, self.values, self.operand_types, self.arenas = {}, {}, {}, {}
        self.terms = {}  # of results that are differences of larger terms: a result as large as those
        self.absent = {o.name for o in self.op.operands if o.optional and draw.random() < 0.5}
        for name, options in ATTRIBUTES.items():
            if name in self.attributes:
                self.attributes[name] = draw.choice(options)
        RULES.get(self.op.name, lambda c: None)(self)

    def size(self, text: str) -> int:
        product = 1
        for part in text.split("*"):
            known = {**self.sizes, **{k: v for k, v in self.attributes.items() if k in SIZED}}
            product *= int(part) if part.isdigit() else known[part]
        return product

    def shape(self, operand) -> tuple[int, ...]:
        if operand.name in self.shapes:
            return self.shapes[operand.name]
        return tuple(self.size(d) for d in operand.dims)

    def type(self, operand) -> int:
        if operand.name in self.operand_types:
            return self.operand_types[operand.name]
        if operand.types == "F":  # F is chosen for each operand
            return self.draw.choice([F32, BF16])
        if "T" == operand.types:
            return self.types["T"]
        if operand.types == "any":
            return self.types["T"]
        return ("f32", "bf16", "i32").index(operand.types)

    def value(self, operand, shape, type) -> torch.Tensor:
        if operand.name in self.values:
            value = self.values[operand.name]
            return value() if callable(value) else value
        if type == I32:
            return torch.randint(-5, 20, shape)
        return torch.randn(shape)

    def build(self):
        """Returns the views of the operands, and their contents on each rank."""
        ends, views, contents = [0, 0], [], [[] for _ in range(self.ranks)]
        for operand in self.op.operands:
            if operand.name in self.absent:
                views.append(None)
                for c in contents:
                    c.append(None)
                continue
            shape, type, arena = self.shape(operand), self.type(operand), self.arenas.get(operand.name, 0)
            offset = -(-ends[arena] // SIZES[type]) * SIZES[type] + SIZES[type] * self.draw.randint(0, 9)
            view = View(arena, offset, type, *shape, *[0] * (4 - len(shape)))
            ends[arena] = offset + view.bytes
            views.append(view)
            for c in contents:
                c.append(self.value(operand, shape, type).reshape(shape).to(TYPES[type]).contiguous())
        assert max(ends) <= BYTES, ends
        if self.op.name in IN_PLACE and self.draw.random() < 0.3:
            same = [i for i, v in enumerate(views) if i and v is not None and v[2:] == views[0][2:]]
            if same:
                other = self.draw.choice(same)
                views[0] = views[other]
                for c in contents:
                    c[0] = c[other]
        return views, contents


def pick(c: Case, **options) -> None:
    for name, values in options.items():
        c.attributes[name] = c.draw.choice(values)


# Attributes that mean the same everywhere, and what they may be.
ATTRIBUTES = {
    "accumulate": [0, 1],
    "accumulate_q": [0, 1],
    "accumulate_bias": [0, 1],
    "batch": [1, 2, 3],
    "eps": [1e-5, 0.1],
    "offset": [0, 1],
    "scale": [0.7, 2.5],
    "softcap": [0, 2.0],
    "function": list(range(len(TABLE.functions))),
    "trans_a": [0, 1],
    "trans_b": [0, 1],
    "inverse": [0, 1],
    "heads": [1, 2, 3],
    "head_dim": [2, 4, 8],
    "top": [1, 2, 3],
}
RULES = {}


def rule(*names):
    def register(function):
        for name in names:
            RULES[name] = function
        return function

    return register


def some_shape(c: Case) -> tuple[int, ...]:
    return tuple(c.draw.randint(1, 9) for _ in range(c.draw.randint(1, 3)))


@rule("fill")
def _(c):
    c.shapes["y"] = some_shape(c)
    pick(c, value=[0, 1, -3, 7])
    c.operand_types["y"] = c.draw.choice([F32, BF16])


@rule("init_normal")
def _(c):
    tensor = c.draw.randrange(2)
    rows, columns = TENSORS[tensor][1:]
    c.sizes.update(r=c.draw.randint(1, 20), c=c.draw.randint(1, 12))
    c.attributes.update(tensor=tensor, row=c.draw.randrange(rows), col=c.draw.randrange(columns), std=c.draw.choice([0.02, 1]))
    pick(c, end=[0, 0, rows // 2, rows])


@rule("embed", "embed_grad")
def _(c):
    first = c.attributes["first"] = c.draw.randint(0, 9)
    pick(c, scale=[0, 0, 3.5])
    c.values["tokens"] = torch.randint(max(0, first - 3), first + c.sizes["v"] + 3, (c.sizes["r"],))


@rule("matmul")
def _(c):
    m, n, k = (c.draw.choice([1, 3, 8, 17, 40]) for _ in range(3))
    c.sizes.update(m=m, n=n)
    c.shapes["a"] = (k, m) if c.attributes["trans_a"] else (m, k)
    c.shapes["b"] = (n, k) if c.attributes["trans_b"] else (k, n)
    if c.attributes["accumulate"]:
        c.absent.add("bias")


def zigzag(c):
    """Draws chunks and a member, and returns the number of all tokens; n is that of the member."""
    t = c.draw.randint(1, 3)
    half = c.draw.randint(1, 4)
    c.attributes.update(chunks=2 * t, member=c.draw.randrange(t))
    c.sizes["n"] = 2 * half
    return 2 * t * half


@rule("rope")
def _(c):
    pick(c, position=[0, 5, 1000], theta=[10000.0, 500.0])
    tokens = zigzag(c) if c.draw.random() < 0.5 else c.sizes["n"]
    c.shapes["positions"] = (tokens * c.attributes["batch"],)
    c.values["positions"] = visible_positions(c, tokens)
    if c.draw.random() < 0.4:
        c.attributes.update(rotation=c.draw.randint(1, 2), head_dim=8)


def visible_positions(c, tokens):
    """Positions in documents: each begins anew at random."""
    rows = torch.zeros(tokens, c.attributes["batch"], dtype=torch.long)
    for b in range(c.attributes["batch"]):
        for t in range(tokens):
            rows[t, b] = 0 if c.draw.random() < 0.3 else (rows[t - 1, b] + 1 if t else c.draw.randint(0, 3))
    return rows.reshape(-1)


@rule("attention", "attention_grad")
def _(c):
    group = c.draw.choice([1, 2, 3])
    kv = c.draw.choice([1, 2])
    c.attributes.update(kv_heads=kv, heads=kv * group, prefix=c.draw.choice([0, 0, 1, 7]))
    c.sizes["value_dim"] = c.draw.choice([c.attributes["head_dim"], 3])
    c.sizes["n"] = c.draw.choice([1, 2, 5, 16, 33])
    prefix, way = c.attributes["prefix"], c.draw.choice(["plain", "plain", "block", "window", "chunks", "zigzag"])
    tokens = c.sizes["n"]
    if way == "chunks":
        tokens = zigzag(c)
    c.sizes["keys"] = prefix + tokens
    if way == "block" and prefix + tokens > 1:
        c.sizes["keys"] = c.draw.randint(1, prefix + tokens - 1)
    if way in ("window", "chunks") and c.draw.random() < 0.7:
        c.attributes["window"] = c.draw.randint(1, 9)
    if way == "zigzag":
        c.sizes["n"] = 2 * c.draw.randint(1, 8)
        c.attributes["zigzag"] = c.draw.randint(1, 2)
        c.sizes["keys"] = prefix + c.sizes["n"]
        c.absent.add("positions")
    c.shapes["positions"] = (tokens * c.attributes["batch"],)
    c.values["positions"] = visible_positions(c, tokens)
    if c.op.name == "attention":
        c.attributes["accumulate"] = 1 if way in ("block", "zigzag") or c.attributes["window"] else c.draw.randint(0, 1)
        return
    if way == "zigzag":
        c.attributes["accumulate_q"] = 1
    c.absent.discard("o")
    c.absent.discard("delta")
    c.absent.add(c.draw.choice(["o", "delta"]))
    c.values["lse"] = lambda: 3 + torch.rand(c.sizes["n"] * c.attributes["batch"], c.attributes["heads"])


def some_infinite(shape) -> torch.Tensor:
    return torch.where(torch.rand(shape) < 0.2, -torch.inf, 3 * torch.randn(shape))


@rule("concat_heads", "concat_heads_grad")
def _(c):
    c.sizes.update(first=c.draw.randint(1, 9), rest=c.draw.randint(1, 9))
    c.attributes["head_dim"] = c.sizes["first"] + c.sizes["rest"]


@rule("attention_merge")
def _(c):
    # The first block has keys for every query.
    p, r, heads = c.sizes["p"], c.sizes["r"], c.attributes["heads"]
    c.values["lses"] = torch.cat([torch.randn(1, r, heads), some_infinite((p - 1, r, heads))])


@rule("attention_sink")
def _(c):
    c.values["lse"] = some_infinite((c.sizes["r"], c.attributes["heads"]))


def labels(c):
    first = c.attributes["first"] = c.draw.randint(0, 9)
    c.attributes["valid"] = c.draw.randint(1, c.sizes["v"])
    c.values["labels"] = torch.randint(max(-1, first - 3), first + c.sizes["v"] + 3, (c.sizes["r"],))


@rule("cross_entropy_stats")
def _(c):
    labels(c)


@rule("cross_entropy", "cross_entropy_grad")
def _(c):
    p, r = c.sizes["p"], c.sizes["r"]
    if "first" in c.attributes:
        labels(c)
    else:
        c.values["labels"] = torch.randint(-1, 4, (r,))
    c.values["stats"] = torch.stack([3 + torch.randn(p, r), 1 + 5 * torch.rand(p, r), torch.randn(p, r)], 2)
    c.values["weight"] = torch.rand(1)


@rule("sumsq")
def _(c):
    c.shapes["x"] = some_shape(c)
    pick(c, weight=[0, 1, 0.5])


@rule("grad_norm")
def _(c):
    c.values["sums"] = torch.rand(c.sizes["k"]) * c.draw.choice([1, 1, torch.inf])
    c.values["limit"] = torch.tensor([c.draw.choice([0.1, 100.0])])
    pick(c, max_norm=[0, 1, 0.5])


def update(c):
    c.values["norm"] = torch.tensor([2.0, c.draw.choice([1.0, 0.3, -1.0])])
    c.values["step"] = torch.tensor([0.01, 1.7, 1.2])
    pick(c, weight_decay=[0, 0.1], beta1=[0.9], beta2=[0.95], momentum=[0, 0.9], eps=[1e-8])


@rule("adamw")
def _(c):
    shape = some_shape(c)
    c.shapes.update({n: shape for n in ("w", "m", "v", "copy", "grad")})
    c.values["v"] = lambda: torch.rand(shape)
    update(c)
    for name in list(c.attributes):
        if name not in ("beta1", "beta2", "eps", "weight_decay"):
            del c.attributes[name]


@rule("sgd")
def _(c):
    rows, columns, row = c.draw.randint(1, 9), c.draw.randint(1, 9), c.draw.choice([0, 0, 3])
    missing = c.draw.choice([0, 0, min(2, rows - 1)]) if row else 0
    if row == 0 and c.draw.random() < 0.5:
        shape = grad = (rows * columns,)
    else:
        shape, grad = (rows, columns), (row + rows - missing, columns)
    c.shapes.update(w=shape, m=shape, copy=shape, grad=grad)
    update(c)
    pick(c, scaled=[0, 1])
    c.attributes["row"] = row
    c.attributes = {a.name: c.attributes[a.name] for a in c.op.attributes}


@rule("nesterov")
def _(c):
    shape = some_shape(c)
    c.shapes.update(y=shape, m=shape, grad=shape)
    update(c)
    c.attributes = {a.name: c.attributes[a.name] for a in c.op.attributes}


@rule("axpby")
def _(c):
    pick(c, alpha=[1, -0.3, 3.4], beta=[1, 0.5])


@rule("normalize")
def _(c):
    c.values["sum"] = torch.rand(1)


@rule("dropout")
def _(c):
    c.attributes.update(tensor=c.draw.randrange(2), col=c.draw.randint(0, 9), first=c.draw.randint(0, 3), replica=c.draw.randint(0, 3))
    c.attributes.update(position=c.draw.choice([0, 9]), rate=c.draw.choice([0.1, 0.5, 0.0]), member=c.draw.choice([0, 2]))
    if c.draw.random() < 0.5:
        zigzag(c)
    c.values["key"] = torch.randint(-(2**31), 2**31 - 1, (2,))


@rule("d2h", "h2d", "d2d")
def _(c):
    c.arenas = {"d2h": {"y": 1}, "h2d": {"x": 1}, "d2d": {}}[c.op.name]


@rule("route")
def _(c):
    e = c.sizes["e"] = c.draw.choice([4, 6, 12])
    c.sizes["l"] = c.draw.choice([e, e // 2, 1])
    c.attributes["first"] = c.draw.randint(0, e - c.sizes["l"])
    pick(c, scores=[0, 1, 2], renormalize=[0, 1], scale=[0, 2.5], eps=[0, 1e-20])
    if c.draw.random() < 0.4:
        size = c.draw.choice([1, 2])
        c.attributes.update(groups=e // size, group_scores=1 if size == 1 else c.draw.randrange(2))
        c.attributes["top_groups"] = c.draw.randint(-(-c.attributes["top"] // size), e // size)


@rule("route_grad")
def _(c):
    c.sizes["e"] = c.draw.choice([4, 6, 12])
    pick(c, scores=[0, 1, 2], renormalize=[0, 1], scale=[0, 2.5], eps=[0, 1e-20])
    if c.attributes["top"] == 1:
        c.attributes["renormalize"] = 0  # the gradient would be 0, and both machines would give their rounding errors
    c.values["experts"] = lambda: torch.stack([torch.randperm(c.sizes["e"])[: c.attributes["top"]] for _ in range(c.sizes["r"])])


@rule("expert_counts", "router_loss_grad")
def _(c):
    c.sizes["e"] = c.draw.choice([4, 6, 12])
    if c.op.name == "expert_counts":
        return
    pick(c, scores=[0, 1, 2], z=[0, 0.25], balance=[0, 0.125])
    shape = (c.attributes["batch"], c.sizes["e"])
    c.values["counts"] = lambda: torch.randint(0, 50, shape).float()


@rule("expert_load")
def _(c):
    e = c.sizes["e"] = c.draw.choice([4, 6, 12])
    c.sizes["top"] = c.draw.randint(1, 4)
    shape = (c.sizes["r"], c.sizes["top"])
    c.values["experts"] = lambda: torch.randint(0, e, shape)
    c.values["load"] = lambda: torch.randint(0, 50, (e,)).float()


@rule("expert_bias")
def _(c):
    e = c.sizes["e"] = c.draw.choice([4, 6, 12])
    c.values["load"] = lambda: torch.randint(0, 5, (e,)).float()
    c.values["norm"] = torch.tensor([2.0, c.draw.choice([1.0, 0.3, -1.0])])
    pick(c, rate=[0.001, 0.25])


@rule("permute", "permute_grad", "unpermute", "unpermute_grad")
def _(c):
    r, top = c.sizes["r"], c.attributes["top"]
    slots = c.draw.randint(1, top)
    n = c.sizes["n"] = r * slots
    pick(c, share=[0, 0.5])

    def places():
        ours = torch.zeros(r, top, dtype=torch.bool)
        for row in ours:
            row[torch.randperm(top)[: c.draw.randint(0, slots)]] = True
        return torch.full((r, top), -1).masked_scatter_(ours, torch.randperm(n)[: int(ours.sum())])

    c.values["places"] = places


@rule("matmul_grouped", "matmul_grouped_weight_grad")
def _(c):
    n, e, k, o = (c.sizes[x] for x in "neko")
    pick(c, share=[0, 0.5])
    c.values["ends"] = torch.tensor(sorted(c.draw.randint(0, n) for _ in range(e - 1)) + [c.draw.choice([n, n, n - n // 3])])
    c.values["ends"].clamp_(max=int(c.values["ends"][-1]))
    c.shapes["b"] = c.shapes["db"] = (e, o, k) if c.attributes["trans_b"] else (e, k, o)
    c.absent -= {"db", "a"}
    if c.op.name == "matmul_grouped_weight_grad" and "dbias" not in c.absent and c.draw.random() < 0.3:
        c.absent |= {"db", "a"}
    if c.op.name == "matmul_grouped" and (c.attributes["trans_b"] or c.attributes["accumulate"]):
        c.absent.add("bias")
    if c.op.name == "matmul_grouped" and c.attributes["trans_b"]:
        c.operand_types["c"] = c.types["T"]


@rule("activation", "activation_grad", "glu", "glu_grad")
def _(c):
    pick(c, share=[0, 0.5])
    c.values["ends"] = torch.randint(0, c.sizes["n"] + 1, (c.sizes["e"],)).sort().values


@rule("scan", "scan_grad")
def _(c):
    # A norm of one number is its sign, whose gradient is 0, and both machines would give their rounding errors.
    pick(c, shared=[1, 2], key_dim=[2, 3, 8], value_dim=[2, 5], delta=[0, 1], norm=[1e-6, 0.5], scale=[0, 0.5])
    pick(c, channels=[1, c.attributes["key_dim"]])
    c.values["positions"] = visible_positions(c, c.sizes["n"])
    strength = c.draw.choice([0.01, 1, 30])
    shape = c.shape(next(o for o in c.op.operands if o.name == "decay"))
    c.values["decay"] = lambda: -strength * torch.rand(shape)
    c.values["beta"] = lambda: torch.rand(shape[0], c.attributes["heads"] * c.attributes["shared"])
    c.terms["ddecay"] = "dbeta"  # of strong decays, 0 is left of terms like those of dbeta


@rule("decay", "decay_grad")
def _(c):
    pick(c, least=[0, 0, 0.5])


@rule("conv", "conv_grad")
def _(c):
    pick(c, width=[1, 3, 4])
    c.values["positions"] = visible_positions(c, c.sizes["n"])


def collective(c):
    c.ranks = c.draw.randint(1, RANKS)
    c.attributes["group"] = c.ranks - 1
    return c.ranks


@rule("all_reduce")
def _(c):
    collective(c)
    c.shapes["x"] = some_shape(c)


@rule("rotate")
def _(c):
    collective(c)
    c.shapes["x"] = c.shapes["y"] = some_shape(c)


@rule("all_gather", "reduce_scatter")
def _(c):
    t, shape = collective(c), some_shape(c)
    small, large = ("x", "y") if c.op.name == "all_gather" else ("y", "x")
    c.shapes[small], c.shapes[large] = shape, (t * shape[0], *shape[1:])


@rule("all_to_all")
def _(c):
    t = collective(c)
    copies = c.attributes["copies"] = c.draw.choice([n for n in range(1, t + 1) if t % n == 0])
    r, columns = c.draw.randint(1, 5), c.draw.randint(1, 5)
    tall, wide = (t * r, columns), (r, t // copies * columns)
    c.shapes["y"], c.shapes["x"] = (wide, tall) if c.attributes["inverse"] else (tall, wide)


SKIPPED = {"load_tokens", "send", "recv", "record", "wait"}  # whole programs test these


def ours(c: Case, views, contents):
    """Executes a case, and returns the operands of each rank."""
    attributes = tuple(c.attributes[a.name] for a in c.op.attributes)
    stream = TABLE.streams.index({"comm": "coll"}.get(c.op.group, "compute"))
    instr = Instr(c.number, stream, tuple(views), attributes)
    code = Code("oracle", (BYTES, BYTES), [Buffer("device", 0, 0, BYTES), Buffer("host", 1, 0, BYTES)])
    code.sections = {"step": [instr]}
    groups = [tuple(range(g + 1)) for g in range(RANKS)]
    program = Program(HEADER, [code], [RankInfo(0, (0, 0, 0), [], groups) for _ in range(c.ranks)])
    links = Local()
    ranks = [Rank(program, n, torch.device("cpu"), links, 5) for n in range(c.ranks)]
    for rank, values in zip(ranks, contents):
        for view, value in zip(views, values):
            if view is not None:
                rank.tensor(view).copy_(value)
    run(ranks, "step", links)
    return stream, [[None if v is None else rank.tensor(v).clone() for v in views] for rank in ranks]


def theirs(c: Case, stream, views, contents):
    """Asks for the results of a case."""
    ranks = []
    for values in contents:
        operands = []
        for view, x in zip(views, values):
            data = view and base64.b64encode(x.flatten().view(torch.uint8).numpy().tobytes()).decode()
            operands.append(view and {"arena": view.buffer, "offset": view.offset, "type": view.type, "shape": view.shape, "data": data})
        ranks.append(operands)
    attributes = [float(c.attributes[a.name]) for a in c.op.attributes]
    print(json.dumps({"op": c.op.name, "stream": stream, "attrs": attributes, "ranks": ranks}), flush=True)
    reply = json.loads(sys.stdin.readline())
    if reply["Error"]:
        raise ValueError(reply["Error"])
    return reply["Results"]


def difference(got: torch.Tensor, want: torch.Tensor, coarse: bool, terms: float) -> float:
    """Returns how many times as large as allowed the largest difference is. Coarse results may be rounded to bf16 on the way. If a
    result is a difference of larger terms, those are rounded to f32, too."""
    if got.dtype == torch.int32:
        return 0.0 if got.equal(want) else 1e9
    a, b = got.double(), want.double()
    same = (a == b) | a.isnan() & b.isnan()
    size = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    relative, absolute = (2.0**-6, 2.0**-7) if coarse else (2.0**-7, 1e-5) if got.dtype == torch.bfloat16 else (1e-4, 1e-5)
    allowed = b.abs() * relative + size * absolute + terms * 1e-6 + 1e-7
    return torch.where(same, 0.0, (a - b).abs() / allowed).nan_to_num(nan=1e9).max().item()


def describe(c: Case, views) -> str:
    shapes = {o.name: (("f32", "bf16", "i32", "u8")[v.type], v.shape) for o, v in zip(c.op.operands, views) if v is not None}
    return f"{c.op.name} {c.attributes} {shapes}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--op", action="append", help="only this opcode")
    parser.add_argument("--flash", action="store_true", help="attention by flash kernels, where they can compute it")
    options = parser.parse_args()
    fused.enabled = options.flash
    torch.set_num_threads(1)
    bad = 0
    for name in OPCODES:
        if name in SKIPPED or options.op and name not in options.op:
            continue
        worst, failed = 0.0, 0
        names = [o.name for o in OPCODES[name][1].operands]
        for i in range(options.cases):
            seed = f"{options.seed} {name} {i}"
            draw = random.Random(seed)
            torch.manual_seed(draw.randrange(2**31))
            c = Case(name, draw)
            views, contents = c.build()
            try:
                stream, got = ours(c, views, contents)
                answers = theirs(c, stream, views, contents)
            except (RuntimeError, ValueError) as error:
                print(f"{seed}: {describe(c, views)}: {error}", file=sys.stderr)
                failed += 1
                continue
            for mine, answer in zip(got, answers):
                for operand, x, text in zip(c.op.operands, mine, answer):
                    if text is None:
                        continue
                    want = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=x.dtype).view(x.shape)
                    like = mine[names.index(c.terms[operand.name])] if operand.name in c.terms else torch.zeros(1)
                    d = difference(x, want, options.flash and c.types["T"] == BF16, like.abs().max().item())
                    worst = max(worst, d)
                    if d > 1:
                        failed += 1
                        print(f"{seed}: {operand.name} differs {d:.3g} times as much as allowed: {describe(c, views)}", file=sys.stderr)
                        if options.op:
                            print(x, want, file=sys.stderr)
        print(f"{name}: {options.cases} cases, {worst:.2g} of the difference that is allowed", file=sys.stderr)
        bad += failed
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
