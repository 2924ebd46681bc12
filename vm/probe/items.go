package probe

import (
	"fmt"

	"sppo/ir"
)

// Matmul is a product c[m,n] = a[m,k] b[k,n], all of one type. Its operands lie in a cache: what reading them from memory takes, if
// that is longer than the arithmetic, the cost model knows from the bandwidth, and the efficiency is to say what the shape costs.
func Matmul(m, n, k int64, t ir.DType) Item {
	return Item{
		Name: fmt.Sprintf("matmul %s [%d,%d] x [%d,%d]", t, m, k, k, n), Op: ir.Matmul,
		Args: []Arg{{Type: t, Shape: []int64{m, n}, Fresh: true}, {Type: t, Shape: []int64{m, k}, Fresh: true}, {Type: t, Shape: []int64{k, n}, Fresh: true}, {}},
	}
}

// Heads is the shape of attention beside its tokens.
type Heads struct {
	Heads, KVHeads, Dim int64
}

func (h Heads) attrs(prefix int64) map[string]float64 {
	return map[string]float64{"heads": float64(h.Heads), "kv_heads": float64(h.KVHeads), "head_dim": float64(h.Dim), "batch": 1, "prefix": float64(prefix)}
}

// Attention is the forward of n tokens behind a prefix, on operands in a cache as those of products.
func Attention(n, prefix int64, h Heads, t ir.DType) Item {
	q := Arg{Type: t, Shape: []int64{n, h.Heads * h.Dim}, Fresh: true}
	kv := Arg{Type: t, Shape: []int64{prefix + n, h.KVHeads * h.Dim}, Fresh: true}
	return Item{
		Name: fmt.Sprintf("attention %s, %d tokens behind %d, %d heads of %d", t, n, prefix, h.Heads, h.Dim), Op: ir.Attention,
		Args:  []Arg{q, {Type: ir.F32, Shape: []int64{n, h.Heads}, Fresh: true}, q, kv, kv},
		Attrs: h.attrs(prefix),
	}
}

// AttentionGrad is its backward.
func AttentionGrad(n, prefix int64, h Heads, t ir.DType) Item {
	q := Arg{Type: t, Shape: []int64{n, h.Heads * h.Dim}, Fresh: true}
	kv := Arg{Type: t, Shape: []int64{prefix + n, h.KVHeads * h.Dim}, Fresh: true}
	sum, lse := Arg{Type: ir.F32, Shape: kv.Shape, Fresh: true}, Arg{Type: ir.F32, Shape: []int64{n, h.Heads}, Value: 8, Fresh: true}
	return Item{
		Name: fmt.Sprintf("attention_grad %s, %d tokens behind %d, %d heads of %d", t, n, prefix, h.Heads, h.Dim), Op: ir.AttentionGrad,
		Args:  []Arg{q, sum, sum, q, q, kv, kv, q, lse},
		Attrs: h.attrs(prefix),
	}
}

// Layer is what a layer does forward and backward of n tokens, as far as it is worth spreading over processors: each kernel reads
// what others have just written, on whichever processor that was. The inner size is that of the scale's products.
func Layer(n int64, s Scale) Item {
	t, inner, wide, q, kv := s.DType, s.Inner, 4*s.Inner, s.Heads.Heads*s.Heads.Dim, s.Heads.KVHeads*s.Heads.Dim
	operand := func(key string, t ir.DType, rows, cols int64) Arg {
		return Arg{Type: t, Shape: []int64{rows, cols}, Key: key, Fresh: true}
	}
	value := func(key string, cols int64) Arg { return operand(key, t, n, cols) }
	weight := func(key string, rows, cols int64) Arg {
		a := operand(key, t, rows, cols)
		a.Value = 0.02 // small, so that nothing grows beyond measure
		return a
	}
	gradient := func(key string, rows, cols int64) Arg { return operand(key, ir.F32, rows, cols) }
	product := func(c, a, b Arg, attrs ...string) Item {
		it := Item{Op: ir.Matmul, Args: []Arg{c, a, b, {}}, Attrs: map[string]float64{}}
		for _, name := range attrs {
			it.Attrs[name] = 1
		}
		return it
	}
	x, y, z := value("x", inner), value("y", inner), value("z", inner)
	queries, keys, values, o, lse := value("q", q), value("k", kv), value("v", kv), value("o", q), operand("lse", ir.F32, n, s.Heads.Heads)
	h, g := value("h", wide), value("g", wide)
	wq, wk, wv, wo := weight("wq", inner, q), weight("wk", inner, kv), weight("wv", inner, kv), weight("wo", q, inner)
	up, down := weight("up", inner, wide), weight("down", wide, inner)
	dy, dg, dh, do, dq := value("dy", inner), value("dg", wide), value("dh", wide), value("do", q), value("dq", q)
	it := product(queries, x, wq)
	it.Name = fmt.Sprintf("a layer's products and attention, %s, %d tokens", t, n)
	it.Then = []Item{
		product(keys, x, wk), product(values, x, wv),
		{Op: ir.Attention, Args: []Arg{o, lse, queries, keys, values}, Attrs: s.Heads.attrs(0)},
		product(y, o, wo), product(h, y, up),
		{Op: ir.Gelu, Args: []Arg{g, h}},
		product(z, g, down),
		product(gradient("ddown", wide, inner), g, z, "trans_a", "accumulate"), product(dg, z, down, "trans_b"),
		{Op: ir.GeluGrad, Args: []Arg{dh, dg, h}},
		product(gradient("dup", inner, wide), y, dh, "trans_a", "accumulate"), product(dy, dh, up, "trans_b"),
		product(gradient("dwo", q, inner), o, dy, "trans_a", "accumulate"), product(do, dy, wo, "trans_b"),
		{Op: ir.AttentionGrad, Attrs: s.Heads.attrs(0),
			Args: []Arg{dq, gradient("dk", n, kv), gradient("dv", n, kv), do, queries, keys, values, o, lse}},
		product(gradient("dwq", inner, q), x, dq, "trans_a", "accumulate"),
	}
	return it
}

