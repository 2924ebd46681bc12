package probe

import (
	"fmt"

	"sppo.dev/ir"
)

// Matmul returns a product c[m,n] = a[m,k] b[k,n], all of one type. Its operands are in a cache. The cost model
// uses the bandwidth to derive the time to read operands from memory, so the efficiency reflects the shape
// only.
func Matmul(m, n, k int64, t ir.DType) Item {
	return Item{
		Name: fmt.Sprintf("matmul %s [%d,%d] x [%d,%d]", t, m, k, k, n), Op: ir.Matmul,
		Args: []Arg{{Type: t, Shape: []int64{m, n}, Fresh: true}, {Type: t, Shape: []int64{m, k}, Fresh: true}, {Type: t, Shape: []int64{k, n}, Fresh: true}, {}},
	}
}

// Heads is the shape of attention without the number of tokens.
type Heads struct {
	Heads, KVHeads, Dim int64
}

func (h Heads) attrs(prefix int64) map[string]float64 {
	return map[string]float64{"heads": float64(h.Heads), "kv_heads": float64(h.KVHeads), "head_dim": float64(h.Dim), "batch": 1, "prefix": float64(prefix)}
}

// Attention returns the forward pass of n tokens after a prefix, on operands in a cache, like those of Matmul.
func Attention(n, prefix int64, h Heads, t ir.DType) Item {
	q := Arg{Type: t, Shape: []int64{n, h.Heads * h.Dim}, Fresh: true}
	kv := Arg{Type: t, Shape: []int64{prefix + n, h.KVHeads * h.Dim}, Fresh: true}
	return Item{
		Name: fmt.Sprintf("attention %s, %d tokens after %d, %d heads of %d", t, n, prefix, h.Heads, h.Dim), Op: ir.Attention,
		Args:  []Arg{q, {Type: ir.F32, Shape: []int64{n, h.Heads}, Fresh: true}, q, kv, kv},
		Attrs: h.attrs(prefix),
	}
}

// AttentionGrad returns the backward pass of Attention.
func AttentionGrad(n, prefix int64, h Heads, t ir.DType) Item {
	q := Arg{Type: t, Shape: []int64{n, h.Heads * h.Dim}, Fresh: true}
	kv := Arg{Type: t, Shape: []int64{prefix + n, h.KVHeads * h.Dim}, Fresh: true}
	sum, lse := Arg{Type: ir.F32, Shape: kv.Shape, Fresh: true}, Arg{Type: ir.F32, Shape: []int64{n, h.Heads}, Value: 8, Fresh: true}
	return Item{
		Name: fmt.Sprintf("attention_grad %s, %d tokens after %d, %d heads of %d", t, n, prefix, h.Heads, h.Dim), Op: ir.AttentionGrad,
		Args:  []Arg{q, sum, sum, q, q, kv, kv, q, lse},
		Attrs: h.attrs(prefix),
	}
}

// Layers returns the forward and then the backward pass of n tokens through a stack of GPT layers. A kernel reads
// results that other kernels, possibly on other processors, have just written, as well as values kept since the
// forward pass and weights that have not been used recently. The inner size is that of the products in the scale.
func Layers(depth int, n int64, s Scale) Item {
	var items []Item
	stack := make([]layer, depth)
	for i := range stack {
		stack[i] = layer{scale: s, tokens: n, index: i}
		items = append(items, stack[i].forward()...)
	}
	for i := range stack {
		items = append(items, stack[depth-1-i].backward()...)
	}
	first := items[0]
	first.Name = fmt.Sprintf("%d layers forward and backward, %s, %d tokens", depth, s.DType, n)
	first.Then = items[1:]
	return first
}

// layer is one layer of a stack whose items are being listed. Values with the same key share a buffer.
type layer struct {
	scale  Scale
	tokens int64
	index  int
	items  []Item
}

// kept holds the values that the forward pass keeps for the backward pass, mainly the inputs of each product
// and each non-linear kernel.
type kept struct {
	x, a, queries, keys, values, o, lse Arg // x is the layer's input, o the output of attention
	m, b, h, g                          Arg // m is the input of the MLP half, h and g the input and output of gelu
}

func (l *layer) kept() kept {
	s := l.scale
	q, kv, wide := s.Heads.Heads*s.Heads.Dim, s.Heads.KVHeads*s.Heads.Dim, 4*s.Inner
	return kept{
		x: l.border("x", l.index), a: l.value("a", s.Inner), queries: l.value("q", q), keys: l.value("k", kv), values: l.value("v", kv),
		o: l.value("o", q), lse: l.operand("lse", ir.F32, l.tokens, s.Heads.Heads),
		m: l.value("m", s.Inner), b: l.value("b", s.Inner), h: l.value("h", wide), g: l.value("g", wide),
	}
}

