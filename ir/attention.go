package ir

import (
	"fmt"
	"math"
	"slices"
)

// This file determines the work of an attention instruction or of its gradient, that is, the query-key pairs.

// HeadKernels lists, in ascending order, the head dimensions whose bf16 attention GPUs compute on tensor cores: in general with
// mma.sync, on Hopper with wgmma. Other dimensions, and f32, run on scalar code. Forward and Backward are the speeds that the cost
// model assumes, relative to heads of 128; `make kernels` compares them with a model of a Hopper card, where 1 stands for 0.9 or
// more. The CUDA device, the cost model and the warnings of plans use this table. Heads whose values have another dimension run on
// mma.sync on Hopper, too, which reaches about half of the rate of wgmma there: an assumption.
var HeadKernels = []HeadKernel{
	{64, 64, 1, 1},
	{80, 80, 1, 1},
	{96, 96, 1, 1},
	{128, 128, 1, 1},
	{192, 128, 0.5, 0.5},
	{192, 192, 1, 0.88},
	{256, 256, 1, 0.80},
}

// HeadKernel is a row of HeadKernels: Dim is the dimension of heads of queries and keys, Value that of heads of values.
type HeadKernel struct {
	Dim, Value        int64
	Forward, Backward float64
}

// HeadKernelOf returns the row for heads of the given dimensions, or false if there is none.
func HeadKernelOf(dim, value int64) (HeadKernel, bool) {
	for _, k := range HeadKernels {
		if k.Dim == dim && k.Value == value {
			return k, true
		}
	}
	return HeadKernel{}, false
}

// zigzag reports whether an instruction attends to the keys of another member of a ring.
func (in *Instr) zigzag() bool {
	a := in.Attr("zigzag")
	return a.Const != 0 || a.Bits != 0
}

// AttentionPart is causal attention: queries Query to Query+Queries-1 of an instruction attend to its first
// Keys keys. All fields except Place count tokens. Of the keys Prefix+r-Window+1 to Prefix+r, query r of the
// part sees those that exist. Every query of the part sees at least one key, unless its document begins after
// the last of these keys. In the operand positions, which holds positions in documents, the rows of the
// part's queries begin at row Place.
type AttentionPart struct{ Query, Queries, Keys, Prefix, Window, Place int64 }

// AttentionParts returns the work of an attention instruction, or of its gradient, on a rank. The first part has the
// most keys. Parts do not overlap. Queries that see no key belong to no part.
func (in *Instr) AttentionParts(consts []int64) []AttentionPart {
	s := in.attention()
	if chunks := in.Attr("chunks").Int(consts); chunks != 0 {
		each, member := s.n/2, in.Attr("member").Int(consts)
		parts := []AttentionPart{
			s.part(each, s.n-each, s.prefix+(chunks-1-member)*each),
			s.part(0, each, s.prefix+member*each),
		}
		return slices.DeleteFunc(parts, func(p AttentionPart) bool { return p.Queries <= 0 })
	}
	switch in.Attr("zigzag").Int(consts) {
	case 0:
		p := AttentionPart{Queries: s.n, Keys: s.keys, Prefix: s.prefix, Window: s.window}
		p.Queries = min(p.Queries, s.keys+s.window-1-s.prefix)
		return []AttentionPart{p}
	case ZigzagBefore:
		return []AttentionPart{s.part(0, s.n, s.prefix+s.n/2).over(s.prefix + s.n/2)}
	}
	parts := []AttentionPart{s.part(s.n/2, s.n-s.n/2, s.keys).over(s.keys)}
	if s.prefix > 0 {
		parts = append(parts, s.part(0, s.n/2, s.prefix).over(s.prefix))
	}
	return parts
}

// attentionSize holds the sizes of an attention instruction, in tokens.
type attentionSize struct{ n, keys, prefix, window, batch, chunks int64 }

