package walk

import (
	"testing"

	"sppo.dev/graph"
	"sppo.dev/passes/plan"
	"sppo.dev/passes/plantest"
)

// TestLoadQueue goes through each rank's tasks with their load queue. Loads must be issued in the order of use,
// no load may be issued before its rows are on the host, and no more loads may be outstanding than the plan
// allows.
func TestLoadQueue(t *testing.T) {
	for _, set := range [][]string{
		{"schedule.pp=1", "schedule.order=layer"},
		{"schedule.pp=2", "schedule.recompute=full"},
		{"schedule.pp=2", "schedule.strategy=seq1f1b", "schedule.keep=[v]"},
		{"schedule.pp=2", "model.window=[8,100,0]"},
		{"schedule.pp=2", "schedule.recompute=full", "model.window=1"},
	} {
		p := plantest.Plan(t, "gpt-docs.sppo", append([]string{"schedule.keep=[]"}, set...)...)
		for early := 1; early <= 3; early++ {
			p.Stream.Early = early
			for rank := range p.Tasks {
				checkQueue(t, p, rank)
			}
		}
	}
}

func checkQueue(t *testing.T, p *plan.Plan, rank int) {
	t.Helper()
	g, rows := p.Graph(), map[[2]int]int64{}
	q := NewLoadQueue(p, g, p.Tasks[rank])
	var waiting []Load
	for _, task := range p.Tasks[rank] {
		layers := p.Layers(task.Stage)
		for visit := range layers {
			k := visit
			if task.Kind == plan.Backward {
				k = len(layers) - 1 - visit
			}
			again := task.Kind == plan.Backward && MakesAttention(p.LayerOf(g, task, k))
			for _, need := range VisitLoads(p, g, VisitKind{task.Kind, task.Subsequence, g.KindOf(layers[k]), again}) {
				need.Task, need.Layer = task, layers[k]
				for l, ok := q.Next(); ok; l, ok = q.Next() {
					if l.End > rows[[2]int{l.Task.Microbatch, l.Layer}] {
						t.Fatalf("%v layer %d: rows up to %d come before they have gone", l.Task, l.Layer, l.End)
					}
					waiting = append(waiting, l)
				}
				if len(waiting) == 0 || waiting[0] != need || len(waiting) > p.Stream.Early+1 {
					t.Fatalf("%v layer %d needs %+v, and %d have come: %+v", task, layers[k], need, len(waiting), waiting)
				}
				waiting = waiting[1:]
				q.Take()
				if task.Kind == plan.Backward && !need.Own && !need.Again {
					q.SentGrads(need)
				}
			}
			if task.Kind == plan.Forward {
				q.SentRows(task, layers[k])
				z := p.Size(task.Subsequence)
				rows[[2]int{task.Microbatch, layers[k]}] = z.Prefix + z.Tokens
			}
		}
	}
	if l, ok := q.Next(); ok || len(waiting) > 0 {
		t.Errorf("%+v and %d more are left at the end", l, len(waiting))
	}
}

// TestStreamedBytes checks that, if V is streamed but K is not, V and dV on the device have the rows of one
// subsequence, and K and dK those of the whole sequence.
func TestStreamedBytes(t *testing.T) {
	p := plantest.Plan(t, "gpt-docs.sppo", "schedule.keep=[k]")
	for _, v := range p.Graph().Layer.Values {
		want := map[string]graph.Rows{"k": graph.Whole, "d.k": graph.Whole, "v": graph.Full, "d.v": graph.Full}
		if rows, ok := want[v.Name]; ok && v.Rows != rows {
			t.Errorf("%s has rows of kind %d, want %d", v.Name, v.Rows, rows)
		}
	}
}
