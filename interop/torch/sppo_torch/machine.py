"""A rank: its arenas, views, streams and events, and the loop that runs the sections of several ranks.

On a CPU, a rank executes its instructions one after another, in the order of the program, which honours all waits. On CUDA, every
stream of the program is a stream of the device, and every event an event.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import Tensor

from . import Refused
from .data import Batch
from .links import Links, Meeting
from .ops import KERNELS
from .program import Instr, Program, State, View
from .randoms import Parameter
from .table import TABLE, Attribute, Opcode

TYPES = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)

# An action returns False if it has to wait for a rank of this process.
Action = Callable[[], Any]


class Step(NamedTuple):
    """An instruction that is ready to run, and where it comes from."""

    action: Action
    stream: int
    instr: Instr


class Rank:
    """A rank with its memory. `batch` is what load_tokens reads; whoever runs a section sets it."""

    def __init__(self, program: Program, number: int, device: torch.device, links: Links, seed: int):
        self.program, self.number, self.device, self.links, self.seed = program, number, device, links, seed
        self.info = program.ranks[number]
        self.code = program.codes[self.info.code]
        cuda = device.type == "cuda"
        on_device, on_host = self.code.arenas
        try:
            self.arenas = (
                torch.empty(on_device, dtype=torch.uint8, device=device),
                torch.empty(on_host, dtype=torch.uint8, pin_memory=cuda and on_host > 0),
            )
        except RuntimeError as error:
            raise Refused(f"rank {number} needs {on_device} bytes of device memory and {on_host} of host memory: {error}") from error
        self.streams = [torch.cuda.Stream(device) for _ in TABLE.streams] if cuda else []
        self.batch: Batch | None = None
        self.views: dict[View, Tensor] = {}
        self.sections = {name: self._bind(name) for name in self.code.sections}

    def tensor(self, view: View) -> Tensor:
        """Returns a view as a tensor that shares the arena's memory."""
        if view not in self.views:
            buffer = self.code.buffers[view.buffer]
            start = buffer.offset + view.offset
            flat = self.arenas[buffer.arena][start : start + view.bytes].view(TYPES[view.type])
            self.views[view] = flat.view(view.shape)
        return self.views[view]

    def result(self, name: str) -> Tensor | None:
        """Returns a result of the code, if it has it."""
        view = self.code.results.get(name)
        return None if view is None else self.tensor(view)

    def states(self) -> list[tuple[State, str, tuple[int, int], tuple[int, int, int], Tensor]]:
        """Returns the states with the name and shape of their tensors, row0, col0 and end, and the rectangle as a matrix."""
        rows = []
        for s in self.code.states:
            name, shape = self.program.tensor(s.tensor)
            place = tuple(self.program.value(self.number, a) for a in (s.row0, s.col0, s.end))
            matrix = self.tensor(s.view)
            rows.append((s, name, shape, place, matrix.view(len(matrix), -1)))
        return rows

    def _bind(self, name: str) -> list[Step]:
        events: dict[int, torch.cuda.Event | None] = {}
        steps = []
        for instr in self.code.sections[name]:
            op = TABLE.opcodes[instr.opcode]
            try:
                action = self._action(op, instr, events)
            except (RuntimeError, KeyError) as error:
                raise Refused(f"code {self.code.name}, {name}: {op.name}: {error}") from error
            if action is not None:
                steps.append(Step(action, instr.stream, instr))
        return steps

    def _action(self, op: Opcode, instr: Instr, events: dict[int, Any]) -> Action | None:
        """Returns what an instruction does, or None if it does nothing on this device."""
        attributes = {a.argument: self._value(a, v) for a, v in zip(op.attributes, instr.attributes)}
        if op.group == "sync":
            return self._sync(op.name, attributes["event"], events)
        operands = [self._operand(op, i, v) for i, v in enumerate(instr.views)]
        stream = TABLE.streams[instr.stream]
        if op.name == "load_tokens":
            return partial(self._load, operands[0], **attributes)
        if op.name in ("send", "recv"):
            return partial(getattr(self.links, op.name), self.number, attributes["peer"], stream, operands[0])
        if op.group == "comm":
            members = attributes.pop("group")
            return partial(self.links.meet, Meeting(op.name, members, stream, self.number, operands, attributes))
        return partial(KERNELS[op.name], *operands, **attributes)

    def _sync(self, name: str, event: int, events: dict[int, Any]) -> Action | None:
        if name == "record":
            events[event] = torch.cuda.Event() if self.streams else None
        elif event not in events:
            raise KeyError(f"event {event} is waited for before it is recorded")
        if not self.streams:
            return None
        return events[event].record if name == "record" else events[event].wait

    def _operand(self, op: Opcode, index: int, view: View | None) -> Tensor | None:
        """Returns an operand, with dimensions beside those of the table flattened."""
        if view is None:
            return None
        x, dims = self.tensor(view), op.operands[index].dims
        if not dims or len(dims) == x.dim():
            return x
        if len(dims) == 1:
            return x.flatten()
        if x.dim() < len(dims):
            raise RuntimeError(f"operand {op.operands[index].name} has shape {tuple(x.shape)}")
        return x.view(*x.shape[: len(dims) - 2], -1, x.shape[-1])

    def _value(self, attribute: Attribute, value: Any) -> Any:
        """Returns an attribute as kernels get it."""
        value = self.program.value(self.number, value)
        if attribute.kind == "tensor":
            name, (rows, columns) = self.program.tensor(value)
            return Parameter(name, rows, columns, self.seed)
        if attribute.kind == "function":
            return TABLE.functions[value]
        if attribute.kind == "group":
            return self.info.groups[value]
        if attribute.name == "rotation":
            return self.program.run["rotations"][value - 1] if value else None
        return bool(value) if attribute.kind == "bool" else value

    def _load(self, tokens: Tensor, **attributes: int) -> None:
        assert self.batch is not None, "the section has no data"
        tokens.copy_(torch.from_numpy(self.batch.load(tokens.numel(), **attributes)), non_blocking=True)

    def place(self, step: Step) -> str:
        """Says which instruction this is, for messages."""
        op = TABLE.opcodes[step.instr.opcode].name
        names = [self.code.buffers[v.buffer].name for v in step.instr.views if v is not None]
        return f"rank {self.number}: {op} {', '.join(names)} on stream {TABLE.streams[step.stream]}"


def run(ranks: Sequence[Rank], section: str, links: Links) -> None:
    """Runs a section on all ranks of this process, until everything in it has ended."""
    left = [(rank, rank.sections[section]) for rank in ranks]
    at = [0] * len(left)
    while any(at[i] < len(steps) for i, (_, steps) in enumerate(left)):
        before = list(at)
        for i, (rank, steps) in enumerate(left):
            at[i] = _advance(rank, steps, at[i])
        if at == before:
            stuck = [rank.place(steps[at[i]]) for i, (rank, steps) in enumerate(left) if at[i] < len(steps)]
            raise RuntimeError("no rank can go on:\n  " + "\n  ".join(stuck))
    links.settle()
    for rank in ranks:
        if rank.streams:
            torch.cuda.synchronize(rank.device)


def _advance(rank: Rank, steps: list[Step], at: int) -> int:
    """Runs instructions until one has to wait, and returns its index."""
    streams = rank.streams
    with torch.no_grad():
        while at < len(steps):
            action, stream, _ = steps[at]
            try:
                if streams:
                    with torch.cuda.stream(streams[stream]):
                        done = action()
                else:
                    done = action()
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(f"{rank.place(steps[at])}: {error}") from error
            if done is False:
                return at
            at += 1
    return at
