package naive

import "math"

// Dropout sets elements of x to 0 and divides the others by 1 - rate (Srivastava et al., 2014). places gives the
// sequence and position of the token in a row. key is the key of step and tensor; col is the column of the whole
// input at which x starts. Each element uses 32 bits of SplitMix64 (Steele, Lea, Flood 2014) with random access,
// so two columns of a token share a value.
func Dropout(x []float64, cols, col int, rate float64, key uint64, places func(row int) (sequence, position int)) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		sequence, position := places(i / cols)
		c := col + i%cols
		bits := splitMix(splitMix(splitMix(key, sequence), position), c/2)
		if c%2 == 1 {
			bits >>= 32
		}
		if float64(uint32(bits)) >= math.Round(rate*(1<<32)) {
			y[i] = v / (1 - rate)
		}
	}
	return y
}

// DropoutKey returns the key of a step's dropout before the matrix with the given name.
func DropoutKey(seed, step int64, tensor string) uint64 {
	return finish(named(seed, "dropout")+golden^uint64(step)) ^ DropoutTensor(tensor)
}

// DropoutTensor returns the part of the key that depends on the matrix.
func DropoutTensor(tensor string) uint64 { return named(0, "dropout "+tensor) }

const golden = 0x9e3779b97f4a7c15

// splitMix returns value i of a key's stream.
func splitMix(key uint64, i int) uint64 { return finish(key + uint64(i+1)*golden) }

func finish(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// named returns the key of the stream for a seed and a name.
func named(seed int64, name string) uint64 {
	key := finish(uint64(seed) + golden)
	for _, c := range []byte(name) {
		key = finish(key ^ uint64(c))
	}
	return key
}
