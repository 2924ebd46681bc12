package naive

import "math"

// Plus returns a vector with a number added to each element.
func Plus(x []float64, offset float64) []float64 {
	y := make([]float64, len(x))
	for i := range x {
		y[i] = x[i] + offset
	}
	return y
}

// LayerNorm (Ba et al., 2016) normalises every row to mean 0 and variance 1, then scales and shifts each column.
// Rows are as wide as gamma. The variance is divided by the width, not by one less.
func LayerNorm(x, gamma, beta []float64, eps float64) []float64 {
	y := make([]float64, len(x))
	for start := 0; start < len(x); start += len(gamma) {
		row := x[start:][:len(gamma)]
		mean, rstd := Moments(row, eps)
		for i := range row {
			y[start+i] = (row[i]-mean)*rstd*gamma[i] + beta[i]
		}
	}
	return y
}

// Moments returns a row's mean and the reciprocal of its standard deviation.
func Moments(row []float64, eps float64) (mean, rstd float64) {
	n := float64(len(row))
	for _, value := range row {
		mean += value / n
	}
	variance := 0.0
	for _, value := range row {
		variance += (value - mean) * (value - mean) / n
	}
	return mean, 1 / math.Sqrt(variance+eps)
}

// RMSNorm (Zhang and Sennrich, 2019) divides every row by its root mean square, then scales each column.
func RMSNorm(x, gamma []float64, eps float64) []float64 {
	y := make([]float64, len(x))
	for start := 0; start < len(x); start += len(gamma) {
		row := x[start:][:len(gamma)]
		r := ReciprocalRMS(row, eps)
		for i := range row {
			y[start+i] = row[i] * r * gamma[i]
		}
	}
	return y
}

// ReciprocalRMS returns the reciprocal of a row's root mean square.
func ReciprocalRMS(row []float64, eps float64) float64 {
	sum := 0.0
	for _, value := range row {
		sum += value * value
	}
	return 1 / math.Sqrt(sum/float64(len(row))+eps)
}

// MatMul returns A*B + bias, where A is [m, k] and B is [k, n] after any transposition: with transA the slice a is
// stored as [k, m], with transB the slice b as [n, k]. bias is nil or has n values, which are added to every row.
func MatMul(a, b, bias []float64, m, n, k int, transA, transB bool) []float64 {
	demand(len(a) == m*k && len(b) == k*n, "matmul of %d by %d values as m=%d n=%d k=%d", len(a), len(b), m, n, k)
	rowA, columnA := k, 1 // distances between adjacent elements
	if transA {
		rowA, columnA = 1, m
	}
	c := make([]float64, m*n)
	for i := range m {
		row := c[i*n : i*n+n]
		if transB {
			for j := range row {
				for p := range k {
					row[j] += a[i*rowA+p*columnA] * b[j*k+p]
				}
			}
		} else { // the same sums in the order in which b lies in memory
			for p := range k {
				x := a[i*rowA+p*columnA]
				for j, y := range b[p*n : p*n+n] {
					row[j] += x * y
				}
			}
		}
		if bias != nil {
			for j := range row {
				row[j] += bias[j]
			}
		}
	}
	return c
}

// Rates returns the angles by which rope (Su et al., 2021) rotates the pairs of a head of D values from one
// position to the next: theta^(-2i/D).
func Rates(headDim int, theta float64) []float64 {
	rates := make([]float64, headDim/2)
	for i := range rates {
		rates[i] = math.Pow(theta, -2*float64(i)/float64(headDim))
	}
	return rates
}

// Rotation rotates the pairs (i, i+len(Rates)) of every head, as GPT-NeoX and Llama's published weights pair them,
// by position times Rates[i]. It multiplies the rotated values by Scale and the rest of the head by Rest.
type Rotation struct {
	Rates       []float64
	Scale, Rest float64
}

// Rope applies a rotation to heads of headDim values. Row r is at position prefix + r/batch.
func Rope(x []float64, batch, heads, headDim, prefix int, r Rotation) []float64 {
	return rotate(x, batch, heads, headDim, prefix, r, 1)
}

func rotate(x []float64, batch, heads, headDim, prefix int, r Rotation, sign float64) []float64 {
	y := make([]float64, len(x))
	half := len(r.Rates)
	for start := 0; start < len(x); start += headDim { // for each head of a row
		position := float64(prefix + start/(heads*headDim)/batch)
		for i, rate := range r.Rates {
			sin, cos := math.Sincos(sign * position * rate)
			first, second := x[start+i], x[start+i+half]
			y[start+i] = r.Scale * (first*cos - second*sin)
			y[start+i+half] = r.Scale * (first*sin + second*cos)
		}
		for i := 2 * half; i < headDim; i++ {
			y[start+i] = r.Rest * x[start+i]
		}
	}
	return y
}

