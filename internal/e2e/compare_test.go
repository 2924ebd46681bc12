package e2e

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// checkSame checks that two runs agree bitwise in losses, norms, gradients and final weights.
func checkSame(t *testing.T, what string, got, want *Result) {
	t.Helper()
	for i := range want.Losses {
		if !sameBits(got.Losses[i], want.Losses[i]) || !sameBits(got.Norms[i], want.Norms[i]) {
			t.Errorf("%s: step %d has loss %v and gradient norm %v, not %v and %v",
				what, i+1, got.Losses[i], got.Norms[i], want.Losses[i], want.Norms[i])
			break
		}
	}
	if !sameBits(got.EvalLoss, want.EvalLoss) {
		t.Errorf("%s: the validation's loss is %v, not %v", what, got.EvalLoss, want.EvalLoss)
	}
	for _, part := range []struct {
		name      string
		got, want map[string][]float32
	}{{"gradient", got.Grads, want.Grads}, {"weight", got.Weights, want.Weights}, {"rounded weight", got.Rounded, want.Rounded}} {
		if different := differing(part.got, part.want, want.Names); len(different) > 0 {
			t.Errorf("%s: the %s differs in %s", what, part.name, strings.Join(different, ", "))
		}
	}
}

func sameBits(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) }

func differing(got, want map[string][]float32, names []string) []string {
	var list []string
	for _, name := range names {
		same := slices.EqualFunc(got[name], want[name], func(a, b float32) bool { return math.Float32bits(a) == math.Float32bits(b) })
		if !same {
			list = append(list, name)
		}
	}
	return list
}

// tolerance bounds the differences due to rounding.
type tolerance struct {
	loss   float64 // relative error of every step's loss
	global float64 // error of the gradient of step 1, relative to its total norm
	tensor float64 // error of each tensor's part, relative to its own norm
}

// tolerances by storage type.
var tolerances = map[string]tolerance{
	"f32":  {loss: 1e-5, global: 1e-5, tensor: 1e-4},
	"bf16": {loss: 2e-2, global: 3e-2, tensor: 0.2},
}

// zeroGradient reports whether a tensor's gradient is zero in theory: without rotation, a key bias adds the
// same value to all scores of a query, which softmax without sinks ignores.
func zeroGradient(c Case, tensor string) bool {
	rotated := c.Positions == "rope" && !strings.Contains(c.Traits, "positions = ") // in all layers
	return strings.HasSuffix(tensor, ".bk") && !rotated && !strings.Contains(c.Traits, "attn_sinks = true") && !strings.Contains(strings.ReplaceAll(c.Traits, "qk_norm = none", ""), "qk_norm = ")
}

// checkClose checks that two runs of a case's model agree within rounding.
func checkClose(t *testing.T, c Case, what string, got, want *Result) {
	t.Helper()
	for _, problem := range notClose(c, got, want, tolerances[c.DType]) {
		t.Errorf("%s: %s", what, problem)
	}
}

// notClose lists the differences between two runs of a case's model that are larger than a tolerance.
func notClose(c Case, got, want *Result, tol tolerance) (problems []string) {
	for i := range want.Losses {
		problems = append(problems, notEqual(fmt.Sprintf("loss of step %d", i+1), got.Losses[i], want.Losses[i], tol.loss)...)
	}
	problems = append(problems, notEqual("loss of the validation", got.EvalLoss, want.EvalLoss, tol.loss)...)
	return append(problems, otherGradients(c, got.Grads, want.Grads, want.Names, tol)...)
}

func checkRelative(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	for _, problem := range notEqual(what, got, want, tolerance) {
		t.Error(problem)
	}
}

func notEqual(what string, got, want, tolerance float64) []string {
	if math.Abs(got-want) <= tolerance*math.Abs(want) {
		return nil
	}
	return []string{fmt.Sprintf("%s is %.9g, not %.9g: relative error %.2g", what, got, want, math.Abs(got-want)/math.Abs(want))} // or NaN
}

