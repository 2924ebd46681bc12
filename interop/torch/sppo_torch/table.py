"""The opcode table of docs/bytecode.md, from opcodes.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class Operand(NamedTuple):
    """An operand of an opcode. `dims` are the names of its dimensions, empty if any shape is allowed; `adds` is the attribute
    that makes an operand with direction acc add."""

    name: str
    dir: str
    types: str
    dims: tuple[str, ...]
    optional: bool = False
    adds: str = ""


class Attribute(NamedTuple):
    """An attribute of an opcode. `argument` is its name as a Python argument, since `as` is a keyword."""

    name: str
    kind: str

    @property
    def argument(self) -> str:
        return "as_" if self.name == "as" else self.name

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "factor")


class Opcode(NamedTuple):
    """A row of the table. `group` is kernel, data, move, comm or sync."""

    name: str
    group: str
    operands: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]


class Table(NamedTuple):
    version: int
    table: int
    streams: tuple[str, ...]
    functions: tuple[str, ...]
    opcodes: tuple[Opcode, ...]

    def opcode(self, name: str) -> Opcode:
        return next(op for op in self.opcodes if op.name == name)


def _opcode(row: dict) -> Opcode:
    operands = (Operand(**o | {"dims": tuple(filter(None, o.get("dims", "").split(",")))}) for o in row.get("operands") or [])
    return Opcode(row["name"], row["class"], tuple(operands), tuple(Attribute(**a) for a in row.get("attributes") or []))


def load() -> Table:
    """Reads opcodes.json, which lies beside this file."""
    text = json.loads((Path(__file__).parent / "opcodes.json").read_text())
    opcodes = tuple(map(_opcode, text["opcodes"]))
    return Table(text["version"], int(text["table"], 16), tuple(text["streams"]), tuple(text["functions"]), opcodes)


TABLE = load()
