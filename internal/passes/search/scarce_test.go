package search

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// scarceJob is a job whose K and V do not fit if memory is scarce, unless they are streamed or the schedule uses
// layer order.
const scarceJob = `import "clusters/local.sppo"
model m { family = gpt layers = 8 hidden = 128 heads = 4 vocab = 256 dtype = f32 }
cluster two = local(ranks = 2)
train { sequence = 4K data = random() }
`

// winnerOf searches scarceJob with some overrides.
func winnerOf(t *testing.T, o pass.Options, set ...string) (*search, *node) {
	t.Helper()
	s := newSearch(ContextOf(nil, o), plan.New(parse(t, scarceJob, set...)))
	n, _ := s.run()
	if n == nil {
		t.Fatalf("%v: no plan", set)
	}
	return s, n
}

// TestScarceMemory searches jobs in which the candidates with the lowest bounds on time do not fit. With the given keys
// pinned, no plan may be more than 3% faster.
func TestScarceMemory(t *testing.T) {
	const llama = "family = llama layers = 32 hidden = 4096 heads = 32 kv_heads = 8 ffn = 14336 vocab = 128256"
	for name, job := range map[string]struct {
		model, cluster, tokens string
		given, pins            []string
	}{
		"8B on three GPUs": {llama, "h100(gpus_per_node = 3)", "700K", nil,
			[]string{"schedule.pp=3", "schedule.sp=1", "schedule.subsequences=16", "schedule.partition=flops"}},
		"GPT-7B on six GPUs": {"family = gpt layers = 32 hidden = 4096 heads = 32 vocab = 50304", "a100-80g(gpus_per_node = 6)", "256K", nil,
			[]string{"schedule.pp=3", "schedule.sp=2", "schedule.subsequences=18", "schedule.virtual_stages=6", "schedule.keep=[]"}},
		"8B on seven GPUs": {llama, "h100(gpus_per_node = 7)", "512K", []string{"train.batch=7"}, []string{"schedule.order=layer", "schedule.zero=3"}},
		"Mistral-7B on one GPU": {"family = llama layers = 32 hidden = 4096 heads = 32 kv_heads = 8 ffn = 14336 vocab = 32768", "h200(gpus_per_node = 1)", "512K", nil,
			[]string{"schedule.order=layer", "schedule.virtual_stages=4"}},
		"8B on eight nodes": {llama, "h100(nodes = 8)", "16M",
			[]string{"schedule.order=sequence", "schedule.sp_mode=megatron"}, []string{"schedule.pp=8", "schedule.sp=8"}},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.Contains(name, "eight nodes") && os.Getenv("SPPO_LONG") == "" {
				t.Skip("slow; set SPPO_LONG=1")
			}
			kind, _, _ := strings.Cut(job.cluster, "(")
			text := fmt.Sprintf("import \"clusters/%s.sppo\"\nmodel m { %s dtype = bf16 }\ncluster c = %s\ntrain { sequence = %s data = random() }\n", kind, job.model, job.cluster, job.tokens)
			find := func(set ...string) ir.Seconds {
				s := newSearch(ContextOf(nil, pass.Options{}), plan.New(parse(t, text, append(set, job.given...)...)))
				n, _ := s.run()
				if n == nil || !doesFit(n) {
					t.Fatalf("%v: no plan fits", set)
				}
				return n.time()
			}
			if found, pinned := find(), find(job.pins...); found > pinned*1.03 {
				t.Errorf("a step takes %v, and %v with %v", found, pinned, job.pins)
			} else {
				t.Logf("a step takes %v, and %v with pins", found, pinned)
			}
		})
	}
}

func doesFit(n *node) bool { return n.need.Shortfall(n.plan.Memory) == nil }