// AttentionShape is the shape of causal attention of Queries tokens after a prefix of Prefix tokens. Queries are
// [Queries*Batch, Heads*HeadDim]. Keys and values, starting with those of the prefix, are [Keys*Batch,
// KVHeads*HeadDim]; Keys is the number of tokens, or 0 for all Prefix+Queries. Heads share keys and values in
// groups of consecutive heads (Ainslie et al., 2023). A query sees the last Window keys up to its own position, or
// all if Window is 0. With Positions, it sees only keys of its own document: at most Positions keys before its
// own. Softcap caps scores as the function Softcap does.
type AttentionShape struct {
	Queries, Prefix, Batch, Heads, KVHeads, HeadDim, Keys, Window int
	Softcap                                                       float64
	Positions                                                     []int32 // [Queries*Batch]
}

// Seen returns the end of the keys that query t sees.
func (s AttentionShape) Seen(t int) int {
	if s.Keys == 0 {
		return s.Prefix + t + 1
	}
	return min(s.Keys, s.Prefix+t+1)
}

// query returns the start of head h of query t of sequence b; key does the same for the key head that h reads.
func (s AttentionShape) query(t, b, h int) int { return ((t*s.Batch+b)*s.Heads + h) * s.HeadDim }
func (s AttentionShape) key(t, b, h int) int {
	return ((t*s.Batch+b)*s.KVHeads + h/(s.Heads/s.KVHeads)) * s.HeadDim
}

// Attention returns softmax(Softcap(q*k^T / sqrt(HeadDim))) * v over the keys that are not in a query's future
// (Vaswani et al., 2017), and the logarithm of every softmax's denominator, [Queries*Batch, Heads].
func Attention(q, k, v []float64, s AttentionShape) (out, logSumExp []float64) {
	weights, logSumExp := attentionWeights(q, k, s)
	out = make([]float64, len(q))
	s.each(func(t, b, h, row int) {
		for u, p := range weights[row] {
			for d := range s.HeadDim {
				out[s.query(t, b, h)+d] += p * v[s.key(u, b, h)+d]
			}
		}
	})
	return out, logSumExp
}

// AttentionTerms returns the sums of the absolute values of the terms p*v that Attention sums. logSumExp may cover
// more keys than these.
func AttentionTerms(q, k, v, logSumExp []float64, s AttentionShape) []float64 {
	terms := make([]float64, len(q))
	s.each(func(t, b, h, row int) {
		for u, score := range s.scores(q, k, t, b, h) {
			if math.IsInf(score, -1) { // masked
				continue
			}
			p := math.Exp(score - logSumExp[row])
			for d := range s.HeadDim {
				terms[s.query(t, b, h)+d] += p * math.Abs(v[s.key(u, b, h)+d])
			}
		}
	})
	return terms
}

// each visits every query of every head, with its row in logSumExp.
func (s AttentionShape) each(visit func(t, b, h, row int)) {
	for t := range s.Queries {
		for b := range s.Batch {
			for h := range s.Heads {
				visit(t, b, h, (t*s.Batch+b)*s.Heads+h)
			}
		}
	}
}

// scores returns the products of a query with the keys up to its position, with minus infinity for keys before its
// window.
func (s AttentionShape) scores(q, k []float64, t, b, h int) []float64 {
	scores := make([]float64, s.Seen(t))
	query, root := q[s.query(t, b, h):][:s.HeadDim], math.Sqrt(float64(s.HeadDim))
	for u := range scores {
		if s.Window > 0 && u <= s.Prefix+t-s.Window || s.Positions != nil && u < s.Prefix+t-int(s.Positions[t*s.Batch+b]) {
			scores[u] = math.Inf(-1)
			continue
		}
		key := k[s.key(u, b, h):]
		for d, x := range query {
			scores[u] += x * key[d] / root
		}
		scores[u] = Softcap(scores[u:u+1], s.Softcap)[0]
	}
	return scores
}

// attentionWeights returns every query's softmax over the keys up to its position.
func attentionWeights(q, k []float64, s AttentionShape) (weights [][]float64, logSumExp []float64) {
	rows := s.Queries * s.Batch * s.Heads
	weights, logSumExp = make([][]float64, rows), make([]float64, rows)
	s.each(func(t, b, h, row int) {
		scores := s.scores(q, k, t, b, h)
		logSumExp[row] = logOfSumOfExp(scores)
		for u := range scores {
			if scores[u] = math.Exp(scores[u] - logSumExp[row]); math.IsInf(logSumExp[row], -1) {
				scores[u] = 0
			}
		}
		weights[row] = scores
	})
	return weights, logSumExp
}

// logOfSumOfExp subtracts the largest value first, so that no exponential overflows.
func logOfSumOfExp(x []float64) float64 {
	largest := math.Inf(-1)
	for _, value := range x {
		largest = math.Max(largest, value)
	}
	if math.IsInf(largest, -1) {
		return largest
	}
	sum := 0.0
	for _, value := range x {
		sum += math.Exp(value - largest)
	}
	return largest + math.Log(sum)
}

