package schedule

import (
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// TestExample compares the package's documentation with the result of Write.
func TestExample(t *testing.T) {
	task := func(kind Kind, i int) Task { return Task{Kind: kind, Subsequence: i, Stage: 1} }
	tasks := []Task{task(Forward, 0), task(Forward, 1), task(Backward, 1), task(Backward, 0)}
	var printed strings.Builder
	if err := New([][]Task{tasks}, []int{2, 2, 2}, 0).Write(0, Timing{Lag: 1, Ahead: 1}, nil).Print(&printed, tasks); err != nil {
		t.Fatal(err)
	}
	got := strings.ReplaceAll(printed.String(), "@1", "")
	source, err := os.ReadFile("schedule.go")
	if err != nil {
		t.Fatal(err)
	}
	_, doc, _ := strings.Cut(string(source), "of 1:\n//\n")
	doc, _, _ = strings.Cut(doc, "//\n// Slots")
	if words := strings.Fields(strings.ReplaceAll(doc, "//", "")); !slices.Equal(words, strings.Fields(got)) {
		t.Errorf("the documentation says\n%s\nand Write lists\n%s", doc, got)
	}
}

// drawn returns the tasks of one rank in an order that a strategy might produce: the forwards of each
// microbatch in order, its backwards in reverse order, several microbatches at a time, with weight gradients
// either deferred or computed together with their backwards.
func drawn(r *rand.Rand) (tasks []Task, layers []int) {
	virtual := 1 + r.IntN(3)
	for range virtual * 2 {
		layers = append(layers, 1+r.IntN(4))
	}
	if r.IntN(3) == 0 { // only the embedding
		layers[0] = 0
	}
	n, microbatches, late := 1+r.IntN(5), 1+r.IntN(3), r.IntN(3) == 0
	type run struct{ microbatch, forward, backward, weights int }
	runs := make([]run, microbatches)
	for m := range runs {
		runs[m].microbatch = m
	}
	all := n * virtual
	at := func(kind Kind, m, k int) Task {
		return Task{Kind: kind, Microbatch: m, Subsequence: k / virtual, Stage: 2 * (k % virtual)}
	}
	for {
		open := slices.DeleteFunc(slices.Clone(runs), func(x run) bool {
			return x.backward == all && (!late || x.weights == all)
		})
		if len(open) == 0 {
			return tasks, layers
		}
		m := open[r.IntN(len(open))].microbatch
		switch x := &runs[m]; {
		case x.forward < all:
			tasks = append(tasks, at(Forward, m, x.forward))
			x.forward++
		case x.backward < all && (!late || x.weights == x.backward || r.IntN(2) == 0):
			tasks = append(tasks, at(Backward, m, all-1-x.backward))
			x.backward++
		default:
			tasks = append(tasks, at(WeightGrad, m, all-1-x.weights))
			x.weights++
		}
	}
}

// layer is a layer of a forward.
type layer struct {
	forward Task
	k       int32
}

// TestCopies checks the copies in random orders of tasks, with random lag and ahead. Each layer of a backward must be
// reloaded exactly once, after its forward and its only Release, and before its visit.
func TestCopies(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var list *List
	for range 2000 {
		tasks, layers := drawn(r)
		lag, ahead := 1+r.IntN(4), 1+r.IntN(6)
		list = New([][]Task{tasks}, layers, 0).Write(0, Timing{Lag: lag, Ahead: ahead}, list)
		gone, released, back := map[layer]bool{}, map[layer]bool{}, map[layer]bool{}
		fail := func(what string, at layer) {
			var words strings.Builder
			_ = list.Print(&words, tasks)
			t.Fatalf("lag %d, ahead %d: %s of layer %d of %s\n%s", lag, ahead, what, at.k, at.forward, words.String())
		}
		for i, task := range tasks {
			visits := int32(0)
			for _, a := range list.Of(i) {
				checkFields(t, a, i)
				at := layer{tasks[a.Task].As(Forward), a.Layer}
				switch a.Op {
				case Visit:
					visits++
					switch order := visits - 1; {
					case task.Kind == Forward && a.Layer != order,
						task.Kind != Forward && a.Layer != int32(layers[task.Stage])-visits:
						fail("a visit out of order", at)
					case task.Kind == Forward:
						gone[at] = true
					case task.Kind == Backward && !back[at]:
						fail("a visit before the reload", at)
					}
				case Release:
					if !gone[at] || released[at] {
						fail("a release without copies or one too many", at)
					}
					released[at] = true
				case Reload:
					if !released[at] || back[at] {
						fail("a reload that is too early or one too many", at)
					}
					back[at] = true
				}
			}
			if visits != int32(layers[task.Stage]) {
				fail("not every layer is visited", layer{task, visits})
			}
		}
	}
}

// TestLag checks that the copies of a forward may run for as many tasks as the lag allows.
func TestLag(t *testing.T) {
	const n, layers = 6, 2
	var tasks []Task
	for i := range n {
		tasks = append(tasks, Task{Kind: Forward, Subsequence: i})
	}
	for lag := 1; lag < n; lag++ {
		list := New([][]Task{tasks}, []int{layers}, 0).Write(0, Timing{Lag: lag, Ahead: 1}, nil)
		for i := range n {
			for _, a := range list.Of(i) {
				if a.Op == Release && int(a.Task) != i-lag {
					t.Errorf("lag %d: %s ends the copies of %s", lag, tasks[i], tasks[a.Task])
				}
			}
		}
	}
}

// TestWithoutLayers checks the tasks of stages without layers: copies of other tasks end during them, too, and their
// backwards pass gradients on.
func TestWithoutLayers(t *testing.T) {
	tasks := []Task{
		{Kind: Forward, Stage: 0}, {Kind: Forward, Stage: 2}, {Kind: Forward, Subsequence: 1, Stage: 0}, {Kind: Forward, Subsequence: 1, Stage: 2},
		{Kind: Backward, Subsequence: 1, Stage: 2}, {Kind: Backward, Subsequence: 1, Stage: 0},
	}
	p := New([][]Task{tasks}, []int{0, 1, 2, 0}, 0)
	list := p.Write(0, Timing{Lag: 1, Ahead: 1}, nil)
	var words strings.Builder
	_ = list.Print(&words, tasks)
	var released []int32
	for _, a := range list.Of(2) {
		if a.Op == Release && a.Task == 1 {
			released = append(released, a.Layer)
		}
	}
	if !slices.Equal(released, []int32{0, 1}) {
		t.Errorf("%s releases layers %v of %s\n%s", tasks[2], released, tasks[1], words.String())
	}
	if embeds := slices.ContainsFunc(list.Of(5), func(a Action) bool { return a.Op == Embedding }); !embeds || !p.feeds(1) || p.feeds(0) {
		t.Errorf("the first stage has no gradients of the embedding, or no input for them\n%s", words.String())
	}
}

// TestSlots checks that the actions in which all ranks take part have the same order in the lists of all ranks,
// however tasks and layers are distributed, and that each piece runs the first and then the second half of
// every layer.
func TestSlots(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		pp := 2 + r.IntN(4)
		layers, tasks := make([]int, pp), make([][]Task, pp)
		for i := range layers {
			layers[i] = 1 + r.IntN(3)
		}
		own := func(kind Kind) { // the task at the turnaround
			for rank := range tasks {
				tasks[rank] = append(tasks[rank], Task{Kind: kind, Subsequence: pp - 1, Stage: rank})
			}
		}
		shared := func(kind Kind, slot int) {
			for stage := range slot + 1 {
				for piece := range pp {
					rank := stage
					if piece > slot {
						rank = piece
					}
					t := Task{Kind: kind, Subsequence: slot - stage, Stage: stage, Piece: piece + 1}
					tasks[rank] = append(tasks[rank], t)
				}
			}
		}
		for slot := range pp - 1 {
			shared(Forward, slot)
		}
		own(Forward)
		own(Backward)
		for slot := range pp - 1 {
			shared(Backward, pp-2-slot)
		}
		p := New(tasks, layers, 0)
		p.Shared = pp - 1
		var first []Action
		for rank := range tasks {
			list := p.Write(rank, Timing{Lag: 1, Ahead: 1 + r.IntN(3)}, nil)
			var common []Action
			halves := map[layer]Op{}
			for i := range tasks[rank] {
				for _, a := range list.Of(i) {
					checkFields(t, a, i)
				}
			}
			for _, a := range list.actions {
				at := layer{tasks[rank][a.Task], a.Layer}
				switch {
				case a.Op.Common():
					a.Task = 0 // differs from rank to rank
					common = append(common, a)
				case a.Op == FirstHalf:
					halves[at] = a.Op
				case a.Op == SecondHalf && halves[at] != FirstHalf:
					t.Fatalf("%s: layer %d has its second half before its first", at.forward, at.k)
				case a.Op == SecondHalf:
					halves[at] = a.Op
				}
			}
			if rank == 0 {
				first = common
			} else if !slices.Equal(first, common) {
				t.Fatalf("%d stages of %d layers: ranks 0 and %d do not agree on what they do together", pp, layers, rank)
			}
			for _, task := range tasks[rank] {
				if task.Piece == 0 {
					continue
				}
				for k := range layers[task.Stage] {
					if halves[layer{task, int32(k)}] != SecondHalf {
						t.Fatalf("%s does not run layer %d", task, k)
					}
				}
			}
		}
	}
}

