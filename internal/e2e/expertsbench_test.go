package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// Sizes of the mixture in BenchmarkExperts, and by how much our steps are to be faster than those of transformers.
const (
	mixtureSequence = 256
	mixtureBatch    = 4
	mixtureThreads  = 2
	mixtureGoal     = 1.5
)

const mixtureSpec = `import "clusters/local.sppo"
model mixture {
  family = qwen3_moe layers = 4 hidden = 128 heads = 4 kv_heads = 2 head_dim = 32 vocab = 256 ffn = 384 dtype = f32
  num_experts = 8 num_experts_per_tok = 2 moe_intermediate_size = 128
}
cluster one = local(ranks = 1)
train { sequence = %d batch = %d steps = 1000000 data = random() optimizer = adamw(lr = 1e-3) }
schedule whole { sp = 1 pp = 1 dp = 1 microbatch = %[2]d subsequences = 1 offload = none recompute = none mux = off }
`

// mixtureConfig is the same model for transformers.
var mixtureConfig = map[string]any{
	"model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
	"vocab_size": 256, "intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": true,
	"pad_token_id": nil, "max_position_embeddings": mixtureSequence,
}

// BenchmarkExperts measures steps (forward, backward, AdamW) of a tiny mixture of experts in f32 and those of transformers with its eager
// kernels, with two threads each, in turns, so that other programs affect both alike. It fails if the median of the ratios is below the
// goal. It needs a Python with transformers, which SPPO_PYTHON names. Where other programs run, set OMP_WAIT_POLICY=passive: threads of
// PyTorch that wait for each other otherwise keep the processors busy.
func BenchmarkExperts(b *testing.B) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		b.Skip("SPPO_PYTHON names no Python that has transformers")
	}
	_, p, err := compile(fmt.Sprintf(mixtureSpec, mixtureSequence, mixtureBatch))
	if err != nil {
		b.Fatal(err)
	}
	theirs := startPeer(b, python)
	job := open(b, p, mixtureThreads, nil)
	if err := job.Init(b.Context()); err != nil {
		b.Fatal(err)
	}
	const steps = 5
	doSteps(b, job, 2) // touches all memory
	theirs(2)
	var ratios, ofProcessor, ours []float64
	for b.Loop() {
		for range 9 {
			before, began := processorTime(b), time.Now()
			doSteps(b, job, steps)
			wall, processor := time.Since(began).Seconds(), (processorTime(b) - before).Seconds()
			peer := theirs(steps)
			ours, ratios, ofProcessor = append(ours, wall/steps), append(ratios, peer.Seconds/wall), append(ofProcessor, peer.Processor/processor)
		}
	}
	b.ReportMetric(mixtureSequence*mixtureBatch/median(ours), "tokens/s")
	b.ReportMetric(median(ratios), "ratio")
	b.ReportMetric(median(ofProcessor), "ratio-of-processor-time")
	b.ReportMetric(mixtureGoal, "goal")
	b.ReportMetric(0, "ns/op")
	if median(ratios) < mixtureGoal {
		b.Errorf("steps are %.2f times as fast as those of transformers", median(ratios))
	}
}

// peerSteps is what a few steps of the peer took.
type peerSteps struct {
	Seconds   float64 `json:"seconds"`
	Processor float64 `json:"processor"`
}

// startPeer starts bench/peers/transformers_steps.py. It returns a function that runs a number of steps there.
func startPeer(b *testing.B, python string) func(steps int) peerSteps {
	b.Helper()
	config, err := json.Marshal(mixtureConfig)
	if err != nil {
		b.Fatal(err)
	}
	c := exec.Command(python, "../../bench/peers/transformers_steps.py", string(config), fmt.Sprint(mixtureSequence), fmt.Sprint(mixtureBatch), fmt.Sprint(mixtureThreads))
	in, err := c.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		c.Wait()
	})
	lines := json.NewDecoder(out)
	return func(steps int) (done peerSteps) {
		if _, err := fmt.Fprintln(in, steps); err != nil {
			b.Fatal(err)
		}
		if err := lines.Decode(&done); err != nil {
			b.Fatal(err)
		}
		return done
	}
}
