package codegen

import (
	"bytes"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

func TestMain(m *testing.M) { irtest.Main(m) }

// planOf runs the passes over a spec file.
func planOf(t testing.TB, file string, set ...string) *plan.Plan {
	t.Helper()
	spec, err := lang.Load(file, lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		t.Fatal(err)
	}
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		t.Fatal(err)
	}
	return plan
}

// tryPlan is like planOf, but returns nil if the spec has no valid plan.
func tryPlan(file string, set ...string) *plan.Plan {
	spec, err := lang.Load(file, lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		return nil
	}
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		return nil
	}
	return plan
}

func buildOf(t testing.TB, plan *plan.Plan) *ir.Program {
	t.Helper()
	p, err := Build(plan)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Programs do not depend on the order of maps or goroutines.
func TestBuildsAreIdentical(t *testing.T) {
	var first []byte
	for range 3 {
		var b bytes.Buffer
		if err := ir.Encode(&b, buildOf(t, planOf(t, "../../examples/tiny.sppo"))); err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = b.Bytes()
		} else if !bytes.Equal(first, b.Bytes()) {
			t.Fatal("the same plan gave different programs")
		}
	}
}

// After placement, an extent must be at most 5% above the maximum number of bytes that are live at once.
func TestExtentsAreNearTheBound(t *testing.T) {
	files, err := filepath.Glob("../../examples/*.sppo")
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, "../../examples/paper/gpt-7b-512k.sppo", "../../examples/paper/gpt-13b-512k.sppo")
	for _, file := range files {
		for _, offload := range []string{"none", "0.5", "full"} {
			l := newLayout(planOf(t, file, "schedule.offload="+offload))
			for i := range l.plan.Parallel.PP {
				if testing.Short() && i > 1 && i < l.plan.Parallel.PP-1 {
					continue // all other middle stages are like the second stage
				}
				checkExtent(t, file+" "+offload, l.lower(i))
			}
		}
	}
}

func checkExtent(t *testing.T, name string, s *lowering) {
	persistent := ir.Bytes(0)
	var lives [ir.NumArenas][]life
	for arena := range lives {
		lives[arena], _ = s.buffers.livesOf(s.buffers.parts[1], ir.Arena(arena)) // of the step
	}
	for _, b := range s.buffers.list {
		if b.persistent {
			persistent += b.size
		}
	}
	s.place()
	for arena, bound := range [...]ir.Bytes{persistent + liveBound(lives[ir.Device]), liveBound(lives[ir.Host])} {
		if got := s.code.Arenas[arena]; float64(got) > 1.05*float64(bound) {
			t.Errorf("%s, %s, %s arena: %s placed, %s ever live: %.3f", name, s.code.Name, ir.Arena(arena), got, bound, float64(got)/float64(bound))
		}
	}
}

// BenchmarkBuild compiles, verifies and encodes the paper's specs, from small to large. A constant ns/instr
// shows that compile time grows linearly with the number of instructions.
func BenchmarkBuild(b *testing.B) {
	for _, name := range []string{"gpt-7b-512k", "gpt-7b-1m", "gpt-13b-1280k", "gpt-65b-1m"} {
		b.Run(name, func(b *testing.B) {
			instrs := 0
			var size bytes.Buffer
			for b.Loop() {
				p := buildOf(b, planOf(b, "../../examples/paper/"+name+".sppo"))
				if err := (ir.VerifyOptions{AllowOverCapacity: true}).Verify(p); err != nil {
					b.Fatal(err)
				}
				size.Reset()
				if err := ir.Encode(&size, p); err != nil {
					b.Fatal(err)
				}
				instrs = 0
				for c := range p.Codes {
					for _, section := range p.Codes[c].Sections {
						instrs += len(section)
					}
				}
			}
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(instrs), "instrs")
			b.ReportMetric(b.Elapsed().Seconds()*1e9/float64(b.N)/float64(instrs), "ns/instr")
			b.ReportMetric(float64(size.Len())/1e6, "MB")
			b.ReportMetric(float64(m.Sys)/(1<<30), "GiB-process")
		})
	}
}

// Checkpoints have the header's description of a run, with which a continued run is compared.
func TestHeaderHasWhatDeterminesGradients(t *testing.T) {
	run := func(set ...string) *ir.Run {
		p, err := Build(planOf(t, "../../examples/moe-docs.sppo", set...))
		if err != nil {
			t.Fatal(err)
		}
		return &p.Run
	}
	before := run("model.router_aux_loss_coef=0", "model.router_z_loss_coef=0")
	got := run("model.router_aux_loss_coef=0.25", "model.aux_loss=joint", "model.router_z_loss_coef=0.5", "train.grad_reduce=bf16").Changes(before)
	want := [][2]string{
		{"router_aux_loss_coef = 0", "router_aux_loss_coef = 0.25"}, {"no aux_loss", `aux_loss = "joint"`},
		{"router_z_loss_coef = 0", "router_z_loss_coef = 0.5"}, {"no grad_reduce", `grad_reduce = "bf16"`},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
