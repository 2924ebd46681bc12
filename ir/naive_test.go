package ir_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// This file compares the verifier with a slow and simple one, which stores order as a relation between
// instructions and checks lifetimes byte by byte.

// naiveRaces reports whether a section has two conflicting accesses that are not ordered.
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

// cell is the record of a byte: 1 + the buffer that owns it, and 1 + the number of the operand that wrote it.
type cell struct{ owner, writer uint32 }

// memory holds the cells of both arenas, and the numbers of the operands whose values have been read.
type memory struct {
	bytes [ir.NumArenas][]cell
	read  map[uint32]bool
}

func newMemory(c *ir.Code, read map[uint32]bool) (m memory) {
	for a, peak := range c.Arenas {
		m.bytes[a] = make([]cell, peak)
	}
	m.read = read
	return m
}

func (m memory) cells(c *ir.Code, v ir.View) []cell {
	b := c.Buffers[v.Buffer]
	return m.bytes[b.Arena][b.Offset+v.Offset:][:v.Bytes()]
}

func (m memory) holds(c *ir.Code, v ir.View) bool {
	held := true
	for _, x := range m.cells(c, v) {
		held = held && x.owner == v.Buffer+1
		m.read[x.writer] = true
	}
	return held
}

func (m memory) put(c *ir.Code, v ir.View, writer uint32) {
	for i := range m.cells(c, v) {
		m.cells(c, v)[i] = cell{v.Buffer + 1, writer}
	}
}

// operandNumber numbers the operands of a code, from 1.
func operandNumber(s ir.Section, i, j int) uint32 { return 1 + uint32(s) + 4*uint32(i*16+j) }

// run executes a section and reports whether every read found the bytes of its buffer.
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
				m.put(c, v, operandNumber(s, i, j))
			}
		}
	}
	return good
}

