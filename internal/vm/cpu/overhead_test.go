package cpu

import (
	"context"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// overheadProgram returns a program that fills one element repeatedly. With events, a second stream fills another
// element, and waits for the first stream before each fill.
func overheadProgram(n int, events bool) *ir.Program {
	view := ir.View{DType: ir.F32, Shape: [ir.MaxDims]int64{1}}
	code := ir.Code{Buffers: []ir.Buffer{{Size: 4}, {Offset: 64, Size: 4}}, Arenas: [ir.NumArenas]ir.Bytes{68, 0}}
	var list []ir.Instr
	put := func(op ir.Op, stream ir.Stream, attr ir.Attr, args ...ir.View) {
		list = append(list, ir.Instr{Op: op, Stream: stream, Attrs: []ir.Attr{attr}, Args: args})
	}
	other := view
	other.Buffer = 1
	for i := 0; len(list) < n; i++ {
		put(ir.Fill, ir.Compute, ir.Float(1), view)
		if events && i%4 == 0 {
			event := ir.Int(int64(code.Events[ir.SectionStep]))
			code.Events[ir.SectionStep]++
			put(ir.Record, ir.Compute, event)
			put(ir.Wait, ir.Mux, event)
			put(ir.Fill, ir.Mux, ir.Float(1), other)
		}
	}
	code.Sections[ir.SectionStep] = list
	return &ir.Program{Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}, Run: ir.Run{Steps: 1, LR: 1}}
}

// TestInstructionsAllocateNothing allows a section at most one allocation per 100 instructions.
func TestInstructionsAllocateNothing(t *testing.T) {
	const n = 10000
	job, err := train.Open(overheadProgram(n, true), func(int) (vm.Device, error) { return New(nil), nil }, train.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	allocs := testing.AllocsPerRun(10, func() {
		if _, err := job.Step(context.Background()); err != nil {
			t.Fatal(err)
		}
	})
	if allocs > n/100 {
		t.Errorf("%v allocations in a section of %d instructions", allocs, n)
	}
}

// BenchmarkOverhead measures the time per instruction of a step whose instructions do almost nothing.
func BenchmarkOverhead(b *testing.B) {
	const n = 10000
	for _, events := range []bool{false, true} {
		name := "one stream"
		if events {
			name = "events"
		}
		b.Run(name, func(b *testing.B) {
			p := overheadProgram(n, events)
			job, err := train.Open(p, func(int) (vm.Device, error) { return New(simd.NewPool(0)), nil }, train.Options{})
			if err != nil {
				b.Fatal(err)
			}
			defer job.Close()
			b.ReportAllocs()
			for b.Loop() {
				if _, err := job.Step(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
			instructions := float64(b.N) * float64(len(p.Codes[0].Sections[ir.SectionStep]))
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/instructions, "ns/instruction")
		})
	}
}
