package sim_test

import (
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

func benchmark(b *testing.B, p *ir.Program, o sim.Options) {
	b.Helper()
	b.ReportAllocs()
	instructions := int64(0)
	for b.Loop() {
		instructions += run(b, p, o).Instructions
	}
	b.ReportMetric(float64(instructions)/b.Elapsed().Seconds(), "instructions/s")
}

// BenchmarkLayered simulates every rank of a medium-sized job.
func BenchmarkLayered(b *testing.B) {
	p := irtest.Layered(irtest.Size{Stages: 4, Layers: 8, Subsequences: 32, RanksPerStage: 16, Rows: 256})
	benchmark(b, p, sim.Options{NoFold: true})
}

// BenchmarkThousands folds 4096 ranks.
func BenchmarkThousands(b *testing.B) {
	p := irtest.Layered(irtest.Size{Stages: 8, Layers: 4, Subsequences: 32, RanksPerStage: 512, Rows: 256})
	benchmark(b, p, sim.Options{})
}

// BenchmarkPaper simulates the paper's largest job: 65B parameters, a million tokens, 128 ranks.
func BenchmarkPaper(b *testing.B) {
	_, p := compile(b, "paper/gpt-65b-1m.sppo")
	b.Run("folded", func(b *testing.B) { benchmark(b, p, sim.Options{}) })
	b.Run("unfolded", func(b *testing.B) { benchmark(b, p, sim.Options{NoFold: true}) })
	b.Run("spans", func(b *testing.B) { benchmark(b, p, sim.Options{Spans: true}) })
}

// BenchmarkShared simulates a node whose ranks share its processors: one clock for all.
func BenchmarkShared(b *testing.B) {
	p := irtest.Layered(irtest.Size{Stages: 4, Layers: 8, Subsequences: 32, RanksPerStage: 16, Rows: 256})
	p.Machine.Parallelism = 2
	benchmark(b, p, sim.Options{})
}
