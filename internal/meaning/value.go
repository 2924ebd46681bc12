package meaning

import (
	"math"
	"math/bits"

	"sppo.dev/internal/near"
)

// value identifies a value of a dataflow: an element of a vector space over the integers modulo the prime 2^61 - 1, of which two
// random coordinates are kept. Every term, such as a product of two matrices, is a random vector that is a hash of its opcode, its
// attributes and the values of its operands. A sum of terms is the sum of their vectors, in any order and however it is nested. So two values
// are equal if and only if they are the same sum of the same terms, except with a probability of about 2^-122 if the hash is random.
type value [2]uint64

const prime = 1<<61 - 1

// constantOne is the vector of the constant 1, for values that are filled in.
var constantOne = newKey("constant").value()

func (v value) isZero() bool { return v == value{} }

func (v value) plus(w value) value {
	for i := range v {
		if v[i] += w[i]; v[i] >= prime {
			v[i] -= prime
		}
	}
	return v
}

// times multiplies a value by a number: by the near.Fraction that it stands for, and otherwise by the number itself, a fraction whose
// denominator is a power of two.
func (v value) times(x float64) value {
	if x == 1 {
		return v
	}
	var factor uint64
	if p, q, ok := near.Fraction(math.Abs(x)); ok {
		factor = product(p, power(q, prime-2))
	} else {
		fraction, exponent := math.Frexp(math.Abs(x))
		factor = rotate(uint64(fraction*(1<<53)), exponent-53)
	}
	for i := range v {
		v[i] = product(v[i], factor)
		if x < 0 && v[i] > 0 {
			v[i] = prime - v[i]
		}
	}
	return v
}

// power returns x^n modulo the prime.
func power(x, n uint64) uint64 {
	y := uint64(1)
	for ; n > 0; n >>= 1 {
		if n&1 == 1 {
			y = product(y, x)
		}
		x = product(x, x)
	}
	return y
}

// rotate returns x * 2^n modulo the prime, for x below 2^61: modulo the prime, 2^61 is 1.
func rotate(x uint64, n int) uint64 {
	if n %= 61; n < 0 {
		n += 61
	}
	return reduce(x<<n&prime | x>>(61-n))
}

func reduce(x uint64) uint64 {
	if x = x&prime + x>>61; x >= prime {
		x -= prime
	}
	return x
}

func product(x, y uint64) uint64 {
	hi, lo := bits.Mul64(x, y)
	return reduce(hi<<3 | lo>>61 + lo&prime)
}

// key is a hash of what determines a term.
type key [2]uint64

func newKey(opcode string) key {
	k := key{0x9e3779b97f4a7c15, 0xc2b2ae3d27d4eb4f}
	for _, c := range []byte(opcode) {
		k = k.with(uint64(c))
	}
	return k
}

func (k key) with(x uint64) key {
	hi, lo := bits.Mul64(k[0]^x, 0xd6e8feb86659fd93)
	k[0] = (hi ^ lo) + 0x9e3779b97f4a7c15
	hi, lo = bits.Mul64(k[1]^bits.RotateLeft64(x, 32), 0xa0761d6478bd642f)
	k[1] = (hi ^ lo) + 0x8ebc6af09c88c6e3
	return k
}

func (k key) int(x int64) key     { return k.with(uint64(x)) }
func (k key) float(x float64) key { return k.with(math.Float64bits(x)) }

// of adds operands.
func (k key) of(values ...value) key {
	for _, v := range values {
		k = k.with(v[0]).with(v[1])
	}
	return k
}

func (k key) value() value {
	k = k.with(1).with(2)
	return value{reduce(k[0]), reduce(k[1])}
}
