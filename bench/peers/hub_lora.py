#!/usr/bin/env python3
"""LoRA as PEFT trains it on the tiny models of hub_models.py: the fixtures of adapters of sppovm.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors peft
    venv/bin/python bench/peers/hub_lora.py hf/testdata/models cmd/sppovm/testdata/adapters
    venv/bin/python bench/peers/hub_lora.py --measure MODEL ADAPTER TOKENS.json    # print the loss under an adapter
    venv/bin/python bench/peers/hub_lora.py --measure MODEL - TOKENS.json          # and of a model without one

Each folder holds the adapter that a run starts from, in PEFT's format with a B that is not 0, and expected.json: the settings of the
optimizer, the tokens of all steps as one stream, the loss of each step before its update, and the loss of the first window after the
last. Everything is computed in f32."""

import json
import pathlib
import sys

import peft
import torch
import transformers as hub

STEPS, SEQUENCE = 8, 16
ADAMW = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
ADAPTERS = [
    ("llama", dict(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
    ("qwen3", dict(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"])),
    ("phi3", dict(r=3, lora_alpha=3, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])),
    ("gpt2", dict(r=4, lora_alpha=4, target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True)),
]


def load(folder):
    return hub.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def window(tokens, step):
    return torch.tensor([tokens[step * SEQUENCE:(step + 1) * SEQUENCE + 1]])


def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).logits[0], tokens[0, 1:])


def main(models, out):
    for seed, (name, arguments) in enumerate(ADAPTERS):
        torch.manual_seed(seed)
        model = peft.get_peft_model(load(pathlib.Path(models) / name), peft.LoraConfig(task_type="CAUSAL_LM", **arguments))
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora_B" in key:
                    p.normal_(0, 0.3)
        folder = pathlib.Path(out) / name
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = name
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        tokens = torch.randint(0, model.config.vocab_size, (STEPS * SEQUENCE + 1,)).tolist()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, window(tokens, step))
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
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
