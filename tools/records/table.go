package main

// record is a published result with the job that represents it here.
type record struct {
	name   string
	job    string // description
	claim  string // published result
	source string

	model    string // model file below examples/
	cluster  string // cluster file below internal/shipped/clusters/
	machine  string // the cluster with its arguments
	sequence int64  // tokens
	batch    int    // sequences of a step; 0: one

	why string // why the figures differ
}

const (
	alst        = "Arctic Long Sequence Training, arXiv 2506.13996, abstract"
	memo        = "Memo: Fine-grained Tensor Management for Ultra-long Context LLM Training, arXiv 2407.12117, abstract"
	upipe       = "Untied Ulysses: Memory-Efficient Context Parallelism via Headwise Chunking, arXiv 2602.21196, abstract"
	slim        = "SlimPipe: Memory-Thrifty and Efficient Pipeline Parallelism, arXiv 2504.14519, abstract"
	trl         = "TRL documentation, \"Training Beyond 1M Tokens\": 380 s for a step of 1,048,576 tokens, which is 345 tokens/s per GPU"
	unpublished = "no published result of this size was found"
	megatron    = "NVIDIA, Megatron-Core: Qwen3-235B-A22B with 128K tokens in BF16 on 256 H100"
	paper       = "SPPO: Efficient Long-sequence LLM Training via Adaptive Sequence Pipeline Parallel Offloading, arXiv 2503.10377, abstract"
)

