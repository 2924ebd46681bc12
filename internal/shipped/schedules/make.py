"""Writes an order of tasks for strategy = csv("FILE"), for any number of pipeline ranks and microbatches.

    python3 make.py ORDER RANKS MICROBATCHES > FILE
    python3 make.py                                 # writes the files in this folder

eager-1f1b   Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism": 1f1b with nearly twice as many forwards at
             the start, so that messages overlap with computation. A rank keeps at most 2 (RANKS - rank) - 1 microbatches.
v-half       Qi et al. 2024, "Pipeline Parallelism with Controllable Memory": two virtual stages per rank in a V. Half of the
             bubble of 1f1b and about half of its activations.
v-min        The same, with two thirds of the bubble of 1f1b and about a third of its activations.
"""

import os
import sys


def eager(ranks, microbatches):
    rows = []
    for rank in range(ranks):
        early = min(microbatches, 2 * (ranks - rank) - 1)
        row = [("F", rank, i) for i in range(early)]
        for i in range(microbatches):
            row.append(("B", rank, i))
            if early + i < microbatches:
                row.append(("F", rank, early + i))
        rows.append(row)
    return rows


# The building blocks: for each rank, the times at which the forwards of its two virtual stages and then their backwards begin, in
# units of a task. Microbatches follow each other every 6 units, because each has six tasks on a rank.

def v_half(rank, ranks):
    wait = 3 if ranks % 2 == 0 else 0
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + wait + 2 * rank - 1, 6 * ranks + wait - rank - 2


def v_min(rank, ranks):
    wait = 2 if ranks % 3 == 0 else 0
    return rank, 2 * ranks - rank - 1, 2 * ranks + wait + rank, 4 * ranks + wait - rank - 1


def repeated(block, ranks, microbatches):
    """Repeats a block, and starts each task as early as its inputs and the block's memory allow."""
    last = 2 * ranks - 1
    times, most = [], 0
    for rank in range(ranks):
        first = block(rank, ranks)
        tasks = zip("FFII", (rank, last - rank, last - rank, rank), first)
        times.append({(kind, stage, i): begin + 6 * i for kind, stage, begin in tasks for i in range(microbatches)})
        most = max(most, kept(times[rank]))
    queues = [{kind: sorted((t for t in at if t[0] == kind), key=at.get) for kind in "FI"} | {"W": []} for at in times]
    rows, ends, held, now = [[] for _ in range(ranks)], {}, [0] * ranks, 0

    def ready(task):
        kind, stage, i = task
        source = ("F", stage - 1, i) if kind == "F" else ("I", stage + 1, i) if stage < last else ("F", stage, i)
        return source == ("F", -1, i) or ends.get(source, now + 1) <= now

    while any(q for queue in queues for q in queue.values()):
        chosen = []
        for rank, queue in enumerate(queues):
            may = [queue[kind][0] for kind in "FI" if queue[kind] and ready(queue[kind][0]) and (kind == "I" or held[rank] < most)]
            if may or queue["W"]:
                chosen.append((rank, min(may, key=times[rank].get) if may else queue["W"][0]))
        now += 1
        for rank, task in chosen:
            kind, stage, i = task
            queues[rank][kind].pop(0)
            rows[rank].append(task)
            ends[task] = now
            held[rank] += {"F": 1, "I": 0, "W": -1}[kind]
            if kind == "I":
                queues[rank]["W"].append(("W", stage, i))
    return rows


def kept(at):
    """Returns how many activations a rank holds at most if weight gradients fill the gaps between the tasks at these times."""
    tasks, held, most, late = {time: kind for (kind, _, _), time in at.items()}, 0, 0, 0
    for time in range(max(tasks) + 1):
        kind = tasks.get(time, "W" if late else "")
        held += {"F": 1, "W": -1}.get(kind, 0)
        late += {"I": 1, "W": -1}.get(kind, 0)
        most = max(most, held)
    return most


ORDERS = {
    "eager-1f1b": eager,
    "v-half": lambda ranks, microbatches: repeated(v_half, ranks, microbatches),
    "v-min": lambda ranks, microbatches: repeated(v_min, ranks, microbatches),
}


def text(order, ranks, microbatches):
    return "".join(",".join(f"{stage}{kind}{i}" for kind, stage, i in row) + "\n" for row in ORDERS[order](ranks, microbatches))


def main():
    if len(sys.argv) == 4 and sys.argv[1] in ORDERS:
        sys.stdout.write(text(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    elif len(sys.argv) == 1:
        for order in ORDERS:
            for ranks in 4, 8:
                name = f"{order}-{ranks}x{4 * ranks}.csv"
                with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), "w") as f:
                    f.write(text(order, ranks, 4 * ranks))
    else:
        sys.exit(__doc__)


main()
