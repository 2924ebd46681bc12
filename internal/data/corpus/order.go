package corpus

import (
	"math/bits"
)

// pick decides whether a sequence belongs to a part or to one of the later parts. The last part needs no pick.
type pick struct{ share uint64 } // of 2^63

const whole = 1 << 63

// deal turns the weights of the parts into picks, one for each part but the last.
func deal(weights []float64) []pick {
	var out []pick
	for i := range max(0, len(weights)-1) {
		var rest float64
		for _, w := range weights[i:] {
			rest += w
		}
		out = append(out, pick{uint64(weights[i] / rest * whole)})
	}
	return out
}

// first returns how many of the first n sequences belong to the part: n*share, rounded up.
func (p pick) first(n uint64) uint64 {
	hi, lo := bits.Mul64(n, p.share)
	lo, carry := bits.Add64(lo, whole-1, 0)
	return (hi+carry)<<1 | lo>>63
}

// pick returns the part of sequence g, and its index among that part's sequences. After any number of
// sequences, the count of a part exceeds its exact share by less than 1, and falls short of it by at most the
// number of earlier parts.
func (c *Corpus) pick(g int64) (int, int64) {
	n := uint64(g)
	for i, p := range c.picks {
		before := p.first(n)
		if p.first(n+1) > before {
			return i, int64(before)
		}
		n -= before
	}
	return len(c.parts) - 1, int64(n)
}

// count returns how many of the first n sequences belong to part i.
func (c *Corpus) count(i int, n int64) int64 {
	left := uint64(n)
	for j, p := range c.picks {
		of := p.first(left)
		if j == i {
			return int64(of)
		}
		left -= of
	}
	return int64(left)
}

// start returns the position of the first token of the part's sequence g. Without shuffling, sequence g starts
// at token g*S, modulo the number of tokens of the part. With shuffling, the part is cut into windows of S
// tokens and a label, and every window is used once per epoch, in an order that depends on the seed and the
// epoch.
func (p *part) start(g, sequence int64) int64 {
	if !p.shuffled {
		hi, lo := bits.Mul64(uint64(g), uint64(sequence))
		return int64(bits.Rem64(hi, lo, uint64(p.train)))
	}
	return p.turn(g, (p.train-1)/sequence) * sequence
}

// turn returns which of the part's n windows its sequence g uses.
func (p *part) turn(g, n int64) int64 {
	if !p.shuffled {
		return g % n
	}
	return permute(g%n, n, scramble(p.seed+uint64(g/n)))
}

// permute applies a permutation of 0 .. n-1 that a key selects: a Feistel network of six rounds over the
// smallest domain of an even number of bits that holds n, repeated until the result is less than n (Black and
// Rogaway, 2002).
func permute(i, n int64, key uint64) int64 {
	half := (bits.Len64(uint64(n-1)) + 1) / 2
	mask := uint64(1)<<half - 1
	x := uint64(i)
	for {
		left, right := x>>half, x&mask
		for round := range uint64(6) {
			left, right = right, left^scramble(key+round<<56^right)&mask
		}
		if x = left<<half | right; x < uint64(n) {
			return int64(x)
		}
	}
}

// scramble returns the output of SplitMix64 (Steele, Lea and Flood, 2014) after one step from state z.
func scramble(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// mulDiv returns a*b/c without overflow.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(q)
}