var records = []record{
	{
		name: "ALST, 1 GPU", job: "Llama-3.1-8B on one H100", claim: "500K tokens", source: alst,
		model: "today/llama-3.1-8b.sppo", cluster: "h100", machine: "h100(gpus_per_node = 1, host_memory = 2TB)", sequence: 500_000,
		why: "Weights, gradients and optimizer state take 18 bytes per parameter, 135 GiB in total, but the device has " +
			"only 75.6 GiB. Optimizer state, master weights and activations are kept on the host. The abstract gives " +
			"no speed.",
	},
	{
		name: "ALST, 8 GPUs", job: "Llama-3.1-8B on 8 H100", claim: "3.7M tokens", source: alst,
		model: "today/llama-3.1-8b.sppo", cluster: "h100", machine: "h100()", sequence: 3_700_000,
		why: "ALST processes the MLP and the loss in tiles. It keeps little more than the inputs of layers, and keeps " +
			"them on the host. Here, subsequences take the place of tiles. The plan recomputes activations for which " +
			"the host has no room, which explains the gap to the ceiling. The abstract gives no speed.",
	},
	{
		name: "ALST, 32 GPUs", job: "Llama-3.1-8B on 32 H100", claim: "15M tokens", source: alst,
		model: "today/llama-3.1-8b.sppo", cluster: "h100", machine: "h100(nodes = 4)", sequence: 15_000_000,
		why: "ALST works in the same way as with 8 GPUs. The abstract gives no speed.",
	},
	{
		name: "UPipe", job: "Llama-3-8B on 8 H100", claim: "5M tokens", source: upipe,
		model: "today/llama-3.1-8b.sppo", cluster: "h100", machine: "h100()", sequence: 5_000_000,
		why: "UPipe runs the attention of a few heads at a time and reuses their buffers. Here, all heads of a rank are " +
			"in memory at once, but only for one subsequence. The plan recomputes more than at 3.7M tokens.",
	},
	{
		name: "TRL", job: "Qwen3-8B on 8 H100", claim: "1M tokens, 345 tokens/s per GPU", source: trl,
		model: "today/qwen3-8b.sppo", cluster: "h100", machine: "h100()", sequence: 1 << 20,
		why: "TRL checkpoints layers, so every forward runs twice, including attention. Here, the outputs of attention " +
			"are offloaded to the host instead. A measured step also has costs that the simulator does not model.",
	},
	{
		name: "Memo", job: "GPT-7B on 8 A800", claim: "1M tokens, 52.30% MFU", source: memo,
		model: "paper/gpt-7b.sppo", cluster: "a100-80g", machine: "a100-80g()", sequence: 1 << 20,
		why: "The published 52.3% is above our ceiling: Memo's kernels ran faster than we assume for an A100, or the " +
			"paper counts FLOPs differently. An A800 is an A100 with slower NVLink, which hardly matters at this " +
			"length.",
	},
	{
		name: "SlimPipe", job: "Llama-70B on 256 GPUs (Hopper, 80 GB)", claim: "2048K tokens, over 45% MFU", source: slim,
		model: "today/llama-3.1-70b.sppo", cluster: "h100", machine: "h100(nodes = 32)", sequence: 2 << 20,
		why: "The abstract does not give the number of sequences per step. Here it is one, which every rank shares: the ranks of a node " +
			"divide heads, and the 32 nodes form a ring, so no pipeline has to fill and drain.",
	},
	{
		name: "SPPO", job: "GPT-7B on 128 A100", claim: "4M tokens", source: paper,
		model: "paper/gpt-7b.sppo", cluster: "a100-80g", machine: "a100-80g(nodes = 16)", sequence: 4 << 20,
		why: "The abstract gives no speed at this length; docs/paper.md compares the paper's speeds at shorter lengths.",
	},
	{
		name: "Qwen3-30B-A3B", job: "Qwen3-30B-A3B on 8 H200", claim: "none", source: unpublished,
		model: "today/qwen3-30b-a3b.sppo", cluster: "h200", machine: "h200()", sequence: 1 << 20,
		why: "Nearly all of the step is attention, as in a dense model of this length: a token uses 3.3 of 30.5 billion parameters.",
	},
	{
		name: "Qwen3.5-35B-A3B", job: "Qwen3.5-35B-A3B on 8 H200", claim: "none", source: unpublished,
		model: "today/qwen3.5-35b-a3b.sppo", cluster: "h200", machine: "h200()", sequence: 1 << 20,
		why: "Three layers in four have linear attention, whose work and states do not grow with the prefix: a step takes about a quarter of that of " +
			"Qwen3-30B-A3B.",
	},
	{
		name: "Kimi-Linear-48B-A3B", job: "Kimi-Linear-48B-A3B on 64 H100", claim: "none", source: unpublished,
		model: "today/kimi-linear-48b-a3b.sppo", cluster: "h100", machine: "h100(nodes = 8)", sequence: 1 << 20,
		why: "Seven layers of 27 have attention over all earlier tokens, of latents and without positions; the others have Kimi " +
			"delta attention. A token uses 3.5 of 49.1 billion parameters, and ranks of several nodes divide heads.",
	},
	{
		name: "gpt-oss-120b", job: "gpt-oss-120b on 16 H100", claim: "none", source: unpublished,
		model: "today/gpt-oss-120b.sppo", cluster: "h100", machine: "h100(nodes = 2)", sequence: 128 << 10,
		why: "Master weights and optimizer state are on the host, and the optimizer takes 3.2 s of the step, which is short: 128K tokens are " +
			"8K for each GPU. With more sequences per step, its share falls.",
	},
	{
		name: "GLM-4.5-Air", job: "GLM-4.5-Air on 64 H100", claim: "none", source: unpublished,
		model: "today/glm-4.5-air.sppo", cluster: "h100", machine: "h100(nodes = 8)", sequence: 512 << 10,
		why: "Attention takes 89% of the step, and collectives 8%. The ranks of a node divide heads, and the eight nodes form a ring.",
	},
	{
		name: "Qwen3-235B-A22B", job: "Qwen3-235B-A22B on 256 H100, 32 sequences per step", claim: "128K tokens, 357 to 389 TFLOP/s per GPU", source: megatron,
		model: "today/qwen3-235b-a22b.sppo", cluster: "h100", machine: "h100(nodes = 32)", sequence: 128 << 10, batch: 32,
		why: "357 TFLOP/s are with the experts that the router chooses, and 389 with equal loads; they are 36% and 39% of the peak. How many " +
			"sequences a step had is not known here; with a single one, each GPU has 512 tokens, and the simulated MFU is 24%. Megatron " +
			"places experts on different ranks (expert parallelism); here, ranks gather the experts of a layer.",
	},
	{
		name: "DeepSeek-V3", job: "DeepSeek-V3 on 256 H100, 32 sequences per step", claim: "none", source: unpublished,
		model: "today/deepseek-v3.sppo", cluster: "h100", machine: "h100(nodes = 32)", sequence: 128 << 10, batch: 32,
		why: "Ranks have different experts, all subsequences pass through one layer after another, and most activations are recomputed. " +
			"The layer for multi-token prediction is not part of the job.",
	},
	{
		name: "Kimi-K2", job: "Kimi K2 on 512 H100, 64 sequences per step", claim: "none", source: unpublished,
		model: "today/kimi-k2.sppo", cluster: "h100", machine: "h100(nodes = 64)", sequence: 128 << 10, batch: 64,
		why: "The plan is like that of DeepSeek-V3: the model has more experts, and half as many heads.",
	},
}
