package main

import (
	"fmt"
	"slices"
	"strings"

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
	var b strings.Builder
	par := &p.Parallel
	flag := func(key string, value any) { fmt.Fprintf(&b, "--%s=%v\n", key, value) }
	flag("training.seq_len", p.Train.Sequence)
	flag("training.local_batch_size", p.Train.Batch/par.DP)
	flag("training.steps", p.Train.Steps)
	if p.Train.GradClip > 0 {
		flag("training.max_norm", p.Train.GradClip)
	}
	flag("training.mixed_precision_param", map[bool]string{true: "bfloat16", false: "float32"}[p.Model.DType == "bf16"])
	replicas, shards, reshard := par.DP, 1, "never"
	if par.Zero >= plan.ZeroState {
		replicas, shards = 1, par.DP
	}
	if par.Zero >= plan.ZeroWeights {
		reshard = "always"
	}
	flag("parallelism.data_parallel_replicate_degree", replicas)
	flag("parallelism.data_parallel_shard_degree", shards)
	flag("parallelism.fsdp_reshard_after_forward", reshard)
	tensor := p.Split().HeadRanks()
	if par.SPMode != graph.ModeMegatron {
		tensor = 1
	}
	flag("parallelism.tensor_parallel_degree", tensor)
	flag("parallelism.context_parallel_degree", par.SP/tensor)
	flag("parallelism.pipeline_parallel_degree", par.PP)
	if par.PP > 1 {
		b.WriteString("--training.disable_cuda_graphs\n") // torchtitan refuses them with pipeline stages
		flag("parallelism.pipeline_parallel_schedule", "_PipelineScheduleRuntime")
		flag("parallelism.pipeline_parallel_schedule_csv", "schedule.csv")
		flag("parallelism.pipeline_parallel_microbatch_size", par.Microbatch)
		flag("parallelism.pipeline_parallel_layers_per_stage", slices.Max(p.LayersPerStage))
		flag("parallelism.pipeline_parallel_first_stage_less_layers", 0)
		flag("parallelism.pipeline_parallel_last_stage_less_layers", 0)
	}
	return b.String(), lostByTitan(p), nil
}

// lostByTitan lists what the flags of torchtitan cannot say of a plan.
func lostByTitan(p *plan.Plan) (lost []string) {
	add := func(is bool, format string, args ...any) {
		if is {
			lost = append(lost, fmt.Sprintf(format, args...))
		}
	}
	par := &p.Parallel
	add(true, "the model, the optimizer and the data: --module and --config choose them")
	add(par.PP > 1, "the order of tasks: write schedule.csv with --to torch-csv")
	add(p.Subsequences.N > 1, "%s: torchtitan does not divide sequences, and cannot train with their order of tasks", words.Plural(p.Subsequences.N, "subsequence"))
	add(p.LayerOrder(), "order = layer")
	add(slices.Min(p.LayersPerStage) != slices.Max(p.LayersPerStage), "%s layers on the stages: the flags give all but the last stage as many", words.List(p.LayersPerStage))
	add(par.SPMode == graph.ModeUlysses && par.SP > 1, "sp_mode = ulysses: context parallelism passes K and V around a ring")
	add(par.Zero == plan.ZeroState || par.Zero == plan.ZeroGradients, "zero = %d: FSDP divides weights as well", par.Zero)
	add(par.OptimizerOffload == plan.OffloadHost, "optimizer_offload = host")
	add(p.Streams(), "keep: K and V that are streamed from the host")
	placed := strings.Join(slices.Concat(p.Offload.Placement...), "")
	add(strings.ContainsRune(placed, plan.PlacementOffload), "offload: activations in host memory")
	add(strings.ContainsRune(placed, plan.PlacementRecompute), "recompute: which activations are recomputed; activation-checkpoint.* is coarser")
	return lost
}
