"""The opcode table of docs/bytecode.md, from opcodes.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Operand:
    """An operand of an opcode. `dims` are the names of its dimensions, empty if any shape is allowed; `adds` is the attribute
    that makes an operand with direction acc add."""

    name: str
    dir: str
    types: str
    dims: tuple[str, ...] = ()
    optional: bool = False
    adds: str = ""


@dataclass(frozen=True)
class Attribute:
    """An attribute of an opcode. `argument` is its name as a Python argument, since `as` is a keyword."""

    name: str
    kind: str

    @property
    def argument(self) -> str:
        return "as_" if self.name == "as" else self.name

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "factor")


@dataclass(frozen=True)
class Opcode:
    """A row of the table. `group` is kernel, data, move, comm or sync."""

    name: str
    group: str
    operands: tuple[Operand, ...] = field(default=())
    attributes: tuple[Attribute, ...] = field(default=())


@dataclass(frozen=True)
class Table:
    version: int
    table: int
    streams: tuple[str, ...]
    functions: tuple[str, ...]
    opcodes: tuple[Opcode, ...]


def _operand(row: dict) -> Operand:
    dims = tuple(row["dims"].split(",")) if row.get("dims") else ()
    return Operand(row["name"], row["dir"], row["types"], dims, row.get("optional", False), row.get("adds", ""))


def load() -> Table:
    """Reads opcodes.json, which lies beside this file."""
    text = json.loads((Path(__file__).parent / "opcodes.json").read_text())
    opcodes = tuple(
        Opcode(
            row["name"],
            row["class"],
            tuple(_operand(o) for o in row.get("operands") or []),
            tuple(Attribute(a["name"], a["kind"]) for a in row.get("attributes") or []),
        )
        for row in text["opcodes"]
    )
    return Table(text["version"], int(text["table"], 16), tuple(text["streams"]), tuple(text["functions"]), opcodes)


TABLE = load()
