"""The command: sppo-torch run PROGRAM.sppb, or python -m sppo_torch run PROGRAM.sppb."""

from __future__ import annotations

import argparse
import glob
import json
import os
import subprocess
import sys
import time
from typing import Any, Callable

import torch
import torch.distributed as dist

from . import Refused, checkpoint
from .data import Written
from .ops import fused
from .program import read
from .train import Job


def _number(least: int) -> Callable[[str], int]:
    """Returns the type of arguments that are numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return number


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sppo-torch", description="Runs training programs of sppo (.sppb) with PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run", help="train")
    train.add_argument("--steps", type=_number(0), help="stop after this step (default: the program's last)")
    train.add_argument("--save", metavar="FOLDER", help="write checkpoints, named step-N, to this folder")
    train.add_argument("--save-every", type=_number(1), metavar="STEPS", help="also write them every so many steps")
    train.add_argument("--keep", type=_number(1), default=2, help="how many checkpoints are kept (default 2)")
    evaluate = commands.add_parser("eval", help="print the validation loss of a checkpoint")
    for command in (train, evaluate):
        command.add_argument("program", metavar="PROGRAM.sppb")
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--dir", default="", help="look for data files in this folder (default: the current one)")
        command.add_argument("--sequences", metavar="FOLDER", help="read sequences here, which sppovm sequences wrote, instead of the data")
        command.add_argument("--sequences-by", metavar="SPPOVM", help="this program writes the files of --sequences that are missing")
        command.add_argument("--resume", metavar="CHECKPOINT", help="a checkpoint, or a folder: its newest; auto: that of --save, if any")
        command.add_argument("--seed", type=_number(0), help="use this seed instead of the program's")
        command.add_argument("--threads", type=_number(1), help="threads for kernels (default: torch's choice)")
        command.add_argument(
            "--attention", choices=("auto", "plain", "flash"), default="auto", help="flash kernels of torch where they are exact (default: on cuda)"
        )
        command.add_argument("--json", action="store_true", help="print one JSON object per line")
        command.add_argument("-q", "--quiet", action="store_true", help="print no progress")
    return parser


def _resume(arguments: argparse.Namespace) -> str | None:
    """Returns the checkpoint to continue from, if any."""
    if arguments.resume != "auto":
        return arguments.resume
    folder = getattr(arguments, "save", None)
    if not folder:
        raise Refused("--resume auto needs --save")
    return folder if checkpoint.checkpoints(folder) else None


def _written(arguments: argparse.Namespace) -> Written | None:
    """Returns the sequences that sppovm has written, or writes as they are needed."""
    if not arguments.sequences:
        return None
    if not arguments.sequences_by:
        return Written(arguments.sequences, None)

    def write(step: int) -> None:
        for old in glob.glob(os.path.join(glob.escape(arguments.sequences), "step-*.npy")):
            os.remove(old)
        command = [arguments.sequences_by, "sequences", arguments.program, "-o", arguments.sequences, "--first", str(step), "--steps", "8"]
        seed = [] if arguments.seed is None else ["--seed", str(arguments.seed)]
        if subprocess.run([*command, "--dir", arguments.dir, *seed]).returncode:
            raise Refused(f"{arguments.sequences_by} could not read the data")

    return Written(arguments.sequences, write)


def _device(kind: str) -> torch.device:
    """Returns this process's device, and joins the other processes if torchrun started several."""
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise Refused("this machine has no GPU that torch can use: run with --device cpu")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        torch.use_deterministic_algorithms(True, warn_only=True)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    return device


class _Report:
    """Prints what a run does: JSON to standard output, progress to standard error; only in process 0."""

    def __init__(self, arguments: argparse.Namespace):
        first = int(os.environ.get("RANK", 0)) == 0
        self.json, self.text = arguments.json and first, not arguments.quiet and first

    def say(self, text: str, **values: Any) -> None:
        if self.json and values:
            print(json.dumps(values), flush=True)
        if self.text:
            print(text, file=sys.stderr, flush=True)


def _validate(job: Job, report: _Report) -> bool:
    """Reports the validation loss, if the program has a validation, and whether it has."""
    loss = job.validate()
    if loss is not None:
        report.say(f"step {job.step}  validation loss {loss:.4f}", step=job.step, eval_loss=loss)
    return loss is not None


def _peaks(job: Job) -> dict[str, int]:
    """Returns the bytes of the largest arenas, and on CUDA what torch allocated beside those of this process."""
    arenas = [[max(a.numel() for a in side) for side in zip(*(r.arenas for r in job.ranks))]]
    device, host = (max(side) for side in zip(*(part for parts in job.links.share(arenas) for part in parts)))
    peaks = {"device_peak_bytes": device, "host_peak_bytes": host}
    if job.device.type == "cuda":
        own = sum(r.arenas[0].numel() for r in job.ranks)
        peaks["beside_bytes"] = torch.cuda.max_memory_allocated(job.device) - own
    return peaks


def _train(job: Job, arguments: argparse.Namespace, report: _Report) -> None:
    settings = job.settings
    every, last = settings["eval_every"], settings["steps"] if arguments.steps is None else min(settings["steps"], arguments.steps)
    saved, refused, validated = -1, 0, -1
    if every and job.step == 0:
        _validate(job, report)
        validated = 0
    began = time.monotonic()
    for result in job.train(last):
        seconds = time.monotonic() - began
        speed = settings["batch"] * settings["sequence"] / seconds
        values = {"step": result.step, "loss": result.loss, "tokens_per_s": speed, "step_s": seconds}
        values |= {"grad_norm": result.norm, "lr": result.lr} | ({"skipped": True} if result.skipped else {})
        report.say(f"step {result.step}/{last}  loss {result.loss:.4f}  {speed:.0f} tokens/s", **values)
        refused = refused + 1 if result.skipped else 0
        if refused and refused >= (settings.get("max_skipped") or refused + 1):
            raise Refused(f"{refused} steps in a row were skipped")
        if every and result.step % every == 0:
            _validate(job, report)
            validated = result.step
        if arguments.save and arguments.save_every and result.step % arguments.save_every == 0:
            checkpoint.save(job, arguments.save, arguments.keep)
            saved = result.step
        began = time.monotonic()
    if arguments.save and saved != job.step:
        checkpoint.save(job, arguments.save, arguments.keep)
    if validated != job.step:
        _validate(job, report)
    report.say("done", done=True, steps=job.step, **_peaks(job))


def main() -> int:
    """Runs the command and returns its exit code: 0, 2 for invalid input, or 1 if the run failed."""
    parser = _arguments()
    arguments = parser.parse_args()
    if arguments.command == "run" and arguments.save_every and not arguments.save:
        parser.error("--save-every needs --save")
    report = _Report(arguments)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    fused.enabled = arguments.attention == "flash" or arguments.attention == "auto" and arguments.device == "cuda"
    try:
        job = Job(read(arguments.program), _device(arguments.device), arguments.dir, arguments.seed, _written(arguments))
        report.say(f"{job.program.header['name']}: {len(job.program.ranks)} ranks, {len(job.ranks)} of them in this process")
        resume = _resume(arguments)
        if resume:
            report.say(f"continuing from {checkpoint.load(job, resume)}")
        if arguments.command == "run":
            _train(job, arguments, report)
        elif not _validate(job, report):
            raise Refused("the program has no validation: compile it with train.eval_batch above 0")
    except Refused as error:
        print(f"sppo-torch: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"sppo-torch: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