// forward lists the items from this layer's x to the next layer's x.
func (l *layer) forward() []Item {
	l.items = nil
	k, s := l.kept(), l.scale
	p := l.shared("p", s.Inner)
	l.norm("a", k.a, k.x)
	l.linear("wq", k.queries, k.a, true)
	l.rope(k.queries, false)
	l.linear("wk", k.keys, k.a, true)
	l.rope(k.keys, false)
	l.linear("wv", k.values, k.a, true)
	l.do(ir.Attention, s.Heads.attrs(0), k.o, k.lse, k.queries, k.keys, k.values)
	l.linear("wo", p, k.o, false)
	l.do(ir.Add, nil, k.m, k.x, p, l.vector("bias of wo", s.Inner))
	l.norm("b", k.b, k.m)
	l.linear("up", k.h, k.b, true)
	l.do(ir.Activation, nil, k.g, k.h)
	l.linear("down", p, k.g, false)
	l.do(ir.Add, nil, l.border("x", l.index+1), k.m, p, l.vector("bias of down", s.Inner))
	return l.items
}

// backward lists the items from the next layer's dx to this layer's dx.
func (l *layer) backward() []Item {
	l.items = nil
	k, s := l.kept(), l.scale
	like := func(key string, a Arg) Arg { return l.shared(key, a.Shape[1]) }
	dx, dy := l.border("dx", l.index), l.border("dx", l.index+1)
	da, dq, dk, dv, do := like("da", k.a), like("dq", k.queries), like("dk", k.keys), like("dv", k.values), like("do", k.o)
	dm, db, dh, dg := like("dm", k.m), like("db", k.b), like("dh", k.h), like("dg", k.g)
	sumK, sumV := dk, dv
	if s.DType != ir.F32 {
		sumK, sumV = l.operand("sum k", ir.F32, dk.Shape...), l.operand("sum v", ir.F32, dv.Shape...)
	}
	l.linearGrad("down", dg, dy, k.g, false)
	l.do(ir.ActivationGrad, nil, dh, dg, k.h)
	l.linearGrad("up", db, dh, k.b, false)
	l.normGrad("b", dm, db, k.m, dy)
	l.linearGrad("wo", do, dm, k.o, false)
	l.do(ir.AttentionGrad, s.Heads.attrs(0), dq, sumK, sumV, do, k.queries, k.keys, k.values, k.o, k.lse)
	if s.DType != ir.F32 {
		l.do(ir.Cast, nil, dk, sumK)
		l.do(ir.Cast, nil, dv, sumV)
	}
	l.linearGrad("wv", da, dv, k.a, false)
	l.rope(dk, true)
	l.linearGrad("wk", da, dk, k.a, true)
	l.rope(dq, true)
	l.linearGrad("wq", da, dq, k.a, true)
	l.normGrad("a", dx, da, k.x, dm)
	return l.items
}

func (l *layer) do(op ir.Op, attrs map[string]float64, args ...Arg) {
	l.items = append(l.items, Item{Op: op, Args: args, Attrs: attrs})
}

// operand returns an operand that only this layer uses.
func (l *layer) operand(key string, t ir.DType, shape ...int64) Arg {
	return Arg{Type: t, Shape: shape, Key: fmt.Sprint(key, " of ", l.index), Fresh: true}
}

// value returns a value that the forward pass keeps for the backward pass.
func (l *layer) value(key string, cols int64) Arg {
	return l.operand(key, l.scale.DType, l.tokens, cols)
}

// shared returns a value that no layer keeps, so all layers share its buffer.
func (l *layer) shared(key string, cols int64) Arg {
	return Arg{Type: l.scale.DType, Shape: []int64{l.tokens, cols}, Key: key, Fresh: true}
}

// border returns the value passed between the layer at the given index and the layer before it.
func (l *layer) border(key string, index int) Arg {
	return l.shared(fmt.Sprint(key, " before ", index), l.scale.Inner)
}

// weight returns a weight with small values, so that results stay bounded.
func (l *layer) weight(key string, rows, cols int64) Arg {
	a := l.operand(key, l.scale.DType, rows, cols)
	a.Value = 0.02
	return a
}

func (l *layer) vector(key string, cols int64) Arg {
	a := l.operand(key, l.scale.DType, cols)
	a.Value = 0.02
	return a
}

func (l *layer) sum(key string, shape ...int64) Arg {
	return l.operand("gradient of "+key, ir.F32, shape...)
}

// linear computes y = x w, plus a bias if bias is set; otherwise a later sum adds the bias.
func (l *layer) linear(w string, y, x Arg, bias bool) {
	in, out := x.Shape[1], y.Shape[1]
	add := Arg{}
	if bias {
		add = l.vector("bias of "+w, out)
	}
	l.do(ir.Matmul, nil, y, x, l.weight(w, in, out), add)
}

// linearGrad computes dx from dy, and the gradients of the weight and the bias.
func (l *layer) linearGrad(w string, dx, dy, x Arg, accumulate bool) {
	in, out := x.Shape[1], dy.Shape[1]
	attrs := map[string]float64{"trans_b": 1}
	if accumulate {
		attrs["accumulate"] = 1
	}
	l.do(ir.Matmul, attrs, dx, dy, l.weight(w, in, out), Arg{})
	l.do(ir.Matmul, map[string]float64{"trans_a": 1, "accumulate": 1}, l.sum(w, in, out), x, dy, Arg{})
	l.do(ir.BiasGrad, map[string]float64{"accumulate": 1}, l.sum("bias of "+w, out), dy)
}

