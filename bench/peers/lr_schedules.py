#!/usr/bin/env python3
"""Prints learning rates of transformers' schedulers: the fixture of package vm.

    python3 -m venv venv && venv/bin/pip install torch transformers
    venv/bin/python bench/peers/lr_schedules.py > internal/train/testdata/lr_schedules.json

Each object describes a run by the keys of ir.Run and contains the rates that get_scheduler's scheduler reports after 1, 2, ... steps,
up to two steps after the last. The tests of vm compare our rates with these and, if SPPO_PYTHON names a Python that has
transformers, with those of a new run of this script."""

import json

import torch
from transformers import get_scheduler

LR, STEPS = 3e-3, 30


def rates(schedule, warmup, min_lr=0.0, decay_steps=0, decay_type=""):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    name, extra = schedule, {}
    if schedule == "constant" and warmup:
        name = "constant_with_warmup"
    if schedule == "cosine" and min_lr:
        name, extra = "cosine_with_min_lr", dict(min_lr=min_lr)
    if schedule == "warmup_stable_decay":
        decay = {"sqrt": "1-sqrt"}.get(decay_type, decay_type)
        extra = dict(num_decay_steps=decay_steps, decay_type=decay, min_lr_ratio=min_lr / LR)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=extra)
    values = []
    for _ in range(STEPS + 2):
        optimizer.step()
        scheduler.step()
        values.append(scheduler.get_last_lr()[0])
    if schedule == "cosine":  # transformers' cosine rises again after its last step
        values = values[:STEPS]
    return dict(run=dict(lr_schedule=schedule, lr=LR, steps=STEPS, warmup=warmup, min_lr=min_lr, decay_steps=decay_steps,
                         decay_type=decay_type), rates=values)


def main():
    table = [rates(schedule, warmup) for schedule in ("constant", "linear", "cosine") for warmup in (0, 1, 7)]
    table += [rates("cosine", warmup, 1e-4) for warmup in (0, 7)]
    table += [rates("warmup_stable_decay", warmup, min_lr, steps, kind)
              for warmup, steps in ((0, 30), (5, 6), (7, 23)) for min_lr in (0.0, 1e-4) for kind in ("cosine", "linear", "sqrt")]
    print("[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]")


main()
