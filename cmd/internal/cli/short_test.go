package cli

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// Largest errors of the figures of a long step, relative to those of its whole program. Peaks differ only in layer order.
const (
	shortPeaks = 0.005
	shortStep  = 0.001
)

// TestShortSteps compares the figures that a shorter step gives with those of the whole step: the peaks of memory are
// equal, and times are nearly equal.
func TestShortSteps(t *testing.T) {
	const job = `import "clusters/h100.sppo"
model m { family = llama layers = 4 hidden = 2048 heads = 16 kv_heads = 8 ffn = 8192 vocab = 32000 dtype = bf16 }
cluster c = h100(nodes = 1, gpus_per_node = 8)
train { sequence = 32K batch = 16 data = random() }
`
	file := filepath.Join(t.TempDir(), "job.sppo")
	if err := os.WriteFile(file, []byte(job), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, set := range []string{
		"pp=4 sp=2 dp=1",
		"pp=1 sp=2 dp=4 zero=3 offload=full",
		"pp=1 sp=1 dp=4 order=layer offload=full",
		"pp=2 sp=4 dp=1 keep=[] sp_mode=ulysses zero=3 partition=length",
		"pp=2 sp=4 dp=1 keep=[] sp_mode=ulysses zero=3 partition=time",
	} {
		t.Run(set, func(t *testing.T) {
			set += " strategy=sppo subsequences=4 mux=off microbatch=1"
			settings := append(strings.Fields("schedule."+strings.ReplaceAll(set, " ", " schedule.")), "cluster.matmul_efficiency=0.62") // whatever the file says
			j, err := OpenPlan(file, settings, passes.Options{})
			if err != nil {
				t.Fatal(err)
			}
			whole, err := codegen.Build(j.Plan)
			if err != nil {
				t.Fatal(err)
			}
			timeline, err := sim.Run(whole, ir.SectionStep, sim.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if j.short = strategy.Shorten(j.Plan); j.short == nil {
				t.Fatal("there is no shorter step")
			}
			if j.Program, err = codegen.Build(j.short); err != nil {
				t.Fatal(err)
			}
			if err := j.Simulate(); err != nil {
				t.Fatal(err)
			}
			near := func(what string, got, want, limit float64) {
				if off := got/want - 1; math.Abs(off) > limit {
					t.Errorf("%s is %g, and %g for the whole step: %+.2f%%", what, got, want, 100*off)
				}
			}
			for i := range whole.Codes {
				got, want := j.Program.Codes[i].Arenas, whole.Codes[i].Arenas
				for arena := range got {
					if got[arena] != want[arena] && (!j.Plan.LayerOrder() || math.Abs(float64(got[arena])/float64(want[arena])-1) > shortPeaks) {
						t.Errorf("stage %d takes %v, and %v in the whole step", i, got, want)
					}
				}
			}
			of := timeline.Pipeline()
			near("the step", float64(j.Plan.Time.StepS), float64(timeline.Makespan), shortStep)
			near("the MFU", j.Plan.Throughput.MFU, timeline.MFU(), shortStep)
			near("tokens per second", j.Plan.Throughput.TGS, timeline.TGS(), shortStep)
			near("the busy share", 1-j.Plan.Time.IdleShare, 1-of.IdleShare(), 2*shortStep)
			near("the busy share without copies", 1/(1+j.Plan.Time.BubbleRatio), 1/(1+of.BubbleRatio()), 2*shortStep)
			t.Logf("%d of %d microbatches: step %+.3f%%", j.short.Parallel.Microbatches, j.Plan.Parallel.Microbatches, 100*(float64(j.Plan.Time.StepS/timeline.Makespan)-1))
		})
	}
}
