package graph

import (
	"fmt"
	"strconv"

	"sppo.dev/ir"
)

// Attention in a ring. Rank k of t holds, of every subsequence, chunks k and 2t-1-k of 2t, and K and V of these alone. What its
// own keys see is causal attention as ever, since its rows are in order. Then the keys of the other ranks come by, all that they
// have so far: after j turns those of rank k-j. All that a rank has of earlier subsequences is seen. Of this one, all queries see
// the first chunk of a rank before theirs, and none the second; of a rank behind, the queries of the second chunk see both, and the
// others none. Either way that is half of all pairs, so each turn is as much work for every rank, and one code serves all: what
// differs is a constant of the rank and the turn.
//
// In the backward pass gradients of keys go round behind them, one turn for each rank, so that they end at home. Each rank computes
// its part beside their way to it, and adds it when they have come.

// constTurn begins the name of a constant that says where the rank stands whose keys a turn brings.
const constTurn = "ring."

func turnConst(j int) string { return constTurn + strconv.Itoa(j) }

// zigzag is that constant for rank k.
func zigzag(turn string, k int) int64 {
	j, err := strconv.Atoi(turn)
	if err != nil {
		panic("internal: no turn " + turn)
	}
	if j <= k {
		return ir.ZigzagBefore
	}
	return ir.ZigzagBehind
}

// RingConsts are the constants that SPConst knows beside the others.
func (g *Model) RingConsts() (names []string) {
	if !g.ring() {
		return nil
	}
	names = append(names, ConstMember)
	for j := 1; j < g.SP; j++ {
		names = append(names, turnConst(j))
	}
	return names
}

// ring reports whether each rank has two chunks of a subsequence.
func (s Split) ring() bool { return s.Mode == ModeRing && s.SP > 1 }

// rotates reports whether K and V go round.
func (s Split) rotates() bool { return s.ring() && !s.Gathers }

// Groups are the names of the groups of ranks, in the order of the constants.
func (g *Model) Groups() []string {
	if g.Gathers {
		return append(GroupNames[:len(GroupNames):len(GroupNames)], "sp_back")
	}
	return GroupNames
}

// gatherChunks brings the rows of all ranks to a cache in the order of the sequence. The first chunks of the ranks make up the first
// half of the subsequence, and their second chunks the second half, from the last rank to the first.
func (b *builder) gatherChunks(cache, local int) {
	b.node(ir.AllGather, []Attr{group(GroupSP)}, Arg{Value: cache, Span: FrontHalf}, Arg{Value: local, Span: FrontHalf})
	b.node(ir.AllGather, []Attr{group(GroupBack)}, Arg{Value: cache, Span: BackHalf}, Arg{Value: local, Span: BackHalf})
}

// chunksGradient is that of half of such rows: every rank has a part of each row's, and they are added in f32.
func chunksGradient(b *builder, n Node) {
	x := n.Args[1]
	if _, ok := b.grads[x.Value]; !ok {
		v := b.Values[x.Value]
		b.grads[x.Value] = all(b.value(Value{Name: "d." + v.Name, Rows: v.Rows, Cols: v.Cols, DType: ir.F32}))
	}
	dx := b.grads[x.Value]
	dx.Span = x.Span
	b.node(ir.ReduceScatter, n.Attrs, dx, b.grad(n.Args[0]))
}

// Chunks is in how many chunks of zigzag order the tokens of a subsequence are; 0 where they are in order.
func (s Split) Chunks() int64 {
	if s.ring() {
		return 2 * int64(s.SP)
	}
	return 0
}

// Grid is what the tokens of each subsequence are a multiple of.
func (s Split) Grid() int64 { return max(int64(s.SP), s.Chunks()) }

// attentionRows are the rows that attention sees.
func (s Split) attentionRows() Rows {
	if s.ring() {
		return Local
	}
	return Full
}

// goRound visits a rank's own keys and values and then those of the others, which are under way one turn before their own.
func (b *builder) goRound(k, v Arg, name string, visit func(j int, k, v Arg)) {
	for j := range b.split.SP {
		nextK, nextV := k, v
		if j+1 < b.split.SP {
			nextK, nextV = b.rotate(k, fmt.Sprintf("k.%s%d", name, j+1)), b.rotate(v, fmt.Sprintf("v.%s%d", name, j+1))
		}
		visit(j, k, v)
		k, v = nextK, nextV
	}
}

