package walk

import (
	"slices"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/ir"
)

// TestLoadQueue goes through the transfers of each rank's visits. Loads must be issued and used in the order in which
// VisitLoads lists them, no load may be issued before its rows are on the host, and no more loads may be outstanding than
// the plan allows. Blocks of dK and dV must be sent when they are complete, and freed one block later.
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
	q := NewLoadQueue(p, g, p.Tasks[rank], Must(p).Schedule(rank))
	var waiting, sent []Transfer
	for _, task := range p.Tasks[rank] {
		layers := p.Layers(task.Stage)
		for visit := range layers {
			k := visit
			if task.Kind == plan.Backward {
				k = len(layers) - 1 - visit
			}
			kind := g.KindOf(layers[k])
			recomputed := task.Kind == plan.Backward && slices.ContainsFunc(p.LayerOf(g, task, k).Backward, func(n graph.Node) bool { return n.Op == ir.Attention })
			needs, attends := VisitLoads(p, g, VisitKind{task.Kind, task.Subsequence, kind, recomputed}), 0
			for _, x := range q.Visit() {
				switch l := x; x.Op {
				case Attend:
					if attends++; l.Recomputed != (recomputed && attends == 1) {
						t.Fatalf("%v layer %d: attention number %d is again: %t", task, layers[k], attends, l.Recomputed)
					}
				case Issue:
					if l.End > rows[[2]int{l.Task.Microbatch, l.Layer}] {
						t.Fatalf("%v layer %d: rows up to %d come before they have gone", l.Task, l.Layer, l.End)
					}
					waiting = append(waiting, l)
				case Use:
					if *l.Load != needs[0] || l.Load != waiting[0].Load || l.Visited != waiting[0].Visited || l.Task != task || l.Layer != layers[k] || len(waiting) > p.Stream.Early+1 || l.Own != (task.Kind == plan.Backward && attends == 0) {
						t.Fatalf("%v layer %d needs %+v and uses %+v, and %d have come: %+v", task, layers[k], needs[0], l, len(waiting), waiting)
					}
					needs, waiting = needs[1:], waiting[1:]
				case Send:
					if sent = append(sent, l); l.Own || l.Recomputed || l.Task != task || len(sent) > 2 {
						t.Fatalf("%v layer %d sends %+v, and %d are in transit", task, layers[k], l, len(sent))
					}
				case Free:
					if l.Load != sent[0].Load || l.Visited != sent[0].Visited {
						t.Fatalf("%v layer %d frees %+v instead of %+v", task, layers[k], l, sent[0])
					}
					sent = sent[1:]
				}
			}
			want := 1
			switch {
			case task.Kind == plan.Backward && !g.LayerOf(kind).Attends:
				want = 0
			case recomputed:
				want = 2
			}
			if len(needs) > 0 || attends != want {
				t.Fatalf("%v layer %d: %d loads are not used; it attends %d times, want %d", task, layers[k], len(needs), attends, want)
			}
			if task.Kind == plan.Forward {
				z := p.Size(task.Subsequence)
				rows[[2]int{task.Microbatch, layers[k]}] = z.Prefix + z.Tokens
			}
		}
	}
	if l, ok := q.next(); ok || len(waiting) > 0 {
		t.Errorf("%+v and %d more are left at the end", l, len(waiting))
	}
}

// TestStreamedBytes checks that, if V is streamed but K is not, V and dV on the device have the rows of one
// subsequence, and K and dK those of the whole sequence.
func TestStreamedBytes(t *testing.T) {
	p := plantest.Plan(t, "gpt-docs.sppo", "schedule.keep=[k]")
	for _, v := range p.Graph().Plain(0).Values {
		want := map[string]graph.Rows{"k": graph.Whole, "d.k": graph.Whole, "v": graph.Full, "d.v": graph.Full}
		if rows, ok := want[v.Name]; ok && v.Rows != rows {
			t.Errorf("%s has rows of kind %d, want %d", v.Name, v.Rows, rows)
		}
	}
}
