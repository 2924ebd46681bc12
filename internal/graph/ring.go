package graph

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/ir"
)

// Attention in a ring. Each subsequence has 2t chunks; member k of t holds chunks k and 2t-1-k, and K and V of only
// these chunks. A rank's attention over its own keys is plain causal attention, because its rows are in order. Then
// the keys of the other ranks arrive, including those of earlier subsequences: after j steps, the keys of rank k-j.
// All queries see all keys of earlier subsequences. Within the current subsequence, all queries see the first chunk
// of a lower rank, and no query sees its second chunk. Queries of a rank's second chunk see both chunks of a higher
// rank, and queries of its first chunk see neither. In both cases, half of all pairs are visible, so every rank has
// the same work in each step. All ranks run the same code, with a constant for each rank and step.
//
// In the backward pass, the gradients of keys follow the keys around the ring, one step later, so
// that they end up on the rank that owns the keys. Each rank computes its contribution while the
// gradients are in transit, and adds it when they arrive.

// constStep is the prefix of constants that specify, for each step, whether the arriving keys come from a lower or
// a higher rank.
const constStep = "ring."

func stepConst(j int) string { return constStep + strconv.Itoa(j) }

// ringConst returns the value of a constant that depends on the place of rank k on the ring.
func (s Split) ringConst(name string, k int) int64 {
	member := k / s.HeadRanks()
	switch name {
	case ConstMember:
		return int64(member)
	case ConstFirstOnRing:
		return truthValue(member == 0)
	case ConstBlock:
		return s.Block(k, 0) / 2
	}
	step, ok := strings.CutPrefix(name, constStep)
	if !ok {
		panic("internal: no constant " + name)
	}
	return zigzag(step, member)
}

// zigzag returns the constant of a step for member k.
func zigzag(step string, k int) int64 {
	j, err := strconv.Atoi(step)
	if err != nil {
		panic("internal: no step " + step)
	}
	if j <= k {
		return ir.ZigzagBefore
	}
	return ir.ZigzagBehind
}

// MemberConsts returns the constants needed in addition to SPConstNames: those of ranks that compute with different
// tokens, those of attention sinks, and those of MLPs that are narrower than the widest.
func (g *Model) MemberConsts() (names []string) {
	if g.AttnSinks && g.HeadRanks() > 1 {
		names = append(names, ConstHead)
	}
	if g.Spread {
		names = append(names, ConstExpert, ConstExpertRow)
	}
	if g.latents() {
		names = append(names, ConstNope, ConstValue)
	}
	if g.LinearKeyHeads > 0 {
		names = append(names, ConstLinearKeys, ConstLinearValues, ConstLinearHead)
	}
	if g.rings() > 1 {
		names = append(names, ConstMember)
	}
	if g.HeadRanks() > 1 && (g.Replicates() || g.latents()) && g.AdapterDropout > 0 {
		names = append(names, ConstBlock)
	}
	if g.rings() > 1 && g.HeadRanks() > 1 {
		names = append(names, ConstFirstOnRing)
	}
	for j := 1; j < g.rings(); j++ {
		names = append(names, stepConst(j))
	}
	return append(names, g.widthConsts()...)
}

// widthConsts returns the constants of MLPs that are narrower than the widest, if ranks divide them.
func (g *Model) widthConsts() (names []string) {
	if g.Replicates() {
		return nil
	}
	widths := []int{g.SharedFFN}
	for _, f := range g.forms {
		widths = append(widths, f.FFN)
	}
	for _, ffn := range widths {
		if c := g.ffnConst(ffn); c != ConstFFN && ffn > 0 && !slices.Contains(names, c) {
			names = append(names, c)
		}
	}
	return names
}

// rings returns the number of members of a ring, each of which has two chunks of a subsequence; 1: there is no ring.
func (s Split) rings() int {
	if s.Mode == ModeRing {
		return s.SP
	}
	return max(1, s.Ring)
}

// HeadRanks returns the number of ranks among which heads are divided. They are adjacent, and together are one member of
// the ring.
func (s Split) HeadRanks() int { return s.SP / s.rings() }