// rotate makes what the rank before has of a value.
func (b *builder) rotate(x Arg, name string) Arg {
	y := all(b.value(Value{Name: name, Rows: SeenLocal, Cols: b.Values[x.Value].Cols, DType: b.Values[x.Value].DType}))
	b.node(ir.Rotate, []Attr{group(GroupSP)}, y, x)
	return y
}

// turnAttrs are those of attention, or of its gradient, to the keys of a turn.
func turnAttrs(attrs []Attr, j int, accumulate string) []Attr {
	attrs = append(attrs[:len(attrs):len(attrs)], from("prefix", FromLocalPrefix))
	if j > 0 {
		attrs = append(attrs, truth(accumulate), constant("zigzag", turnConst(j)))
	}
	return attrs
}

// ringAttention goes on with the softmax from turn to turn, in f32.
func (b *builder) ringAttention(attrs []Attr, o, lse, q, keys, values int) {
	sum := o
	if b.act != ir.F32 {
		v := b.Values[o]
		sum = b.value(Value{Name: "attn.sum", Rows: v.Rows, Cols: v.Cols, DType: ir.F32})
	}
	b.goRound(seen(keys), seen(values), "turn", func(j int, k, v Arg) {
		b.node(ir.Attention, turnAttrs(attrs, j, "accumulate"), all(sum), all(lse), all(q), k, v)
	})
	if sum != o {
		b.node(ir.Cast, nil, all(o), all(sum))
	}
}

// ringGradient is that of all turns at once, which the first stands for.
func ringGradient(b *builder, n Node) {
	if n.Attrs[attrIndex(n.Op, "zigzag")].Source == FromConst {
		return
	}
	sum, lse, q, k, v := n.Args[0], n.Args[1], n.Args[2], n.Args[3], n.Args[4]
	do, dq, keys, values := b.grad(sum), b.newGrad(q.Value), b.need(k.Value), b.need(v.Value)
	keys.Span, values.Span = k.Span, v.Span
	query, stats, o := b.need(q.Value), b.need(lse.Value), b.need(b.rounded(sum.Value))
	delta := b.value(Value{Name: "attn.delta", Rows: Local, Cols: b.Values[lse.Value].Cols, DType: ir.F32})
	b.node(ir.AttentionDelta, []Attr{n.Attrs[attrIndex(n.Op, "heads")], n.Attrs[attrIndex(n.Op, "head_dim")]}, all(delta), do, o)
	total := dq
	if b.act != ir.F32 {
		total = b.value(Value{Name: "d.q.sum", Rows: Local, Cols: b.Values[dq].Cols, DType: ir.F32})
	}
	own := b.cacheGrads(k.Value, v.Value)
	home := [2]Arg{seen(own[0]), seen(own[1])}
	travelling, parts, names := home, home, [2]string{"k", "v"}
	for i, name := range names { // the same place at every turn, or that of what is still under way might be taken
		parts[i] = all(b.value(Value{Name: "d." + name + ".part", Rows: SeenLocal, Cols: b.Values[own[i]].Cols, DType: ir.F32}))
	}
	sameForAll := append(n.Attrs[:attrIndex(n.Op, "prefix"):attrIndex(n.Op, "prefix")], n.Attrs[attrIndex(n.Op, "softcap")])
	b.goRound(keys, values, "back", func(j int, k, v Arg) {
		attrs, into := turnAttrs(sameForAll, j, "accumulate_q"), parts
		if j == 0 {
			attrs, into = append(attrs, from("accumulate", NotFirst)), home
		}
		for i := range travelling {
			if j > 0 {
				travelling[i] = b.rotate(travelling[i], fmt.Sprintf("d.%s.turn%d", names[i], j))
			}
		}
		b.node(ir.AttentionGrad, attrs, all(total), into[0], into[1], do, query, k, v, Arg{Value: Missing}, stats, all(delta))
		for i := range travelling {
			if j > 0 {
				b.node(ir.Add, nil, travelling[i], travelling[i], parts[i])
			}
		}
	})
	for i := range home {
		b.node(ir.Rotate, []Attr{group(GroupSP)}, home[i], travelling[i])
	}
	if total != dq {
		b.node(ir.Cast, nil, all(dq), all(total))
	}
	b.contribute(q.Value, all(dq))
}

// rounded is a sum in the type of activations: what a cast has made of it, or itself.
func (b *builder) rounded(v int) int {
	for _, n := range b.Forward {
		if n.Op == ir.Cast && n.Args[1].Value == v {
			return n.Args[0].Value
		}
	}
	return v
}
