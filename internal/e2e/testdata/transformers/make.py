"""Writes what transformers computes for tiny models: the loss of every token and projections of every gradient.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python make.py [FOLDER [NAME...]]

It writes one file for each configuration, to this folder unless another is given. Those named FAMILY-deep also have the losses of steps
with AdamW, and all of this once more for sequences of several documents, each of which transformers gets as a sequence of its own. TestTransformers (../../transformers_test.go) compares
our programs with the files. With SPPO_PYTHON=venv/bin/python it also writes them again and compares both.

Weights and tokens are functions of names and indices that the test repeats, so the files hold neither. A weight is stored [in, out],
as in our programs. A gradient is kept as its norm and as dot products with vectors of signs, which is enough to bound
its distance from another: the mean square of the differences estimates the square of that distance.
"""

import json
import math
import os
import sys

import numpy as np
import torch
import transformers

SEQUENCE, BATCH, PROJECTIONS = 40, 2, 8
STEPS, ADAMW = 10, dict(lr=0.002, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0)
DOCUMENTS = [[11, 12, 29], [23]]  # where documents end in each sequence, other than at its end
MARGIN = 1e-4  # of a router's choice: if scores are closer, rounding may change it, and other tokens are drawn
MASK = (1 << 64) - 1
torch.set_num_threads(1)


def fnv(name):
    h = 0xCBF29CE484222325
    for b in name.encode():
        h = (h ^ b) * 0x100000001B3 & MASK
    return h


def draws(name, n):
    """SplitMix64 at n places, as integers of 24 bits."""
    with np.errstate(over="ignore"):
        z = np.uint64(fnv(name)) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return (z ^ z >> np.uint64(31)) >> np.uint64(40)


def weights(name, shape):
    """Numbers between -1/2 and 1/2, around 1 for norms that multiply."""
    values = (draws(name, math.prod(shape)).astype(np.float64) / 2**24 - 0.5).astype(np.float32)
    return torch.from_numpy(values.reshape(shape) + (1 if name.endswith("gamma") else 0))


def signs(name, projection, n):
    return torch.from_numpy((draws(f"{name}#{projection}", n) & np.uint64(1)).astype(np.float64) * 2 - 1)


LLAMA = {
    "embed": "model.embed_tokens.weight",
    "ln_f.gamma": "model.norm.weight",
    "head": "lm_head.weight",
}
LLAMA_LAYER = {
    "ln1.gamma": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight", "bq": "self_attn.q_proj.bias",
    "wk": "self_attn.k_proj.weight", "bk": "self_attn.k_proj.bias",
    "wv": "self_attn.v_proj.weight", "bv": "self_attn.v_proj.bias",
    "q_norm.gamma": "self_attn.q_norm.weight", "k_norm.gamma": "self_attn.k_norm.weight",
    "wo": "self_attn.o_proj.weight", "bo": "self_attn.o_proj.bias",
    "ln2.gamma": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight", "b_gate": "mlp.gate_proj.bias",
    "w_up": "mlp.up_proj.weight", "b_up": "mlp.up_proj.bias",
    "w_down": "mlp.down_proj.weight", "b_down": "mlp.down_proj.bias",
}
POST = {"ln1_post.gamma": "post_attention_layernorm.weight", "ln2_post.gamma": "post_feedforward_layernorm.weight"}
GEMMA = POST | {"ln2.gamma": "pre_feedforward_layernorm.weight"}
HUNYUAN = {"q_norm.gamma": "self_attn.query_layernorm.weight", "k_norm.gamma": "self_attn.key_layernorm.weight"}
NEMOTRON = {"ln1.beta": "input_layernorm.bias", "ln2.beta": "post_attention_layernorm.bias",
            "w1": "mlp.up_proj.weight", "w2": "mlp.down_proj.weight"}
GPT2 = {"embed": "transformer.wte.weight", "pos": "transformer.wpe.weight",
        "ln_f.gamma": "transformer.ln_f.weight", "ln_f.beta": "transformer.ln_f.bias"}
GPT2_LAYER = {
    "ln1.gamma": "ln_1.weight", "ln1.beta": "ln_1.bias", "wo": "attn.c_proj.weight", "bo": "attn.c_proj.bias",
    "ln2.gamma": "ln_2.weight", "ln2.beta": "ln_2.bias",
    "w1": "mlp.c_fc.weight", "b1": "mlp.c_fc.bias", "w2": "mlp.c_proj.weight", "b2": "mlp.c_proj.bias",
}
# Parts of one parameter: its name, which part, and of how many columns each part is.
FUSED_GPT2 = {f"{kind}{part}": (f"attn.c_attn.{name}", i) for kind, name in (("w", "weight"), ("b", "bias")) for i, part in enumerate("qkv")}
FUSED_PHI = {"wq": ("self_attn.qkv_proj.weight", 0), "wk": ("self_attn.qkv_proj.weight", 1), "wv": ("self_attn.qkv_proj.weight", 2),
             "w_gate": ("mlp.gate_up_proj.weight", 0), "w_up": ("mlp.gate_up_proj.weight", 1)}


EXPERTS = {"router.w": "mlp.gate.weight", "experts.w_down": "mlp.experts.down_proj", "router.correction": "mlp.gate.e_score_correction_bias",
           "shared.w_gate": "mlp.shared_experts.gate_proj.weight", "shared.w_up": "mlp.shared_experts.up_proj.weight",
           "shared.w_down": "mlp.shared_experts.down_proj.weight"}

LATENT = {"wq_a": "self_attn.q_a_proj.weight", "q_a_norm.gamma": "self_attn.q_a_layernorm.weight", "kv_a_norm.gamma": "self_attn.kv_a_layernorm.weight",
          "wkv": "self_attn.kv_a_proj_with_mqa.weight", "wk_rope": "self_attn.kv_a_proj_with_mqa.weight",
          "wk": "self_attn.kv_b_proj.weight", "wv": "self_attn.kv_b_proj.weight"}