// Activate applies an elementwise function by name: gelu (Hendrycks and Gimpel, 2016), its approximation gelu_tanh
// as in GPT-2, silu, or relu2 (So et al., 2021).
func Activate(function string, x []float64) []float64 {
	y := make([]float64, len(x))
	for i, v := range x {
		switch function {
		case "gelu":
			y[i] = v * normalCDF(v)
		case "gelu_tanh":
			y[i] = 0.5 * v * (1 + geluTanh(v))
		case "silu":
			y[i] = v * sigmoid(v)
		case "relu2":
			y[i] = math.Max(v, 0) * math.Max(v, 0)
		default:
			demand(false, "function %q", function)
		}
	}
	return y
}

const geluCubic = 0.044715

func geluTanh(x float64) float64 { return math.Tanh(math.Sqrt(2/math.Pi) * (x + geluCubic*x*x*x)) }

func normalCDF(x float64) float64 { return 0.5 * math.Erfc(-x/math.Sqrt2) }

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// GLU (Shazeer, 2020) returns function(gate) * up.
func GLU(function string, gate, up []float64) []float64 { return times(Activate(function, gate), up) }

func times(a, b []float64) []float64 {
	y := make([]float64, len(a))
	for i := range a {
		y[i] = a[i] * b[i]
	}
	return y
}

// Softcap returns limit * tanh(x / limit), or x if limit is 0.
func Softcap(x []float64, limit float64) []float64 {
	if limit == 0 {
		return x
	}
	y := make([]float64, len(x))
	for i, v := range x {
		y[i] = limit * math.Tanh(v/limit)
	}
	return y
}

// Embed looks up tokens in a table that holds the vocabulary from token first on. A token outside the table gives
// zeros, so that the sum over the parts of a divided vocabulary is the whole lookup.
func Embed(table []float64, tokens []int32, hidden, first int) []float64 {
	y := make([]float64, len(tokens)*hidden)
	for row, token := range tokens {
		if at := int(token) - first; at >= 0 && at < len(table)/hidden {
			copy(y[row*hidden:], table[at*hidden:][:hidden])
		}
	}
	return y
}

// CrossEntropy returns every row's -log softmax(logits)[label] and the logarithm of its softmax's denominator.
// Rows have the width of the vocabulary.
func CrossEntropy(logits []float64, labels []int32, vocab int) (losses, logSumExp []float64) {
	return CrossEntropyJoin(CrossEntropyStats(logits, labels, vocab, vocab, 0), len(labels))
}

// CrossEntropyStats returns the contribution of a part of the vocabulary to the loss of each row, as [rows, 3]:
// the largest logit, the sum of exp(logit - largest), and the label's logit, or 0 if the label is in another part.
// Rows have `width` columns. The first `valid` columns are the tokens from first on; the rest is padding.
func CrossEntropyStats(logits []float64, labels []int32, width, valid, first int) []float64 {
	var stats []float64
	for row, label := range labels {
		values := logits[row*width:][:valid]
		largest, sum, target := math.Inf(-1), 0.0, 0.0
		for _, value := range values {
			largest = math.Max(largest, value)
		}
		for _, value := range values {
			sum += math.Exp(value - largest)
		}
		if at := int(label) - first; at >= 0 && at < valid {
			target = values[at]
		}
		stats = append(stats, largest, sum, target)
	}
	return stats
}

// CrossEntropyJoin computes the loss of every row from the statistics of all parts of the vocabulary, [parts,
// rows, 3].
func CrossEntropyJoin(stats []float64, rows int) (losses, logSumExp []float64) {
	losses, logSumExp = make([]float64, rows), make([]float64, rows)
	for row := range rows {
		var logs []float64
		label := 0.0
		for at := 3 * row; at < len(stats); at += 3 * rows {
			logs = append(logs, stats[at]+math.Log(stats[at+1]))
			label += stats[at+2]
		}
		logSumExp[row] = logOfSumOfExp(logs)
		losses[row] = logSumExp[row] - label
	}
	return losses, logSumExp
}

// NumericGrad differentiates f at x by central differences over five points. The error falls with the fourth power
// of the step: in float64, a smooth f of ordinary size gives about ten digits. x is unchanged on return.
func NumericGrad(f func(x []float64) float64, x []float64) []float64 {
	grad := make([]float64, len(x))
	for i := range x {
		step := 2e-4 * math.Max(1, math.Abs(x[i]))
		at := func(steps float64) float64 {
			moved := append([]float64(nil), x...)
			moved[i] += steps * step
			return f(moved)
		}
		grad[i] = (8*(at(1)-at(-1)) - (at(2) - at(-2))) / (12 * step)
	}
	return grad
}

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
