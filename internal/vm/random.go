package vm

import (
	"math"
	"math/bits"
)

// Random is a counter-based generator: value i of a stream is a pure function of the stream's key and i, so any
// rank can draw any part without drawing the rest. It is SplitMix64 (Steele, Lea, Flood 2014) with random
// access: the finaliser applied to key + (i+1)*golden.
type Random struct{ key uint64 }

const golden = 0x9e3779b97f4a7c15

// NewRandom returns the stream for a seed, a name and numbers. Streams that differ in any of these are
// unrelated.
func NewRandom(seed int64, name string, numbers ...int64) Random {
	key := mix(uint64(seed) + golden)
	for _, c := range []byte(name) {
		key = mix(key ^ uint64(c))
	}
	for _, n := range numbers {
		key = mix(key + golden ^ uint64(n))
	}
	return Random{key}
}

// Key returns the stream's key, for devices that implement the generator themselves.
func (r Random) Key() uint64 { return r.key }

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// Uint64 returns value i.
func (r Random) Uint64(i uint64) uint64 { return mix(r.key + (i+1)*golden) }

// Below returns value i as an integer in [0, n). Its bias, n/2^64, is negligible.
func (r Random) Below(i uint64, n int64) int64 {
	hi, _ := bits.Mul64(r.Uint64(i), uint64(n))
	return int64(hi)
}

// Uniform returns value i as a number in (0, 1], so its logarithm is finite.
func (r Random) Uniform(i uint64) float64 { return float64(r.Uint64(i)>>11+1) * 0x1p-53 }

// Normals writes to out the elements first, first+1, ... of the stream of normal numbers with mean 0 and
// standard deviation std. Elements 2j and 2j+1 are the pair that the method of Box and Muller (1958) gives for
// the uniform values 2j and 2j+1, computed in f64.
func (r Random) Normals(first uint64, out []float32, std float64) {
	for n := 0; n < len(out); {
		pair := (first + uint64(n)) &^ 1
		radius := math.Sqrt(-2*math.Log(r.Uniform(pair))) * std
		sin, cos := math.Sincos(2 * math.Pi * r.Uniform(pair+1))
		if first+uint64(n) == pair {
			out[n] = float32(radius * cos)
			n++
		}
		if n < len(out) {
			out[n] = float32(radius * sin)
			n++
		}
	}
}

// InitialValues returns the stream of a tensor's initial values: normal number row*columns+column is the value
// of the element at (row, column). Every device must use it, so that the initial weights do not depend on the
// device.
func InitialValues(seed int64, tensor string) Random { return NewRandom(seed, "init "+tensor) }

// Dropout applies a dropout instruction. Every device must drop the same elements.
type Dropout struct {
	stream    Random
	threshold uint32 // draws below it set an element to 0
	scale     float32
}

// DropoutKey returns the key of a step, which package train passes to instructions as ir.ResultDropout.
func DropoutKey(seed, step int64) uint64 { return NewRandom(seed, "dropout", step).key }

// DropoutTensor returns the key of a tensor. The key of an instruction's stream is the exclusive or of the
// step's key and the tensor's key.
func DropoutTensor(tensor string) uint64 { return NewRandom(0, "dropout "+tensor).key }

// DropoutThreshold returns how many of the 2^32 possible draws set an element to 0.
func DropoutThreshold(rate float64) uint32 { return uint32(min(math.Round(rate*0x1p32), 0x1p32-1)) }

// DropoutScale returns the factor by which the kept elements are multiplied.
func DropoutScale(rate float64) float32 { return float32(1 / (1 - rate)) }

// NewDropout returns the dropout for the given keys of a step and a tensor.
func NewDropout(step, tensor uint64, rate float64) Dropout {
	return Dropout{Random{step ^ tensor}, DropoutThreshold(rate), DropoutScale(rate)}
}

// Row applies dropout to a token's elements, starting at the given column; in and out may be the same slice.
// position is the token's position in the given sequence of the step's batch. Columns 2j and 2j+1 use the lower
// and the upper half of value j of the token's stream.
func (d Dropout) Row(sequence, position int64, column uint64, out, in []float32) {
	token := Random{Random{d.stream.Uint64(uint64(sequence))}.Uint64(uint64(position))}
	for i, x := range in {
		out[i] = 0
		if c := column + uint64(i); uint32(token.Uint64(c/2)>>(c%2*32)) >= d.threshold {
			out[i] = x * d.scale
		}
	}
}
