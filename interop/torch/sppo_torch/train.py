"""A run: what the machine writes before a section and reads after it, the learning rate, validations, skipped steps."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Iterator

import torch

from . import Refused, randoms
from .data import Batch, Written, open_data
from .links import Distributed, Links, Local
from .machine import Rank, run
from .program import Program
from .table import TABLE

_LARGEST = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_NORMS = 100  # the median of this many norms is the measure of a spike
_ENOUGH = 10  # from this many norms on


def learning_rate(run: dict[str, Any], step: int) -> float:
    """Returns the learning rate of a step, counted from 1."""
    lr, low, warmup, steps = run["lr"], run["min_lr"], run["warmup"], run["steps"]
    schedule = run["lr_schedule"] or "constant"
    stable = schedule == "warmup_stable_decay"
    decay = run["decay_steps"] if stable else steps - warmup
    if step <= warmup:
        start = low if stable else 0.0
        return start + (lr - start) * step / warmup
    if schedule == "constant" or step <= steps - decay:
        return lr
    if step >= steps:
        return low
    x = (step - (steps - decay)) / decay
    fall = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "sqrt": 1 - math.sqrt(x)}
    return low + (lr - low) * fall[run["decay_type"] if stable else schedule]


@dataclass
class StepResult:
    step: int
    loss: float
    norm: float
    lr: float
    skipped: bool


class Job:
    """A run of a program. All ranks are in this process, or one in each process of torch.distributed."""

    def __init__(self, program: Program, device: torch.device, folder: str = "", seed: int | None = None, written: Written | None = None):
        self.program, self.device = program, device
        self.settings = program.run
        self.seed = self.settings["seed"] if seed is None else seed
        self.step, self.skipped, self.norms = 0, 0, []
        self.links, numbers = _connect(program, device)
        self.data = open_data(self.settings, self.seed, folder, written)
        self.ranks = [Rank(program, n, device, self.links, self.seed) for n in numbers]
        self._run("init", None)

    def _run(self, section: str, batch: Batch | None) -> None:
        for rank in self.ranks:
            rank.batch = batch
        run(self.ranks, section, self.links)

    def _set(self, name: str, values: list[float] | list[int]) -> None:
        for rank in self.ranks:
            result = rank.result(name)
            if result is not None:
                result.copy_(torch.tensor(values, dtype=result.dtype))

    def _get(self, name: str) -> list[float] | None:
        """Returns a result of the first rank that has it; None if no rank has."""
        found = [r.tolist() for r in (rank.result(name) for rank in self.ranks) if r is not None]
        everyone = [f for f in self.links.share(found[:1]) if f]
        return everyone[0][0] if everyone else None

    def _limit(self) -> float:
        """Returns the largest norm at which weights are updated."""
        spikes = self.settings.get("spikes") or 0
        if not spikes or len(self.norms) < _ENOUGH:
            return _LARGEST
        return min(_LARGEST, spikes * sorted(self.norms)[len(self.norms) // 2])

    def train_step(self) -> StepResult:
        """Runs the next step."""
        self.step += 1
        settings, updates = self.settings, self.step - self.skipped
        lr = learning_rate(settings, self.step)
        corrections = [1 / (1 - settings[b] ** updates) if settings[b] < 1 else 1.0 for b in ("beta1", "beta2")]
        self._set("step", [lr, *corrections])
        self._set("spike", [self._limit()])
        key = randoms.key(self.seed, "dropout", self.step)
        self._set("dropout", [_signed32(key & 0xFFFFFFFF), _signed32(key >> 32)])
        batch = Batch(self.data, self.step)
        if self._has("weight"):
            self._set("weight", [1 / max(1, batch.labels(settings["batch"], settings["sequence"]))])
        self._run("step", batch)
        loss, norm = self._get("loss"), self._get("grad_norm")
        if loss is None or norm is None:
            raise Refused("the program has no loss or no gradient norm")
        skipped = norm[1] < 0
        if skipped:
            self.skipped += 1
        else:
            self.norms = [*self.norms[1 - _NORMS :], norm[0]]
        return StepResult(self.step, loss[0], norm[0], lr, skipped)

    def _has(self, name: str) -> bool:
        return any(name in code.results for code in self.program.codes)

    def validate(self) -> float | None:
        """Returns the validation loss, or None if the program has no validation."""
        settings = self.settings
        if not settings["eval_batch"] or not self.program.codes[0].sections["eval"]:
            return None
        size, total, weights = settings["eval_sequences"], 0.0, 0
        for section in range(-(-settings["eval_batch"] // size)):
            batch = Batch(self.data, self.step, section * size)
            labels = size * settings["sequence"]
            if self._has("eval_weight"):
                labels = batch.labels(size, settings["sequence"])
                self._set("eval_weight", [1 / max(1, labels)])
            self._run("eval", batch)
            loss = self._get("eval_loss")
            if loss is None:
                raise Refused("the program has no validation loss")
            total, weights = total + loss[0] * labels, weights + labels
        return total / max(1, weights)

    def train(self, steps: int) -> Iterator[StepResult]:
        """Runs the steps up to a number."""
        while self.step < steps:
            yield self.train_step()


def _signed32(n: int) -> int:
    return n - (1 << 32) if n >> 31 else n


def _connect(program: Program, device: torch.device) -> tuple[Links, list[int]]:
    """Returns the links of this process's ranks, and their numbers."""
    dist = torch.distributed
    if not dist.is_initialized():
        return Local(), list(range(len(program.ranks)))
    if dist.get_world_size() != len(program.ranks):
        raise Refused(f"the program has {len(program.ranks)} ranks, but there are {dist.get_world_size()} processes: start one for each")
    lines = set()
    for info in program.ranks:
        for section in program.codes[info.code].sections.values():
            for instr in section:
                for a, v in zip(TABLE.opcodes[instr.opcode].attributes, instr.attributes):
                    if a.kind == "group":
                        lines.add((info.groups[v], TABLE.streams[instr.stream]))
    return Distributed(lines, device), [dist.get_rank()]
