package naive

import "math"

// Dropout sets elements of x to 0 and divides the others by 1 - rate (Srivastava et al., 2014). places returns
// the sequence and the position of a row's token. key is the result of DropoutKey; col is the column of the
// whole input at which x starts. Each element uses 32 of the 64 bits that SplitMix64 (Steele, Lea, Flood 2014),
// used with random access, gives for each pair of a token's columns.
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

// DropoutKey returns the key for the dropout of a matrix's input in one step, given the matrix's name.
func DropoutKey(seed, step int64, tensor string) uint64 {
	return finish(named(seed, "dropout")+golden^uint64(step)) ^ DropoutTensor(tensor)
}

// DropoutTensor returns the part of the key that depends on the matrix.
func DropoutTensor(tensor string) uint64 { return named(0, "dropout "+tensor) }

const golden = 0x9e3779b97f4a7c15

// splitMix returns value i of the random stream of a key.
func splitMix(key uint64, i int) uint64 { return finish(key + uint64(i+1)*golden) }

func finish(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// named returns the key of the random stream for a seed and a name.
func named(seed int64, name string) uint64 {
	key := finish(uint64(seed) + golden)
	for _, c := range []byte(name) {
		key = finish(key ^ uint64(c))
	}
	return key
}
