package schedule

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestDivided checks the visits of random tasks whose weights and gradients are divided. During a visit, its layer and that
// of the next visit are whole, and no other. A layer that is whole is not gathered again, and stays whole if one of the
// next two visits reads it. Every pass that computes weight gradients ends by reducing them. The first half of a backward may have some.
func TestDivided(t *testing.T) {
	type layer struct {
		stage int
		k     int32
	}
	r := rand.New(rand.NewPCG(5, 6))
	for range 1000 {
		tasks, layers := drawn(r)
		p := New([][]Task{tasks}, layers, 0)
		p.Gathers, p.Early, p.Reduces = true, r.IntN(2) == 0, func(t Task) bool { return t.Subsequence%2 == 0 }
		list := p.Write(0, Timing{Lag: 1, Ahead: 1 + r.IntN(3)}, nil)
		at := func(a Action) layer { return layer{tasks[a.Task].Stage, a.Layer} }
		var visits []layer
		for _, a := range list.actions {
			if a.Op == Visit && tasks[a.Task].Kind != WeightGrad {
				visits = append(visits, at(a))
			}
		}
		done, whole := 0, []layer{}
		for i, a := range list.actions {
			fail := func(what string) {
				t.Helper()
				var words strings.Builder
				_ = list.Print(&words, tasks)
				t.Fatalf("%s of layer %d of %s, after %d visits: %s; whole: %v\n%s", a.Op, a.Layer, tasks[a.Task], done, what, whole, words.String())
			}
			task := tasks[a.Task]
			switch is := slices.Contains(whole, at(a)); a.Op {
			case Gather:
				if is {
					fail("it is whole")
				}
				whole = append(whole, at(a))
			case Complete:
				if !is {
					fail("it is not whole")
				}
			case Free:
				if next := visits[done+1 : min(done+3, len(visits))]; !is || at(a) != visits[done] || slices.Contains(next, at(a)) {
					fail("too early, or of another layer")
				}
				whole = slices.DeleteFunc(whole, func(l layer) bool { return l == at(a) })
			case Visit:
				if task.Kind != WeightGrad {
					freed := list.actions[i-1].Op == Free
					if is == freed || done+1 < len(visits) && !slices.Contains(whole, visits[done+1]) || len(whole) > 2 {
						fail("other layers are whole than those of this visit and the next")
					}
					done++
				}
				adds := task.Kind == WeightGrad || task.Kind == Backward && (p.Early || !slices.Contains(tasks, task.As(WeightGrad)))
				if next := list.actions[i+1]; (next.Op == Reduce && next.Task == a.Task && next.Layer == a.Layer) != (adds && p.Reduces(task)) {
					fail("it reduces other gradients than those that it completes")
				}
			}
		}
		if len(whole) > 0 {
			t.Fatalf("layers that stay whole: %v", whole)
		}
	}
}
