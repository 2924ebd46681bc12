package codegen

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// TestFootprint compares the memory bound that guides the passes with the peak after placement. The bound must
// never be lower, and must be at most 4% higher, or 10% if virtual stages or halves of backward passes are
// interleaved, which leaves gaps of all sizes. With mux = left or on, it may be up to 2.5 times the peak. Only with SPPO_LONG do
// the models have all their layers.
func TestFootprint(t *testing.T) {
	const latents = "model.bias=[mlp] model.layer_types=latent model.kv_lora_rank=512 model.qk_nope_head_dim=128 model.qk_rope_head_dim=64 model.v_head_dim=128 model.layers=8 schedule.latent_cache=on"
	for _, c := range []struct {
		file  string
		short []string
		sets  [][]string
	}{
		{"../../examples/tiny.sppo", nil, settings("none", "full", "0.5")},
		{"../../examples/gpt-docs.sppo", nil, settings("none", "full")},
		{"../../examples/llama-docs.sppo", nil, settings("none", "full")},
		{"../../examples/paper/gpt-7b-512k.sppo", []string{"model.layers=8"}, settings("none", "full", "0.5", "carry", "schedule.mux=right", "schedule.mux=right schedule.offload=none schedule.recompute=full", "schedule.mux=right schedule.recompute=selective", "schedule.virtual_stages=2", "schedule.virtual_stages=2 model.layers=7", "schedule.virtual_stages=2 model.layers=6 train.batch=2 schedule.strategy=seq1f1b", "schedule.recompute=keep_attention",
			"schedule.mux=left", "schedule.mux=left schedule.offload=none", "schedule.mux=on schedule.offload=0.5", "schedule.mux=on schedule.offload=carry schedule.recompute=selective",
			"schedule.mux=on schedule.zero=3 schedule.sp_mode=ulysses", "schedule.mux=left schedule.zero=2 schedule.sp=4 schedule.dp=2 train.batch=2", "schedule.mux=left schedule.pp=8 schedule.sp=4",
			"cluster.d2h_bandwidth=8GB/s schedule.offload=carry", "train.batch=4 schedule.strategy=seq1f1b", "train.batch=4 schedule.strategy=terapipe", "train.batch=2 schedule.strategy=zb-h1", "train.batch=2 schedule.strategy=zb-h2 schedule.offload=none", "schedule.pp=1 schedule.sp=4",
			"schedule.keep=[]", "schedule.keep=[] schedule.offload=none", "schedule.keep=[k] schedule.recompute=full", "schedule.keep=[] schedule.pp=1 schedule.order=layer model.layers=4",
			"schedule.pp=1 schedule.order=layer model.layers=4", "schedule.pp=1 schedule.order=layer model.layers=5 schedule.recompute=full train.batch=2",
			"schedule.pp=1 schedule.order=layer model.layers=6 schedule.virtual_stages=3 schedule.offload=0.5", "schedule.pp=1 schedule.order=layer model.layers=4 schedule.offload=none",
			"schedule.pp=1 schedule.order=layer model.layers=4 schedule.recompute=full_kv schedule.offload=full", "schedule.pp=1 schedule.order=layer model.layers=4 schedule.recompute=full_kv schedule.offload=none",
			"schedule.pp=1 schedule.order=layer model.layers=8 schedule.virtual_stages=2 schedule.recompute=full_kv schedule.offload=0.5 schedule.sp_mode=ulysses schedule.zero=3 schedule.dp=2 train.batch=4",
			"schedule.pp=1 schedule.order=layer model.layers=4 schedule.recompute=full_kv schedule.offload=full schedule.sp_mode=ring schedule.zero=2",
			"schedule.sp_mode=ring", "schedule.sp_mode=ring schedule.subsequences=1 schedule.recompute=keep_attention", "schedule.sp_mode=ring schedule.subsequences=4 schedule.recompute=keep_attention", "schedule.sp_mode=ring schedule.offload=none schedule.recompute=full train.batch=2 schedule.strategy=zb-h1",
			"schedule.sp_mode=ring schedule.pp=1 schedule.order=layer model.layers=4",
			"schedule.keep=[] model.layers=8", "schedule.keep=[k] schedule.recompute=full model.layers=8",
			"schedule.sp_mode=ulysses schedule.zero=2 schedule.pp=1 schedule.order=layer schedule.virtual_stages=2 model.layers=8",
			"schedule.sp_mode=ring schedule.zero=3 schedule.pp=1 schedule.order=layer schedule.virtual_stages=2 model.layers=8",
			"schedule.sp_mode=ulysses schedule.zero=3 schedule.dp=2 schedule.pp=1 train.batch=4 schedule.order=layer schedule.virtual_stages=2 model.layers=8",
			"memory", "auto", "schedule.offload=auto schedule.recompute=auto cluster.device_memory=34GiB cluster.d2h_bandwidth=3GB/s cluster.h2d_bandwidth=3GB/s",
			"schedule.offload=none schedule.recompute=auto",
			"model.ffn=[16384,4096,8192] model.layer_types=[full,full,none]", "model.ffn=[16384,4096,8192] model.layer_types=[none,full,full] schedule.offload=full",
			"model.ffn=[16384,0,8192] model.layer_types=[full,full,none] schedule.mux=on schedule.offload=0.5",
			"model.ffn=[16384,0,8192] model.layer_types=[full,full,none] schedule.offload=auto schedule.recompute=auto cluster.device_memory=34GiB",
			latents, latents+" schedule.recompute=full", latents+" schedule.keep=[] schedule.offload=full", latents+" schedule.sp_mode=ring schedule.recompute=keep_attention",
			latents+" schedule.pp=1 schedule.order=layer schedule.recompute=full_kv", latents+" schedule.sp_mode=ulysses schedule.zero=3 schedule.partition=length", latents+" schedule.sp_mode=ulysses schedule.zero=3 train.batch=2 schedule.strategy=zb-h1")},
		{"../../examples/paper/gpt-13b-512k.sppo", []string{"model.layers=16"}, settings("none", "full", "schedule.sp_mode=ulysses schedule.dp=2 schedule.pp=4 train.batch=2 model.tied=true", "train.batch=4 schedule.strategy=1f1b schedule.subsequences=1",
			"schedule.sp_mode=ulysses schedule.zero=2 schedule.subsequences=1 schedule.recompute=full schedule.offload=none",
			"schedule.sp_mode=ulysses schedule.zero=3 schedule.subsequences=1 schedule.recompute=full schedule.offload=none",
			"schedule.sp_mode=ulysses schedule.zero=3 schedule.dp=2 schedule.pp=4 train.batch=2", "schedule.sp_mode=ulysses schedule.zero=3 schedule.dp=2 schedule.pp=4 train.batch=16 schedule.strategy=zb-h1 schedule.subsequences=1",
			"train.batch=8 schedule.strategy=zb-h1 schedule.subsequences=1", "train.batch=8 schedule.strategy=zb-v schedule.subsequences=1 schedule.virtual_stages=2 schedule.pp=4 schedule.sp=8", "train.batch=8 schedule.strategy=dualpipe-v schedule.subsequences=1 schedule.virtual_stages=2 schedule.pp=4 schedule.sp=8 schedule.recompute=full",
			"train.batch=8 schedule.strategy=interleaved-1f1b schedule.subsequences=1 schedule.virtual_stages=2 schedule.pp=4 schedule.sp=8 schedule.offload=none",
			"schedule.zero=3 schedule.dp=4 schedule.pp=2 train.batch=8")},
	} {
		for _, set := range c.sets {
			if os.Getenv("SPPO_LONG") == "" { // the same number of stages, with two layers each
				set = append(slices.Clone(c.short), set...)
			}
			plan := planOf(t, c.file, set...)
			checkFootprint(t, fmt.Sprint(c.file, set), plan)
			if plan.Offload.Policy == "auto" && !plan.Memory.Fits {
				t.Errorf("%s %v: what was chosen to fit does not", c.file, set)
			}
		}
	}
}

