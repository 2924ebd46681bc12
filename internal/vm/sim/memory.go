package sim

import (
	"cmp"
	"slices"

	"sppo.dev/ir"
)

// Level describes what an arena contains from a given time on.
type Level struct {
	At    ir.Seconds
	Parts ir.Parts // bytes of each use
}

// Bytes returns the bytes of all uses.
func (l *Level) Bytes() (all ir.Bytes) {
	for _, n := range l.Parts {
		all += n
	}
	return all
}

// change is the time at which a buffer's life begins or ends.
type change struct {
	at     ir.Seconds
	what   int // 1: it begins; -1: it ends
	buffer int
}

// Memory returns the bytes in use of an arena of rank r over time, by use. A buffer is in use from the start of the
// first instruction that touches it to the end of the last one. Buffers that other sections or checkpoints use are
// always in use. Each byte belongs to the buffer that began to use it last: an instruction may write its result over
// an operand, or over the part of a buffer that no later instruction reads. The timeline needs spans.
func (t *Timeline) Memory(r int, a ir.Arena) []Level {
	code := &t.program.Codes[t.program.Ranks[r].Code]
	var changes []change
	for b, l := range t.lives(code, t.Rank(r).Spans) {
		if code.Buffers[b].Arena == a && l.End > l.Begin {
			changes = append(changes, change{l.Begin, 1, b}, change{l.End, -1, b})
		}
	}
	slices.SortStableFunc(changes, func(x, y change) int { // at equal times, lives end first
		return cmp.Or(cmp.Compare(x.at, y.at), cmp.Compare(x.what, y.what))
	})
	parts := code.Parts()
	curve := []Level{{}}
	var held owned
	for _, c := range changes {
		last := &curve[len(curve)-1]
		if c.at > last.At {
			curve = append(curve, Level{c.at, last.Parts})
			last = &curve[len(curve)-1]
		}
		b := &code.Buffers[c.buffer]
		for _, s := range held.replace(ownedRange{b.Offset, b.Offset + b.Size, c.buffer}, c.what > 0) {
			last.Parts[parts[s.buffer]] -= s.to - s.from
		}
		if c.what > 0 {
			last.Parts[parts[c.buffer]] += b.Size
		}
	}
	return curve
}

// owned lists the ranges of bytes in use, by address. They do not overlap.
type owned []ownedRange

type ownedRange struct {
	from, to ir.Bytes
	buffer   int // the buffer to which the bytes belong
}

// replace gives the range r to its buffer or, if the buffer's life ends, frees those bytes of r that still belong to
// it. It returns the ranges that changed owner or became free.
func (o *owned) replace(r ownedRange, begins bool) (lost []ownedRange) {
	first, _ := slices.BinarySearchFunc(*o, r.from, func(x ownedRange, at ir.Bytes) int {
		if x.to <= at {
			return -1
		}
		return 1
	})
	var before, next []ownedRange // these replace the ranges from first to end
	if begins {
		next = append(next, r)
	}
	end := first
	for ; end < len(*o) && (*o)[end].from < r.to; end++ {
		x := (*o)[end]
		if !begins && x.buffer != r.buffer {
			next = append(next, x)
			continue
		}
		lost = append(lost, ownedRange{max(x.from, r.from), min(x.to, r.to), x.buffer})
		if x.from < r.from {
			before = append(before, ownedRange{x.from, r.from, x.buffer})
		}
		if r.to < x.to {
			next = append(next, ownedRange{r.to, x.to, x.buffer})
		}
	}
	*o = slices.Replace(*o, first, end, append(before, next...)...)
	return lost
}

// lives returns the lifetimes of the buffers of a code. If a buffer is never live, its end is before its start.
func (t *Timeline) lives(code *ir.Code, spans []Span) []Span {
	lives := make([]Span, len(code.Buffers))
	for b := range lives {
		lives[b] = Span{t.Makespan, -1}
	}
	whole := func(v ir.View) {
		if v.Present() {
			lives[v.Buffer] = Span{0, t.Makespan}
		}
	}
	for i := range code.States {
		if code.States[i].Role != ir.RoleGrad { // which exists only until the update
			whole(code.States[i].View)
		}
	}
	for i := range code.Results {
		if code.Results[i].Name != ir.ResultLosses { // this result exists only in validations
			whole(code.Results[i].View)
		}
	}
	for pc := range code.Sections[t.Section] {
		for _, v := range code.Sections[t.Section][pc].Args {
			if v.Present() {
				life := &lives[v.Buffer]
				life.Begin, life.End = min(life.Begin, spans[pc].Begin), max(life.End, spans[pc].End)
			}
		}
	}
	for s := range ir.NumSections {
		if s == t.Section {
			continue
		}
		for pc := range code.Sections[s] {
			for _, v := range code.Sections[s][pc].Args {
				if v.Present() && lives[v.Buffer].End >= 0 { // used in this section and in another: always live
					whole(v)
				}
			}
		}
	}
	return lives
}