// MemoryBound are kernels that are as fast as memory, on operands of about so many bytes with rows of so many columns. What comes
// from the kernel before is fresh; what forward has kept for backward, weights and their moments are not.
func MemoryBound(bytes, cols int64, t ir.DType) []Item {
	rows := max(bytes/int64(t.Bytes())/cols, 1)
	x := Arg{Type: t, Shape: []int64{rows, cols}}
	fresh := Arg{Type: t, Shape: x.Shape, Fresh: true}
	wide := Arg{Type: ir.F32, Shape: []int64{rows, cols}}
	row := Arg{Type: t, Shape: []int64{cols}}
	stats := Arg{Type: ir.F32, Shape: []int64{rows, 1}, Value: 1}
	sum := Arg{Type: ir.F32, Shape: []int64{cols}}
	positive := Arg{Type: ir.F32, Shape: wide.Shape, Value: 0.5}
	item := func(op ir.Op, attrs map[string]float64, args ...Arg) Item {
		return Item{Name: fmt.Sprintf("%s %s [%d,%d]", ir.Ops[op].Name, t, rows, cols), Op: op, Args: args, Attrs: attrs}
	}
	eps := map[string]float64{"eps": 1e-5}
	adamw := map[string]float64{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
	return []Item{
		item(ir.Gelu, nil, x, fresh),
		item(ir.GeluGrad, nil, x, fresh, x),
		item(ir.SwiGLU, nil, x, fresh, fresh),
		item(ir.SwiGLUGrad, nil, x, x, fresh, x, x),
		item(ir.Add, nil, x, fresh, x, Arg{}),
		item(ir.RMSNorm, eps, x, stats, fresh, row),
		item(ir.RMSNormGrad, nil, x, sum, fresh, x, stats, row, x),
		item(ir.AdamW, adamw, wide, wide, positive, Arg{Type: ir.BF16, Shape: wide.Shape}, wide,
			Arg{Type: ir.F32, Shape: []int64{3}, Value: 1e-3}, Arg{Type: ir.F32, Shape: []int64{2}, Value: 1}),
	}
}

// Copy is a copy of bytes: CopyD2D, CopyD2H or CopyH2D. What goes to the host goes behind its last reader.
func Copy(op ir.Op, bytes int64) Item {
	y, x := Arg{Type: ir.U8, Shape: []int64{bytes}}, Arg{Type: ir.U8, Shape: []int64{bytes}, Fresh: op == ir.CopyD2H}
	return Item{Name: fmt.Sprintf("%s of %s", ir.Ops[op].Name, ir.Bytes(bytes)), Op: op, Args: []Arg{y, x}}
}

// Nothing is a kernel with next to nothing to do.
func Nothing() Item {
	return Item{Name: "a kernel on 8 elements", Op: ir.Fill, Args: []Arg{{Type: ir.F32, Shape: []int64{8}}}, Attrs: map[string]float64{"value": 1}}
}

// Message is one from the first rank to the second.
func Message(bytes int64) Item {
	return Item{Name: fmt.Sprintf("message of %s", ir.Bytes(bytes)), Op: ir.Send, Args: []Arg{{Type: ir.U8, Shape: []int64{bytes}}}}
}

// Gather is an all_gather of so many bytes in all.
func Gather(bytes int64, ranks int) Item {
	whole, part := collective(bytes, ranks)
	return Item{Name: among(ir.AllGather, whole, ranks), Op: ir.AllGather, Args: []Arg{whole, part}}
}

// Scatter is a reduce_scatter of so many bytes in all.
func Scatter(bytes int64, ranks int) Item {
	whole, part := collective(bytes, ranks)
	return Item{Name: among(ir.ReduceScatter, whole, ranks), Op: ir.ReduceScatter, Args: []Arg{part, whole}}
}

func collective(bytes int64, ranks int) (whole, part Arg) {
	n := bytes / int64(ranks) / 4
	return Arg{Type: ir.F32, Shape: []int64{n * int64(ranks), 1}}, Arg{Type: ir.F32, Shape: []int64{n, 1}}
}

func among(op ir.Op, whole Arg, ranks int) string {
	return fmt.Sprintf("%s of %s among %d ranks", ir.Ops[op].Name, ir.Bytes(4*whole.Shape[0]), ranks)
}