// rotates reports whether K and V are passed around the ring.
func (s Split) rotates() bool { return s.rings() > 1 && !s.Gathers }

// headGroup returns the group of ranks that divide heads, and ringGroup an attribute that names those of a ring.
func (s Split) headGroup() int {
	if s.rings() > 1 {
		return GroupHeads
	}
	return GroupSP
}

func (s Split) ringGroup() Attr {
	if s.HeadRanks() > 1 {
		return group(GroupRing)
	}
	return group(GroupSP)
}

// Groups returns the names of the groups of ranks, in the order of the constants.
func (g *Model) Groups() []string {
	switch {
	case g.rings() > 1 && g.HeadRanks() > 1:
		return GroupNames
	case g.Gathers:
		return GroupNames[:GroupBack+1]
	}
	return GroupNames[:GroupBack]
}

// Members returns the numbers in the stage of the ranks with which rank k forms a group.
func (s Split) Members(group, k int) (members []int) {
	for j := range s.SP {
		together, alike := j/s.HeadRanks() == k/s.HeadRanks(), j%s.HeadRanks() == k%s.HeadRanks()
		if group == GroupSP || group == GroupHeads && together || (group == GroupRing || group == GroupBack) && alike {
			members = append(members, j)
		}
	}
	if group == GroupBack {
		slices.Reverse(members)
	}
	return members
}

// Members is like that of Split, and also knows which ranks hold the same key and value heads.
func (g *Model) Members(group, k int) (members []int) {
	if group != GroupKV {
		return g.Split.Members(group, k)
	}
	for j := range g.SP {
		if g.SPConst(ConstKV, j) == g.SPConst(ConstKV, k) {
			members = append(members, j)
		}
	}
	return members
}

// gatherChunks gathers the rows of all ranks into K or V in the order of the sequence. The first chunks of the
// ranks make up the first half of the subsequence. Their second chunks, from the last rank to the first, make
// up the second half.
func (b *builder) gatherChunks(kv, local int) {
	b.node(ir.AllGather, []Attr{b.split.ringGroup()}, Arg{Value: kv, Span: FrontHalf}, Arg{Value: local, Span: FrontHalf})
	b.node(ir.AllGather, []Attr{group(GroupBack)}, Arg{Value: kv, Span: BackHalf}, Arg{Value: local, Span: BackHalf})
}

// chunksGradient adds the gradient of one of the two gathers of gatherChunks, each of which covers half of the
// rows. Every rank contributes to each row, and the contributions are added in f32.
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

// Size returns the part of a size that depends only on the split.
func (s Split) Size() Size { return Size{SP: int64(s.SP), Ring: int64(s.rings())} }

// Chunks returns the number of chunks of a subsequence in zigzag order, or 0 if its tokens are in sequence
// order.
func (s Split) Chunks() int64 {
	if s.rings() > 1 {
		return 2 * int64(s.rings())
	}
	return 0
}

// Grid returns a number by which the length of each subsequence must be divisible.
func (s Split) Grid() int64 {
	if s.rings() > 1 {
		return 2 * int64(s.SP)
	}
	return int64(s.SP)
}

// Block returns the place of the i-th of a rank's two blocks of rows among the 2 * SP blocks of a subsequence. The two
// chunks of a member of the ring, one after another, are divided among its ranks.
func (s Split) Block(k, i int) int64 {
	each := s.HeadRanks() // blocks of a chunk
	j, member := 2*(k%each)+i, k/each
	if j < each || s.rings() == 1 {
		return int64(member*each + j)
	}
	return int64((2*s.rings()-1-member)*each + j - each)
}

// goRound visits a rank's own keys and values, then those of the other ranks. Each transfer starts one step
// before its data is visited.
func (b *builder) goRound(k, v Arg, name string, visit func(j int, k, v Arg)) {
	for j := range b.split.rings() {
		nextK, nextV := k, v
		if j+1 < b.split.rings() {
			nextK, nextV = b.rotate(k, fmt.Sprintf("k.%s%d", name, j+1)), b.rotate(v, fmt.Sprintf("v.%s%d", name, j+1))
		}
		visit(j, k, v)
		k, v = nextK, nextV
	}
}

