package ir_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"sppo.dev/ir"
	"sppo.dev/ir/irtest"
)

// The verifier against another that is slow and plain: order as a relation between instructions, lives byte by byte.

// naiveRaces says whether a section has two conflicting accesses that are not ordered.
func naiveRaces(c *ir.Code, s ir.Section) bool {
	instrs := c.Sections[s]
	before := make([][]bool, len(instrs))
	last := map[ir.Stream]int{}
	recorded := map[int64]int{}
	for i := range instrs {
		in := &instrs[i]
		before[i] = make([]bool, len(instrs))
		follow := func(p int) {
			before[i][p] = true
			for j, yes := range before[p] {
				before[i][j] = before[i][j] || yes
			}
		}
		if p, ok := last[in.Stream]; ok {
			follow(p)
		}
		last[in.Stream] = i
		switch in.Op {
		case ir.Record:
			recorded[in.Attrs[0].Int(nil)] = i
		case ir.Wait:
			follow(recorded[in.Attrs[0].Int(nil)])
		}
		for j := range i {
			if !before[i][j] && conflict(c, in, &instrs[j]) {
				return true
			}
		}
	}
	return false
}

func conflict(c *ir.Code, a, b *ir.Instr) bool {
	for i, v := range a.Args {
		for j, w := range b.Args {
			if !v.Present() || !w.Present() {
				continue
			}
			_, writesA := a.Access(i)
			_, writesB := b.Access(j)
			p, q := c.Buffers[v.Buffer], c.Buffers[w.Buffer]
			apart := p.Offset+v.Offset+v.Bytes() <= q.Offset+w.Offset || q.Offset+w.Offset+w.Bytes() <= p.Offset+v.Offset
			if p.Arena == q.Arena && !apart && (writesA || writesB) {
				return true
			}
		}
	}
	return false
}

// memory holds for each byte of both arenas 1 + the buffer whose life it is in.
type memory [ir.NumArenas][]uint32

func newMemory(c *ir.Code) (m memory) {
	for a, peak := range c.Arenas {
		m[a] = make([]uint32, peak)
	}
	return m
}

func (m memory) bytes(c *ir.Code, v ir.View) []uint32 {
	b := c.Buffers[v.Buffer]
	return m[b.Arena][b.Offset+v.Offset:][:v.Bytes()]
}

func (m memory) holds(c *ir.Code, v ir.View) bool {
	return !slices.ContainsFunc(m.bytes(c, v), func(owner uint32) bool { return owner != v.Buffer+1 })
}

func (m memory) put(c *ir.Code, v ir.View) {
	for i := range m.bytes(c, v) {
		m.bytes(c, v)[i] = v.Buffer + 1
	}
}

// run executes a section and says whether every read found its buffer.
func (m memory) run(c *ir.Code, s ir.Section) bool {
	good := true
	for i := range c.Sections[s] {
		in := &c.Sections[s][i]
		for j, v := range in.Args {
			if reads, _ := in.Access(j); reads && !m.holds(c, v) {
				good = false
			}
		}
		for j, v := range in.Args {
			if _, writes := in.Access(j); writes {
				m.put(c, v)
			}
		}
	}
	return good
}

// naiveLives runs init and then every order of a few steps and evaluations.
func naiveLives(c *ir.Code) bool {
	states := func(m memory) bool {
		return !slices.ContainsFunc(c.States, func(s ir.State) bool { return !m.holds(c, s.View) })
	}
	steps := func(m memory) bool {
		m.put(c, c.Results[1].View)
		return m.run(c, ir.SectionStep) && m.holds(c, c.Results[0].View) && states(m)
	}
	evals := func(m memory) bool { return m.run(c, ir.SectionEval) }
	for order := range 8 {
		m := newMemory(c)
		if !m.run(c, ir.SectionInit) || !states(m) {
			return false
		}
		for i := range 3 {
			next := steps
			if order>>i&1 == 1 {
				next = evals
			}
			if !next(m) {
				return false
			}
		}
	}
	return true
}

func TestVerifierAgreesWithANaiveOne(t *testing.T) {
	verdicts := map[[2]bool]int{}
	for seed := range uint64(1500) {
		r := rand.New(rand.NewPCG(seed, 2))
		p := irtest.Random(seed%40, 40+r.IntN(60))
		c := &p.Codes[r.IntN(len(p.Codes))]
		s := ir.Section(r.IntN(int(ir.NumSections)))
		if len(c.Sections[s]) == 0 {
			continue
		}
		// Losing an instruction other than a record may break order or lives, and messages, which are not compared.
		i := r.IntN(len(c.Sections[s]))
		if r.IntN(2) == 0 {
			for i+1 < len(c.Sections[s]) && c.Sections[s][i].Op != ir.Wait {
				i++
			}
		}
		if c.Sections[s][i].Op == ir.Record {
			continue
		}
		lost := p.Text(c, &c.Sections[s][i])
		c.Sections[s] = slices.Delete(slices.Clone(c.Sections[s]), i, i+1)
		var found *ir.VerifyError
		if err := ir.Verify(p); !errors.As(err, &found) {
			found = &ir.VerifyError{}
		}
		if found.More > 0 {
			continue
		}
		races := naiveRaces(c, ir.SectionInit) || naiveRaces(c, ir.SectionStep) || naiveRaces(c, ir.SectionEval)
		if found.Has(ir.FindRace) != races {
			t.Fatalf("seed %d, without %s %d %s: races %v: %v", seed, s, i, lost, races, found)
		}
		lives := naiveLives(c)
		if found.Has(ir.FindUninitialised) == lives {
			t.Fatalf("seed %d, without %s %d %s: lives %v: %v", seed, s, i, lost, lives, found)
		}
		verdicts[[2]bool{races, lives}]++
	}
	t.Logf("by races and lives: %v", verdicts)
	if len(verdicts) < 3 {
		t.Errorf("too few kinds of programs: %v", verdicts)
	}
}
