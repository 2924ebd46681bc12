package ir

import "fmt"

// Rings of ranks that each hold two chunks of a sequence's tokens: of 2t chunks member k of t has the k-th and the k-th from the
// end, so that causal attention is as much work for each of them, at every turn.

// Values of the attribute zigzag: where the member stands whose keys are attended to.
const (
	ZigzagBefore = 1
	ZigzagBehind = 2
)

// ZigzagChunk is the number of the j-th chunk in zigzag order.
func ZigzagChunk(j, chunks int64) int64 {
	if j%2 == 0 {
		return j / 2
	}
	return chunks - 1 - j/2
}

// zigzag reports whether an instruction attends to keys of another member of a ring.
func (in *Instr) zigzag() bool {
	a := in.Attr("zigzag")
	return a.Const != 0 || a.Bits != 0
}

// AttentionPart is causal attention of some of an instruction's queries over its first keys, in tokens.
type AttentionPart struct{ Query, Queries, Keys, Prefix int64 }

// AttentionParts are what an instruction of attention, or of its gradient, does on a rank. The first has the most keys; it, and
// those that follow, cover different queries.
func (in *Instr) AttentionParts(consts []int64) []AttentionPart {
	batch := max(1, in.Attr("batch").Int(consts))
	n, keys, prefix := in.Arg("q").Rows()/batch, in.Arg("k").Rows()/batch, in.Attr("prefix").Int(consts)
	switch in.Attr("zigzag").Int(consts) {
	case 0:
		return []AttentionPart{{0, n, keys, prefix}}
	case ZigzagBefore:
		return []AttentionPart{{0, n, prefix + n/2, prefix + n/2}}
	}
	parts := []AttentionPart{{n / 2, n - n/2, keys, keys}}
	if prefix > 0 {
		parts = append(parts, AttentionPart{0, n / 2, prefix, prefix})
	}
	return parts
}

// checkRing: another member's keys are as many as a rank's own, and its result goes on from that of those.
func checkRing(in *Instr) error {
	batch, prefix := int64(in.Attr("batch").Bits), int64(in.Attr("prefix").Bits)
	q, k := in.Arg("q").Rows(), in.Arg("k").Rows()
	continued := "accumulate"
	if in.Op == AttentionGrad {
		continued = "accumulate_q"
	}
	a := in.Attr(continued)
	switch {
	case k != q+prefix*batch:
		return fmt.Errorf("k has %d rows, and in a ring as many as prefix*batch + %d = %d", k, q, q+prefix*batch)
	case q/batch%2 != 0:
		return fmt.Errorf("%d queries are not two chunks", q/batch)
	case a.Const != 0 || a.Bits == 0:
		return fmt.Errorf("zigzag wants %s", continued)
	}
	return nil
}

// checkZigzag: rows are whole chunks.
func checkZigzag(in *Instr) error {
	a := in.Attr("chunks")
	chunks, batch := int64(a.Bits), int64(in.Attr("batch").Bits)
	if a.Const != 0 {
		return fmt.Errorf("attribute chunks must be literal")
	}
	if chunks == 0 {
		return nil
	}
	tokens, pieces := in.Args[0].Rows()/max(batch, 1), chunks
	if in.Op == LoadTokens {
		tokens = in.Args[0].Elements() / max(batch, 1)
	} else {
		pieces = 2 // of the member
	}
	if chunks < 2 || chunks%2 != 0 || tokens%pieces != 0 {
		return fmt.Errorf("%d tokens are not %d of %d chunks", tokens, pieces, chunks)
	}
	return nil
}