def latent_columns(config):
    """For matrices of latent attention, the columns of transformers' that are ours, in our order: heads begin with the rotated elements."""
    latent, still, turned, value = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    pairs = [2 * (i % (turned // 2)) + i // (turned // 2) for i in range(turned)] if getattr(config, "rope_interleave", True) else list(range(turned))
    each = lambda width, columns: [h * width + i for h in range(config.num_attention_heads) for i in columns]
    return {"wq": each(still + turned, [still + i for i in pairs] + list(range(still))), "wkv": list(range(latent)), "wk_rope": [latent + i for i in pairs],
            "wk": each(still + value, range(still)), "wv": each(still + value, range(still, still + value))}


# One block in each layer, so that both norms have the same place.
NEMOTRON_H = {"embed": "model.embeddings.weight", "ln_f.gamma": "model.norm_f.weight", "head": "lm_head.weight"}
NEMOTRON_H_LAYER = {
    "wq": "q_proj.weight", "wk": "k_proj.weight", "wv": "v_proj.weight", "wo": "o_proj.weight", "w1": "up_proj.weight", "w2": "down_proj.weight",
    "linear.rate": "A_log", "linear.b_dt": "dt_bias", "linear.skip": "D", "linear.norm.gamma": "norm.weight", "linear.wo": "out_proj.weight",
    "router.w": "gate.weight", "router.correction": "gate.e_score_correction_bias", "experts.w1": "experts.up_proj", "experts.w2": "experts.down_proj",
    "latent.w_in": "fc1_latent_proj.weight", "latent.w_out": "fc2_latent_proj.weight",
    "shared.w1": "shared_experts.up_proj.weight", "shared.w2": "shared_experts.down_proj.weight",
}


# Layers with linear attention; those with latent attention have some of the same names.
KIMI_LAYER = {
    "ln1.gamma": "input_layernorm.weight", "ln2.gamma": "post_attention_layernorm.weight",
    "linear.wq": "self_attn.q_proj.weight", "linear.wk": "self_attn.k_proj.weight", "linear.wv": "self_attn.v_proj.weight", "linear.wb": "self_attn.b_proj.weight",
    "linear.wa_low": "self_attn.forget_gate.f_a_proj.weight", "linear.wa": "self_attn.forget_gate.f_b_proj.weight",
    "linear.rate": "self_attn.forget_gate.A_log", "linear.b_dt": "self_attn.forget_gate.dt_bias",
    "linear.wz_low": "self_attn.g_a_proj.weight", "linear.wz": "self_attn.g_b_proj.weight", "linear.norm.gamma": "self_attn.o_norm.weight", "linear.wo": "self_attn.o_proj.weight",
}

# Layers of Qwen3-Next and Qwen3.5 with linear attention. The linear maps, of which several may be one, are in fused().
DELTA_LAYER = {
    "ln1.gamma": "input_layernorm.weight", "ln2.gamma": "post_attention_layernorm.weight",
    "linear.rate": "linear_attn.A_log", "linear.b_dt": "linear_attn.dt_bias", "linear.norm.gamma": "linear_attn.norm.weight", "linear.wo": "linear_attn.out_proj.weight",
}
SHARED = {f"shared.w_{name}": f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")} | {"shared.router.w": "mlp.shared_expert_gate.weight"}


def delta_columns(config):
    """For linear maps of the gated delta rule, transformers' map and those of its columns that are ours."""
    keys, values, wide, of = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim
    q, v, shared = keys * of, values * wide, values // keys
    if config.model_type == "qwen3_5_text":
        parts = {"wq": (0, q), "wk": (q, q), "wv": (2 * q, v)}
        return {name: ("in_proj_qkv", list(range(at, at + n))) for name, (at, n) in parts.items()} | {
            f"w{name}": (f"in_proj_{name}", list(range(n))) for name, n in (("z", v), ("b", values), ("a", values))}
    each = lambda all, first, n: [h * all + first + i for h in range(keys) for i in range(n)]
    all = 2 * of + 2 * shared * wide
    return {name: ("in_proj_qkvz", each(all, first, n)) for name, first, n in (("wq", 0, of), ("wk", of, of), ("wv", 2 * of, shared * wide), ("wz", 2 * of + shared * wide, shared * wide))} | {
        "wb": ("in_proj_ba", each(2 * shared, 0, shared)), "wa": ("in_proj_ba", each(2 * shared, shared, shared))}


def gated_columns(config):
    """The columns of queries and of gates in a map of both, head by head."""
    each = lambda at: [h * 2 * config.head_dim + at + i for h in range(config.num_attention_heads) for i in range(config.head_dim)]
    return {"wq": each(0), "wg": each(config.head_dim)}


class Tensors:
    """The parameters of a model by our names, and the place of each in one of the model's own."""

    def __init__(self, model, config, family):
        self.parameters = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name.endswith("correction_bias")}
        heads, kv = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.places = {}
        self.alternating = family == "gpt_oss"  # the columns of gate and up
        self.columns = latent_columns(config) if family in ("latent", "kimi") else gated_columns(config) if family == "delta" else {}
        delta = delta_columns(config) if family == "delta" else {}
        self.columns |= {f"linear.{name}": columns for name, (_, columns) in delta.items()}
        self.neighbours = dim if family == "ernie" else 0  # elements of a head, if rotated pairs are neighbours
        gpt2, phi, post = family == "gpt2", family == "phi3", family == "olmo2"
        ours = GPT2 if gpt2 else LLAMA | ({"ln_f.beta": "model.norm.bias"} if family == "nemotron" else {})
        layer = dict(GPT2_LAYER if gpt2 else LLAMA_LAYER)
        if post:
            del layer["ln1.gamma"], layer["ln2.gamma"]
            layer |= POST
        if family.startswith("gemma"):
            layer |= GEMMA
        if family in ("experts", "latent", "kimi", "delta"):
            layer |= EXPERTS
        if family == "delta":
            layer |= SHARED | {"wg": "self_attn.q_proj.weight"}
        if family in ("latent", "kimi"):
            layer |= LATENT
            if config.q_lora_rank is not None:
                layer["wq"] = "self_attn.q_b_proj.weight"
        if family == "gpt_oss":
            layer |= {"sinks": "self_attn.sinks", "router.w": "mlp.router.weight", "router.b": "mlp.router.bias",
                      "experts.w_down": "mlp.experts.down_proj", "experts.b_down": "mlp.experts.down_proj_bias"}
        if family == "sinks":
            layer["sinks"] = "self_attn.sinks"
        if family == "hunyuan":
            layer |= HUNYUAN
        if family == "nemotron":
            for name in ("w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down"):
                del layer[name]
            layer |= NEMOTRON
        fused = FUSED_GPT2 if gpt2 else FUSED_PHI if phi else {}
        widths = {"qkv": [heads * dim, kv * dim, kv * dim], "gate_up": [config.intermediate_size] * 2 if phi else []}
        experts = {"experts.w_gate": 0, "experts.w_up": 1}  # halves of the rows of each expert's matrix
        if family == "nemotron_h":
            self.nemotron_h(config)
            return
        for name, theirs in ours.items():
            self.place(name, theirs, 0, None)
        for i in range(config.num_hidden_layers):
            prefix = f"transformer.h.{i}." if gpt2 else f"model.layers.{i}."
            linear = family in ("kimi", "delta") and config.layer_types[i] == "linear_attention"
            own = KIMI_LAYER if family == "kimi" else DELTA_LAYER
            for name, theirs in (own | {k: v for k, v in layer.items() if not v.startswith("self_attn.")} if linear else layer).items():
                self.place(f"layer.{i}.{name}", prefix + theirs, 0, None)
            if linear and family == "delta":
                keys, at = config.linear_num_key_heads * config.linear_key_head_dim, 0
                for name, (theirs, _) in delta.items():
                    self.place(f"layer.{i}.linear.{name}", f"{prefix}linear_attn.{theirs}.weight", 0, None)
                for name, width in zip("qkv", (keys, keys, config.linear_num_value_heads * config.linear_value_head_dim)):
                    self.place(f"layer.{i}.linear.conv_{name}", prefix + "linear_attn.conv1d.weight", at, width)
                    at += width
            for part, name in enumerate("qkv" if linear and family == "kimi" else ""):
                width = config.linear_num_heads * config.linear_head_dim
                self.place(f"layer.{i}.linear.conv_{name}", prefix + "self_attn.conv1d.weight", part * width, width)
            for name, theirs in ({"router.correction": "mlp.e_score_correction_bias"} if family == "experts" else {}).items():
                self.place(f"layer.{i}.{name}", prefix + theirs, 0, None)
            for name, half in experts.items() if family == "gpt_oss" else ():
                self.place(f"layer.{i}.{name}", prefix + "mlp.experts.gate_up_proj", half, None)
                self.place(f"layer.{i}.{name.replace('.w', '.b')}", prefix + "mlp.experts.gate_up_proj_bias", half, None)
            for name, half in experts.items() if family in ("experts", "latent", "kimi", "delta") else ():
                self.place(f"layer.{i}.{name}", prefix + "mlp.experts.gate_up_proj", half, None)
            for name, (theirs, part) in fused.items():
                parts = widths["gate_up" if "gate_up" in theirs else "qkv"]
                self.place(f"layer.{i}.{name}", prefix + theirs, sum(parts[:part]), parts[part])

    def nemotron_h(self, config):
        for name, theirs in NEMOTRON_H.items():
            self.place(name, theirs, 0, None)
        values, keys = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
        parts = {"wz": (0, values), "wv": (values, values), "wk": (2 * values, keys), "wq": (2 * values + keys, keys),
                 "wa": (2 * values + 2 * keys, config.mamba_num_heads)}
        convolved = {"v": (0, values), "k": (values, keys), "q": (values + keys, keys)}
        for i, block in enumerate(config.layers_block_type):
            layer, mixer = f"layer.{i}.", f"model.layers.{i}.mixer."
            self.place(layer + ("ln2.gamma" if block in ("mlp", "moe") else "ln1.gamma"), f"model.layers.{i}.norm.weight", 0, None)
            for name, theirs in NEMOTRON_H_LAYER.items():
                self.place(layer + name, mixer + theirs, 0, None)
            for name, part in parts.items():
                self.place(f"{layer}linear.{name}", mixer + "in_proj.weight", *part)
            for name, part in convolved.items():
                self.place(f"{layer}linear.conv_{name}", mixer + "conv1d.weight", *part)
                self.place(f"{layer}linear.b_conv_{name}", mixer + "conv1d.bias", *part)

    def place(self, name, theirs, first, width):
        if theirs in self.parameters:
            self.places[name] = (theirs, first, width)

    def of_heads(self, name):
        """The columns of a matrix that are ours, or None for all."""
        return None if any(part in name for part in (".experts.", ".shared.")) else self.columns.get(".".join(name.split(".")[2:]))

    def view(self, name, tensor):
        """Our part of a parameter or its gradient, as [in, out]."""
        theirs, first, width = self.places[name]
        if self.alternating and "experts." in name:
            if "down" in name:
                return tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
            return tensor[..., first::2]
        if ".conv_" in name:
            return tensor[first:first + width, 0]
        if tensor.dim() == 4:  # A_log of Kimi Linear
            return tensor[0, 0, :, 0]
        if name.endswith("experts.w1"):
            return tensor.transpose(1, 2)
        if name.endswith("experts.w2"):
            return tensor
        if tensor.dim() == 3:  # of experts: ours are [in, out] except for the last of each, all of them on each other
            return tensor if name.endswith("w_down") else tensor.chunk(2, dim=1)[first].transpose(1, 2)
        linear = tensor.dim() == 2 and name not in ("embed", "pos", "head")
        conv = theirs.startswith("transformer.h.")  # GPT-2's Conv1D stores [in, out]
        if linear and not conv:
            tensor = tensor.T
        columns = self.of_heads(name)
        if columns is not None:
            return tensor[:, columns]  # a copy
        if self.neighbours and name.endswith((".wq", ".wk", ".bq", ".bk")):  # [..., heads, 2, pairs], of the same order as ours
            tensor = tensor.unflatten(-1, (-1, self.neighbours // 2, 2)).transpose(-1, -2)
        return tensor if width is None else tensor[..., first:first + width]


def token_losses(model, tokens, documents):
    """Returns the losses of all tokens after the first by sequence, 0 for the first tokens of documents, and the number of the others."""
    def of(rows):
        logits = model(rows[:, :-1], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)

    if documents is None:
        losses = of(tokens)
        return losses, losses.numel()
    rows, count = [], 0
    for row, ends in zip(tokens, documents):
        parts, first = [], 0
        for end in ends + [len(row)]:
            if end - first > 1:
                parts.append(of(row[None, first:end])[0])
                count += end - first - 1
            parts.append(torch.zeros(1))
            first = end
        rows.append(torch.cat(parts)[:-1])
    return torch.stack(rows), count


def balance(model, tokens):
    """Returns the loss that balances experts, times its coefficient, as a mean over sequences, or 0."""
    if not getattr(model.config, "output_router_logits", False):
        return 0
    of = [model(row[None, :-1], use_cache=False, output_router_logits=True).aux_loss for row in tokens]
    return model.config.router_aux_loss_coef * sum(of) / len(of)


def losses_and_gradients(model, tensors, tokens, documents=None):
    model.zero_grad()
    losses, count = token_losses(model, tokens, documents)
    (losses.sum() / count + balance(model, tokens)).backward()
    gradients = {}
    for name, (theirs, _, _) in tensors.places.items():
        if name.endswith("correction"):
            continue  # it is not trained
        g = tensors.view(name, tensors.parameters[theirs].grad).double().flatten()
        gradients[name] = [g.norm().item()] + [(g @ signs(name, k, g.numel())).item() for k in range(PROJECTIONS)]
    return losses.tolist(), gradients


def steps_of(model, tokens, documents=None):
    """Returns the mean losses after each of the first steps with AdamW. It restores the parameters."""
    before = {name: values.clone() for name, values in model.state_dict().items()}
    optimizer, means = torch.optim.AdamW(model.parameters(), **ADAMW), []
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        losses, count = token_losses(model, tokens, documents)
        if step > 0:
            means.append(losses.double().sum().item() / count)
        if step < STEPS:
            (losses.sum() / count).backward()
            optimizer.step()
    model.load_state_dict(before)
    return means


class Close(Exception):
    """A router's choice is decided by less than MARGIN."""


def watch_routers(model, top):
    """Returns a list to which each forward pass adds by how much the last chosen expert of a token is ahead of the next, at least."""
    margins = []

    def add(margin):
        margins.append(margin)
        if margin < MARGIN:
            raise Close

    def kept_groups(groups, scores, top):
        best = scores.topk(top + 1, dim=-1)[0]
        add((best[:, -2] - best[:, -1]).min().item())
        kept = torch.zeros_like(scores).scatter_(1, scores.topk(top, dim=-1)[1], 1)
        return groups.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)

    def hook(router, arguments, outputs):
        logits = outputs[0].detach().float()
        if hasattr(router, "e_score_correction_bias") or len(arguments) > 1:
            scores = logits.sigmoid() + getattr(router, "e_score_correction_bias", arguments[-1])
            if (getattr(router, "num_group", 1) or 1) > 1:
                groups = scores.view(len(scores), router.num_group, -1)
                scores = kept_groups(groups, groups.topk(2, dim=-1)[0].sum(dim=-1), router.topk_group)
        else:
            scores = logits.softmax(dim=-1)
            if getattr(router, "topk_method", "") == "group_limited_greedy":
                groups = scores.view(len(scores), router.num_group, -1)
                scores = kept_groups(groups, groups.max(dim=-1)[0], router.topk_group)
        best = scores.topk(top + 1, dim=-1)[0]
        add((best[:, -2] - best[:, -1]).min().item())

    for name, module in model.named_modules():
        if name.endswith((".mlp.gate", ".mlp.router", ".mixer.gate")):
            module.register_forward_hook(hook)
    return margins


class DenseMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    """Takes the place of gpt-oss's experts, to compare its attention with ours."""

    def forward(self, x):
        return super().forward(x), None


def make(name, family, keys, config, folder):
    """config has transformers' keys; keys are the equivalent keys of a spec's model block."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**config)
    config._attn_implementation = config._experts_implementation = "eager"
    if config.model_type == "mistral4":  # which AutoModelForCausalLM does not know
        model = transformers.Mistral4ForCausalLM(config).float().eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    if family == "sinks":
        config.mlp_bias = False
        for layer in model.model.layers:
            layer.mlp = DenseMLP(config)
    tensors = Tensors(model, config, family)
    with torch.no_grad():
        for ours, (theirs, _, _) in tensors.places.items():
            view = tensors.view(ours, tensors.parameters[theirs])
            value = weights(ours, tuple(view.shape))
            if ours.endswith("gamma") and (family.startswith("gemma") or family in ("nemotron", "delta")):
                value -= 1  # they add it themselves
            columns = tensors.of_heads(ours)
            if columns is None:
                view.copy_(value)
            else:
                tensors.parameters[theirs].T[:, columns] = value
    covered = {theirs for theirs, _, _ in tensors.places.values()}
    missing = set(tensors.parameters) - covered
    assert not missing, missing
    margins = watch_routers(model, config.num_experts_per_tok) if family in ("experts", "gpt_oss", "nemotron_h", "latent", "kimi") or getattr(config, "num_experts", 0) else []
    short = lambda values: [float(f"{v:.9g}") for v in values]

    def results(tokens, documents=None):
        losses, gradients = losses_and_gradients(model, tensors, tokens, documents)
        out = {"losses": [short(row) for row in losses], "gradients": {k: short(v) for k, v in gradients.items()}}
        return out | ({"steps": short(steps_of(model, tokens, documents))} if name.endswith("-deep") else {})

    start = {key: values.clone() for key, values in model.state_dict().items()}
    for draw in range(1000):
        del margins[:]
        drawn = f"tokens-{draw}" if draw else "tokens"
        tokens = torch.from_numpy((draws(drawn, BATCH * (SEQUENCE + 1)) % np.uint64(config.vocab_size)).astype(np.int64)).view(BATCH, SEQUENCE + 1)
        try:
            file = {"keys": keys} | results(tokens)
            if name.endswith("-deep"):
                file["documents"] = {"ends": DOCUMENTS} | results(tokens, DOCUMENTS)
            break
        except Close:
            model.load_state_dict(start)
    else:
        raise SystemExit(f"{name}: a router is close to another choice, whatever the tokens")
    if draw:
        file["tokens"] = drawn
    if margins:
        file["margin"] = float(f"{min(margins):.3g}")
    with open(os.path.join(folder, name + ".json"), "w") as f:
        f.write(json.dumps(file, indent=0).replace(",\n", ", ").replace("[\n", "[").replace("\n]", "]") + "\n")


SIZES = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=36, vocab_size=37,
             max_position_embeddings=64, rms_norm_eps=1e-6, pad_token_id=None, bos_token_id=0, eos_token_id=0)
SIZES_ODD = SIZES | dict(hidden_size=36, num_attention_heads=6, intermediate_size=37, vocab_size=53)
SIZES_DEEP = SIZES | dict(num_hidden_layers=4)
DEEP = "layers = 4 hidden = 24 heads = 4 ffn = 36 vocab = 37 norm_eps = 1e-6"
ODD = "layers = 3 hidden = 36 heads = 6 ffn = 37 vocab = 53 norm_eps = 1e-6"
KEYS = "layers = 3 hidden = 24 heads = 4 ffn = 36 vocab = 37 norm_eps = 1e-6"


def rope(theta=10000.0, **scaling):
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "default"} | scaling}


def configurations():
    """Name, family of the tensors' names, keys of the spec, and the configuration."""
    c = lambda model_type, **more: SIZES | {"model_type": model_type} | more
    o = lambda model_type, **more: SIZES_ODD | {"model_type": model_type} | more
    yield ("gpt2", "gpt2", "family = gpt2 layers = 2 hidden = 24 heads = 4 vocab = 41",
           dict(model_type="gpt2", n_embd=24, n_layer=2, n_head=4, vocab_size=41, n_positions=SEQUENCE, bos_token_id=0, eos_token_id=0))
    yield "llama", "llama", f"family = llama {KEYS}", c("llama")
    yield ("llama3", "llama", f"family = llama3 {KEYS} kv_heads = 2", c("llama", num_key_value_heads=2, **rope(500000.0)))
    yield ("llama3_1", "llama", f"family = llama3_1 {KEYS} kv_heads = 2 rope_original = 32",
           c("llama", num_key_value_heads=2, **rope(500000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                  original_max_position_embeddings=32)))
    yield ("llama-biases", "llama", f"family = llama {KEYS} head_dim = 10 kv_heads = 1 activation = gelu tied = true bias = [qkv, attn_out, mlp]",
           c("llama", head_dim=10, num_key_value_heads=1, hidden_act="gelu", tie_word_embeddings=True, attention_bias=True, mlp_bias=True))
    yield ("llama-linear", "llama", f"family = llama {KEYS} rope_scaling = linear rope_factor = 4", c("llama", **rope(rope_type="linear", factor=4.0)))
    yield ("mistral", "llama", f"family = mistral {KEYS} kv_heads = 1 head_dim = 8",
           c("mistral", num_key_value_heads=1, head_dim=8, sliding_window=None, **rope(1000000.0)))
    yield ("qwen2-yarn", "llama", f"family = qwen2 {KEYS} kv_heads = 2 rope_scaling = yarn rope_factor = 4 rope_original = 20",
           c("qwen2", num_key_value_heads=2, use_sliding_window=False,
             **rope(1000000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20)))
    yield ("qwen3", "llama", f"family = qwen3 {KEYS} kv_heads = 2 head_dim = 10", c("qwen3", num_key_value_heads=2, head_dim=10, **rope(1000000.0)))
    yield ("qwen3-yarn", "llama", f"family = qwen3 {KEYS} kv_heads = 4 head_dim = 12 tied = true rope_theta = 1000 "
           "rope_scaling = yarn rope_factor = 2 rope_original = 20 rope_fast = 4 rope_truncate = false rope_amplitude = 1.5",
           c("qwen3", num_key_value_heads=4, head_dim=12, tie_word_embeddings=True,
             **rope(1000.0, rope_type="yarn", factor=2.0, original_max_position_embeddings=20, beta_fast=4.0, truncate=False, attention_factor=1.5)))
    long, short = [1.0 + i for i in range(4)], [1.0 + i / 8 for i in range(4)]
    phi = dict(num_key_value_heads=2, head_dim=8, num_attention_heads=4, hidden_size=32, sliding_window=None)
    for name, original in (("phi3-long", 20), ("phi3-short", 48)):
        yield (name, "phi3", f"family = phi3 layers = 3 hidden = 32 heads = 4 ffn = 36 vocab = 37 norm_eps = 1e-6 kv_heads = 2 rope_scaling = longrope "
               f"rope_factor = {64 / original} rope_original = {original} rope_long = {long} rope_short = {short}",
               c("phi3", **phi, **rope(rope_type="longrope", long_factor=long, short_factor=short, original_max_position_embeddings=original),
                 original_max_position_embeddings=original))
    yield ("phi4-partial", "phi3", "family = phi3 layers = 3 hidden = 32 heads = 4 ffn = 36 vocab = 37 norm_eps = 1e-6 kv_heads = 2 rope_partial = 0.75",
           c("phi3", **phi, **rope(partial_rotary_factor=0.75)))
    yield ("olmo2", "olmo2", f"family = olmo2 {KEYS} kv_heads = 2", c("olmo2", num_key_value_heads=2, **rope(500000.0)))
    nested = lambda **full: {"rope_parameters": {"full_attention": dict(rope_theta=500000.0, rope_type="default") | full,
                                                 "sliding_attention": dict(rope_theta=500000.0, rope_type="default")}}
    yield ("olmo3", "olmo2", f"family = olmo3 {KEYS} kv_heads = 2 window = 7 layer_types = [sliding, full, sliding] rope_scaling = yarn rope_factor = 4 rope_original = 20",
           c("olmo3", num_key_value_heads=2, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
             **nested(rope_type="yarn", factor=4.0, original_max_position_embeddings=20)))
    window = lambda n, *full: dict(sliding_window=n, layer_types=[f"{'full' if i in full else 'sliding'}_attention" for i in range(3)])
    yield ("olmo3-plain", "olmo2", f"family = olmo3 {KEYS} window = 5 layer_types = [sliding, sliding, full] rope_theta = 100 rope_local_theta = 100",
           c("olmo3", **window(5, 2), rope_parameters={k: dict(rope_theta=100.0, rope_type="default") for k in ("full_attention", "sliding_attention")}))
    yield ("olmo3-odd", "olmo2", f"family = olmo3 {ODD} kv_heads = 2 tied = true window = 3 layer_types = [full, sliding, sliding] rope_local_theta = 50",
           o("olmo3", num_key_value_heads=2, tie_word_embeddings=True, **window(3, 0),
             rope_parameters={"full_attention": dict(rope_theta=500000.0, rope_type="default"), "sliding_attention": dict(rope_theta=50.0, rope_type="default")}))
    yield ("olmo3-full", "olmo2", f"family = olmo3 {ODD} kv_heads = 6 window = 0 rope_theta = 1000 activation = gelu",
           o("olmo3", num_key_value_heads=6, hidden_act="gelu", **window(3, 0, 1, 2),
             rope_parameters={k: dict(rope_theta=1000.0, rope_type="default") for k in ("full_attention", "sliding_attention")}))
    yield ("seed_oss-plain", "llama", f"family = seed_oss {KEYS} kv_heads = 2 head_dim = 8 rope_theta = 1000", c("seed_oss", num_key_value_heads=2, head_dim=8, **rope(1000.0)))
    yield ("seed_oss-odd", "llama", f"family = seed_oss {ODD} kv_heads = 6 head_dim = 6 bias = [qkv, mlp] tied = true",
           o("seed_oss", num_key_value_heads=6, head_dim=6, mlp_bias=True, tie_word_embeddings=True, **rope(10000000.0)))
    yield ("seed_oss-unbiased", "llama", f"family = seed_oss {ODD} kv_heads = 1 head_dim = 14 bias = [] rope_theta = 100 rope_scaling = linear rope_factor = 2",
           o("seed_oss", num_key_value_heads=1, head_dim=14, attention_bias=False, **rope(100.0, rope_type="linear", factor=2.0)))
    yield ("seed_oss", "llama", f"family = seed_oss {KEYS} kv_heads = 1 head_dim = 10 bias = [qkv, attn_out]",
           c("seed_oss", num_key_value_heads=1, head_dim=10, attention_out_bias=True, **rope(10000000.0)))
    yield ("granite", "llama", f"family = granite {KEYS} kv_heads = 2 rope_theta = 10000 attn_scale = 0.3 logit_scale = {1 / 1.7} "
           f"embed_scale = {12 / 0.22}".replace("norm_eps = 1e-6", f"norm_eps = {1e-6 / 0.22 ** 2}"),
           c("granite", num_key_value_heads=2, tie_word_embeddings=True, attention_multiplier=0.3, logits_scaling=1.7, embedding_multiplier=12.0,
             residual_multiplier=0.22, **rope()))
    granite = lambda branch, embed, attention, logits: (
        f"attn_scale = {attention} logit_scale = {1 / logits} embed_scale = {embed / branch} norm_eps = {1e-6 / branch ** 2}",
        dict(residual_multiplier=branch, embedding_multiplier=embed, attention_multiplier=attention, logits_scaling=logits))
    for name, keys, make, more, (ours, theirs) in (
            ("plain", KEYS, c, "tied = false rope_theta = 10000", granite(1.0, 1.0, 6 ** -0.5, 1.0)),
            ("odd", ODD, o, "kv_heads = 6 tied = true rope_theta = 100", granite(0.4, 3.0, 0.2, 0.7)),
            ("biases", ODD, o, "kv_heads = 1 tied = true bias = [qkv, attn_out, mlp] rope_theta = 1000", granite(2.0, 1.5, 1.0, 2.5))):
        yield (f"granite-{name}", "llama", f"family = granite {keys} {more} {ours}".replace("norm_eps = 1e-6 ", ""),
               make("granite", num_key_value_heads={"plain": None, "odd": 6, "biases": 1}[name], tie_word_embeddings=name != "plain",
                    attention_bias=name == "biases", mlp_bias=name == "biases", **theirs, **rope({"plain": 1e4, "odd": 100.0, "biases": 1000.0}[name])))
    yield ("exaone4-full", "olmo2", f"family = exaone4 {KEYS} kv_heads = 1 rope_scaling = llama3 rope_factor = 8 rope_original = 20",
           c("exaone4", num_key_value_heads=1, sliding_window=None, layer_types=["full_attention"] * 3,
             **rope(1000000.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=20)))
    yield ("exaone4-odd", "olmo2", f"family = exaone4 {ODD} kv_heads = 6 tied = true rope_theta = 100 window = 3 layer_types = [full, sliding, full] positions = [none, rope, none]",
           o("exaone4", num_key_value_heads=6, tie_word_embeddings=True, **window(3, 0, 2), **rope(100.0)))
    yield ("exaone4-sliding", "olmo2", f"family = exaone4 {ODD} kv_heads = 1 window = 9 layer_types = [sliding, full, full] positions = [rope, none, none]",
           o("exaone4", num_key_value_heads=1, **window(9, 1, 2), **rope(1000000.0)))
    yield ("hunyuan_v1_dense", "hunyuan", f"family = hunyuan_v1_dense {KEYS} kv_heads = 2 head_dim = 8", c("hunyuan_v1_dense", num_key_value_heads=2, head_dim=8, **rope()))
    yield ("hunyuan_v1_dense-alpha", "hunyuan", f"family = hunyuan_v1_dense {KEYS} kv_heads = 4 head_dim = 12 tied = true rope_theta = {10000.0 * 20.0 ** (12 / 10)}",
           c("hunyuan_v1_dense", num_key_value_heads=4, head_dim=12, tie_word_embeddings=True, **rope(rope_type="dynamic", factor=1.0, alpha=20.0)))
    yield ("hunyuan_v1_dense-odd", "hunyuan", f"family = hunyuan_v1_dense {ODD} kv_heads = 1 head_dim = 6 bias = [qkv, attn_out] rope_theta = 100",
           o("hunyuan_v1_dense", num_key_value_heads=1, head_dim=6, attention_bias=True, **rope(100.0)))
    yield ("hunyuan_v1_dense-yarn", "hunyuan", f"family = hunyuan_v1_dense {ODD} kv_heads = 6 head_dim = 10 rope_scaling = yarn rope_factor = 4 rope_original = 20 activation = gelu",
           o("hunyuan_v1_dense", num_key_value_heads=6, head_dim=10, hidden_act="gelu", **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=20)))
    grown = lambda theta, beta, original, **more: rope(theta, llama_4_scaling_beta=beta, original_max_position_embeddings=original, **more)
    yield ("ministral3", "llama", f"family = ministral3 {KEYS} kv_heads = 2 head_dim = 10 rope_factor = 4 rope_original = 8 rope_beta = 0.4",
           c("ministral3", num_key_value_heads=2, head_dim=10, **grown(1000000.0, 0.4, 8, rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=1.0)))
    yield ("ministral3-window", "llama", f"family = ministral3 {KEYS} kv_heads = 4 head_dim = 8 window = 60 rope_scaling = llama3 rope_factor = 8 rope_original = 16 rope_beta = 1 rope_theta = 500",
           c("ministral3", num_key_value_heads=4, head_dim=8, sliding_window=60,
             **grown(500.0, 1.0, 16, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)))
    yield ("ministral3-odd", "llama", f"family = ministral3 {ODD} kv_heads = 1 head_dim = 6 tied = true rope_factor = 2 rope_original = 3 rope_beta = 0.2 rope_amplitude = 1.3",
           o("ministral3", num_key_value_heads=1, head_dim=6, tie_word_embeddings=True,
             **grown(1000000.0, 0.2, 3, rope_type="yarn", factor=2.0, attention_factor=1.3)))
    yield ("ministral3-plain", "llama", f"family = ministral3 {ODD} kv_heads = 6 head_dim = 14 rope_scaling = none rope_theta = 100",
           o("ministral3", num_key_value_heads=6, head_dim=14, **grown(100.0, 0.0, 20)))
    yield ("ernie4_5", "ernie", f"family = ernie4_5 {KEYS} kv_heads = 2 head_dim = 8", c("ernie4_5", num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, **rope(500000.0)))
    yield ("ernie4_5-biases", "ernie", f"family = ernie4_5 {KEYS} kv_heads = 1 head_dim = 10 tied = false bias = [qkv, attn_out, mlp] rope_theta = 100",
           c("ernie4_5", num_key_value_heads=1, head_dim=10, tie_word_embeddings=False, use_bias=True, **rope(100.0)))
    yield ("ernie4_5-odd", "ernie", f"family = ernie4_5 {ODD} kv_heads = 6 head_dim = 14 activation = gelu rope_theta = 1000",
           o("ernie4_5", num_key_value_heads=6, head_dim=14, tie_word_embeddings=True, hidden_act="gelu", **rope(1000.0)))
    yield ("ernie4_5-linear", "ernie", f"family = ernie4_5 {ODD} kv_heads = 1 head_dim = 6 tied = false rope_scaling = linear rope_factor = 4",
           o("ernie4_5", num_key_value_heads=1, head_dim=6, tie_word_embeddings=False, **rope(500000.0, rope_type="linear", factor=4.0)))
    moe = lambda experts, top, width: f"num_experts = {experts} num_experts_per_tok = {top} moe_intermediate_size = {width}"
    yield ("qwen3_moe", "experts", f"family = qwen3_moe {KEYS} kv_heads = 2 head_dim = 8 {moe(8, 2, 14)}",
           c("qwen3_moe", num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=14, norm_topk_prob=True, **rope(1000000.0)))
    yield ("qwen3_moe-steps", "experts", f"family = qwen3_moe {KEYS} kv_heads = 4 head_dim = 6 {moe(6, 3, 10)} norm_topk_prob = false decoder_sparse_step = 2 tied = true",
           c("qwen3_moe", num_key_value_heads=4, head_dim=6, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=10, norm_topk_prob=False,
             decoder_sparse_step=2, tie_word_embeddings=True, **rope(1000000.0)))
    yield ("qwen3_moe-odd", "experts", f"family = qwen3_moe {ODD} kv_heads = 1 head_dim = 10 {moe(5, 1, 7)} mlp_only_layers = [1] norm_topk_prob = false bias = [qkv, attn_out] rope_theta = 100",
           o("qwen3_moe", num_key_value_heads=1, head_dim=10, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=7, norm_topk_prob=False,
             mlp_only_layers=[1], attention_bias=True, **rope(100.0)))
    yield ("qwen3_moe-yarn", "experts", f"family = qwen3_moe {ODD} kv_heads = 6 head_dim = 6 {moe(7, 4, 9)} rope_scaling = yarn rope_factor = 4 rope_original = 20 activation = gelu",
           o("qwen3_moe", num_key_value_heads=6, head_dim=6, num_experts=7, num_experts_per_tok=4, moe_intermediate_size=9, norm_topk_prob=True, hidden_act="gelu",
             **rope(1000000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20)))
    joint, coefficient = "router_aux_loss_coef = 0.5 aux_loss = joint", dict(output_router_logits=True, router_aux_loss_coef=0.5)
    yield ("qwen3_moe-joint", "experts", f"family = qwen3_moe {KEYS} kv_heads = 2 head_dim = 8 {moe(6, 2, 10)} mlp_only_layers = [1] {joint}",
           c("qwen3_moe", num_key_value_heads=2, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10, norm_topk_prob=True,
             mlp_only_layers=[1], **coefficient, **rope(1000000.0)))
    yield ("mixtral-joint", "experts", f"family = mixtral {ODD} kv_heads = 2 {moe(5, 3, 11)} {joint}",
           o("mixtral", num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=3, **coefficient, **rope(1000000.0)) | dict(intermediate_size=11))
    yield ("mixtral", "experts", f"family = mixtral {KEYS} kv_heads = 2 {moe(8, 2, 14)}",
           c("mixtral", num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, **rope(1000000.0)) | dict(intermediate_size=14))
    yield ("mixtral-window", "experts", f"family = mixtral {KEYS} kv_heads = 4 head_dim = 8 {moe(4, 2, 20)} window = 60 rope_theta = 500",
           c("mixtral", num_key_value_heads=4, head_dim=8, sliding_window=60, num_local_experts=4, num_experts_per_tok=2, **rope(500.0)) | dict(intermediate_size=20))
    yield ("mixtral-odd", "experts", f"family = mixtral {ODD} kv_heads = 1 head_dim = 10 {moe(5, 3, 11)} tied = true",
           o("mixtral", num_key_value_heads=1, head_dim=10, num_local_experts=5, num_experts_per_tok=3, tie_word_embeddings=True, **rope(1000000.0)) | dict(intermediate_size=11))
    yield ("mixtral-few", "experts", f"family = mixtral {ODD} kv_heads = 6 {moe(3, 2, 7)} rope_scaling = linear rope_factor = 2 rope_theta = 1000",
           o("mixtral", num_key_value_heads=6, num_local_experts=3, num_experts_per_tok=2, **rope(1000.0, rope_type="linear", factor=2.0)) | dict(intermediate_size=7))
    sinks = "attn_sinks = true bias = [qkv, attn_out] layer_types = [sliding, full, sliding]"
    yield ("sinks", "sinks", f"family = llama {KEYS} kv_heads = 2 head_dim = 8 {sinks} window = 5 rope_theta = 150000 rope_scaling = yarn rope_factor = 4 rope_original = 20 "
           "rope_truncate = false",
           c("gpt_oss", num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, **window(5, 1),
             **rope(150000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20, truncate=False)))
    yield ("sinks-odd", "sinks", f"family = llama {ODD} kv_heads = 1 head_dim = 10 {sinks} window = 11 rope_theta = 100 tied = true",
           o("gpt_oss", num_key_value_heads=1, head_dim=10, num_local_experts=2, num_experts_per_tok=1, tie_word_embeddings=True, **window(11, 1), **rope(100.0)))
    oss = lambda experts, top, width, **more: dict(num_local_experts=experts, num_experts_per_tok=top, intermediate_size=width) | more
    yield ("gpt_oss", "gpt_oss", f"family = gpt_oss {KEYS} kv_heads = 2 head_dim = 8 {moe(4, 2, 14)} window = 5 layer_types = [sliding, full, sliding] rope_factor = 4 rope_original = 20",
           c("gpt_oss", num_key_value_heads=2, head_dim=8, **window(5, 1), **rope(150000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20, truncate=False))
           | oss(4, 2, 14))
    yield ("gpt_oss-odd", "gpt_oss", f"family = gpt_oss {ODD} kv_heads = 1 head_dim = 10 {moe(5, 3, 7)} window = 9 layer_types = [full, sliding, full] rope_scaling = none rope_theta = 100 "
           "tied = true", o("gpt_oss", num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, **window(9, 0, 2), **rope(100.0)) | oss(5, 3, 7))
    yield ("gpt_oss-plain", "gpt_oss", f"family = gpt_oss {KEYS} kv_heads = 4 {moe(8, 4, 10)} window = 0 bias = [router, experts] rope_scaling = none rope_theta = 1000".replace(
           "heads = 4 ffn", "heads = 4 head_dim = 6 ffn"), c("gpt_oss", num_key_value_heads=4, head_dim=6, attention_bias=False, **window(9, 0, 1, 2), **rope(1000.0)) | oss(8, 4, 10))
    yield ("gpt_oss-whole", "gpt_oss", f"family = gpt_oss {ODD} kv_heads = 6 head_dim = 6 {moe(3, 2, 9)} window = 11 layer_types = [sliding, sliding, full] rope_factor = 2 rope_original = 20 "
           "rope_truncate = true", o("gpt_oss", num_key_value_heads=6, head_dim=6, **window(11, 2),
                                     **rope(150000.0, rope_type="yarn", factor=2.0, original_max_position_embeddings=20)) | oss(3, 2, 9))
    half = lambda theta, share=0.5, **scaling: rope(theta, partial_rotary_factor=share, **scaling)
    glm = lambda experts, top, width, **more: dict(n_routed_experts=experts, num_experts_per_tok=top, moe_intermediate_size=width, num_mtp_layers=0) | more
    yield ("glm4_moe", "experts", f"family = glm4_moe {KEYS} kv_heads = 2 head_dim = 8 {moe(8, 2, 14)} shared_expert_intermediate_size = 14 first_k_dense_replace = 1",
           c("glm4_moe", num_key_value_heads=2, head_dim=8, attention_bias=True, **glm(8, 2, 14), **half(1000000.0)))
    yield ("glm4_moe-groups", "experts", f"family = glm4_moe {KEYS} kv_heads = 4 head_dim = 12 {moe(12, 3, 10)} shared_expert_intermediate_size = 20 bias = [] qk_norm = head "
           "n_group = 4 topk_group = 2 routed_scaling_factor = 2.5 norm_topk_prob = false",
           c("glm4_moe", num_key_value_heads=4, head_dim=12, use_qk_norm=True, **half(1000000.0),
             **glm(12, 3, 10, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=False, first_k_dense_replace=0)))
    yield ("glm4_moe-odd", "experts", f"family = glm4_moe {ODD} kv_heads = 1 head_dim = 12 {moe(5, 2, 7)} shared_expert_intermediate_size = 21 first_k_dense_replace = 2 tied = true "
           "routed_scaling_factor = 1.5 rope_theta = 100",
           o("glm4_moe", num_key_value_heads=1, head_dim=12, attention_bias=True, tie_word_embeddings=True, **half(100.0),
             **glm(5, 2, 7, n_shared_experts=3, first_k_dense_replace=2, routed_scaling_factor=1.5)))
    yield ("glm4_moe-whole", "experts", f"family = glm4_moe {ODD} kv_heads = 6 head_dim = 6 {moe(7, 4, 9)} shared_expert_intermediate_size = 9 rope_partial = 1 bias = []",
           o("glm4_moe", num_key_value_heads=6, head_dim=6, **glm(7, 4, 9, first_k_dense_replace=0), **half(1000000.0, 1.0)))
    mini = lambda experts, top, width: dict(num_local_experts=experts, num_experts_per_tok=top, intermediate_size=width)
    yield ("minimax_m2", "experts", f"family = minimax_m2 {KEYS} kv_heads = 2 head_dim = 8 {moe(8, 2, 14)}",
           c("minimax_m2", num_key_value_heads=2, head_dim=8, **half(5000000.0)) | mini(8, 2, 14))
    yield ("minimax_m2-whole", "experts", f"family = minimax_m2 {KEYS} kv_heads = 4 head_dim = 6 {moe(6, 3, 10)} rope_partial = 1 tied = true rope_theta = 100",
           c("minimax_m2", num_key_value_heads=4, head_dim=6, tie_word_embeddings=True, **rope(100.0)) | mini(6, 3, 10))
    yield ("minimax_m2-odd", "experts", f"family = minimax_m2 {ODD} kv_heads = 2 head_dim = 12 {moe(5, 2, 7)}",
           o("minimax_m2", num_key_value_heads=2, head_dim=12, **half(5000000.0)) | mini(5, 2, 7))
    yield ("minimax_m2-quarter", "experts", f"family = minimax_m2 {ODD} kv_heads = 6 head_dim = 8 {moe(9, 4, 11)} rope_partial = 0.25 activation = gelu",
           o("minimax_m2", num_key_value_heads=6, head_dim=8, hidden_act="gelu", **half(5000000.0, 0.25)) | mini(9, 4, 11))
    latent = lambda q, kv, still, turned, value: (f"{f'q_lora_rank = {q} ' if q else ''}kv_lora_rank = {kv} qk_nope_head_dim = {still} qk_rope_head_dim = {turned} v_head_dim = {value}")
    mla = lambda q, kv, still, turned, value, heads, experts, top, width, dense=0, **more: dict(
        num_key_value_heads=heads, q_lora_rank=q or None, kv_lora_rank=kv, qk_nope_head_dim=still, qk_rope_head_dim=turned, v_head_dim=value, n_routed_experts=experts,
        num_experts_per_tok=top, moe_intermediate_size=width, first_k_dense_replace=dense) | more
    yarn = lambda factor, mscale, whole, **more: rope(10000.0, rope_type="yarn", factor=factor, original_max_position_embeddings=20, mscale=mscale, mscale_all_dim=whole, **more)
    grown = lambda factor, whole, width: (0.1 * whole * math.log(factor) + 1) ** 2 / width ** 0.5
    shared = lambda width: f"shared_expert_intermediate_size = {width}"
    yield ("deepseek_v3", "latent", f"family = deepseek_v3 {KEYS} {latent(20, 16, 8, 4, 6)} {moe(8, 2, 14)} {shared(14)} first_k_dense_replace = 1 n_group = 4 topk_group = 2 "
           f"routed_scaling_factor = 2.5 rope_scaling = yarn rope_factor = 4 rope_original = 20 rope_amplitude = 1 attn_scale = {grown(4, 1, 12)}",
           c("deepseek_v3", n_group=4, topk_group=2, n_shared_experts=1, **mla(20, 16, 8, 4, 6, 4, 8, 2, 14, 1), **yarn(4.0, 1.0, 1.0)))
    yield ("deepseek_v3-plain", "latent", f"family = deepseek_v3 {KEYS} {latent(0, 12, 5, 8, 10)} {moe(5, 3, 10)} {shared(20)} norm_topk_prob = false tied = true rope_theta = 100",
           c("deepseek_v3", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0, tie_word_embeddings=True, **mla(0, 12, 5, 8, 10, 4, 5, 3, 10, n_shared_experts=2), **rope(100.0)))
    yield ("deepseek_v3-odd", "latent", f"family = deepseek_v3 {ODD} {latent(17, 13, 7, 2, 9)} {moe(5, 2, 7)} {shared(7)} first_k_dense_replace = 2",
           o("deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=1.0, rope_interleave=False, **mla(17, 13, 7, 2, 9, 6, 5, 2, 7, 2), n_shared_experts=1, **rope(10000.0)))
    yield ("deepseek_v3-linear", "latent", f"family = deepseek_v3 {ODD} {latent(9, 20, 4, 6, 4)} {moe(6, 2, 9)} {shared(9)} rope_scaling = linear rope_factor = 2 routed_scaling_factor = 1.5",
           o("deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=1.5, **mla(9, 20, 4, 6, 4, 6, 6, 2, 9), n_shared_experts=1, **rope(10000.0, rope_type="linear", factor=2.0)))
    yield ("deepseek_v2", "latent", f"family = deepseek_v2 {KEYS} {latent(20, 16, 8, 4, 6)} {moe(8, 2, 14)} {shared(28)} first_k_dense_replace = 1 rope_scaling = yarn rope_factor = 4 "
           f"rope_original = 20 rope_amplitude = 1 attn_scale = {grown(4, 0.707, 12)}",
           c("deepseek_v2", n_shared_experts=2, **mla(20, 16, 8, 4, 6, 4, 8, 2, 14, 1), **yarn(4.0, 0.707, 0.707)))
    yield ("deepseek_v2-lite", "latent", f"family = deepseek_v2 {KEYS} {latent(0, 16, 6, 4, 10)} {moe(5, 3, 9)} {shared(9)} tied = true",
           c("deepseek_v2", n_shared_experts=1, tie_word_embeddings=True, **mla(0, 16, 6, 4, 10, 4, 5, 3, 9), **rope(10000.0)))
    yield ("deepseek_v2-odd", "latent", f"family = deepseek_v2 {ODD} {latent(13, 18, 8, 2, 7)} {moe(7, 2, 7)} {shared(21)} first_k_dense_replace = 2 routed_scaling_factor = 1.7 rope_theta = 500",
           o("deepseek_v2", n_shared_experts=3, routed_scaling_factor=1.7, **mla(13, 18, 8, 2, 7, 6, 7, 2, 7, 2), **rope(500.0)))
    yield ("deepseek_v2-scaled", "latent", f"family = deepseek_v2 {ODD} {latent(10, 12, 4, 4, 5)} {moe(4, 2, 8)} {shared(8)} rope_scaling = yarn rope_factor = 3 rope_original = 20 "
           f"rope_amplitude = {(0.1 * 0.8 * math.log(3) + 1) / (0.1 * 1.2 * math.log(3) + 1)} attn_scale = {grown(3, 1.2, 8)}",
           o("deepseek_v2", n_shared_experts=1, **mla(10, 12, 4, 4, 5, 6, 4, 2, 8), **yarn(3.0, 0.8, 1.2)))
    limited = lambda groups, kept: f"n_group = {groups} topk_group = {kept} topk_method = group_limited_greedy"
    greedy = lambda groups, kept: dict(n_group=groups, topk_group=kept, topk_method="group_limited_greedy")
    yield ("deepseek_v2-groups", "latent", f"family = deepseek_v2 {KEYS} {latent(20, 16, 8, 4, 6)} {moe(12, 3, 14)} {shared(28)} first_k_dense_replace = 1 {limited(4, 2)} "
           f"routed_scaling_factor = 16 rope_scaling = yarn rope_factor = 4 rope_original = 20 rope_amplitude = 1 attn_scale = {grown(4, 0.707, 12)}",
           c("deepseek_v2", n_shared_experts=2, routed_scaling_factor=16.0, **greedy(4, 2), **mla(20, 16, 8, 4, 6, 4, 12, 3, 14, 1), **yarn(4.0, 0.707, 0.707)))
    yield ("deepseek_v2-single", "latent", f"family = deepseek_v2 {ODD} {latent(13, 18, 8, 2, 7)} {moe(7, 2, 7)} {shared(21)} first_k_dense_replace = 1 {limited(7, 3)} rope_theta = 500",
           o("deepseek_v2", n_shared_experts=3, **greedy(7, 3), **mla(13, 18, 8, 2, 7, 6, 7, 2, 7, 1), **rope(500.0)))
    beta = dict(llama_4_scaling_beta=0.4)
    yield ("mistral4", "latent", f"family = mistral4 {KEYS} {latent(20, 16, 4, 4, 8)} {moe(8, 2, 14)} {shared(14)} rope_scaling = yarn rope_factor = 4 rope_original = 20 rope_amplitude = 1 "
           f"rope_beta = 0.4 attn_scale = {grown(4, 1, 8)}",
           c("mistral4", n_shared_experts=1, **mla(20, 16, 4, 4, 8, 4, 8, 2, 14), **yarn(4.0, 1.0, 1.0, **beta)))
    yield ("mistral4-plain", "latent", f"family = mistral4 {KEYS} {latent(0, 12, 5, 4, 6)} {moe(5, 3, 9)} {shared(18)} tied = true rope_theta = 100 rope_scaling = linear rope_factor = 2",
           c("mistral4", n_shared_experts=2, tie_word_embeddings=True, **mla(0, 12, 5, 4, 6, 4, 5, 3, 9),
             **rope(100.0, rope_type="linear", factor=2.0, llama_4_scaling_beta=0.0, original_max_position_embeddings=8)))
    yield ("mistral4-odd", "latent", f"family = mistral4 {ODD} {latent(13, 17, 3, 6, 7)} {moe(7, 2, 7)} {shared(7)} first_k_dense_replace = 1 norm_topk_prob = false rope_scaling = yarn "
           f"rope_factor = 3 rope_original = 20 rope_beta = 0.4",
           o("mistral4", n_shared_experts=1, norm_topk_prob=False, rope_interleave=False, **mla(13, 17, 3, 6, 7, 6, 7, 2, 7, 1),
             **rope(10000.0, rope_type="yarn", factor=3.0, original_max_position_embeddings=20, **beta)))
    yield ("mistral4-dense", "latent", f"family = mistral4 {ODD} {latent(8, 9, 2, 2, 10)} {moe(4, 2, 8)} {shared(8)} first_k_dense_replace = 2 routed_scaling_factor = 1.5 rope_scaling = yarn rope_factor = 2 "
           "rope_original = 20 rope_beta = 0.1", o("mistral4", n_shared_experts=1, routed_scaling_factor=1.5, **mla(8, 9, 2, 2, 10, 6, 4, 2, 8, 2),
             **rope(10000.0, rope_type="yarn", factor=2.0, original_max_position_embeddings=20, llama_4_scaling_beta=0.1)))
    mixed = lambda heads, dim, width, kinds: (
        f"linear_num_key_heads = {heads} linear_num_value_heads = {heads} linear_key_head_dim = {dim} linear_value_head_dim = {dim} linear_conv_kernel_dim = {width} "
        f"layer_types = [{', '.join('latent' if k == 'f' else 'kimi_delta' for k in kinds)}]",
        dict(linear_num_heads=heads, linear_head_dim=dim, linear_conv_kernel_dim=width, layer_types=["full_attention" if k == "f" else "linear_attention" for k in kinds]))
    kimi = lambda *sizes, **more: {{"n_routed_experts": "num_local_experts"}.get(key, key): value for key, value in mla(*sizes, n_shared_experts=1).items()} | more
    for name, make, base, latents, experts, (keys, linears), more, theirs in (
            ("kimi_linear", c, KEYS, (0, 16, 8, 4, 6), (8, 2, 14), mixed(2, 10, 4, "llf"), "first_k_dense_replace = 1 routed_scaling_factor = 2.5",
             dict(routed_scaling_factor=2.5)),
            ("kimi_linear-groups", c, KEYS, (20, 12, 5, 3, 10), (8, 3, 10), mixed(4, 6, 3, "flf"), "n_group = 4 topk_group = 2 norm_topk_prob = false",
             dict(routed_scaling_factor=1.0, n_group=4, topk_group=2, norm_topk_prob=False)),
            ("kimi_linear-odd", o, ODD, (0, 13, 7, 2, 9), (5, 2, 7), mixed(2, 7, 2, "lff"), "mlp_layer_types = [sparse, dense, sparse]",
             dict(routed_scaling_factor=1.0, mlp_layer_types=["sparse", "dense", "sparse"])),
            ("kimi_linear-whole", o, ODD, (9, 20, 4, 6, 4), (6, 2, 9), mixed(6, 16, 5, "lfl"), "routed_scaling_factor = 1.5", dict(routed_scaling_factor=1.5))):
        heads = 4 if make is c else 6
        yield (name, "kimi", f"family = kimi_linear {base} {latent(*latents)} {moe(*experts)} {shared(experts[2])} {keys} {more}",
               make("kimi_linear", **kimi(*latents, heads, *experts, 1 if "first_k_dense_replace" in more else 0), **linears, **theirs))
    yield ("exaone4", "olmo2", f"family = exaone4 {KEYS} kv_heads = 2 window = 6 layer_types = [sliding, sliding, full] positions = [rope, rope, none]",
           c("exaone4", num_key_value_heads=2, sliding_window=6, sliding_window_pattern=3, **rope(1000000.0)))
    yield ("smollm3", "llama", f"family = smollm3 {KEYS} kv_heads = 2 layers = 4".replace("layers = 3 ", ""),
           c("smollm3", num_hidden_layers=4, num_key_value_heads=2, no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True, **rope(5000000.0)))
    yield ("gemma2", "gemma2", f"family = gemma2 {KEYS} head_dim = 12 kv_heads = 2 attn_scale = {20 ** -0.5} attn_softcap = 2 logit_softcap = 3",
           c("gemma2", head_dim=12, num_key_value_heads=2, query_pre_attn_scalar=20, attn_logit_softcapping=2.0,
             final_logit_softcapping=3.0, sliding_window=4096, tie_word_embeddings=True))
    yield ("gemma2-window", "gemma2", f"family = gemma2 {KEYS} head_dim = 6 kv_heads = 1 attn_scale = {6 ** -0.5} attn_softcap = 1.5 logit_softcap = 3 window = 3",
           c("gemma2", head_dim=6, num_key_value_heads=1, query_pre_attn_scalar=6, attn_logit_softcapping=1.5,
             final_logit_softcapping=3.0, sliding_window=3, tie_word_embeddings=True))
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    thetas = lambda full: {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}
    stretched = {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0}
    yield ("gemma3", "gemma3", f"family = gemma3 {KEYS} head_dim = 8 kv_heads = 1 attn_scale = {16 ** -0.5} rope_scaling = linear rope_factor = 8 "
           "window = 11 layer_types = [sliding, sliding, full]",
           c("gemma3_text", head_dim=8, num_key_value_heads=1, query_pre_attn_scalar=16, sliding_window=11, tie_word_embeddings=True,
             layer_types=types, **thetas(stretched)))
    yield ("gemma3-long-window", "gemma3", f"family = gemma3 {KEYS} head_dim = 10 kv_heads = 2 rope_theta = 500 rope_local_theta = 50 window = 60",
           c("gemma3_text", head_dim=10, num_key_value_heads=2, query_pre_attn_scalar=10, sliding_window=60, tie_word_embeddings=True,
             rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}))
    yield ("gemma3-full", "gemma3", f"family = gemma3 {KEYS} head_dim = 8 kv_heads = 1 attn_scale = {16 ** -0.5} rope_theta = 10000 window = 0",
           c("gemma3_text", head_dim=8, num_key_value_heads=1, query_pre_attn_scalar=16, sliding_window=4096, tie_word_embeddings=True,
             layer_types=["full_attention"] * 3, **thetas({"rope_type": "default", "rope_theta": 10000.0})))
    yield ("qwen2-window", "llama", f"family = qwen2 {KEYS} kv_heads = 4 window = 9 layer_types = [full, sliding, sliding]",
           c("qwen2", num_key_value_heads=4, use_sliding_window=True, sliding_window=9, max_window_layers=1, **rope(1000000.0)))
    yield ("nemotron", "nemotron", f"family = llama {KEYS} kv_heads = 2 head_dim = 8 norm = layernorm norm_offset = 1 activation = relu2 gated = false rope_partial = 0.5",
           c("nemotron", norm_eps=1e-6, num_key_value_heads=2, head_dim=8, **rope(partial_rotary_factor=0.5)))
    yield from deep()


def deep():
    """A configuration for each of the families whose programs are compared under many schedules, with layers and heads for four ranks."""
    d = lambda model_type, **more: SIZES_DEEP | {"model_type": model_type} | more
    types = lambda *full: [f"{'full' if i in full else 'sliding'}_attention" for i in range(4)]
    moe = lambda experts, top, width: f"num_experts = {experts} num_experts_per_tok = {top} moe_intermediate_size = {width}"
    yield ("qwen3_moe-deep", "experts", f"family = qwen3_moe {DEEP} kv_heads = 4 head_dim = 8 {moe(4, 2, 12)}",
           d("qwen3_moe", num_key_value_heads=4, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True, **rope(1000000.0)))
    yield ("mixtral-deep", "experts", f"family = mixtral {DEEP} kv_heads = 4 {moe(4, 2, 13)}",
           d("mixtral", num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, **rope(1000000.0)) | dict(intermediate_size=13))
    yield ("gpt_oss-deep", "gpt_oss", f"family = gpt_oss {DEEP} kv_heads = 4 head_dim = 8 {moe(4, 2, 12)} window = 5 layer_types = [sliding, full] rope_factor = 4 rope_original = 20",
           d("gpt_oss", num_key_value_heads=4, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, layer_types=types(1, 3),
             **rope(150000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20, truncate=False)) | dict(intermediate_size=12))
    yield ("glm4_moe-deep", "experts", f"family = glm4_moe {DEEP} kv_heads = 4 head_dim = 8 {moe(4, 2, 10)} shared_expert_intermediate_size = 10 first_k_dense_replace = 1 qk_norm = head",
           d("glm4_moe", num_key_value_heads=4, head_dim=8, attention_bias=True, use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=10,
             num_mtp_layers=0, **rope(1000000.0, partial_rotary_factor=0.5)))
    yield ("minimax_m2-deep", "experts", f"family = minimax_m2 {DEEP} kv_heads = 4 head_dim = 8 {moe(4, 2, 11)}",
           d("minimax_m2", num_key_value_heads=4, head_dim=8, num_local_experts=4, num_experts_per_tok=2, **rope(5000000.0, partial_rotary_factor=0.5)) | dict(intermediate_size=11))
    mla = dict(num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
               moe_intermediate_size=10, n_shared_experts=1, first_k_dense_replace=1)
    latent = f"q_lora_rank = 20 kv_lora_rank = 16 qk_nope_head_dim = 6 qk_rope_head_dim = 4 v_head_dim = 8 {moe(4, 2, 10)} shared_expert_intermediate_size = 10 first_k_dense_replace = 1"
    yarn = lambda **more: rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20, mscale=1.0, mscale_all_dim=1.0, **more)
    scaled = f"rope_scaling = yarn rope_factor = 4 rope_original = 20 rope_amplitude = 1 attn_scale = {(0.1 * math.log(4) + 1) ** 2 / 10 ** 0.5}"
    yield ("deepseek_v3-deep", "latent", f"family = deepseek_v3 {DEEP} {latent} routed_scaling_factor = 1.5 {scaled}",
           d("deepseek_v3", n_group=1, topk_group=1, routed_scaling_factor=1.5, **mla, **yarn()))
    yield ("deepseek_v2-deep", "latent", f"family = deepseek_v2 {DEEP} {latent} {scaled}", d("deepseek_v2", **mla, **yarn()))
    yield ("deepseek_v2-groups-deep", "latent", f"family = deepseek_v2 {DEEP} {latent.replace('num_experts = 4', 'num_experts = 8')} {scaled} n_group = 4 topk_group = 2 "
           "topk_method = group_limited_greedy routed_scaling_factor = 1.5",
           d("deepseek_v2", routed_scaling_factor=1.5, n_group=4, topk_group=2, topk_method="group_limited_greedy", **mla | dict(n_routed_experts=8), **yarn()))
    yield ("mistral4-deep", "latent", f"family = mistral4 {DEEP} {latent} {scaled} rope_beta = 0.4", d("mistral4", **mla, **yarn(llama_4_scaling_beta=0.4)))
    gentle = DEEP.replace("1e-6", "0.02")  # norms of results of scans near 0 would make rounding grow from step to step
    yield ("kimi_linear-deep", "kimi", f"family = kimi_linear {gentle} {latent} routed_scaling_factor = 1.5 linear_num_key_heads = 4 linear_num_value_heads = 4 linear_key_head_dim = 6 "
           "linear_value_head_dim = 6 linear_conv_kernel_dim = 4 layer_types = [kimi_delta, kimi_delta, kimi_delta, latent]",
           d("kimi_linear", rms_norm_eps=0.02, routed_scaling_factor=1.5, linear_num_heads=4, linear_head_dim=6, linear_conv_kernel_dim=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
             **{"num_local_experts" if key == "n_routed_experts" else key: value for key, value in mla.items()}))
    gated = "layer_types = [gated_delta, full] linear_num_key_heads = 4 linear_num_value_heads = 8 linear_key_head_dim = 6 linear_value_head_dim = 5 linear_conv_kernel_dim = 4"
    linears = dict(rms_norm_eps=0.02, num_key_value_heads=4, head_dim=8, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=6, linear_value_head_dim=5,
                   linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"] * 2)
    yield ("qwen3_next-deep", "delta", f"family = qwen3_next {gentle} kv_heads = 4 head_dim = 8 {gated} {moe(4, 2, 10)} shared_expert_intermediate_size = 9 shared_expert_gate = true",
           d("qwen3_next", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=10, shared_expert_intermediate_size=9, norm_topk_prob=True, **linears,
             **rope(10000000.0, partial_rotary_factor=0.25)))
    yield ("qwen3_5-deep", "delta", f"family = qwen3_5 {gentle} kv_heads = 4 head_dim = 8 {gated}",
           d("qwen3_5_text", **linears, **rope(10000000.0, partial_rotary_factor=0.25)))
    both = lambda full: {"full_attention": full, "sliding_attention": dict(rope_theta=500000.0, rope_type="default")}
    yield ("olmo3-deep", "olmo2", f"family = olmo3 {DEEP} kv_heads = 4 window = 7 layer_types = [sliding, sliding, sliding, full] rope_scaling = yarn rope_factor = 4 rope_original = 20",
           d("olmo3", num_key_value_heads=4, sliding_window=7, layer_types=types(3),
             rope_parameters=both(dict(rope_theta=500000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=20))))
    yield ("seed_oss-deep", "llama", f"family = seed_oss {DEEP} kv_heads = 4 head_dim = 10 bias = [qkv, attn_out]",
           d("seed_oss", num_key_value_heads=4, head_dim=10, attention_out_bias=True, **rope(10000000.0)))
    yield ("ministral3-deep", "llama", f"family = ministral3 {DEEP} kv_heads = 4 head_dim = 10 rope_factor = 4 rope_original = 8 rope_beta = 0.4",
           d("ministral3", num_key_value_heads=4, head_dim=10, **rope(
               1000000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4)))
    yield ("granite-deep", "llama", f"family = granite {DEEP} kv_heads = 4 rope_theta = 10000 attn_scale = 0.3 logit_scale = {1 / 1.7} "
           f"embed_scale = {12 / 0.22}".replace("norm_eps = 1e-6", f"norm_eps = {1e-6 / 0.22 ** 2}"),
           d("granite", num_key_value_heads=4, tie_word_embeddings=True, attention_multiplier=0.3, logits_scaling=1.7, embedding_multiplier=12.0,
             residual_multiplier=0.22, **rope()))
    yield ("exaone4-deep", "olmo2", f"family = exaone4 {DEEP} kv_heads = 4 window = 6 layer_types = [sliding, sliding, sliding, full] positions = [rope, rope, rope, none]",
           d("exaone4", num_key_value_heads=4, sliding_window=6, sliding_window_pattern=4, **rope(1000000.0)))
    blocks = {"linear_attention": (0, "mamba2"), "moe": (36, "none"), "full_attention": (0, "full"), "mlp": (36, "none")}
    listed = lambda names: "[" + ", ".join(map(str, names)) + "]"
    yield ("nemotron_h-deep", "nemotron_h", f"family = nemotron_h {DEEP} kv_heads = 4 head_dim = 8 {moe(4, 2, 10)} scoring_func = sigmoid e_score_correction_bias = true "
           "shared_expert_intermediate_size = 11 moe_latent_size = 9 linear_num_key_heads = 4 linear_num_value_heads = 8 linear_key_head_dim = 5 linear_value_head_dim = 6 "
           "linear_conv_kernel_dim = 4 use_conv_bias = true time_step_min = 0.3 mlp_layer_types = [dense, sparse, dense, dense] "
           f"layer_types = {listed(mixer for _, mixer in blocks.values())}".replace("ffn = 36", f"ffn = {listed(width for width, _ in blocks.values())}"),
           {key: value for key, value in d("nemotron_h").items() if key not in ("num_hidden_layers", "rms_norm_eps")} | dict(
               layers_block_type=list(blocks), num_key_value_heads=4, head_dim=8, layer_norm_epsilon=1e-6, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=10,
               moe_shared_expert_intermediate_size=11, moe_latent_size=9, n_groups=4, mamba_num_heads=8, ssm_state_size=5, mamba_head_dim=6, conv_kernel=4, time_step_min=0.3))
    yield ("hunyuan_v1_dense-deep", "hunyuan", f"family = hunyuan_v1_dense {DEEP} kv_heads = 4 head_dim = 8", d("hunyuan_v1_dense", num_key_value_heads=4, head_dim=8, **rope()))
    yield ("ernie4_5-deep", "ernie", f"family = ernie4_5 {DEEP} kv_heads = 4 head_dim = 8 tied = true", d("ernie4_5", num_key_value_heads=4, head_dim=8, tie_word_embeddings=True, **rope(500000.0)))


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__))
    for configuration in configurations():
        if len(sys.argv) > 2 and configuration[0] not in sys.argv[2:]:
            continue
        make(*configuration, target)
