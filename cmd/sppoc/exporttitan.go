package main

import (
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
)

// torchtitan returns the flags of torchtitan 0.3 whose job comes nearest to a plan. Its --module and --config choose the model,
// the optimizer and the data.
func torchtitan(p *plan.Plan) (string, []string, error) {
	if _, _, err := torchCSV(p); err != nil {
		return "", nil, err
	}
	var f flagList
	flag, par := f.add, &p.Parallel
	flag("training.seq_len", p.Train.Sequence)
	flag("training.local_batch_size", p.Train.Batch/par.DP)
	flag("training.steps", p.Train.Steps)
	if p.Train.GradClip > 0 {
		flag("training.max_norm", p.Train.GradClip)
	}
	flag("training.mixed_precision_param", map[bool]string{true: "bfloat16", false: "float32"}[p.Model.DType == "bf16"])
	replicas, shards := replicasAndShards(par)
	flag("parallelism.data_parallel_replicate_degree", replicas)
	flag("parallelism.data_parallel_shard_degree", shards)
	flag("parallelism.fsdp_reshard_after_forward", map[bool]string{true: "always", false: "never"}[par.Zero == plan.ZeroWeights])
	tensor := tensorRanks(p)
	flag("parallelism.tensor_parallel_degree", tensor)
	flag("parallelism.context_parallel_degree", par.SP/tensor)
	flag("parallelism.pipeline_parallel_degree", par.PP)
	if par.PP > 1 {
		f = append(f, "training.disable_cuda_graphs") // torchtitan refuses them with pipeline stages
		flag("parallelism.pipeline_parallel_schedule", "_PipelineScheduleRuntime")
		flag("parallelism.pipeline_parallel_schedule_csv", "schedule.csv")
		flag("parallelism.pipeline_parallel_microbatch_size", par.Microbatch)
		flag("parallelism.pipeline_parallel_layers_per_stage", slices.Max(p.LayersPerStage))
		flag("parallelism.pipeline_parallel_first_stage_less_layers", 0)
		flag("parallelism.pipeline_parallel_last_stage_less_layers", 0)
	}
	return f.String(), lostByTitan(p), nil
}

// lostByTitan lists what the flags of torchtitan cannot say of a plan.
func lostByTitan(p *plan.Plan) []string {
	var l losses
	par := &p.Parallel
	l.add(true, "the model, the optimizer and the data: --module and --config choose them")
	l.add(par.PP > 1, "the order of tasks: write schedule.csv with --to torch-csv")
	l.add(p.Subsequences.N > 1, "%s: torchtitan does not divide sequences, and cannot train with their order of tasks", words.Plural(p.Subsequences.N, "subsequence"))
	l.add(slices.Min(p.LayersPerStage) != slices.Max(p.LayersPerStage), "%s layers on the stages: the flags give all but the last stage as many", words.List(p.LayersPerStage))
	l.add(par.SPMode == graph.ModeUlysses && par.SP > 1, "sp_mode = ulysses: context parallelism passes K and V around a ring")
	l.add(par.Zero == plan.ZeroState || par.Zero == plan.ZeroGradients, "zero = %d: FSDP divides weights as well", par.Zero)
	l.add(p.Train.GradReduce == "bf16", "grad_reduce = bf16: torchtitan sums gradients in f32")
	l.add(par.OptimizerOffload == plan.OffloadHost, "optimizer_offload = host")
	l.common(p)
	l.add(recomputes(p), "recompute: which activations are recomputed; activation-checkpoint.* is coarser")
	l.add(offloads(p), "offload: activations in host memory")
	return l
}
