"""Checkpoints as docs/bytecode.md describes them. A checkpoint describes whole tensors, so a run can continue from one that ranks
divided differently."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import Refused
from .checksum import crc32c
from .machine import Rank
from .train import Job

FORMAT = 3
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
_CRC = b',\n"crc32c": "'


class Piece(NamedTuple):
    """The rectangle of an entry: from row, col on; padding is left out."""

    entry: str
    row: int
    col: int
    data: Tensor


def _entry(name: str, role: str) -> str:
    return name if role in ("weight", "master") else f"optimizer.{role}.{name}"


def _saved(rank: Rank) -> Iterator[tuple[str, str, tuple[int, int], tuple[int, int], Tensor]]:
    """Yields the rectangles of a rank: tensor, role, shape of the whole, first row and column, values without padding. Of a tensor
    with a master, the weight is left out."""
    masters = {s.tensor for s in rank.code.states if s.role == "master"}
    for state, name, shape, (row, col, end), matrix in rank.states():
        if state.role == "grad" or state.role == "weight" and state.tensor in masters:
            continue
        rows, columns = min(end or shape[0], shape[0]) - row, shape[1] - col
        part = matrix[: max(0, rows), : max(0, columns)]
        if part.numel():
            yield name, state.role, shape, (row, col), part


# Writing


def save(job: Job, folder: str, keep: int = 2) -> Path:
    """Writes the checkpoint step-N of a run, complete or not at all, and returns its folder. Every process must call it."""
    path = Path(folder) / f"step-{job.step}"
    draft = Path(folder) / f"step-{job.step}.tmp"
    first = job.ranks[0].number == 0
    if first:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    job.links.share(None)
    owners = _owners(job)
    shards, tensors = [], {}
    for rank in job.ranks:
        shards += _write_rank(rank, owners, draft)
        for name, role, shape, _, part in _saved(rank):
            dtype = "F32" if part.dtype == torch.float32 else "BF16"
            tensors[name, role] = {"tensor": name, "role": role, "dtype": dtype, "shape": list(shape)}
    everyone = job.links.share((shards, tensors))
    if first:
        _write_manifest(job, draft, [s for part in everyone for s in part[0]], [part[1] for part in everyone])
        shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    job.links.share(None)
    return path


def _owners(job: Job) -> dict[tuple[str, int, int, int], int]:
    """Returns which rank writes a rectangle that several hold: the lowest."""
    owners: dict[tuple[str, int, int, int], int] = {}
    mine = [(_entry(n, role), *at, len(part), rank.number) for rank in job.ranks for n, role, _, at, part in _saved(rank)]
    for entry, row, col, rows, number in sorted(m for part in job.links.share(mine) for m in part):
        owners.setdefault((entry, row, col, rows), number)
    return owners


def _write_rank(rank: Rank, owners: dict[tuple[str, int, int, int], int], draft: Path) -> list[dict[str, Any]]:
    """Writes a rank's files. A file has at most one rectangle of an entry."""
    files: list[dict[str, Piece]] = []
    for name, role, shape, (row, col), part in _saved(rank):
        entry = _entry(name, role)
        if owners[entry, row, col, len(part)] != rank.number:
            continue
        data = part[:, 0] if shape[1] == 1 else part
        number = next((i for i, f in enumerate(files) if entry not in f), len(files))
        files += [{}] if number == len(files) else []
        files[number][entry] = Piece(entry, row, col, data)
    shards = []
    for i, pieces in enumerate(files):
        file = f"rank-{rank.number:05d}{f'-{i}' if i else ''}.safetensors"
        text = _safetensors(list(pieces.values()))
        _write(draft / file, text)
        shards.append({"file": file, "rank": rank.number, "bytes": len(text), "crc32c": f"{crc32c(text):08x}"})
    return shards


def _safetensors(pieces: list[Piece]) -> bytes:
    header: dict[str, Any] = {}
    offsets, body, at = {}, [], 0
    for p in pieces:
        data = p.data.contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
        dtype = "F32" if p.data.dtype == torch.float32 else "BF16"
        header[p.entry] = {"dtype": dtype, "shape": list(p.data.shape), "data_offsets": [at, at + len(data)]}
        offsets[p.entry] = {"saved_offsets": [p.row, p.col][: p.data.dim()]}
        body.append(data)
        at += len(data)
    header["__metadata__"] = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(body)


def _write_manifest(job: Job, draft: Path, shards: list[dict], tensors: list[dict]) -> None:
    header, run = job.program.header, dict(job.settings)
    sums = run.pop("sums", None)
    places = [info.place for info in job.program.ranks]
    made = dict(zip(("dp", "pp", "sp"), (max(p[i] for p in places) + 1 for i in range(3))))
    manifest = {
        "format": FORMAT,
        "program": header["name"],
        "model": header["model"],
        "step": job.step,
        "sequence": run["sequence"],
        "skipped": job.skipped,
        "norms": job.norms,
        "seed": job.seed,
        "run": run,
        "made": {**made, "sums": sums, "devices": [f"torch {job.device.type}"]},
        "tensors": list({k: v for part in tensors for k, v in part.items()}.values()),
        "shards": sorted(shards, key=lambda s: s["file"]),
    }
    text = json.dumps(manifest, indent=1).encode().rstrip(b"\n}")
    _write(draft / "manifest.json", text + _CRC + f'{crc32c(text):08x}"}}\n'.encode())


