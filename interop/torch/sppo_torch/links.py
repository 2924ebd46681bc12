"""How ranks meet: messages and collectives, in one process or between processes.

A message or a collective returns whether it took place; if it did not, because other ranks of this process are not there yet, the
caller runs these and tries again. Between processes, calls wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from .ops.move import COLLECTIVES

# The streams of a message: that of the sender, and that of the receiver which faces it.
FACING = {"send_next": "recv_prev", "send_prev": "recv_next", "mux": "mux_in"}
CHANNELS = {stream: i for i, pair in enumerate(FACING.items()) for stream in pair}


class Meeting:
    """A collective of a rank: what it gives, where the result goes, and how far it is."""

    def __init__(self, name: str, members: tuple[int, ...], stream: str, rank: int, operands: list[Tensor], attributes: dict):
        self.name, self.members, self.stream, self.rank = name, members, stream, rank
        self.result, self.gift, self.attributes = operands[0], operands[-1], attributes
        self.round = 0

    def finish(self, gifts: list[Tensor]) -> None:
        COLLECTIVES[self.name](self.result, gifts, self.members.index(self.rank), **self.attributes)


class Local:
    """All ranks in this process. On CUDA they share a device: whoever takes a tensor waits for the stream that wrote it."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], deque] = defaultdict(deque)
        self.rounds: dict[tuple, int] = defaultdict(int)
        self.gifts: dict[tuple, dict[int, Any]] = defaultdict(dict)
        self.taken: dict[tuple, int] = defaultdict(int)

    def send(self, rank: int, peer: int, stream: str, x: Tensor) -> bool:
        self.messages[rank, peer, CHANNELS[stream]].append(_parcel(x))
        return True

    def recv(self, rank: int, peer: int, stream: str, y: Tensor) -> bool:
        waiting = self.messages[peer, rank, CHANNELS[stream]]
        if not waiting:
            return False
        y.flatten().view(torch.uint8).copy_(_open(waiting.popleft()).flatten().view(torch.uint8))
        return True

    def meet(self, meeting: Meeting) -> bool:
        line = (meeting.members, meeting.stream)
        key = (*line, self.rounds[*line, meeting.rank])
        gifts = self.gifts[key]
        if meeting.rank not in gifts:
            gifts[meeting.rank] = _parcel(meeting.gift)
        if len(gifts) < len(meeting.members):
            return False
        meeting.finish([_open(gifts[m]) for m in meeting.members])
        self.rounds[*line, meeting.rank] += 1
        self.taken[key] += 1
        if self.taken[key] == len(meeting.members):
            del self.gifts[key], self.taken[key]
        return True

    def settle(self) -> None:
        """Checks that all messages of a section have arrived."""
        left = [key for key, waiting in self.messages.items() if waiting]
        if left:
            raise RuntimeError(f"messages without a receiver: {left}")

    def share(self, values: Any) -> list[Any]:
        """Returns the values of all processes."""
        return [values]


def _parcel(x: Tensor) -> tuple[Tensor, Any]:
    """Copies a tensor, with an event of the stream that copies it."""
    copy = x.clone()
    return copy, torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None


def _open(parcel: tuple[Tensor, Any]) -> Tensor:
    x, event = parcel
    if event is not None:
        stream = torch.cuda.current_stream(x.device)
        stream.wait_event(event)
        x.record_stream(stream)
    return x


class Distributed:
    """One rank in each process, over gloo or NCCL. Groups that share ranks, and the streams of a rank, do not wait for each
    other: every stream of every group has its own process group, and so has every channel of messages.

    Sums over gloo are made from what every member gives, in group order, so that a job gives the same bits in one process and in
    several. NCCL sums f32 in an order of its own; what it would sum in bf16 is gathered and summed in f32.
    """

    def __init__(self, lines: Iterable[tuple[tuple[int, ...], str]], device: torch.device):
        world = list(range(dist.get_world_size()))
        self.cuda = device.type == "cuda"
        self.channels = [dist.new_group(world) for _ in FACING]
        self.groups = {line: dist.new_group(list(line[0])) for line in sorted(set(lines))}
        self.pending: list[tuple[Any, Tensor]] = []

    def send(self, rank: int, peer: int, stream: str, x: Tensor) -> bool:
        copy = x.flatten().view(torch.uint8) if self.cuda else x.flatten().view(torch.uint8).clone()
        work = dist.isend(copy, peer, self.channels[CHANNELS[stream]])
        if self.cuda:
            work.wait()  # the stream waits, not this process
        else:
            self.pending = [(w, t) for w, t in self.pending if not w.is_completed()] + [(work, copy)]
        return True

    def recv(self, rank: int, peer: int, stream: str, y: Tensor) -> bool:
        dist.irecv(y.flatten().view(torch.uint8), peer, self.channels[CHANNELS[stream]]).wait()
        return True

    def meet(self, meeting: Meeting) -> bool:
        group = self.groups[meeting.members, meeting.stream]
        y, x = meeting.result, meeting.gift.contiguous()
        if self.cuda and meeting.name == "all_gather":
            dist.all_gather_into_tensor(y.flatten(), x.flatten(), group)
        elif self.cuda and meeting.name == "all_reduce" and y.dtype == torch.float32:
            dist.all_reduce(y, group=group)
        elif self.cuda and meeting.name == "reduce_scatter" and y.dtype == torch.float32:
            dist.reduce_scatter_tensor(y.flatten(), x.flatten(), group=group)
        else:
            gifts = [torch.empty_like(x) for _ in meeting.members]
            dist.all_gather([g.flatten().view(torch.uint8) for g in gifts], x.flatten().view(torch.uint8), group)
            meeting.finish(gifts)
        return True

    def settle(self) -> None:
        """Waits until all messages of a section have been sent."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()

    def share(self, values: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, values)
        return everyone


Links = Local | Distributed
