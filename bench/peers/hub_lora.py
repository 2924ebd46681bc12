#!/usr/bin/env python3
"""Trains LoRA with PEFT on the tiny models of hub_models.py: the adapter fixtures of sppovm.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors peft
    venv/bin/python bench/peers/hub_lora.py internal/hf/testdata/models cmd/sppovm/testdata/adapters
    venv/bin/python bench/peers/hub_lora.py --measure MODEL ADAPTER TOKENS.json    # print the loss with an adapter
    venv/bin/python bench/peers/hub_lora.py --measure MODEL - TOKENS.json          # and without an adapter

Each folder contains the initial adapter of a run, in PEFT's format with a B that is not 0, and expected.json: the settings of the
optimizer, the tokens of all steps as one stream, the loss of each step before its update, and the loss of the first window after the
last step. Everything is computed in f32. With dropout, PEFT's dropout modules are replaced by one that drops the same elements as a run
of sppo with SEED; the last loss is without dropout."""

import json
import pathlib
import sys

import peft
import numpy as np
import torch
import transformers as hub

from splitmix import GOLDEN, draw, finish, stream

STEPS, SEQUENCE, SEED = 8, 16, 5
ADAMW = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
ADAPTERS = [
    ("llama", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    ("qwen3", dict(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"])),
    ("phi3", dict(r=3, lora_alpha=3, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
    ("gpt2", dict(r=4, lora_alpha=4, target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True)),
    ("llama-dropout", dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"], lora_dropout=0.25)),
    ("gemma3-vision", dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"])),  # also of the vision part
    ("mistral-small-vision", dict(r=3, lora_alpha=3, target_modules=["k_proj", "o_proj"])),
]
TENSORS = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w_gate", "up_proj": "w_up", "down_proj": "w_down"}


class Dropout(torch.nn.Module):
    """Dropout of one sequence, as vm.Dropout draws it."""

    def __init__(self, rate, tensor):
        super().__init__()
        self.rate, self.key, self.step = rate, stream(0, "dropout " + tensor), 0

    def forward(self, x):
        if self.step == 0:
            return x
        step = finish(stream(SEED, "dropout") + GOLDEN ^ np.uint64(self.step))
        tokens = draw(draw(step ^ self.key, 0), np.arange(x.shape[1]))
        columns = np.arange(x.shape[2])
        bits = draw(tokens[:, None], columns // 2) >> (columns % 2 * 32).astype(np.uint64) & np.uint64(0xffffffff)
        return x * torch.tensor(bits >= np.uint64(round(self.rate * 2**32)), dtype=x.dtype) / (1 - self.rate)


def dropouts(model):
    """Replaces the dropout of all adapters and returns the modules."""
    modules = []
    for name, module in model.named_modules():
        for adapter, old in getattr(module, "lora_dropout", {}).items():
            if isinstance(old, torch.nn.Dropout):
                parts = name.split(".")
                layer = next(int(part) for part in parts if part.isdigit())
                module.lora_dropout[adapter] = Dropout(old.p, f"layer.{layer}.{TENSORS[parts[-1]]}.lora_a")
                modules.append(module.lora_dropout[adapter])
    return modules


def load(folder):
    kind = hub.AutoModelForImageTextToText if hasattr(hub.AutoConfig.from_pretrained(folder), "vision_config") else hub.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def window(tokens, step):
    return torch.tensor([tokens[step * SEQUENCE:(step + 1) * SEQUENCE + 1]])


def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:])


def main(models, out):
    for seed, (name, arguments) in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        base = load(pathlib.Path(models) / name.removesuffix("-dropout"))
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **arguments))
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora_B" in key:
                    p.normal_(0, 0.3)
        folder = pathlib.Path(out) / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = name.removesuffix("-dropout")
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokens = torch.randint(0, model.config.get_text_config().vocab_size, (STEPS * SEQUENCE + 1,)).tolist()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
        losses = []
        drops = dropouts(model)
        for step in range(STEPS):
            for module in drops:
                module.step = step + 1
            loss = loss_of(model, window(tokens, step))
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for module in drops:
            module.step = 0
        last = loss_of(model, window(tokens, 0)).item()
        (folder / "expected.json").write_text(json.dumps(dict(
            sequence=SEQUENCE, adamw=ADAMW, tokens=tokens, losses=losses, last=last)) + "\n")
        print(name)


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        base = load(sys.argv[2])
        model = base if sys.argv[3] == "-" else peft.PeftModel.from_pretrained(base, sys.argv[3])
        print(json.dumps(loss_of(model.eval(), window(json.loads(pathlib.Path(sys.argv[4]).read_text())["tokens"], 0)).item()))
    else:
        main(sys.argv[1], sys.argv[2])