func checkGradients[F float32 | float64](t *testing.T, c Case, what string, got map[string][]float32, want map[string][]F, names []string, tol tolerance) {
	t.Helper()
	for _, problem := range otherGradients(c, got, want, names, tol) {
		t.Errorf("%s: %s", what, problem)
	}
}

// otherGradients compares each tensor relative to its own norm, and all tensors together relative to the total
// norm. If the terms of a tensor's gradient almost cancel, their rounding errors may exceed its norm. An error
// that is small even for the total norm is therefore allowed.
func otherGradients[F float32 | float64](c Case, got map[string][]float32, want map[string][]F, names []string, tol tolerance) (problems []string) {
	const small = 0.01 // of the allowed error of all tensors together
	difference, size := 0.0, 0.0
	for _, name := range names {
		d, s := distance(got[name], want[name])
		difference, size = math.Hypot(difference, d), math.Hypot(size, s)
	}
	if !(difference <= tol.global*size) {
		problems = append(problems, fmt.Sprintf("the gradient is off by %.2g of its norm %.2g", difference/size, size))
	}
	for _, name := range names {
		if d, s := distance(got[name], want[name]); !zeroGradient(c, name) && !(d <= max(tol.tensor*s, small*tol.global*size)) {
			problems = append(problems, fmt.Sprintf("gradient of %s is off by %.2g of its norm %.2g", name, d/s, s))
		}
	}
	return problems
}

// distance returns the norm of the difference between two tensors, and the norm of the second.
func distance[F float32 | float64](got []float32, want []F) (difference, size float64) {
	if len(got) != len(want) {
		return math.NaN(), 0
	}
	for i := range want {
		d, w := float64(got[i])-float64(want[i]), float64(want[i])
		difference, size = difference+d*d, size+w*w
	}
	return math.Sqrt(difference), math.Sqrt(size)
}

// checkPeaks is the first half of E5: the highest byte that a rank touched is exactly the peak that the program
// declares, which is exactly the plan's.
func checkPeaks(t testing.TB, c Case, plan *plan.Plan, p *ir.Program, job *train.Job) {
	t.Helper()
	checkBound(t, c, plan, p)
	planned := [ir.NumArenas][]ir.Bytes{ir.Device: plan.Memory.DevicePeakBytes, ir.Host: plan.Memory.HostPeakBytes}
	for r := range p.Ranks {
		code := p.Ranks[r].Code
		touched := job.Peaks(r)
		for arena := range ir.NumArenas {
			declared := p.Codes[code].Arenas[arena]
			if touched[arena] != declared {
				t.Errorf("%v: rank %d touched %d bytes of the %s arena, the program declares %d", c, r, touched[arena], arena, declared)
			}
			if want := planned[arena][p.Ranks[r].PP]; declared != want {
				t.Errorf("%v: rank %d declares %d bytes of the %s arena, the plan says %d", c, r, declared, arena, want)
			}
		}
	}
}

// checkBound compares the memory bound of the passes with the live bytes of the program, which must never
// exceed it, and with the placed bytes. The bound includes a margin for gaps in the placement. In the tiny arenas
// of these cases the gaps may exceed this margin, by less than 5% of the bound.
func checkBound(t testing.TB, c Case, plan *plan.Plan, p *ir.Program) {
	t.Helper()
	bound := memory.FootprintOf(plan)
	for s := range bound.Device {
		check := func(arena ir.Arena, got, placed ir.Bytes) {
			if live := mostLive(&p.Codes[s], arena); live > got {
				t.Errorf("%v: stage %d is bound to %d bytes of the %s arena, and %d live at once", c, s, got, arena, live)
			}
			if placed-got > got/20 {
				t.Errorf("%v: stage %d is bound to %d bytes of the %s arena, and %d are placed", c, s, got, arena, placed)
			}
		}
		check(ir.Device, bound.Device[s].Bytes, plan.Memory.DevicePeakBytes[s])
		check(ir.Host, bound.Host[s], plan.Memory.HostPeakBytes[s])
	}
}

