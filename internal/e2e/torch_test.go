package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/interop/torch/torchtest"
	"sppo.dev/ir"
)

// The machine in interop/torch computes the same losses and gradient norms of random specs as the cpu device. Its arenas have the
// sizes that the program declares.
func TestTorchRunsRandomSpecs(t *testing.T) {
	torchtest.Command(t) // skips the test if there is no torch
	draws, seed := 2, irtest.Seed(t)
	if os.Getenv("SPPO_LONG") != "" {
		draws = 60
	}
	for i := range uint64(draws) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1000+i))
			d := drawSpec(r)
			for !d.compile(t) {
				d = drawSpec(r)
			}
			_, p, err := compile(d.text, d.drawn()...)
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "job.sppb")
			if err := ir.WriteFile(file, p); err != nil {
				t.Fatal(err)
			}
			job := open(t, p, 1, nil)
			if err := job.Init(t.Context()); err != nil {
				t.Fatal(err)
			}
			var want []torchtest.Record
			for range p.Run.Steps {
				step, err := job.Step(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				want = append(want, torchtest.Record{Step: step.Step, Loss: &step.Loss, GradNorm: step.GradNorm})
			}
			t.Logf("%s %s, %d ranks", d.model.Family, d.model.DType, len(p.Ranks))
			got := torchtest.Run(t, file)
			torchtest.Compare(t, got, want, map[string]float64{"f32": 1e-4, "bf16": 4e-2}[d.model.DType])
			torchtest.CheckArenas(t, p, got)
		})
	}
}
