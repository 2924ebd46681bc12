package ir

import (
	"math/rand/v2"
	"testing"
)

// A shadow gives every byte the same state as a plain array of states that undergoes the same changes.
func TestShadowIsAnArrayOfStates(t *testing.T) {
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 1))
		size := 1 + r.IntN(3000)
		s := newShadow(Bytes(size))
		plain := make([]state, size)
		for i := range plain {
			plain[i].buffer = NoBuffer
		}
		for step := range uint32(1500) {
			lo := r.IntN(size)
			hi := lo + 1 + r.IntN(min(size-lo, 1+r.IntN(200)))
			if r.IntN(3) == 0 {
				st := state{buffer: uint32(r.IntN(9)), writer: access{Stream(r.IntN(3)), 0, 1 + step}}
				s.replace(Bytes(lo), Bytes(hi), st)
				for i := lo; i < hi; i++ {
					plain[i] = st
				}
				continue
			}
			stream := r.IntN(3)
			at := lo
			s.visit(Bytes(lo), Bytes(hi), func(from, to Bytes, st *state) {
				if int(from) != at || to <= from || int(to) > hi {
					t.Fatalf("seed %d: visits %d to %d where %d is next of %d to %d", seed, from, to, at, lo, hi)
				}
				for ; at < int(to); at++ {
					if plain[at] != *st {
						t.Fatalf("seed %d: byte %d is %v, not %v", seed, at, *st, plain[at])
					}
				}
				st.reads[stream] = step
			})
			if at != hi {
				t.Fatalf("seed %d: visits end at %d of %d", seed, at, hi)
			}
			for i := lo; i < hi; i++ {
				plain[i].reads[stream] = step
			}
		}
		checkWritten(t, s, plain)
	}
}

func checkWritten(t *testing.T, s *shadow, plain []state) {
	t.Helper()
	owner := make([]uint32, len(plain))
	for i := range owner {
		owner[i] = NoBuffer
	}
	end := Bytes(0)
	for _, w := range s.written() {
		if w.lo < end || w.hi <= w.lo {
			t.Fatalf("range %d to %d after %d", w.lo, w.hi, end)
		}
		end = w.hi
		for i := w.lo; i < w.hi; i++ {
			owner[i] = w.buffer
		}
	}
	for i := range plain {
		want := plain[i].buffer
		if plain[i].writer.number == 0 {
			want = NoBuffer
		}
		if owner[i] != want {
			t.Fatalf("byte %d is left to %d, not %d", i, owner[i], want)
		}
	}
}