// takesOver reports whether an instruction writes operand i to the same address as an operand that it reads
// from another buffer.
func takesOver(c *ir.Code, in *ir.Instr, i int) bool {
	at := func(v ir.View) ir.Bytes { return c.Buffers[v.Buffer].Offset + v.Offset }
	_, writes := in.Access(i)
	return writes && slices.ContainsFunc(in.Args[i+1:], func(v ir.View) bool {
		return v.Present() && v.Buffer != in.Args[i].Buffer && c.Buffers[v.Buffer].Arena == c.Buffers[in.Args[i].Buffer].Arena && at(v) == at(in.Args[i])
	})
}

// mostLive returns the largest number of bytes of an arena that are live at the same time. A buffer is live
// from its first to its last use in the issue order of a section. Buffers used by several sections, or read
// before they are written, are live throughout.
func mostLive(c *ir.Code, arena ir.Arena) ir.Bytes {
	type use struct{ section, first, last int }
	uses := map[uint32]use{}
	throughout := map[uint32]bool{}
	for section := range ir.NumSections {
		for at := range c.Sections[section] {
			in := &c.Sections[section][at]
			for i, v := range in.Args {
				if v.Buffer == ir.NoBuffer || c.Buffers[v.Buffer].Arena != arena {
					continue
				}
				u, known := uses[v.Buffer]
				if !known {
					u = use{int(section), at, at}
					if takesOver(c, in, i) {
						u.first++ // up to this instruction, the bytes count for the other buffer
					}
					throughout[v.Buffer], _ = in.Access(i)
				}
				throughout[v.Buffer] = throughout[v.Buffer] || u.section != int(section)
				u.last = at
				uses[v.Buffer] = u
			}
		}
	}
	var always, most ir.Bytes
	for section := range ir.NumSections {
		changes := make([]ir.Bytes, len(c.Sections[section])+1)
		for b, u := range uses {
			if u.section == int(section) && !throughout[b] {
				changes[u.first] += graph.Align(c.Buffers[b].Size)
				changes[u.last+1] -= graph.Align(c.Buffers[b].Size)
			}
		}
		now := ir.Bytes(0)
		for _, change := range changes {
			now += change
			most = max(most, now)
		}
	}
	for b := range throughout {
		if throughout[b] {
			always += graph.Align(c.Buffers[b].Size)
		}
	}
	return always + most
}

// checkOrder is the second half of E5: every stream executed the program's instructions in order, and each
// instruction once per section. It drops the timelines that it has checked.
func checkOrder(t testing.TB, c Case, p *ir.Program, traces []*vm.Trace) {
	t.Helper()
	for r, trace := range traces {
		code := &p.Codes[p.Ranks[r].Code]
		for _, timeline := range trace.Timelines {
			var want [ir.NumStreams][]int32
			for pc := range code.Sections[timeline.Section] {
				s := code.Sections[timeline.Section][pc].Stream
				want[s] = append(want[s], int32(pc))
			}
			for s, spans := range timeline.Streams {
				if !slices.EqualFunc(spans, want[s], func(span vm.Span, pc int32) bool { return span.PC == pc }) {
					t.Errorf("%v: rank %d, %s %d: stream %s did not execute the program's %d instructions in their order",
						c, r, timeline.Section, timeline.Round, ir.Stream(s), len(want[s]))
				}
			}
		}
		trace.Timelines = trace.Timelines[:0]
	}
}

// checkSimulated runs a step and a validation in virtual time, where every stream must execute the same
// instructions in the same order.
func checkSimulated(t testing.TB, c Case, p *ir.Program) {
	t.Helper()
	ranks, err := sim.New(p, sim.Options{})
	if err != nil {
		t.Fatalf("%v: simulating: %v", c, err)
	}
	traces := make([]*vm.Trace, len(p.Ranks))
	job := openOn(t, p, func(rank int) vm.Device {
		traces[rank] = vm.NewTrace(ranks.Device(rank))
		return traces[rank]
	})
	if err := job.Init(t.Context()); err != nil {
		t.Fatalf("%v: simulating init: %v", c, err)
	}
	doSteps(t, job, 1)
	if _, err := job.Eval(t.Context()); err != nil {
		t.Fatalf("%v: simulating a validation: %v", c, err)
	}
	checkOrder(t, c, p, traces)
}