// TestFootprintIsExact checks that the bound, without its allowance for gaps, equals the maximum number of
// bytes that are live at once, except for the alignment of a step's results. It covers plans in which
// gradients, weights and optimizer state are divided or are a large part of a rank's memory.
func TestFootprintIsExact(t *testing.T) {
	const aligning = 4 * ir.Alignment
	for _, set := range settings("none", "full", "carry", "schedule.zero=3 schedule.sp=1", "schedule.pp=1 schedule.recompute=full schedule.offload=none",
		"schedule.sp_mode=ulysses schedule.zero=0 schedule.dp=2 schedule.pp=1", "schedule.sp_mode=ulysses schedule.zero=1 schedule.dp=2 schedule.pp=1 model.dtype=bf16",
		"schedule.sp_mode=ulysses schedule.zero=2 schedule.dp=2 schedule.pp=1 train.batch=4", "schedule.sp_mode=ulysses schedule.zero=2 schedule.pp=1 schedule.subsequences=1",
		"schedule.sp_mode=ulysses schedule.zero=3 schedule.pp=1 schedule.subsequences=1 schedule.recompute=full model.layers=3",
		"schedule.sp_mode=ulysses schedule.zero=3 schedule.strategy=seq1f1b schedule.offload=none", "schedule.zero=3 schedule.dp=2 schedule.pp=1 schedule.order=layer",
		"cluster.gpus_per_node=7 train.batch=7 schedule.dp=7 schedule.pp=1 schedule.sp=1 schedule.zero=0 model.ffn=129", "cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.zero=1 model.dtype=bf16",
		"cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.sp_mode=ulysses schedule.zero=2", "cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.sp_mode=ulysses schedule.zero=3 schedule.subsequences=1",
		"cluster.gpus_per_node=5 train.batch=5 schedule.dp=5 schedule.pp=1 schedule.sp=1 schedule.zero=3 model.layers=3 model.dtype=bf16",
		"cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.sp_mode=ulysses schedule.zero=1 train.optimizer=muon(lr=1e-3)",
		"schedule.sp_mode=ulysses schedule.zero=0 schedule.dp=2 schedule.pp=1 train.grad_reduce=bf16", "schedule.sp_mode=ulysses schedule.zero=1 schedule.dp=2 schedule.pp=1 model.dtype=bf16 train.grad_reduce=bf16",
		"schedule.sp_mode=ulysses schedule.zero=2 schedule.dp=2 schedule.pp=1 train.batch=4 train.grad_reduce=bf16", "schedule.sp_mode=ulysses schedule.zero=2 schedule.pp=1 schedule.subsequences=1 train.grad_reduce=bf16",
		"schedule.sp_mode=ulysses schedule.zero=0 schedule.offload=none train.grad_reduce=bf16", "schedule.zero=3 schedule.dp=2 schedule.pp=1 schedule.order=layer train.grad_reduce=bf16",
		"cluster.gpus_per_node=7 train.batch=7 schedule.dp=7 schedule.pp=1 schedule.sp=1 schedule.zero=0 model.ffn=129 train.grad_reduce=bf16", "cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.zero=1 model.dtype=bf16 train.grad_reduce=bf16",
		"cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.sp_mode=ulysses schedule.zero=3 schedule.subsequences=1 train.grad_reduce=bf16",
		"cluster.gpus_per_node=6 train.batch=3 schedule.dp=3 schedule.pp=1 schedule.sp_mode=ulysses schedule.zero=1 train.optimizer=muon(lr=1e-3) train.grad_reduce=bf16",
		"model.layers=4 schedule.virtual_stages=2 schedule.zero=3 schedule.sp=1 schedule.dp=2 schedule.subsequences=1 schedule.recompute=keep_attention train.freeze=[embeddings,attention,mlp,norms] model.hidden=128 model.heads=4",
		"model.ffn=[128,0,64] model.layer_types=[full,full,none] model.layers=6",
		"model.ffn=[128,0,64] model.layer_types=[none,full,full] model.layers=6 schedule.sp_mode=ulysses schedule.zero=3 schedule.dp=2 schedule.pp=1 schedule.order=layer schedule.offload=full") {
		plan := planOf(t, "../../examples/tiny.sppo", set...)
		bound, l := memory.FootprintOf(plan), newLayout(plan)
		for i, peak := range bound.Device {
			s := l.lower(i)
			base := aligned(s.buffers.placePersistent()[ir.Device])
			most := base
			for _, part := range s.buffers.parts {
				lives, _ := s.buffers.livesOf(part, ir.Device)
				most = max(most, base+liveBound(lives))
			}
			if got := peak.Bytes - peak.Terms[memory.TermPacking]; got < most || got > most+aligning {
				t.Errorf("%v, stage %d: the bound is %d before gaps, and %d live at once: %d more", set, i, got, most, got-most)
			}
		}
	}
}

