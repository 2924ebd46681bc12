package e2e

import (
	"flag"
	"math/rand/v2"
	"slices"
	"testing"

	"sppo.dev/internal/meaning"
	"sppo.dev/ir"
)

// fuzzed is a program that FuzzMeaning changes, and its results over finite fields.
type fuzzed struct {
	p    *ir.Program
	want []float64
}

// fuzzLargest is the largest number of instructions of a step, over all ranks, of a program that is fuzzed. The fuzzer ends a process that
// takes more than ten seconds for an input.
const fuzzLargest = 4000

// fuzzPrograms compiles small programs of random specs, before any time is measured: few, because compiling and running one takes longer
// than judging a changed one.
func fuzzPrograms(f *testing.F) (list []fuzzed) {
	n := 3
	if flag.Lookup("test.fuzz").Value.String() != "" {
		n = 48
	}
	for seed := uint64(0); len(list) < n; seed++ {
		p, instructions := drawnProgram(f, rand.New(rand.NewPCG(seed, 0))), 0
		for _, r := range p.Ranks {
			instructions += len(p.Codes[r.Code].Sections[ir.SectionStep])
		}
		if instructions > fuzzLargest {
			continue
		}
		if _, err := meaning.Prove(p); err != nil {
			f.Fatal(err)
		}
		want, err := outcomeOver(f, p)
		if err != nil {
			f.Fatal(err)
		}
		list = append(list, fuzzed{p, want})
	}
	return list
}

// FuzzMeaning changes the programs of random specs. Neither the verifier nor the proof may panic. A program that both accept has the
// same results over finite fields as before, and runs on the cpu.
func FuzzMeaning(f *testing.F) {
	kinds := append(slices.Clone(mutations), meaningMutations...)
	kinds = append(kinds, mutation{"change an operand", false, (*mutant).changeOperand})
	for i := range uint64(16) {
		f.Add(i, i, uint8(i))
	}
	programs := fuzzPrograms(f)
	f.Fuzz(func(t *testing.T, spec, seed uint64, changes uint8) {
		before := programs[spec%uint64(len(programs))]
		m, what := newMutant(rand.New(rand.NewPCG(seed, spec)), before.p), ""
		for range 1 + changes%3 {
			if kind := kinds[m.IntN(len(kinds))]; kind.apply(m) {
				what += kind.name + ": " + m.what + "\n"
			}
		}
		if err := (ir.VerifyOptions{AllowOverCapacity: true}).Verify(m.p); err != nil || anotherJob(before.p, m.p) {
			_, _ = meaning.Prove(m.p) // it must not panic
			return
		}
		if _, err := meaning.Prove(m.p); err != nil {
			return
		}
		got, err := outcomeUnlike(t, m.p, before.want)
		if err != nil || !sameNumbers(got, before.want) {
			t.Errorf("accepted, but has other results (%v):\n%s", err, what)
		}
		job := open(t, m.p, 1, nil)
		if err := job.Init(t.Context()); err != nil {
			t.Fatalf("on the cpu: %v\n%s", err, what)
		}
		if _, err := job.Step(t.Context()); err != nil {
			t.Errorf("on the cpu: %v\n%s", err, what)
		}
		if _, err := job.Eval(t.Context()); err != nil {
			t.Errorf("on the cpu: %v\n%s", err, what)
		}
	})
}

// changeOperand changes where an operand is, its shape, its element type or the buffer that holds it.
func (m *mutant) changeOperand() bool {
	i := m.any(func(in *ir.Instr) bool { return len(in.Args) > 0 })
	if i < 0 {
		return false
	}
	v := &m.instrs()[i].Args[m.IntN(len(m.instrs()[i].Args))]
	if !v.Present() {
		return false
	}
	switch m.IntN(4) {
	case 0:
		v.Offset = max(0, v.Offset+ir.Bytes(m.IntN(5)-2)*v.DType.Bytes())
	case 1:
		v.Shape[m.IntN(len(v.Dims()))] += m.Int64N(3) - 1
	case 2:
		v.DType = ir.DType(m.IntN(int(ir.NumDTypes)))
	default:
		v.Buffer = uint32(m.IntN(len(m.code.Buffers)))
	}
	m.what += " with another operand"
	return true
}
