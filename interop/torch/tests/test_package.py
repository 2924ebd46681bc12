"""What can be tested without a program."""

import inspect
import io
import struct
import unittest
from contextlib import redirect_stderr
from unittest import mock

import torch

from sppo_torch import Refused, program, randoms
from sppo_torch.__main__ import main
from sppo_torch.checksum import crc32c
from sppo_torch.ops import KERNELS
from sppo_torch.ops.move import COLLECTIVES
from sppo_torch.table import TABLE
from sppo_torch.train import learning_rate


class Opcodes(unittest.TestCase):
    def test_every_kernel_has_a_function_with_the_operands_and_attributes_of_the_table(self):
        for op in TABLE.opcodes:
            with self.subTest(op.name):
                if op.group == "comm" and op.name not in ("send", "recv"):
                    self.assertIn(op.name, COLLECTIVES)
                if op.group not in ("kernel", "move"):
                    continue
                kernel, named = KERNELS[op.name], op
                reads = [o.name for o in op.operands]
                if hasattr(kernel, "__wrapped__"):  # differentiable: one function for an opcode and its gradient
                    named = TABLE.opcode(kernel.__name__)
                    reads = [o.name for o in named.operands if o.dir == "in"]
                    if op != named:
                        grads = ["d" + o.name for o in named.operands]
                        self.assertLessEqual({o.name for o in op.operands}, {*reads, *grads})
                        self.assertLessEqual(set(named.attributes), set(op.attributes))
                parameters = inspect.signature(kernel).parameters.values()
                operands = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
                attributes = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
                self.assertEqual(operands, reads)
                self.assertEqual(attributes, [a.argument for a in named.attributes])


class Numbers(unittest.TestCase):
    def test_checksum(self):
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)
        data = bytes(i * i % 251 for i in range(100_000))
        whole = crc32c(data)
        state = 0xFFFFFFFF
        for byte in data:
            state ^= byte
            for _ in range(8):
                state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
        self.assertEqual(whole, state ^ 0xFFFFFFFF)

    def test_tensors_and_scalars_draw_the_same(self):
        key = randoms.key(7, "text offset", 12)
        many = randoms.below_all(key, torch.arange(100), 1000)
        self.assertEqual(many.tolist(), [randoms.below(key, i, 1000) for i in range(100)])

    def test_learning_rate(self):
        run = dict(lr=1.0, min_lr=0.1, warmup=2, steps=12, lr_schedule="linear", decay_steps=0, decay_type="")
        self.assertEqual([round(learning_rate(run, t), 6) for t in (1, 2, 7, 12)], [0.5, 1.0, 0.55, 0.1])


class Programs(unittest.TestCase):
    def test_refusals(self):
        head = b"sppb\r\n\x1a\n" + struct.pack("<IQ", TABLE.version, TABLE.table ^ 1) + b"E"
        for data, word in ((b"", "not a program"), (head + b"0000", "damaged"), (head + struct.pack("<I", crc32c(head)), "release")):
            with self.assertRaisesRegex(Refused, word):
                program.decode(data)


class Commands(unittest.TestCase):
    def test_refusals(self):
        for flags, word in (("--steps -1", "less than 0"), ("--keep 0", "less than 1"), ("--steps x", "invalid number"), ("--save-every 2", "needs --save")):
            said = io.StringIO()
            with self.subTest(flags), mock.patch("sys.argv", ["sppo-torch", "run", "job.sppb", *flags.split()]), redirect_stderr(said):
                with self.assertRaises(SystemExit) as ended:
                    main()
                self.assertEqual(ended.exception.code, 2)
                self.assertIn(word, said.getvalue())

    def test_missing_program(self):
        said = io.StringIO()
        with mock.patch("sys.argv", ["sppo-torch", "run", "nowhere.sppb"]), redirect_stderr(said):
            self.assertEqual(main(), 2)
        self.assertIn("nowhere.sppb: No such file", said.getvalue())


if __name__ == "__main__":
    unittest.main()