// TestMeasureFit tries several sizes of device memory. MeasureFit must say that a plan fits if and only if it
// fits after placement. For a plan that MeasureFit does not place, it must report at most the shortfall after
// placement.
func TestMeasureFit(t *testing.T) {
	placed := planOf(t, "../../examples/tiny.sppo", "schedule.offload=none")
	if err := Measure(placed); err != nil {
		t.Fatal(err)
	}
	peak, unplaced := slices.Max(placed.Memory.DevicePeakBytes), 0
	for _, capacity := range []ir.Bytes{0, peak / 2, peak - 4*ir.Alignment, peak - 1, peak, 2 * peak} {
		tried := planOf(t, "../../examples/tiny.sppo", "schedule.offload=none")
		tried.Memory.DeviceCapacityBytes, placed.Memory.DeviceCapacityBytes = capacity, capacity
		short, err := MeasureFit(tried)
		want := placed.Memory.Shortfall()
		if err != nil || (short == nil) != (want == nil) {
			t.Fatalf("with %s: %v, %v, want %v", capacity, short, err, want)
		}
		if !tried.Memory.Placed {
			unplaced++
			if short == nil || short.Bytes > want.Bytes {
				t.Errorf("with %s, not placed: %v, want at most %v", capacity, short, want)
			}
		} else if !slices.Equal(tried.Memory.DevicePeakBytes, placed.Memory.DevicePeakBytes) {
			t.Errorf("with %s: %v, want %v", capacity, tried.Memory.DevicePeakBytes, placed.Memory.DevicePeakBytes)
		}
	}
	if unplaced == 0 {
		t.Error("every plan was placed")
	}
}

