"""Reads programs (.sppb) as docs/bytecode.md describes them."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import Refused
from .checksum import crc32c
from .table import TABLE

_MAGIC = b"sppb\r\n\x1a\n"
_ABSENT = 0xFFFFFFFF
SECTIONS = ("init", "step", "eval")
ROLES = ("weight", "master", "moment1", "moment2", "grad", "momentum")
SIZES = (4, 2, 4, 1)  # bytes of an element of f32, bf16, i32, u8


class View(NamedTuple):
    """A contiguous array in a buffer. `offset` is in bytes; unused dimensions are 0 and come last."""

    buffer: int = 0
    offset: int = 0
    type: int = 0
    d0: int = 0
    d1: int = 0
    d2: int = 0
    d3: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(d for d in self[3:] if d)

    @property
    def bytes(self) -> int:
        return SIZES[self.type] * math.prod(self.shape)


class Const(NamedTuple):
    """An attribute whose value is a constant of the rank."""

    index: int


class Instr(NamedTuple):
    """An instruction. An absent operand is None."""

    opcode: int
    stream: int
    views: tuple[View | None, ...]
    attributes: tuple[Any, ...]


class Buffer(NamedTuple):
    name: str
    arena: int  # 0: device, 1: host
    offset: int
    size: int


class State(NamedTuple):
    """The rectangle of a tensor that a rank holds in a role."""

    tensor: int
    role: str
    view: View
    row0: Any
    col0: Any
    end: Any


@dataclass
class Code:
    """What ranks that do the same work have in common. `arenas` are the bytes of the device and the host arena."""

    name: str
    arenas: tuple[int, int]
    buffers: list[Buffer] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    results: dict[str, View] = field(default_factory=dict)
    sections: dict[str, list[Instr]] = field(default_factory=dict)


@dataclass
class RankInfo:
    code: int
    place: tuple[int, int, int]  # dp, pp, sp
    consts: list[int]
    groups: list[tuple[int, ...]]


@dataclass
class Program:
    """A program: its header, which is JSON, the codes, and the ranks."""

    header: dict[str, Any]
    codes: list[Code]
    ranks: list[RankInfo]

    @property
    def run(self) -> dict[str, Any]:
        return self.header["run"]

    def tensor(self, index: int) -> tuple[str, tuple[int, int]]:
        """Returns the name and the rows and columns of a parameter."""
        row = self.header["tensors"][index]
        return row["name"], (row["shape"][0], row["shape"][1])

    def value(self, rank: int, attribute: Any) -> Any:
        """Returns an attribute's value on a rank."""
        return self.ranks[rank].consts[attribute.index] if isinstance(attribute, Const) else attribute


class _Reader:
    def __init__(self, data: bytes, place: str):
        self.data, self.at, self.place = data, 0, place

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise Refused(f"{self.place}: the file ends within a value")
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        while True:
            b = self.byte()
            value |= (b & 0x7F) << shift
            if b < 0x80:
                return value
            shift += 7

    def zigzag(self) -> int:
        n = self.varint()
        return (n >> 1) ^ -(n & 1)

    def string(self) -> str:
        return self.take(self.varint()).decode()

    def view(self, base: View) -> View:
        bits = self.byte()
        if not bits:
            return base
        fields = list(base)
        for i in range(7):
            if bits >> i & 1:
                fields[i] = self.byte() if i == 2 else fields[i] + self.zigzag()
        fields[0] &= 0xFFFFFFFF
        return View(*fields)

    def attribute(self, is_float: bool) -> Any:
        const = self.varint()
        if const:
            return Const(const - 1)
        return struct.unpack("<d", self.take(8))[0] if is_float else self.zigzag()


def _section(r: _Reader) -> list[Instr]:
    _, count, _, _ = r.varint(), r.varint(), r.varint(), r.varint()
    views: dict[int, list[View]] = {}
    attributes: dict[int, list[Any]] = {}
    instrs = []
    for _ in range(count):
        number, stream = r.byte(), r.byte()
        if number >= len(TABLE.opcodes) or stream >= len(TABLE.streams):
            raise Refused(f"{r.place}: opcode {number} on stream {stream} does not exist")
        op = TABLE.opcodes[number]
        for _ in range(r.byte().bit_count()):
            r.varint()  # provenance, which has no influence on what an instruction does
        of = views.setdefault(number, [View()] * len(op.operands))
        for i in range(len(of)):
            of[i] = r.view(of[i])
        last = attributes.setdefault(number, [0.0 if a.is_float else 0 for a in op.attributes])
        bits = r.varint()
        for i, a in enumerate(op.attributes):
            if bits >> i & 1:
                last[i] = r.attribute(a.is_float)
        present = tuple(None if v.buffer == _ABSENT else v for v in of)
        instrs.append(Instr(number, stream, present, tuple(last)))
    return instrs


