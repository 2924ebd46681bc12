"""Writes PyTorch's pipeline schedules as CSV files, and checks files of sppo with PyTorch.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python make.py [FOLDER]
    venv/bin/python make.py --check FILE...

The first form writes a file for each schedule class and number of ranks, to this folder unless another is given, and
slots.json: for each file and rank, how many activations are live at a time. The second form loads files with
PyTorch (_load_csv, which calls _validate_schedule and adds communication), simulates them, and prints the same JSON.
TestTasksOfTorch (../../tasks_test.go) reads the files. With SPPO_PYTHON=venv/bin/python it also writes them again,
and checks what sppo writes.
"""

import csv
import json
import os
import sys

from torch.distributed.pipelining import analyze_pipeline_activation_liveness, schedules

# class, virtual stages per rank, sizes of the runtime schedules
CLASSES = [("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3),
           ("InterleavedZeroBubble", 1), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)]
RANKS = [2, 4, 6, 8]


class Stage(schedules._PipelineStageBase):
    """Stage has the properties that a schedule reads when it is built, and records the calls of a step."""

    _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = None

    def __init__(self, index, stages, ranks):
        self.calls = []
        self.stage_index, self.num_stages, self.group_size, self.group_rank, self.group = index, stages, ranks, 0, None
        self.submod = None

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.calls.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **kwargs):
        self.calls.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, *args):
        pass

    release_fwd_send_outputs = perform_reduce_grad
    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = lambda self, microbatch: []


def build(name, ranks, each, microbatches):
    """Returns the cells of each rank: the schedule's list of actions or, for GPipe and 1F1B, the calls in a step. (The list
    of Schedule1F1B is not what it runs: it lacks forwards.)"""
    cls = schedules.get_schedule_class(name)
    if issubclass(cls, schedules.PipelineScheduleSingle):
        stages = [Stage(r, ranks, ranks) for r in range(ranks)]
        for stage in stages:
            s = cls(stage, microbatches)
            s._initialize_stage = lambda *args: None
            s._step_microbatches([()] * microbatches)
        return [stage.calls for stage in stages]
    stages = [Stage(i * ranks, ranks * each, ranks) for i in range(each)]
    if name in ("ZBVZeroBubble", "DualPipeV"):
        stages[1] = Stage(2 * ranks - 1, ranks * each, ranks)
    order = cls(stages, microbatches).pipeline_order
    return [order[r] for r in range(ranks)]


def load(file):
    """Loads a file, as torchtitan does, and simulates it without the actions that gather and reduce weights."""
    with open(file, newline="") as f:
        rows = [[schedules._Action.from_str(cell) for cell in row] for row in csv.reader(f)]
    leaves = [[leaf for a in row if a for leaf in a.sub_actions or (a,)] for row in rows]
    stages = 1 + max(a.stage_index for row in leaves for a in row)
    microbatches = 1 + max(a.microbatch_index for row in leaves for a in row)
    local = [Stage(i, stages, len(rows)) for i in sorted({a.stage_index for a in leaves[0]})]
    s = schedules._PipelineScheduleRuntime(local, microbatches)
    s._load_csv(file, format="compute_only")
    kept = ("F", "I", "B", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
    order = {r: [leaf for a in row for leaf in a.sub_actions or (a,) if leaf.computation_type.value in kept]
             for r, row in s.pipeline_order_with_comms.items()}
    schedules._simulate_comms_compute(order, lambda i: s.stage_index_to_group_rank[i], stages)
    return [analyze_pipeline_activation_liveness(
        s, pp_rank=r, stage_indices=sorted({a.stage_index for a in row}), granularity="stage_microbatch").num_slots
        for r, row in enumerate(leaves)]


def main():
    if sys.argv[1:2] == ["--check"]:
        print(json.dumps({os.path.basename(f): load(f) for f in sys.argv[2:]}))
        return
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    slots = {}
    for name, each in CLASSES:
        for ranks in RANKS:
            microbatches = 2 * ranks
            file = f"{name}-{each}-{ranks}.csv"
            with open(os.path.join(folder, file), "w", newline="") as f:
                csv.writer(f).writerows(build(name, ranks, each, microbatches))
            slots[file] = load(os.path.join(folder, file))
    with open(os.path.join(folder, "slots.json"), "w") as f:
        f.write("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in slots.items()) + "\n}\n")


main()