// norm computes y from x, with the gamma and beta of the given name.
func (l *layer) norm(name string, y, x Arg) {
	l.do(ir.LayerNorm, map[string]float64{"eps": 1e-5}, y, l.operand("stats of "+name, ir.F32, l.tokens, 2), x,
		l.vector("gamma of "+name, x.Shape[1]), l.vector("beta of "+name, x.Shape[1]))
}

func (l *layer) normGrad(name string, dx, dy, x, residual Arg) {
	cols := x.Shape[1]
	l.do(ir.LayerNormGrad, map[string]float64{"accumulate": 1}, dx, l.sum("gamma of "+name, cols), l.sum("beta of "+name, cols), dy, x,
		l.operand("stats of "+name, ir.F32, l.tokens, 2), l.vector("gamma of "+name, cols), residual)
}

// rope works in place.
func (l *layer) rope(x Arg, inverse bool) {
	dim := l.scale.Heads.Dim
	attrs := map[string]float64{"heads": float64(x.Shape[1] / dim), "head_dim": float64(dim), "batch": 1, "theta": 10000}
	if inverse {
		attrs["inverse"] = 1
	}
	l.do(ir.Rope, attrs, x, x)
}

// MemoryBound returns kernels limited by memory bandwidth. Their operands have the given number of columns and
// about the given number of bytes. As in training, results of the previous kernel are in the cache; values
// saved for the backward pass, weights and moments are not.
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
		item(ir.Activation, nil, x, fresh),
		item(ir.ActivationGrad, nil, x, fresh, x),
		item(ir.GLU, map[string]float64{"function": float64(ir.Silu)}, x, fresh, fresh),
		item(ir.GLUGrad, map[string]float64{"function": float64(ir.Silu)}, x, x, fresh, x, x),
		item(ir.Add, nil, x, fresh, x, Arg{}),
		item(ir.RMSNorm, eps, x, stats, fresh, row),
		item(ir.RMSNormGrad, nil, x, sum, fresh, x, stats, row, x),
		item(ir.AdamW, adamw, wide, wide, positive, Arg{Type: ir.BF16, Shape: wide.Shape}, wide,
			Arg{Type: ir.F32, Shape: []int64{3}, Value: 1e-3}, Arg{Type: ir.F32, Shape: []int64{2}, Value: 1}),
	}
}

// Copy returns a copy of the given number of bytes: CopyD2D, CopyD2H or CopyH2D. The source of a copy to the
// host is fresh, because in training the copy directly follows the last kernel that reads it.
func Copy(op ir.Op, bytes int64) Item {
	y, x := Arg{Type: ir.U8, Shape: []int64{bytes}}, Arg{Type: ir.U8, Shape: []int64{bytes}, Fresh: op == ir.CopyD2H}
	return Item{Name: fmt.Sprintf("%s of %s", ir.Ops[op].Name, ir.Bytes(bytes)), Op: op, Args: []Arg{y, x}}
}

// Nothing returns a kernel with almost no work.
func Nothing() Item {
	return Item{Name: "a kernel on 8 elements", Op: ir.Fill, Args: []Arg{{Type: ir.F32, Shape: []int64{8}}}, Attrs: map[string]float64{"value": 1}}
}

// Message returns a message of the given size from the first rank to the second.
func Message(bytes int64) Item {
	return Item{Name: fmt.Sprintf("message of %s", ir.Bytes(bytes)), Op: ir.Send, Args: []Arg{{Type: ir.U8, Shape: []int64{bytes}}}}
}

// Gather returns an all_gather whose result has about the given number of bytes.
func Gather(bytes int64, ranks int) Item {
	whole, part := collective(bytes, ranks)
	return Item{Name: among(ir.AllGather, whole, ranks), Op: ir.AllGather, Args: []Arg{whole, part}}
}

// Scatter returns a reduce_scatter whose input on each rank has about the given number of bytes.
func Scatter(bytes int64, ranks int) Item {
	whole, part := collective(bytes, ranks)
	return Item{Name: among(ir.ReduceScatter, whole, ranks), Op: ir.ReduceScatter, Args: []Arg{part, whole}}
}

// Behind returns the kernel followed by a second item. In the repetitions, the two alternate, and each waits for
// the other to end.
func Behind(kernel, then Item) Item {
	kernel.Name = fmt.Sprintf("%s, and %s", kernel.Name, then.Name)
	kernel.Then = []Item{then}
	return kernel
}

func collective(bytes int64, ranks int) (whole, part Arg) {
	n := bytes / int64(ranks) / 4
	return Arg{Type: ir.F32, Shape: []int64{n * int64(ranks), 1}}, Arg{Type: ir.F32, Shape: []int64{n, 1}}
}

func among(op ir.Op, whole Arg, ranks int) string {
	return fmt.Sprintf("%s of %s among %d ranks", ir.Ops[op].Name, ir.Bytes(4*whole.Shape[0]), ranks)
}
