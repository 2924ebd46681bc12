package ir_test

import (
	"bytes"
	"fmt"
	"io"
	"runtime"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// layered returns a program with 8 codes for 128 ranks and n subsequences.
func layered(n int) *ir.Program {
	return irtest.Layered(irtest.Size{Stages: 8, Layers: 10, Subsequences: n, RanksPerStage: 16, Rows: 64})
}

func instructions(p *ir.Program) int {
	n := 0
	for i := range p.Codes {
		for s := range p.Codes[i].Sections {
			n += len(p.Codes[i].Sections[s])
		}
	}
	return n
}

func TestLayeredProgramVerifies(t *testing.T) {
	p := irtest.Layered(irtest.Size{Stages: 2, Layers: 2, Subsequences: 6, RanksPerStage: 2, Rows: 16})
	if err := (ir.VerifyOptions{AllowUnread: true}).Verify(p); err != nil {
		t.Fatal(err)
	}
}

// The time per instruction must not grow with the size of the program.
func BenchmarkProgram(b *testing.B) {
	for _, n := range []int{16, 64, 160} {
		p := layered(n)
		count := instructions(p)
		var file bytes.Buffer
		if err := ir.Encode(&file, p); err != nil {
			b.Fatal(err)
		}
		run := func(name string, f func() error) {
			b.Run(fmt.Sprintf("%s/%d", name, count), func(b *testing.B) {
				for b.Loop() {
					if err := f(); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(count), "ns/instr")
			})
		}
		run("encode", func() error { return ir.Encode(io.Discard, p) })
		run("decode", func() error { _, err := ir.Decode(file.Bytes()); return err })
		run("verify", func() error { return ir.VerifyOptions{AllowUnread: true}.Verify(p) })
		src := text(b, p)
		run("parse", func() error { _, err := ir.ParseText("bench.sppir", src); return err })
		run("print", func() error { return ir.Print(io.Discard, p) })
		b.Logf("%d instructions, %.1f bytes each", count, float64(file.Len())/float64(count))
	}
}

// A decoded program must take little more memory than its instructions.
func BenchmarkDecodedBytes(b *testing.B) {
	p := layered(64)
	var file bytes.Buffer
	if err := ir.Encode(&file, p); err != nil {
		b.Fatal(err)
	}
	count := instructions(p)
	p = nil
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	back, err := ir.Decode(file.Bytes())
	if err != nil {
		b.Fatal(err)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(count), "bytes/instr")
	runtime.KeepAlive(back)
}