// naiveLives runs the init section and then three steps or evaluations, in every possible combination. It
// notes which operands are read, and reports whether every read found the bytes of its buffer.
func naiveLives(c *ir.Code, read map[uint32]bool) bool {
	states := func(m memory) bool {
		good := true
		for _, s := range c.States {
			good = m.holds(c, s.View) && good
		}
		return good
	}
	steps := func(m memory) bool {
		m.put(c, c.Results[1].View, 0)
		return m.run(c, ir.SectionStep) && m.holds(c, c.Results[0].View) && states(m)
	}
	evals := func(m memory) bool { return m.run(c, ir.SectionEval) }
	for order := range 8 {
		m := newMemory(c, read)
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

// naiveUnread reports whether any operand is written but never read. It skips communication, which depends on
// other codes.
func naiveUnread(c *ir.Code, read map[uint32]bool) bool {
	for s := range ir.NumSections {
		for i := range c.Sections[s] {
			in := &c.Sections[s][i]
			if in.Info().Class == ir.ClassComm {
				continue
			}
			results, useful := 0, 0
			for j := range in.Args {
				if _, writes := in.Access(j); !writes {
					continue
				}
				results++
				if read[operandNumber(s, i, j)] {
					useful++
				} else if !in.Info().Operands[j].Spare {
					return true
				}
			}
			if results > 0 && useful == 0 {
				return true
			}
		}
	}
	return false
}

// changesInPlace reports whether operand j is both read and written.
func changesInPlace(in *ir.Instr, j int) bool {
	reads, writes := false, false
	for k := range in.Args {
		if r, w := in.Access(k); in.Args[k] == in.Args[j] {
			reads, writes = reads || r, writes || w
		}
	}
	return reads && writes
}

// value is the history of a byte of a buffer within a section.
type value struct{ written, read, stale, replaced bool }

// naiveValues reports whether every buffer represents one value in a section without reloads. Values of states,
// and those that the section reads before it writes them, come from before the section.
func naiveValues(c *ir.Code, s ir.Section) bool {
	type place struct {
		buffer uint32
		at     ir.Bytes
	}
	values, ended := map[place]value{}, map[uint32]bool{}
	found := map[place]bool{}
	each := func(v ir.View, f func(place)) {
		for at := v.Offset; at < v.Offset+v.Bytes(); at++ {
			f(place{v.Buffer, at})
		}
	}
	if s != ir.SectionInit {
		for _, state := range c.States {
			each(state.View, func(p place) { found[p] = true })
		}
	}
	if s == ir.SectionStep {
		each(c.Results[1].View, func(p place) { values[p] = value{written: true} })
	}
	good := true
	for i := range c.Sections[s] {
		in := &c.Sections[s][i]
		for j, v := range in.Args {
			if reads, _ := in.Access(j); reads {
				each(v, func(p place) {
					x := values[p]
					found[p] = found[p] || !x.written
					if !changesInPlace(in, j) {
						good = good && !x.stale
						x.read = true
					}
					values[p] = x
				})
			}
		}
		for j, v := range in.Args {
			if _, writes := in.Access(j); !writes {
				continue
			}
			change := changesInPlace(in, j)
			good = good && (change || !ended[v.Buffer])
			each(v, func(p place) {
				x := values[p]
				switch {
				case change && x.written:
					good = good && !x.read && !x.replaced
				case !change && x.written:
					good = false
				default:
					x.stale, x.replaced = x.read, !change && found[p]
				}
				x.written, x.read = true, false
				values[p] = x
			})
			for p := range values {
				b, d := &c.Buffers[p.buffer], &c.Buffers[v.Buffer]
				under := b.Arena == d.Arena && b.Offset+p.at >= d.Offset+v.Offset && b.Offset+p.at < d.Offset+v.Offset+v.Bytes()
				if p.buffer != v.Buffer && under {
					ended[p.buffer] = true
				}
			}
		}
	}
	return good
}

func TestVerifierAgreesWithANaiveOne(t *testing.T) {
	verdicts := map[string]int{}
	for seed := uint64(0); seed < 600 || seed < 6000 && len(verdicts) < 6; seed++ { // some kinds are rare
		r := rand.New(rand.NewPCG(seed, 3))
		p := irtest.Random(seed%40, 40+r.IntN(60))
		c := &p.Codes[r.IntN(len(p.Codes))]
		s := ir.Section(r.IntN(int(ir.NumSections)))
		if len(c.Sections[s]) == 0 {
			continue
		}
		// Removing or repeating an instruction other than a record may break order or lifetimes. It may also
		// break messages, which are not compared.
		i := r.IntN(len(c.Sections[s]))
		twice := r.IntN(3) == 0 // repeat it instead
		if !twice && r.IntN(2) == 0 {
			for i+1 < len(c.Sections[s]) && c.Sections[s][i].Op != ir.Wait {
				i++
			}
		}
		if c.Sections[s][i].Op == ir.Record {
			continue
		}
		lost := p.Text(c, &c.Sections[s][i])
		if c.Sections[s] = slices.Clone(c.Sections[s]); twice {
			if c.Sections[s][i].Info().Class == ir.ClassComm {
				continue
			}
			c.Sections[s] = slices.Insert(c.Sections[s], i, c.Sections[s][i])
		} else {
			c.Sections[s] = slices.Delete(c.Sections[s], i, i+1)
		}
		var found *ir.VerifyError
		if err := (ir.VerifyOptions{AllowUnread: true}).Verify(p); !errors.As(err, &found) {
			found = &ir.VerifyError{}
		}
		if found.More > 0 {
			continue
		}
		races := naiveRaces(c, ir.SectionInit) || naiveRaces(c, ir.SectionStep) || naiveRaces(c, ir.SectionEval)
		if found.Has(ir.FindRace) != races {
			t.Fatalf("seed %d, without %s %d %s: races %v: %v", seed, s, i, lost, races, found)
		}
		read := map[uint32]bool{}
		lives := naiveLives(c, read)
		if found.Has(ir.FindUninitialised) == lives {
			t.Fatalf("seed %d, without %s %d %s: lives %v: %v", seed, s, i, lost, lives, found)
		}
		values := naiveValues(c, ir.SectionInit) && naiveValues(c, ir.SectionStep) && naiveValues(c, ir.SectionEval)
		if lives && found.Has(ir.FindLife) == values {
			t.Fatalf("seed %d, %s %d %s: values %v: %v", seed, s, i, lost, values, found)
		}
		if len(found.Findings) == 0 {
			strict := ir.Verify(p)
			errors.As(strict, &found)
			unread := slices.ContainsFunc(found.Findings, func(f ir.Finding) bool { return f.At.Code == c.Name && f.Kind == ir.FindDead && !isComm(c, &f) })
			if found.More == 0 && unread != naiveUnread(c, read) {
				t.Fatalf("seed %d, %s %d %s: unread %v: %v", seed, s, i, lost, !unread, found)
			}
			verdicts["unread "+strconv.FormatBool(unread)]++
		}
		verdicts[fmt.Sprintf("races %v, lives %v, values %v", races, lives, values)]++
	}
	t.Logf("%v", verdicts)
	if len(verdicts) < 6 {
		t.Errorf("too few kinds of programs: %v", verdicts)
	}
}

// isComm reports whether a finding is about communication.
func isComm(c *ir.Code, f *ir.Finding) bool {
	return c.Sections[f.At.Section][f.At.Index].Info().Class == ir.ClassComm
}