// rotate passes a value to the next rank and receives the previous rank's value.
func (b *builder) rotate(x Arg, name string) Arg {
	y := all(b.value(Value{Name: name, Rows: SeenLocal, Cols: b.Values[x.Value].Cols, DType: b.Values[x.Value].DType}))
	b.node(ir.Rotate, []Attr{b.split.ringGroup()}, y, x)
	return y
}

// stepAttrs returns the attributes of attention, or of its gradient, for the keys of a step.
func stepAttrs(attrs []Attr, j int, accumulate string) []Attr {
	attrs = append(attrs[:len(attrs):len(attrs)], from("prefix", FromLocalPrefix))
	if j > 0 {
		attrs = append(attrs, truth(accumulate), constant("zigzag", stepConst(j)))
	}
	return attrs
}

// ringAttention computes attention step by step and accumulates the softmax in f32.
func (g *Model) ringAttention(b *builder, attrs []Attr, o, lse, q, keys, values int) {
	sum := o
	if b.act != ir.F32 {
		v := b.Values[o]
		sum = b.value(Value{Name: "attn.total", Rows: v.Rows, Cols: v.Cols, DType: ir.F32})
	}
	b.goRound(seen(keys), seen(values), "turn", func(j int, k, v Arg) {
		b.node(ir.Attention, stepAttrs(attrs, j, "accumulate"), all(sum), all(lse), all(q), k, v)
	})
	g.sink(b, sum, lse)
	if sum != o {
		b.node(ir.Cast, nil, all(o), all(sum))
	}
}

// ringGradient computes the gradients of all steps. It appends all of them when it is called for the node of
// the first step, and nothing for the other steps.
func ringGradient(b *builder, n Node) {
	if n.Attrs[attrIndex(n.Op, "zigzag")].Source == FromConst {
		return
	}
	sum, lse, q, k, v := n.Args[0], n.Args[1], n.Args[2], n.Args[3], n.Args[4]
	do, dq, keys, values := b.grad(sum), b.newGrad(q.Value), b.need(k.Value), b.need(v.Value)
	keys.Span, values.Span = k.Span, v.Span
	query, stats, o := b.need(q.Value), b.need(lse.Value), b.need(b.rounded(sum.Value))
	delta := b.value(Value{Name: "attn.delta", Rows: Held, Cols: b.Values[lse.Value].Cols, DType: ir.F32})
	b.node(ir.AttentionDelta, []Attr{n.Attrs[attrIndex(n.Op, "heads")], integer("head_dim", b.Values[o.Value].Cols/b.Values[lse.Value].Cols)}, all(delta), do, o)
	total := dq
	if b.act != ir.F32 {
		total = b.value(Value{Name: "d.q.sum", Rows: Held, Cols: b.Values[dq].Cols, DType: ir.F32})
	}
	own := b.kvGrads(k.Value, v.Value)
	home := [2]Arg{seen(own[0]), seen(own[1])}
	travelling, parts, names := home, home, [2]string{"k", "v"}
	for i, name := range names { // contributions have their own buffer, because the sums are in transit
		parts[i] = all(b.value(Value{Name: "d." + name + ".part", Rows: SeenLocal, Cols: b.Values[own[i]].Cols, DType: ir.F32}))
	}
	sameForAll := append(n.Attrs[:attrIndex(n.Op, "prefix"):attrIndex(n.Op, "prefix")], n.Attrs[attrIndex(n.Op, "softcap")])
	b.goRound(keys, values, "back", func(j int, k, v Arg) {
		attrs, into := stepAttrs(sameForAll, j, "accumulate_q"), parts
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
		b.node(ir.Rotate, []Attr{b.split.ringGroup()}, home[i], travelling[i])
	}
	if total != dq {
		b.node(ir.Cast, nil, all(dq), all(total))
	}
	b.contribute(q.Value, all(dq))
}

// rounded returns a sum in the activation type: the result of its cast, or the sum itself.
func (b *builder) rounded(v int) int {
	for _, n := range b.Forward {
		if n.Op == ir.Cast && n.Args[1].Value == v {
			return n.Args[0].Value
		}
	}
	return v
}
