"""Runs training programs of sppo (.sppb) with PyTorch.

The package was written from docs/bytecode.md, not from the sources of the other machines, so that agreement means something.

    table.py        the opcode table, read from opcodes.json
    program.py      reads a .sppb file
    checksum.py     CRC-32C
    ops/            what opcodes compute: one function for each
    links.py        messages and collectives between ranks: in one process, over gloo, over NCCL
    machine.py      a rank: its arenas, views, streams, events; the loop that runs a section
    randoms.py      random numbers
    data.py         the sequences of a step
    train.py        a run: learning rate, validation, skipped steps
    checkpoint.py   checkpoints, which sppovm can resume, and the other way round
    __main__.py     the command
"""


class Refused(Exception):
    """An error in what the user gave: a program, a checkpoint, data or a flag. Its text names the place, the cause and, if there is
    one, the remedy."""
