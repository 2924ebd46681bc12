package ir_test

import (
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// TestAttentionWork compares the work of attention with the work found by counting, one by one, the
// visible pairs and the keys that at least one query sees.
func TestAttentionWork(t *testing.T) {
	seed := irtest.Seed(t)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 600 {
		n, prefix, batch, heads, dim := 1+r.Int64N(20), r.Int64N(20), 1+r.Int64N(3), 1+r.Int64N(3), 1+r.Int64N(4)
		keys, window, on := 1+r.Int64N(prefix+n), r.Int64N(prefix+n+5), r.IntN(2) == 0
		pairs, seen, unseeing := int64(0), map[int64]bool{}, false
		for q := range n {
			before := pairs
			for k := range min(keys, prefix+q+1) {
				if window == 0 || k > prefix+q-window {
					pairs++
					seen[k] = true
				}
			}
			unseeing = unseeing || pairs == before
		}
		in := attentionInstr(n, prefix, keys, batch, heads, dim)
		in.Attrs[5], in.Attrs[7] = ir.Bool(on), ir.Int(window)
		if err := in.CheckShapes(); (err == nil) != (pairs > 0 && (on || !unseeing)) {
			t.Fatalf("seed %d: %d queries after %d of %d keys, window %d, goes on: %v: %v", seed, n, prefix, keys, window, on, err)
		} else if err != nil {
			continue
		}
		w := in.Work()
		if want := ir.Flops(4 * pairs * batch * heads * dim); w.Flops != want {
			t.Fatalf("seed %d: %d queries after %d of %d keys, window %d: %v operations, want %v", seed, n, prefix, keys, window, w.Flops, want)
		}
		results := n*dim + n
		if on {
			results *= 2
		}
		unread := int64(0) // keys that no query sees
		for k := range min(keys, prefix+n) {
			if !seen[k] {
				unread++
			}
		}
		if want := 4 * ir.Bytes(batch*heads) * ir.Bytes(results+n*dim+2*(keys-unread)*dim); w.Bytes != want {
			t.Fatalf("seed %d: %v bytes, want %v", seed, w.Bytes, want)
		}
		checkParts(t, &in, n, prefix, keys, window)
		if in = attentionInstr(n, prefix, prefix+n+1, batch, heads, dim); in.CheckShapes() == nil {
			t.Fatalf("seed %d: keys after the last query are accepted", seed)
		}
	}
}

func attentionInstr(n, prefix, keys, batch, heads, dim int64) ir.Instr {
	shape := func(tokens int64) ir.View {
		return ir.View{Shape: [ir.MaxDims]int64{tokens * batch, heads * dim}}
	}
	in := ir.Instr{Op: ir.Attention, Args: []ir.View{shape(n), {Shape: [ir.MaxDims]int64{n * batch, heads}}, shape(n), shape(keys), shape(keys), ir.Absent()},
		Attrs: []ir.Attr{ir.Int(heads), ir.Int(heads), ir.Int(dim), ir.Int(batch), ir.Int(prefix)}}
	for len(in.Attrs) < len(ir.Ops[ir.Attention].Attrs) {
		in.Attrs = append(in.Attrs, ir.Int(0))
	}
	return in
}

// checkParts requires that the parts of an instruction together have exactly its query-key pairs, and that
// every query of a part sees a key.
func checkParts(t *testing.T, in *ir.Instr, n, prefix, keys, window int64) {
	t.Helper()
	type pair struct{ query, key int64 }
	got := map[pair]bool{}
	for _, p := range in.AttentionParts(nil) {
		for r := range p.Queries {
			first, end := max(0, p.Prefix+r-p.Window+1), min(p.Keys, p.Prefix+r+1)
			for k := first; k < end; k++ {
				got[pair{p.Query + r, k}] = true
			}
			if first >= end {
				t.Fatalf("%+v: query %d sees no key", p, r)
			}
		}
	}
	for q := range n {
		for k := range keys {
			if sees := k <= prefix+q && (window == 0 || k > prefix+q-window); sees != got[pair{q, k}] {
				t.Fatalf("%d queries after %d of %d keys, window %d: query %d sees key %d: %v", n, prefix, keys, window, q, k, !sees)
			}
		}
	}
}

// TestRingWork checks that, when each member of a ring has gathered all keys, the members together do the work
// of one instruction with all queries.
func TestRingWork(t *testing.T) {
	for _, window := range []int64{0, 1, 3, 8, 40} {
		whole := attentionInstr(24, 5, 29, 1, 2, 4)
		part := attentionInstr(8, 5, 29, 1, 2, 4)
		whole.Attrs[7], part.Attrs[7], part.Attrs[8] = ir.Int(window), ir.Int(window), ir.Int(6)
		pairs := int64(0)
		for member := range int64(3) {
			part.Attrs[9] = ir.Int(member)
			if err := part.CheckShapes(); err != nil {
				t.Fatal(err)
			}
			for _, p := range part.AttentionParts(nil) {
				for r := range p.Queries {
					pairs += min(p.Keys, p.Prefix+r+1) - max(0, p.Prefix+r-p.Window+1)
				}
			}
		}
		if got, want := 3*part.Work().Flops, whole.Work().Flops; got != want || ir.Flops(4*pairs*8) != want {
			t.Errorf("window %d: members have %v operations in all, their parts %v, the whole %v", window, got, 4*pairs*8, want)
		}
	}
}
