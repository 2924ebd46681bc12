package e2e

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/ir"
)

// TestResumeOnTokens checks E6 on token files that are read in order, shuffled, or mixed by weight. A run also
// resumes on one stage and, within the rounding of E3, with a different number of replicas. If a file has changed
// in the meantime, the error names it.
func TestResumeOnTokens(t *testing.T) {
	dir := t.TempDir()
	r := rand.New(rand.NewPCG(1, 1))
	put := func(name string, n int) string {
		path := filepath.Join(dir, name)
		data := make([]byte, 2*n)
		for i := range n {
			data[2*i] = byte(r.IntN(tinyVocab))
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	a, b := put("a.bin", 9001), put("b.bin", 777)
	c := Case{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", PP: 2, SP: 2, DP: 2, N: 3, Offload: "0.5",
		Partition: "flops", Batch: 4, Microbatch: 2, Steps: 6, Layers: 2, Sequence: 48, Vocab: tinyVocab}
	compiled := func(c Case, options string) *ir.Program {
		t.Helper()
		_, p, err := compile(c.Spec(), fmt.Sprintf("train.data=tokens(%q, %q%s)", a, b, options), "train.holdout=0.08")
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	seen := map[string]string{}
	path := filepath.Join(t.TempDir(), "checkpoint")
	for _, options := range []string{", shuffle = off", "", ", weights = [1, 3]"} {
		p := compiled(c, options)
		whole := trained(t, p, open(t, p, 1, nil), func() {})
		key := fmt.Sprint(whole.Losses)
		if other, ok := seen[key]; ok {
			t.Errorf("tokens(...%s) and tokens(...%s) have the same losses", options, other)
		}
		seen[key] = options
		save(t, p, path, 3)
		checkResumed(t, "the same program"+options, p, path, whole)
		checkResumed(t, "nothing divided"+options, compiled(c.unpiped(), options), path, whole)
		for _, replicas := range []int{1, 4} { // the same tokens, summed in another order
			other := c
			other.DP, other.Microbatch = replicas, 1
			checkResumedClosely(t, fmt.Sprintf("%d replicas%s", replicas, options), compiled(other, options), path, whole)
		}
	}
	data, err := os.ReadFile(b)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-2] ^= 1
	if err := os.WriteFile(b, data, 0o644); err != nil {
		t.Fatal(err)
	}
	job := open(t, compiled(c, ", weights = [1, 3]"), 1, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	err = job.Restore(t.Context(), path)
	if want := b + " changed since the checkpoint: bytes 0 to 1554"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// checkResumedClosely resumes from a checkpoint and compares losses within the rounding of E3. It also checks
// that the losses of consecutive steps differ by much more than rounding, so that the comparison would reveal
// wrong tokens.
func checkResumedClosely(t *testing.T, what string, p *ir.Program, path string, whole *Result) {
	t.Helper()
	job := open(t, p, 1, nil)
	if err := job.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := job.Restore(t.Context(), path); err != nil {
		t.Fatalf("%s: restoring: %v", what, err)
	}
	const tolerance = 1e-5
	for job.Steps() < p.Run.Steps {
		step := doSteps(t, job, 1)
		want := whole.Losses[step.Step-1]
		checkRelative(t, fmt.Sprintf("%s: loss of step %d", what, step.Step), step.Loss, want, tolerance)
		if other := whole.Losses[step.Step-2]; math.Abs(other-want) <= 10*tolerance*want {
			t.Errorf("%s: steps %d and %d have losses %g and %g: they tell no tokens apart", what, step.Step-1, step.Step, other, want)
		}
	}
}
