package sim_test

import (
	"math"
	"testing"

	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// pathJobs returns programs with different kinds of waits.
func pathJobs(t *testing.T) map[string]*ir.Program {
	jobs := map[string]*ir.Program{}
	for _, job := range []struct {
		name, file string
		set        []string
	}{
		{"threads of one computer", "tiny.sppo", nil},
		{"mux among threads", "tiny.sppo", []string{"schedule.mux=on"}},
		{"stages", "paper/gpt-7b-512k.sppo", []string{"model.layers=8"}},
		{"slow copies", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "cluster.d2h_bandwidth=3GB/s", "cluster.h2d_bandwidth=3GB/s"}},
		{"copies in turns", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "schedule.keep=[]", "schedule.subsequences=8", "cluster.d2h_bandwidth=3GB/s", "cluster.h2d_bandwidth=3GB/s", "cluster.copy_duplex=half"}},
		{"streamed", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "schedule.keep=[]", "schedule.subsequences=8"}},
		{"replicas", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "schedule.pp=2", "schedule.dp=2", "train.batch=2", "schedule.subsequences=4", "cluster.node_network_bandwidth=1GB/s"}},
		{"contention", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "schedule.pp=2", "schedule.dp=2", "train.batch=2", "schedule.subsequences=4", "cluster.contention=0.4", "cluster.nvlink_bandwidth=10GB/s"}},
		{"zero-bubble", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "schedule.strategy=zb-h1", "train.batch=8", "train.sequence=32K", "schedule.subsequences=1", "schedule.offload=none"}},
		{"mux", "paper/gpt-7b-512k.sppo", []string{"model.layers=8", "schedule.mux=on", "schedule.subsequences=8"}},
	} {
		_, jobs[job.name] = compile(t, job.file, job.set...)
	}
	return jobs
}

// byKind returns the seconds of a path by kind of work.
func byKind(t *testing.T, name string, p *ir.Program, tl *sim.Timeline) map[ir.WorkKind]float64 {
	t.Helper()
	out := map[ir.WorkKind]float64{}
	end := ir.Seconds(0)
	for i, s := range tl.Causes().Path() {
		if s.Begin != end || s.End <= s.Begin {
			t.Fatalf("%s: segment %d is from %v to %v, the one before ends at %v", name, i, s.Begin, s.End, end)
		}
		end = s.End
		if s.Site == sim.Nowhere {
			if s.End-s.Begin > 1e-9*tl.Makespan {
				t.Errorf("%s: nothing is known of %v to %v", name, s.Begin, s.End)
			}
			continue
		}
		span := tl.Rank(s.Rank).Spans[s.PC]
		if slack := 1e-9 * tl.Makespan; s.Begin < span.Begin-slack || s.End > span.End+slack {
			t.Errorf("%s: a segment from %v to %v, of an instruction from %v to %v", name, s.Begin, s.End, span.Begin, span.End)
		}
		in := &p.Codes[p.Ranks[s.Rank].Code].Sections[ir.SectionStep][s.PC]
		if in.Info().Class == ir.ClassSync {
			t.Errorf("%s: an event is on the path", name)
		}
		out[in.Work().Kind] += float64(s.End - s.Begin)
	}
	if end != tl.Makespan {
		t.Errorf("%s: the path ends at %v, the step at %v", name, end, tl.Makespan)
	}
	return out
}

// The critical path has no gap and is as long as the step. Without contention, speeding up work that is not on
// it has no effect, and speeding up work on it saves at most the time that this work takes on the path.
func TestCriticalPath(t *testing.T) {
	off := 0
	for name, p := range pathJobs(t) {
		tl := run(t, p, sim.Options{Spans: true})
		on := byKind(t, name, p, tl)
		for _, o := range []sim.Options{{Spans: true, NoFold: true, Jitter: 0.2, Seed: 3}, {Spans: true, Contention: true}} {
			if name != "streamed" && name != "mux" {
				byKind(t, name, p, run(t, p, o))
			}
		}
		if p.Machine.Parallelism > 0 || p.Machine.HalfDuplex() || p.Machine.Contention > 0 {
			continue // faster work may delay other work here
		}
		for kind := ir.WorkMatmul; kind <= ir.WorkCollective; kind++ {
			faster := float64(run(t, p, sim.Options{Scale: map[ir.WorkKind]float64{kind: 0.5}}).Makespan)
			saved := float64(tl.Makespan) - faster
			if on[kind] == 0 {
				off++
			}
			if slack := 1e-9 * float64(tl.Makespan); saved < -slack || saved > on[kind]/2+slack {
				t.Errorf("%s: work of kind %d takes %g s of the path, and twice as fast it saves %g s", name, kind, on[kind], saved)
			}
		}
	}
	if off == 0 {
		t.Error("all kinds of work are on the path of every job")
	}
}

// The cause of a wait is the work that precedes the event. The cause of a late message is what its sender did
// before sending it.
func TestCauses(t *testing.T) {
	a, b := &script{}, &script{}
	a.work(ir.Compute, 7)           // pc 0: 0 .. 7
	a.then(ir.Compute, ir.SendNext) // 1, 2
	a.send(ir.SendNext, 2, 1)       // 3: 7 .. 9
	b.work(ir.Compute, 1)           // 0: 0 .. 1
	b.recv(ir.RecvPrev, 2, 0)       // 1: 7 .. 9
	b.then(ir.RecvPrev, ir.Compute) // 2, 3
	b.work(ir.Compute, 3)           // 4: 9 .. 12
	tl := run(t, program(a, b), sim.Options{Spans: true})
	causes := tl.Causes()
	for _, c := range []struct{ at, want sim.Site }{
		{sim.Site{1, 4}, sim.Site{1, 1}},
		{sim.Site{1, 3}, sim.Site{1, 1}},
		{sim.Site{1, 1}, sim.Site{0, 0}},
		{sim.Site{0, 3}, sim.Site{0, 0}},
		{sim.Site{0, 0}, sim.Nowhere},
	} {
		if got := causes.Of(c.at); got != c.want {
			t.Errorf("%v waits for %v, want %v", c.at, got, c.want)
		}
	}
	path := causes.Path()
	if len(path) != 3 || path[0].Site != (sim.Site{0, 0}) || path[2].Site != (sim.Site{1, 4}) || math.Abs(float64(path[1].End-9)) > 1e-12 {
		t.Errorf("%v", path)
	}
}
