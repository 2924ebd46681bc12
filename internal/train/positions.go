package train

import "math/bits"

// PositionLosses collects losses of tokens by position in the sequence, in buckets whose ends are powers of
// two: positions 0, 1, 2 to 3, 4 to 7, and so on. After successful long-context training, the loss falls from
// bucket to bucket.
type PositionLosses struct {
	sums   []float64
	counts []int64
}

// PositionLoss is a bucket.
type PositionLoss struct {
	First, End int64 // positions from 0; End is exclusive
	Loss       float64
	Tokens     int64 // number of tokens with a loss
}

// Add adds the losses of consecutive tokens, given the position of the first. NaN losses are ignored.
func (p *PositionLosses) Add(position int64, losses []float32) {
	for i, loss := range losses {
		if loss != loss {
			continue
		}
		bucket := bits.Len64(uint64(position) + uint64(i))
		for len(p.sums) <= bucket {
			p.sums, p.counts = append(p.sums, 0), append(p.counts, 0)
		}
		p.sums[bucket] += float64(loss)
		p.counts[bucket]++
	}
}

// Mean returns the mean loss of all tokens with a loss, and their number. If there are none, the mean is 0.
func (p *PositionLosses) Mean() (loss float64, tokens int64) {
	for i := range p.sums {
		loss, tokens = loss+p.sums[i], tokens+p.counts[i]
	}
	return loss / float64(max(1, tokens)), tokens
}

// Buckets lists the non-empty buckets in order.
func (p *PositionLosses) Buckets() (list []PositionLoss) {
	for i, n := range p.counts {
		if n == 0 {
			continue
		}
		first := int64(0)
		if i > 0 {
			first = 1 << (i - 1)
		}
		list = append(list, PositionLoss{First: first, End: 1 << i, Loss: p.sums[i] / float64(n), Tokens: n})
	}
	return list
}
