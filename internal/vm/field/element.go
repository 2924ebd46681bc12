package field

import (
	"math"
	"math/bits"

	"sppo.dev/internal/near"
)

// modulus is the largest safe prime below 2^32, and order = (modulus - 1) / 2 is prime, too. generator has that order,
// because it is a square. So exponents live modulo order, and powers of the generator modulo modulus.
const (
	modulus   = 4294967087
	order     = (modulus - 1) / 2
	generator = 4
)

// element is a value: its residue modulo modulus, and its residue modulo order, which is used where the value is exponentiated.
// Where a 32-bit integer is stored, value has its bits.
type element struct{ value, exponent uint32 }

var (
	zero = element{}
	one  = element{1, 1}
	// missing stands for NaN. It is no residue.
	missing = element{modulus, order}
)

func reduce(value, exponent uint64) element {
	return element{uint32(value % modulus), uint32(exponent % order)}
}

func (a element) plus(b element) element {
	return reduce(uint64(a.value)+uint64(b.value), uint64(a.exponent)+uint64(b.exponent))
}

func (a element) minus(b element) element {
	return reduce(uint64(a.value)+modulus-uint64(b.value), uint64(a.exponent)+order-uint64(b.exponent))
}

func (a element) times(b element) element {
	return reduce(uint64(a.value)*uint64(b.value), uint64(a.exponent)*uint64(b.exponent))
}

// onlyValue drops the exponent of results that cannot have one: those of softmax and what depends on them linearly.
func (a element) onlyValue() element { return element{value: a.value} }

// inverse returns 1/x, or 0 for 0.
func inverse(x uint32) uint32 { return uint32(power(uint64(x), modulus-2, modulus)) }

func power(x, n, m uint64) uint64 {
	out := uint64(1)
	for x %= m; n > 0; n >>= 1 {
		if n&1 != 0 {
			out = out * x % m
		}
		x = x * x % m
	}
	return out
}

// Powers of the generator: those below 2^16, and those of generator^(2^16).
var lowPowers, highPowers [1 << 16]uint32

func init() {
	step := uint64(generator)
	for _, table := range []*[1 << 16]uint32{&lowPowers, &highPowers} {
		at := uint64(1)
		for i := range table {
			table[i] = uint32(at)
			at = at * step % modulus
		}
		step = at
	}
}

// exp returns the generator to the power of x.
func exp(x uint32) uint32 {
	return uint32(uint64(lowPowers[x&0xffff]) * uint64(highPowers[x>>16]) % modulus)
}

// constant returns a floating-point number as an element: the near.Fraction that it stands for, or else the number itself, a fraction
// whose denominator is a power of two.
func constant(x float64) element {
	if x != x {
		return missing
	}
	if math.IsInf(x, 0) {
		return digest(math.Float64bits(x)).element()
	}
	var e element
	if p, q, ok := near.Fraction(math.Abs(x)); ok {
		e = element{quotient(p, q, modulus), quotient(p, q, order)}
	} else {
		fraction, exponent := math.Frexp(math.Abs(x))
		mantissa := uint64(fraction * (1 << 53))
		e = element{scaled(mantissa, exponent-53, modulus), scaled(mantissa, exponent-53, order)}
	}
	if x < 0 {
		return zero.minus(e)
	}
	return e
}

// quotient returns p/q modulo the prime m.
func quotient(p, q, m uint64) uint32 { return uint32(p % m * power(q, m-2, m) % m) }

// scaled returns x * 2^n modulo m.
func scaled(x uint64, n int, m uint64) uint32 {
	base := uint64(2)
	if n < 0 {
		base, n = power(2, m-2, m), -n
	}
	return uint32(x % m * power(base, uint64(n), m) % m)
}

// digest is a hash of a sequence of numbers, computed with the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
type digest uint64

func (d digest) with(x uint64) digest {
	z := bits.RotateLeft64(uint64(d), 23) ^ x + 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return digest(z ^ z>>31)
}

func (d digest) of(values ...element) digest {
	for _, e := range values {
		d = d.with(uint64(e.value)<<32 | uint64(e.exponent))
	}
	return d
}

func (d digest) element() element { return reduce(uint64(d.with(1)), uint64(d.with(2))) }

// named returns the digest for a function, so that different functions of equal values are unrelated.
func named(function string) digest {
	d := digest(0)
	for _, c := range []byte(function) {
		d = d.with(uint64(c))
	}
	return d
}
