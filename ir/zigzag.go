package ir

import "fmt"

// In a ring, each rank holds two chunks of a sequence's tokens. Of 2t chunks, member k of t holds
// the k-th from the start and the k-th from the end, so causal attention is the same amount of work
// for all members in every turn.

// Values of the attribute zigzag: whether the member whose keys are attended to comes before or after this one.
const (
	ZigzagBefore = 1
	ZigzagBehind = 2
)

// ZigzagChunk returns the number of the j-th chunk in zigzag order.
func ZigzagChunk(j, chunks int64) int64 {
	if j%2 == 0 {
		return j / 2
	}
	return chunks - 1 - j/2
}

// checkRing checks that there are as many keys after the prefix as queries, that the queries form two chunks,
// and that the result is added to the one over the rank's own keys.
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
		return fmt.Errorf("k has %d rows, but in a ring it must have prefix*batch + %d = %d", k, q, q+prefix*batch)
	case q/batch%2 != 0:
		return fmt.Errorf("%d queries are not two chunks", q/batch)
	case a.Const != 0 || a.Bits == 0:
		return fmt.Errorf("zigzag wants %s", continued)
	}
	return nil
}

// checkPositions checks that, if positions in documents are given, every row has one.
func checkPositions(in *Instr, rows int64) error {
	if p := in.Arg("positions"); p.Present() && (p.Elements() != rows || len(p.Dims()) != 1) {
		return fmt.Errorf("%d positions in documents for %d tokens", p.Elements(), rows)
	}
	return nil
}

// checkZigzag checks that the rows of an instruction form whole chunks.
func checkZigzag(in *Instr) error {
	a := in.Attr("chunks")
	chunks, batch := int64(a.Bits), int64(in.Attr("batch").Bits)
	if a.Const != 0 {
		return fmt.Errorf("attribute chunks must be literal")
	}
	if in.Op == Rope {
		if err := checkPositions(in, times(in.Args[0].Rows(), max(1, chunks/2))); err != nil {
			return err
		}
	}
	if chunks == 0 {
		return nil
	}
	tokens, pieces := in.Args[0].Rows()/max(batch, 1), chunks
	if in.Op == LoadTokens {
		tokens = in.Args[0].Elements() / max(batch, 1)
	} else {
		pieces = 2 // pieces of the member
	}
	if chunks < 2 || chunks%2 != 0 || tokens%pieces != 0 {
		return fmt.Errorf("%d tokens are not %d of %d chunks", tokens, pieces, chunks)
	}
	return nil
}