// TestSharedFits checks that, with mux, automatic offloading leaves room for the bytes that ranks borrow from
// others, and that the choice it would make without mux does not fit.
func TestSharedFits(t *testing.T) {
	for _, mux := range []string{"right", "left", "on"} {
		set := strings.Fields("schedule.mux=" + mux + " schedule.recompute=auto cluster.device_memory=36GiB schedule.offload=auto")
		plan := planOf(t, "../../examples/paper/gpt-7b-512k.sppo", set...)
		if err := Measure(plan); err != nil {
			t.Fatal(err)
		}
		if !plan.Memory.Fits {
			t.Errorf("%v: ranks hold %v of %v", set, plan.Memory.DevicePeakBytes, plan.Memory.DeviceCapacityBytes)
		}
		plan.Offload = planOf(t, "../../examples/paper/gpt-7b-512k.sppo", append(set, "schedule.mux=off")...).Offload
		if err := Measure(plan); err != nil {
			t.Fatal(err)
		}
		if plan.Memory.Fits && mux != "right" { // with mux=right, ranks borrow less than the turnaround needs anyway
			t.Errorf("%v: it fits as chosen without, too: %v", set, plan.Memory.DevicePeakBytes)
		}
	}
}

// settings returns the overrides of several plans, given as one line for each plan. A single word is an offload
// policy.
func settings(lines ...string) [][]string {
	var sets [][]string
	for _, line := range lines {
		if !strings.Contains(line, "=") {
			line = "schedule.offload=" + line
		}
		sets = append(sets, strings.Fields(line))
	}
	return sets
}

func checkFootprint(t *testing.T, name string, plan *plan.Plan) {
	bound := memory.FootprintOf(plan)
	if err := Measure(plan); err != nil {
		t.Fatal(err)
	}
	for s := range bound.Device {
		for _, arena := range []struct {
			name         string
			bound, exact ir.Bytes
		}{
			{"device", bound.Device[s].Bytes, plan.Memory.DevicePeakBytes[s]},
			{"host", bound.Host[s], plan.Memory.HostPeakBytes[s]},
		} {
			ratio, most := float64(arena.bound)/float64(max(1, arena.exact)), 1.04
			if plan.Parallel.VirtualStages > 1 && plan.Schedule.Strategy != "sppo" || len(plan.Splits(s)) > 0 {
				most = 1.1
			}
			if plan.Mux.Left { // the factor that memory.Slack allows
				most = 2.5
			}
			if arena.bound < arena.exact || ratio > most && arena.exact > 0 {
				t.Errorf("%s, stage %d, %s: bound %s, placed %s: %.4f", name, s, arena.name, arena.bound, arena.exact, ratio)
			}
		}
	}
}