// TestStreamedOrLayered gives a job less and less memory. Whenever a plan with K and V on the device and in sequence order
// fits, the search must find one that is no slower. At some memory sizes, only plans with other values fit. The
// long form of the test uses twice as many sizes.
func TestStreamedOrLayered(t *testing.T) {
	plain := []string{"schedule.order=sequence", "schedule.keep=[k, v]", "schedule.partition=flops"}
	var both, wider int
	for i, memory := 0, 64<<10; memory >= 4<<10; i, memory = i+1, memory*3/4 {
		if i%2 == 1 && os.Getenv("SPPO_LONG") == "" {
			continue
		}
		set := []string{fmt.Sprintf("cluster.device_memory=%dKiB", memory)}
		_, closed := winnerOf(t, pass.Options{}, append(slices.Clone(set), plain...)...)
		_, open := winnerOf(t, pass.Options{}, set...)
		switch {
		case doesFit(closed) && !doesFit(open):
			t.Errorf("%v: it does not fit with these open", set)
		case doesFit(closed):
			both++
			if most := closed.plan.Time.StepS * (1 + searchGap); open.plan.Time.StepS > most {
				t.Errorf("%v: %v with these open, and %v without", set, open.plan.Time.StepS, closed.plan.Time.StepS)
			}
		case doesFit(open):
			wider++
		}
	}
	if both == 0 || wider == 0 {
		t.Errorf("%d sizes of memory suffice for plain values, %d more for others", both, wider)
	}
}

// TestStoppedSearch checks that a search that is stopped after some candidates returns the best of them.
func TestStoppedSearch(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	planned, all := 0, 0
	tight := []string{"cluster.device_memory=24MiB"}
	winnerOf(t, pass.Options{Progress: func(p pass.Progress) { all = p.Planned }}, tight...)
	_, n := winnerOf(t, pass.Options{Stop: ctx.Done(), Progress: func(p pass.Progress) {
		if planned = p.Planned; p.StepS > 0 {
			stop()
		}
	}}, tight...)
	if !doesFit(n) || planned >= all {
		t.Errorf("stopped after %d of %d candidates with a plan that fits: %t", planned, all, doesFit(n))
	}
}

// TestStagesOfFrozenLayers checks that the first stage gets more layers if some have no backward pass and take
// about a third of the others' time. The busy times of the stages may differ by at most the time of one layer.
func TestStagesOfFrozenLayers(t *testing.T) {
	set := []string{"model.layers=16", "schedule.pp=2", "schedule.sp=1", "schedule.dp=1", "schedule.subsequences=4", "schedule.virtual_stages=1", "schedule.strategy=sppo",
		"schedule.offload=none", "schedule.recompute=none", "schedule.order=sequence", "schedule.keep=[k, v]", "schedule.partition=flops", "cluster.device_memory=4GiB"}
	_, trained := winnerOf(t, pass.Options{}, set...)
	if got := trained.plan.LayersPerStage; !slices.Equal(got, []int{8, 8}) {
		t.Errorf("layers %v where all are trained", got)
	}
	_, frozen := winnerOf(t, pass.Options{}, append(set, `train.freeze=[embeddings, "layer.0-7"]`)...)
	busy, layers := frozen.plan.Time.BusyS, frozen.plan.LayersPerStage
	layer := slices.Max(trained.plan.Time.BusyS) / 8
	if layers[0] <= 9 || max(busy[0], busy[1])-min(busy[0], busy[1]) > layer {
		t.Errorf("stages of %v layers are busy for %v; a trained layer takes %v", layers, busy, layer)
	}
	t.Logf("%v layers, busy %v", layers, busy)
}

// TestLossChunk checks that the loss head takes the longest chunks that fit.
func TestLossChunk(t *testing.T) {
	const text = `import "clusters/local.sppo"
model m { family = gpt layers = 2 hidden = 128 heads = 4 vocab = 262144 tied = true dtype = f32 }
cluster c = local(ranks = 1)
train { sequence = 4K data = random() }
schedule { order = sequence optimizer_offload = none }
`
	for memory, want := range map[string]int{"4GiB": 1024, "1200MiB": 256, "720MiB": 64} { // 512 MiB of state, and 1 MiB of logits per token
		s := newSearch(ContextOf(nil, pass.Options{}), plan.New(parse(t, text, "cluster.device_memory="+memory)))
		n, _ := s.run()
		if n == nil || !doesFit(n) || n.schedule.LossChunk != want {
			t.Errorf("with %s, the plan is %v, not one with chunks of %d", memory, n, want)
		}
	}
}
