"""The sequences of a step or a validation: random tokens, text, or files that sppovm has written (sppovm sequences)."""

from __future__ import annotations

import glob
import os
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from . import Refused, randoms


class Sequence(NamedTuple):
    """The tokens of a sequence, one more than its length; its labels, -1 where one does not count, at the places of their
    tokens; and each token's position in its document."""

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray


class Batch:
    """What the instructions of a section load: sequences of a step, or of a section of a validation."""

    def __init__(self, source: Source, step: int, first: int | None = None):
        """`first` is the first sequence of a section of a validation; None in a step."""
        self.source, self.step, self.first = source, step, first
        self.sequences: dict[int, Sequence] = {}

    def sequence(self, index: int) -> Sequence:
        if index not in self.sequences:
            validation = self.first is not None
            got = self.source.validation(self.first + index) if validation else self.source.train(self.step, index)
            self.sequences[index] = got
        return self.sequences[index]

    def load(self, n: int, first: int, replica: int, position: int, batch: int, chunks: int, as_: int) -> np.ndarray:
        """Returns what a load_tokens of n numbers loads."""
        count = n // batch
        rows = position + _order(count, chunks)
        columns = [self.sequence(replica + first + b)[as_][rows] for b in range(batch)]
        return np.stack(columns, 1).reshape(-1).astype(np.int32)

    def labels(self, sequences: int, length: int) -> int:
        """Counts the labels that count in the first sequences."""
        return sum(int((self.sequence(i).labels[1 : length + 1] >= 0).sum()) for i in range(sequences))


def _order(n: int, chunks: int) -> np.ndarray:
    """Returns the order of n tokens in zigzag order: the first chunk, the last, the second, and so on."""
    if not chunks:
        return np.arange(n)
    cut = np.arange(n).reshape(chunks, -1)
    return np.concatenate([cut[i] if half == 0 else cut[chunks - 1 - i] for i in range(chunks // 2) for half in (0, 1)])


def _plain(tokens: np.ndarray) -> Sequence:
    tokens = tokens.astype(np.int32)
    return Sequence(tokens, tokens, np.arange(len(tokens), dtype=np.int32))


class Random:
    def __init__(self, run: dict[str, Any], seed: int):
        self.seed, self.vocab, self.length = seed, run["vocab"], run["sequence"] + 1

    def _draw(self, key: int) -> Sequence:
        return _plain(randoms.below_all(key, torch.arange(self.length), self.vocab).numpy())

    def train(self, step: int, index: int) -> Sequence:
        return self._draw(randoms.key(self.seed, "random tokens", step, index))

    def validation(self, index: int) -> Sequence:
        return self._draw(randoms.key(self.seed, "random validation tokens", 0, index))


class _Held:
    """Data that are tokens in a row, the last of which are held out for validations."""

    def __init__(self, run: dict[str, Any], seed: int, count: int):
        self.seed, self.length, self.batch = seed, run["sequence"], run["batch"]
        self.held = int(count * (run.get("holdout") or 0))
        self.trained = count - self.held
        sections = -(-run["eval_batch"] // run["eval_sequences"]) if run["eval_batch"] else 0
        self.validations = sections * run["eval_sequences"]

    def held_start(self, index: int) -> int:
        """Returns where a sequence of a validation begins among the tokens that are held out."""
        room = self.held - self.length - 1
        return index * room // (self.validations - 1) if self.validations > 1 else 0


class Text(_Held):
    def __init__(self, run: dict[str, Any], seed: int, folder: str):
        parts = []
        for path in find(run["data_files"], folder):
            with open(path, "rb") as file:
                parts.append(file.read())
        self.bytes = np.frombuffer(b"\n".join(parts), np.uint8)
        super().__init__(run, seed, len(self.bytes))
        if self.trained <= self.length or self.validations and self.held <= self.length:
            raise Refused(f"the text has {len(self.bytes)} bytes: too few for sequences of {self.length}")

    def _cut(self, start: int) -> Sequence:
        return _plain(self.bytes[start : start + self.length + 1])

    def train(self, step: int, index: int) -> Sequence:
        return self._cut(randoms.below(randoms.key(self.seed, "text offset", step), index, self.trained - self.length))

    def validation(self, index: int) -> Sequence:
        return self._cut(self.trained + self.held_start(index))


class Written:
    """Sequences in a folder, in a file for each step. `write`, if given, writes the files of a step and of those that follow."""

    def __init__(self, folder: str, write: Callable[[int], None] | None):
        self.folder, self.write, self.step, self.rows = folder, write, 0, np.empty(0)

    def _read(self, name: str, step: int) -> np.ndarray:
        path = os.path.join(self.folder, name)
        if self.write and not os.path.exists(path):
            self.write(step)
        if not os.path.exists(path):
            raise Refused(f"{path} is missing: sppovm sequences writes it")
        return np.load(path, mmap_mode="r")

    def train(self, step: int, index: int) -> Sequence:
        if self.step != step:
            self.step, self.rows = step, self._read(f"step-{step}.npy", step)
        return Sequence(*self.rows[:, index])

    def validation(self, index: int) -> Sequence:
        return Sequence(*self._read("validation.npy", max(1, self.step))[:, index])


Source = Random | Text | Written


def find(patterns: list[str], folder: str) -> list[str]:
    """Returns the files that match any pattern, each once, sorted by name."""
    found: set[str] = set()
    for pattern in patterns:
        matches = [m for m in glob.glob(os.path.join(folder, pattern), recursive=True, include_hidden=True)]
        matches = [m for m in matches if os.path.isfile(m)]
        if not matches:
            raise Refused(f"no file matches {pattern!r} in {folder or '.'}: --dir names the folder of the data")
        found.update(matches)
    return sorted(found)


def open_data(run: dict[str, Any], seed: int, folder: str, written: Written | None = None) -> Source:
    """Opens the data of a run, or raises Refused."""
    if written:
        return written
    kind = run["data_kind"]
    if kind == "random":
        return Random(run, seed)
    if kind == "text":
        return Text(run, seed, folder)
    raise Refused(f"data of kind {kind}: let sppovm sequences PROGRAM -o FOLDER read it, and name the folder with --sequences")
