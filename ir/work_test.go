package ir_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"sppo.dev/ir"
)

// TestAttentionWork counts the pairs that see each other one by one.
func TestAttentionWork(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 1))
	for range 300 {
		n, prefix, batch, heads, dim := 1+r.Int64N(20), r.Int64N(20), 1+r.Int64N(3), 1+r.Int64N(3), 1+r.Int64N(4)
		keys := 1 + r.Int64N(prefix+n)
		pairs := int64(0)
		for q := range n {
			pairs += min(keys, prefix+q+1)
		}
		shape := func(tokens int64) ir.View {
			return ir.View{Shape: [ir.MaxDims]int64{tokens * batch, heads * dim}}
		}
		in := ir.Instr{Op: ir.Attention, Args: []ir.View{shape(n), {Shape: [ir.MaxDims]int64{n * batch, heads}}, shape(n), shape(keys), shape(keys)},
			Attrs: []ir.Attr{ir.Int(heads), ir.Int(heads), ir.Int(dim), ir.Int(batch), ir.Int(prefix), ir.Bool(false), ir.Int(0)}}
		if err := in.CheckShapes(); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		w := in.Work()
		if want := ir.Flops(4 * pairs * batch * heads * dim); w.Flops != want {
			t.Fatalf("seed %d: %d queries after %d of %d keys: %v operations, want %v", seed, n, prefix, keys, w.Flops, want)
		}
		if want := 4 * ir.Bytes(batch*heads) * ir.Bytes(2*n*dim+n+2*keys*dim); w.Bytes != want {
			t.Fatalf("seed %d: %v bytes, want %v", seed, w.Bytes, want)
		}
		in.Args[3], in.Args[4] = shape(prefix+n+1), shape(prefix+n+1)
		if err := in.CheckShapes(); err == nil {
			t.Fatalf("seed %d: keys behind the last query are accepted", seed)
		}
	}
}
