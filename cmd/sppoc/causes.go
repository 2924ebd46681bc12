package main

import (
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// standIns maps every rank to the shown rank that represents it.
type standIns struct {
	program *ir.Program
	t       *sim.Timeline
	ranks   map[int]int   // rank to its index among the shown ranks
	classes map[int32]int // class (same work at the same times) to the index of its first shown rank
	codes   map[int32]int // code to the index of the first shown rank that runs it
}

func newStandIns(p *ir.Program, t *sim.Timeline, chosen []int) *standIns {
	s := &standIns{p, t, map[int]int{}, map[int32]int{}, map[int32]int{}}
	for i, r := range chosen {
		s.ranks[r] = i
		if _, ok := s.classes[t.Class[r]]; !ok {
			s.classes[t.Class[r]] = i
		}
		if _, ok := s.codes[p.Ranks[r].Code]; !ok {
			s.codes[p.Ranks[r].Code] = i
		}
	}
	return s
}

// of returns the index of the shown rank that represents a rank, or -1.
func (s *standIns) of(rank int) int {
	if rank < 0 {
		return -1
	}
	for _, find := range []func() (int, bool){
		func() (int, bool) { i, ok := s.ranks[rank]; return i, ok },
		func() (int, bool) { i, ok := s.classes[s.t.Class[rank]]; return i, ok },
		func() (int, bool) { i, ok := s.codes[s.program.Ranks[rank].Code]; return i, ok },
	} {
		if i, ok := find(); ok {
			return i
		}
	}
	return -1
}

// path adds the critical path to the page.
func (p *page) path(causes *sim.Causes, s *standIns) pagePath {
	var ranks []int16
	var pcs []int32
	var begins, ends []float64
	for _, x := range causes.Path() {
		ranks, pcs = append(ranks, int16(s.of(x.Rank))), append(pcs, int32(x.PC))
		begins, ends = append(begins, float64(x.Begin)), append(ends, float64(x.End))
	}
	return pagePath{addColumn(p, "i16", ranks), addColumn(p, "i32", pcs), addColumn(p, "f64", begins), addColumn(p, "f64", ends)}
}

// causes adds to the page, for each instruction, the instruction that it waited for, unless that is its
// predecessor on the same stream.
func (p *page) causes(x *pageRank, causes *sim.Causes, s *standIns) {
	instrs := s.program.Codes[s.program.Ranks[x.Rank].Code].Sections[s.t.Section]
	var of, pcs, ranks []int32
	var at []int16
	for pc, span := range s.t.Rank(x.Rank).Spans {
		if span.End <= span.Begin {
			continue
		}
		c := causes.Of(sim.Site{Rank: x.Rank, PC: pc})
		if c == sim.Nowhere || c.Rank == x.Rank && instrs[c.PC].Stream == instrs[pc].Stream {
			continue
		}
		of, at = append(of, int32(pc)), append(at, int16(s.of(c.Rank)))
		pcs, ranks = append(pcs, int32(c.PC)), append(ranks, int32(c.Rank))
	}
	x.Cause = pageCauses{addColumn(p, "i32", of), addColumn(p, "i16", at), addColumn(p, "i32", pcs), addColumn(p, "i32", ranks)}
}
