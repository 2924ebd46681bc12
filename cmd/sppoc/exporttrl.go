package main

import (
	"fmt"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// trl returns the flags of "trl sft" of TRL 1.16 whose job comes nearest to a plan. TRL passes those that are not its own to accelerate.
// Pipeline stages, which it does not have, become ranks that divide sequences: the job keeps its GPUs and its batch.
func trl(p *plan.Plan) (string, []string, error) {
	var f flagList
	par, train := &p.Parallel, &p.Train
	f.add("max_length", train.Sequence)
	f.add("per_device_train_batch_size", par.Microbatch)
	f.add("gradient_accumulation_steps", par.Microbatches)
	f.add("max_steps", train.Steps)
	f.add("seed", train.Seed)
	f.add("max_grad_norm", train.GradClip)
	f.add("bf16", p.Model.DType == "bf16")
	f.optimizer(train)
	f.add("gradient_checkpointing", recomputes(p))
	f.add("activation_offloading", offloads(p))
	if m := &p.Model; m.Adapter != "" {
		f = append(f, "use_peft")
		f.add("lora_r", m.AdapterRank)
		f.add("lora_alpha", m.AdapterAlpha)
		f.add("lora_dropout", m.AdapterDropout)
		f = append(f, "lora_target_modules "+strings.Join(m.AdapterTargets, " "))
	}

	f.add("num_processes", par.Ranks())
	f.add("num_machines", (par.Ranks()+p.Cluster.GPUsPerNode-1)/p.Cluster.GPUsPerNode)
	if f = append(f, "use_parallelism_config"); onDeepSpeed(p) {
		f = append(f, "use_deepspeed")
		f.add("zero_stage", par.Zero)
		if par.OptimizerOffload == plan.OffloadHost {
			f.add("offload_optimizer_device", "cpu")
		}
		f.add("parallelism_config_dp_replicate_size", par.DP)
		f.add("parallelism_config_sp_size", par.SP*par.PP)
		return f.String(), lostByTRL(p), nil
	}
	f = append(f, "use_fsdp")
	f.add("fsdp_version", 2)
	f.add("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
	f.add("fsdp_reshard_after_forward", par.Zero == plan.ZeroWeights)
	f.add("fsdp_offload_params", par.OptimizerOffload == plan.OffloadHost)
	replicas, shards := replicasAndShards(par)
	f.add("parallelism_config_dp_replicate_size", replicas)
	f.add("parallelism_config_dp_shard_size", shards)
	f.add("parallelism_config_tp_size", tensorRanks(p))
	f.add("parallelism_config_cp_size", par.SP/tensorRanks(p)*par.PP)
	return f.String(), lostByTRL(p), nil
}

// onDeepSpeed reports whether ranks exchange heads, for which TRL needs DeepSpeed instead of FSDP.
func onDeepSpeed(p *plan.Plan) bool {
	return p.Parallel.SP > 1 && p.Parallel.SPMode == graph.ModeUlysses
}

// optimizer adds the optimizer and its learning rates.
func (f *flagList) optimizer(t *lang.Train) {
	o := &t.Optimizer
	switch o.Kind {
	case "adamw":
		f.add("optim", "adamw_torch_fused")
		f.add("adam_beta1", o.Beta1)
		f.add("adam_beta2", o.Beta2)
		f.add("adam_epsilon", o.Eps)
	case "sgd":
		f.add("optim", "sgd")
		f.add("optim_args", fmt.Sprintf("momentum=%v", o.Momentum))
	}
	f.add("learning_rate", o.LR)
	f.add("weight_decay", o.WeightDecay)
	f.add("warmup_steps", t.Warmup)
	schedule := t.LRSchedule
	switch {
	case schedule == "constant" && t.Warmup > 0:
		schedule = "constant_with_warmup"
	case schedule == "cosine" && t.MinLR > 0:
		schedule = "cosine_with_min_lr"
		f.add("lr_scheduler_kwargs", fmt.Sprintf(`{"min_lr":%.12g}`, t.MinLR))
	case schedule == ir.LRStableDecay:
		decay := strings.Replace(t.DecayType, "sqrt", "1-sqrt", 1)
		f.add("lr_scheduler_kwargs", fmt.Sprintf(`{"num_decay_steps":%d,"decay_type":%q,"min_lr_ratio":%.12g}`, t.DecaySteps, decay, t.MinLR/o.LR))
	}
	f.add("lr_scheduler_type", schedule)
}

// lostByTRL lists what the flags of TRL cannot say of a plan.
func lostByTRL(p *plan.Plan) []string {
	var l losses
	par, train := &p.Parallel, &p.Train
	l.add(true, "the model and the data: give --model_name_or_path and --dataset_name")
	l.add(par.PP > 1, "%s: TRL has none, so the flags divide sequences over their GPUs as well", words.Plural(par.PP, "pipeline stage"))
	l.add(p.Subsequences.N > 1, "%s: TRL computes whole sequences", words.Plural(p.Subsequences.N, "subsequence"))
	l.add(onDeepSpeed(p) && par.Ring > 0, "sp = %s: DeepSpeed has no ring, so the flags divide heads over all ranks", par.SPText())
	l.add(!onDeepSpeed(p) && par.Zero < plan.ZeroWeights, "zero = %d: FSDP divides weights as well", par.Zero)
	l.add(train.Optimizer.Kind == "muon", "optimizer = muon")
	l.add(train.LRSchedule == "linear" && train.MinLR > 0, "min_lr: the linear schedule of transformers ends at 0")
	l.add(len(train.Freeze) > 0, "freeze")
	l.add(train.Guard.Spikes > 0, "guard: TRL skips no steps")
	l.common(p)
	l.add(recomputes(p), "recompute: which activations are recomputed; TRL recomputes whole layers")
	l.add(offloads(p), "offload: which activations are in host memory; TRL offloads all that it keeps")
	return l
}