def _code(r: _Reader) -> Code:
    code = Code(r.string(), (r.varint(), r.varint()))
    r.place = f"code {code.name}"
    name, end = b"", 0
    for _ in range(r.varint()):
        name = name[: r.varint()] + r.take(r.varint())
        arena, offset, size = r.byte(), end + r.zigzag(), r.varint()
        end = offset + size
        if arena > 1 or offset < 0 or end > code.arenas[arena]:
            raise Refused(f"{r.place}: buffer {name.decode()} lies outside its arena")
        code.buffers.append(Buffer(name.decode(), arena, offset, size))
    for _ in range(r.varint()):
        tensor, role, view = r.varint(), ROLES[r.byte()], r.view(View())
        code.states.append(State(tensor, role, view, r.attribute(False), r.attribute(False), r.attribute(False)))
    for _ in range(r.varint()):
        result = r.string()
        code.results[result] = r.view(View())
    for section in SECTIONS:
        code.sections[section] = _section(r)
    _check(code)
    return code


def _check(code: Code) -> None:
    """Refuses views that lie outside their buffers."""
    views = [s.view for s in code.states] + list(code.results.values())
    views += [v for s in code.sections.values() for i in s for v in i.views if v is not None]
    for v in set(views):
        if v.buffer >= len(code.buffers) or v.type >= len(SIZES) or min(v[3:]) < 0 or v.offset < 0:
            raise Refused(f"code {code.name}: the view {v} is not valid")
        if v.offset + v.bytes > code.buffers[v.buffer].size:
            raise Refused(f"code {code.name}: a view lies outside buffer {code.buffers[v.buffer].name}")


def _ranks(r: _Reader, consts: int, groups: int) -> list[RankInfo]:
    ranks = []
    for number in range(r.varint()):
        code, dp, pp, sp = (r.zigzag() for _ in range(4))
        values = [r.zigzag() for _ in range(consts)]
        members = []
        for _ in range(groups):
            last, group = 0, []
            for _ in range(r.varint()):
                last += r.zigzag()
                group.append(last)
            members.append(tuple(group))
        ranks.append(RankInfo(code, (dp, pp, sp), values, members))
    return ranks


def decode(data: bytes) -> Program:
    """Decodes the bytes of a .sppb file, or raises Refused."""
    if data[:8] != _MAGIC:
        raise Refused("this is not a program (.sppb): build one with sppoc build")
    if data[-5:-4] != b"E" or struct.unpack("<I", data[-4:])[0] != crc32c(data[:-4]):
        raise Refused("the program is damaged: its checksum is wrong")
    version, table = struct.unpack("<IQ", data[8:20])
    if (version, table) != (TABLE.version, TABLE.table):
        raise Refused(
            f"the program has version {version} and opcodes {table:016x}; this package has {TABLE.version} and "
            f"{TABLE.table:016x}: install the package of the same release as sppoc"
        )
    header: dict[str, Any] = {}
    codes: list[Code] = []
    ranks: list[RankInfo] = []
    at = 20
    while at < len(data) - 5:
        kind, length = struct.unpack("<cQ", data[at : at + 9])
        part = data[at + 9 : at + 9 + length]
        at += 9 + length
        if kind == b"H":
            header = json.loads(part)
        elif kind == b"C":
            codes.append(_code(_Reader(part, f"code {len(codes)}")))
        elif kind == b"R":
            names = [len(header.get(n) or []) for n in ("consts", "groups")]
            ranks = _ranks(_Reader(part, "ranks"), names[0], names[1])
        else:
            raise Refused(f"the program has an unknown part {kind!r}")
    return Program(header, codes, ranks)


def read(path: str | Path) -> Program:
    """Reads a .sppb file, or raises Refused."""
    try:
        return decode(Path(path).read_bytes())
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}") from error
    except Refused as error:
        raise Refused(f"{path}: {error}") from error