// attention reads the sizes from operands and literal attributes. A window that is absent, or that exceeds the
// number of tokens up to the last query, becomes that number.
func (in *Instr) attention() attentionSize {
	s := attentionSize{batch: max(1, int64(in.Attr("batch").Bits)), prefix: int64(in.Attr("prefix").Bits)}
	s.chunks = int64(in.Attr("chunks").Bits)
	s.n, s.keys = in.Arg("q").Rows()/s.batch, in.Arg("k").Rows()/s.batch
	s.window = s.end()
	if w := int64(in.Attr("window").Bits); w != 0 {
		s.window = min(s.window, w)
	}
	return s
}

// end returns the number of tokens up to the last query, counted from the first key.
func (s attentionSize) end() int64 { return Plus(s.prefix, times(s.n, max(1, s.chunks/2))) }

// part returns the attention of those of the given queries that see a key, the first of which has prefix keys before it.
func (s attentionSize) part(query, queries, prefix int64) AttentionPart {
	queries = min(queries, s.keys+s.window-1-prefix)
	return AttentionPart{query, queries, min(s.keys, prefix+queries), prefix, s.window, (prefix - s.prefix) * s.batch}
}

// over limits a part to the given number of keys from the first, which must all be inside its window.
func (p AttentionPart) over(keys int64) AttentionPart {
	p.Keys, p.Window = keys, p.Prefix+p.Queries
	return p
}

// firstSeen returns the first key that any query sees.
func (s attentionSize) firstSeen() int64 { return min(max(0, s.prefix-s.window+1), s.keys) }

// visiblePairs returns the number of query-key pairs that are visible: of the keys prefix+r-window+1 to
// prefix+r, query r of n sees those that exist.
func visiblePairs(n, prefix, keys, window int64) float64 {
	pairs := pairsBelow(n, prefix+1, keys)
	if hidden := prefix - window + 1; hidden >= 0 {
		return pairs - pairsBelow(n, hidden, keys)
	} else if n += hidden; n > 0 {
		return pairs - pairsBelow(n, 0, keys)
	}
	return pairs
}

// pairsBelow returns the sum of min(keys, first+r) over the queries r = 0 to n-1.
func pairsBelow(n, first, keys int64) float64 {
	partly := float64(max(0, min(n, keys-first+1)))
	return partly*float64(first-1) + partly*(partly+1)/2 + (float64(n)-partly)*float64(keys)
}

// valueDim returns the width of a head of values, and of o, in an attention instruction or its gradient.
func (in *Instr) valueDim() int64 { return in.Arg("v").Cols() / int64(in.Attr("kv_heads").Bits) }

// attentionWork returns 2 FLOPs for each visible query-key pair, head and element of the heads in each product. In the forward pass,
// these are the product QK, which is as wide as the heads of Q and K, and PV, which is as wide as those of V. In the backward pass,
// QK is computed again, dQ and dK are as wide, and dP and dV are as wide as V: wide and narrow are the numbers of such products. The
// members of a ring share all pairs equally. Keys that no query sees are not read. Their gradients cause memory traffic only if they are
// overwritten, not if they are added to.
func attentionWork(in *Instr, wide, narrow float64, kind WorkKind) Work {
	s := in.attention()
	members := max(1, s.chunks/2)
	pairs := visiblePairs(s.n*members, s.prefix, s.keys, s.window) / float64(members)
	if in.zigzag() {
		// Whether the other member comes before or after, half of the n*n pairs after the prefix are visible.
		pairs = float64(s.n)*float64(s.prefix) + float64(s.n)*float64(s.n)/2
	}
	w := memoryWork(in)
	w.Bytes -= in.unseenBytes(s)
	w.Kind = kind
	w.Flops = Flops(2 * pairs * float64(s.batch) * (wide*float64(in.Arg("q").Cols()) + narrow*float64(int64(in.Attr("heads").Bits)*in.valueDim())))
	w.Rows = min(s.n, s.keys, s.window)
	w.DType = in.Arg("q").DType
	w.HeadDim, w.ValueDim = int64(in.Attr("head_dim").Bits), in.valueDim()
	return w
}

// unseenBytes returns the bytes that memoryWork counts although nothing accesses them: those of keys and values
// before the window, and of their gradients, if these are added to.
func (in *Instr) unseenBytes(s attentionSize) (bytes Bytes) {
	unseen := s.firstSeen() * s.batch
	if unseen == 0 {
		return 0
	}
	row := func(name string) Bytes { return in.Arg(name).Bytes() / Bytes(max(1, in.Arg(name).Rows())) }
	bytes = Bytes(unseen) * (row("k") + row("v"))
	if in.Op == AttentionGrad && in.Attr("accumulate").Bits != 0 {
		bytes += 2 * Bytes(unseen) * (row("dk") + row("dv"))
	}
	return bytes
}

