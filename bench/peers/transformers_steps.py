#!/usr/bin/env python3
"""Trains a model of transformers on the CPU with AdamW, eagerly in f32, for BenchmarkExperts in internal/e2e.

    venv/bin/python bench/peers/transformers_steps.py CONFIG SEQUENCE BATCH THREADS

CONFIG is the JSON of a config.json. Each line of standard input is a number of steps. After these, a line of JSON on standard output has
the seconds that they took, those of the processor, and the last loss. Tokens are random."""

import json
import sys
import time

import torch
import transformers


def main(config, sequence, batch, threads):
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    config = transformers.AutoConfig.for_model(**config)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, config.vocab_size, (batch, sequence + 1))
    for line in sys.stdin:
        began, processor = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
        print(json.dumps(dict(seconds=time.perf_counter() - began, processor=time.process_time() - processor, loss=loss.item())), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