def _write(path: Path, text: bytes) -> None:
    with open(path, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# Reading


def checkpoints(folder: str | Path) -> list[Path]:
    """Returns the checkpoints of a folder, the newest last."""
    found = [p for p in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", p.name) and (p / "manifest.json").exists()]
    return sorted(found, key=lambda p: int(p.name[5:]))


def find(path: str) -> Path:
    """Returns a checkpoint, or the newest of a folder of checkpoints."""
    if (Path(path) / "manifest.json").exists():
        return Path(path)
    found = checkpoints(path)
    if not found:
        raise Refused(f"{path} is neither a checkpoint nor a folder of checkpoints")
    return found[-1]


class _File:
    """A file of a checkpoint, whose tensors are read when they are needed."""

    def __init__(self, path: Path):
        self.data = np.memmap(path, np.uint8, "r")
        size = struct.unpack("<Q", self.data[:8].tobytes())[0]
        self.header = json.loads(self.data[8 : 8 + size].tobytes())
        self.start = 8 + size
        self.offsets = json.loads(self.header.pop("__metadata__")["DCP_SHARDING_INFO"])

    def pieces(self) -> Iterator[Piece]:
        for entry, row in self.header.items():
            begin, end = (self.start + o for o in row["data_offsets"])
            data = torch.from_numpy(self.data[begin:end].copy()).view(_DTYPES[row["dtype"]])
            at = self.offsets[entry]["saved_offsets"]
            columns = math.prod(row["shape"][1:])
            yield Piece(entry, at[0], at[1] if len(at) > 1 else 0, data.view(-1, columns))


def load(job: Job, path: str) -> Path:
    """Continues a run from a checkpoint, and returns its folder."""
    folder = find(path)
    manifest = _manifest(folder)
    _check(job, manifest, folder)
    files = [_read(folder, shard) for shard in manifest["shards"]]
    wanted: dict[str, list[list[Any]]] = {}
    for rank in job.ranks:
        for name, role, _, (row, col), part in _saved(rank):
            wanted.setdefault(_entry(name, role), []).append([row, col, part, 0])
    for file in files:
        for piece in file.pieces():
            for want in wanted.get(piece.entry, []):
                want[3] += _overlap(piece, *want[:3])
    for entry, wants in wanted.items():
        if any(w[3] != w[2].numel() for w in wants):
            raise Refused(f"{folder}: entry {entry} is incomplete")
    for rank in job.ranks:
        _round_masters(rank)
    job.step, job.skipped, job.norms = manifest["step"], manifest["skipped"], list(manifest.get("norms") or [])
    return folder


def _manifest(folder: Path) -> dict[str, Any]:
    text = (folder / "manifest.json").read_bytes()
    end = text.rfind(_CRC)
    if end < 0 or f"{crc32c(text[:end]):08x}".encode() != text[end + len(_CRC) :][:8]:
        raise Refused(f"{folder}: the checkpoint is damaged: manifest.json has another checksum")
    return json.loads(text)


def _check(job: Job, manifest: dict[str, Any], folder: Path) -> None:
    if manifest["format"] > FORMAT:
        raise Refused(f"{folder} has format {manifest['format']}; this package reads up to {FORMAT}")
    theirs, ours = manifest["model"], job.program.header["model"]
    for name in sorted(set(theirs) | set(ours)):
        if name != "name" and (theirs.get(name) or None) != (ours.get(name) or None):
            raise Refused(f"{folder} has another model: {name} is {theirs.get(name)} instead of {ours.get(name)}")
    if manifest["seed"] != job.seed:
        raise Refused(f"{folder} has seed {manifest['seed']} instead of {job.seed}")


def _read(folder: Path, shard: dict[str, Any]) -> _File:
    path = folder / shard["file"]
    if not path.exists() or path.stat().st_size != shard["bytes"]:
        raise Refused(f"{folder}: the checkpoint is damaged: {shard['file']} is missing or has another size")
    file = _File(path)
    if f"{crc32c(file.data):08x}" != shard["crc32c"]:
        raise Refused(f"{folder}: the checkpoint is damaged: {shard['file']} has another checksum")
    return file


def _overlap(piece: Piece, row: int, col: int, part: Tensor) -> int:
    """Copies what a piece and a rank's rectangle share, and returns how many elements that are."""
    top, left = max(row, piece.row), max(col, piece.col)
    bottom = min(row + part.shape[0], piece.row + piece.data.shape[0])
    right = min(col + part.shape[1], piece.col + piece.data.shape[1])
    if top >= bottom or left >= right:
        return 0
    source = piece.data[top - piece.row : bottom - piece.row, left - piece.col : right - piece.col]
    part[top - row : bottom - row, left - col : right - col].copy_(source)
    return source.numel()


def _round_masters(rank: Rank) -> None:
    """Writes masters, rounded, to the weights of the same rows."""
    states = rank.states()
    for state, _, shape, (row, col, end), master in states:
        if state.role != "master":
            continue
        rows = min(row + len(master), end or shape[0], shape[0])
        for other, _, _, (first, column, _), weight in states:
            if other.role == "weight" and other.tensor == state.tensor and column == col:
                top, bottom = max(row, first), min(rows, first + len(weight))
                if top < bottom:
                    weight[top - first : bottom - first].copy_(master[top - row : bottom - row])