func checkAttention(in *Instr) error {
	heads, kvHeads := in.Attr("heads").Bits, in.Attr("kv_heads").Bits
	if kvHeads == 0 || heads%kvHeads != 0 {
		return fmt.Errorf("%d heads are not a multiple of %d kv_heads", heads, kvHeads)
	}
	for _, name := range []string{"window", "chunks"} {
		if a := in.Attr(name); a.Const != 0 || int64(a.Bits) < 0 {
			return fmt.Errorf("attribute %s must be literal and not negative", name)
		}
	}
	if a := in.Attr("softcap"); a.Const != 0 || !(a.Float(nil) >= 0 && a.Float(nil) <= math.MaxFloat32) {
		return fmt.Errorf("attribute softcap must be literal, finite and not negative")
	}
	s, adds := in.attention(), in.Attr("accumulate")
	q, k, last := in.Arg("q").Rows(), in.Arg("k").Rows(), times(s.end(), s.batch)
	switch {
	case last == math.MaxInt64:
		return fmt.Errorf("prefix is %d, and prefix*batch + %d exceeds 64 bits", s.prefix, q)
	case s.chunks != 0 && (s.chunks < 2 || s.chunks%2 != 0 || s.n%2 != 0):
		return fmt.Errorf("%d queries are not two of %d chunks", s.n, s.chunks)
	case s.chunks != 0 && k < last && (adds.Const != 0 || adds.Bits == 0):
		return fmt.Errorf("k has %d rows, and the %d queries of some members may see none of them, which requires accumulate", k, s.n)
	case k > last:
		return fmt.Errorf("k has %d rows, more than prefix*batch + %d = %d", k, q, last)
	}
	if err := checkWindow(in, s); err != nil {
		return err
	}
	if in.zigzag() {
		if err := checkRing(in); err != nil {
			return err
		}
	}
	if err := checkPositions(in, times(q, max(1, s.chunks/2))); err != nil {
		return err
	}
	if in.Op == AttentionGrad && in.Arg("o").Present() == in.Arg("delta").Present() {
		return fmt.Errorf("exactly one of o and delta must be given")
	}
	return nil
}

// checkWindow checks that at least one query sees a key, and that the instruction accumulates if any other
// query sees none.
func checkWindow(in *Instr, s attentionSize) error {
	continued := "accumulate"
	if in.Op == AttentionGrad {
		continued = "accumulate_q"
	}
	a := in.Attr(continued)
	switch {
	case in.zigzag() && (in.Attr("window").Bits != 0 || s.chunks != 0 || in.Arg("positions").Present()):
		return fmt.Errorf("zigzag excludes window, chunks and positions")
	case s.keys-1 < s.prefix-s.window+1:
		return fmt.Errorf("no query sees a key: the first query sees keys from %d on, but there are only %d", s.prefix-s.window+1, s.keys)
	case s.keys-1 < s.end()-s.window && (a.Const != 0 || a.Bits == 0):
		return fmt.Errorf("the last query sees keys from %d on, but there are only %d, which requires %s", s.end()-s.window, s.keys, continued)
	}
	return nil
}

// checkMember checks that a rank's position in a ring is valid.
func (in *Instr) checkMember(value func(string) int64) error {
	if z := value("zigzag"); in.zigzag() && (z < ZigzagBefore || z > ZigzagBehind) {
		return fmt.Errorf("zigzag is %d, not %d or %d", z, ZigzagBefore, ZigzagBehind)
	}
	return checkPlace(value("member"), value("chunks"))
}

// checkPlace checks that a ring with the given number of chunks has a member with the given number.
func checkPlace(member, chunks int64) error {
	if chunks != 0 && (member < 0 || member >= chunks/2) {
		return fmt.Errorf("member %d of a ring of %d", member, chunks/2)
	}
	return nil
}