// TestRecompute checks the recomputation of K and V before the first backward of a stage visits a layer: in the order of
// subsequences, each from an input that has been loaded, with at most inputLoads on the device.
func TestRecompute(t *testing.T) {
	for n := 1; n < 6; n++ {
		var tasks []Task
		for i := range n {
			tasks = append(tasks, Task{Kind: Forward, Subsequence: i})
		}
		for i := range n {
			tasks = append(tasks, Task{Kind: Backward, Subsequence: n - 1 - i})
		}
		list := New([][]Task{tasks}, []int{2, 1}, 0).Write(0, Timing{Lag: 1, Ahead: 1, Recomputes: true}, nil)
		layers := 0
		for i := range tasks {
			loaded, done := int32(0), int32(0)
			for _, a := range list.Of(i) {
				checkFields(t, a, i)
				switch a.Op {
				case LoadInput:
					if loaded++; a.Of != loaded-1 || loaded-done > inputLoads {
						t.Fatalf("%d subsequences: %s loads input %d, and has loaded %d and used %d", n, tasks[i], a.Of, loaded-1, done)
					}
				case Recompute:
					if done++; a.Of != done-1 || done > loaded {
						t.Fatalf("%d subsequences: %s recomputes %d, and has loaded %d and used %d", n, tasks[i], a.Of, loaded, done-1)
					}
				case Visit:
					if first := i == n; first != (done == int32(n)) || done != loaded {
						t.Fatalf("%d subsequences: %s visits a layer after recomputing %d of %d", n, tasks[i], done, loaded)
					}
					if done > 0 {
						layers++
					}
					loaded, done = 0, 0
				}
			}
		}
		if layers != 2 {
			t.Fatalf("%d subsequences: %d layers are recomputed", n, layers)
		}
	}
}
