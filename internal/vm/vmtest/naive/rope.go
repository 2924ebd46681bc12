package naive

import "math"

// RopeConfig defines the rates at which the pairs of a head's values rotate.
type RopeConfig struct {
	Theta   float64 `json:"rope_theta"`
	Local   float64 `json:"rope_local_theta"` // theta of layers with a window, which then have no scaling; 0: as in the other layers
	Partial float64 `json:"rope_partial"`     // rotated share of a head
	Scaling string  `json:"rope_scaling"`     // none | linear | llama3 | yarn | longrope

	Factor    float64   `json:"rope_factor"`   // sequences may be this many times as long as Original
	Original  int       `json:"rope_original"` // sequence length of pretraining, in tokens
	Low       float64   `json:"rope_low"`      // llama3: pairs that make fewer turns than this in Original tokens are scaled fully
	High      float64   `json:"rope_high"`     // llama3: pairs that make more turns than this are not scaled
	Fast      float64   `json:"rope_fast"`     // yarn: the same limits; Fast corresponds to High, Slow to Low
	Slow      float64   `json:"rope_slow"`
	Truncate  bool      `json:"rope_truncate"` // yarn: round the limits to whole pairs
	Amplitude float64   `json:"rope_amplitude"`
	Beta      float64   `json:"rope_beta"`  // of queries: see Rotation
	Short     []float64 `json:"rope_short"` // longrope: scale of each pair's wavelength for sequences up to Original tokens
	Long      []float64 `json:"rope_long"`  // the same for longer sequences
}

// rotation returns the rotation of heads of the given dimension in sequences of the given length.
func (r *RopeConfig) rotation(headDim, sequence int) Rotation {
	width := int(math.Round(float64(headDim) * r.Partial))
	out := Rotation{Rates: Rates(width, r.Theta), Scale: r.Amplitude, Rest: 1}
	for i, rate := range out.Rates {
		switch r.Scaling {
		case "none":
		case "linear":
			out.Rates[i] = rate / r.Factor
		case "llama3":
			out.Rates[i] = r.llama3(rate)
		case "yarn":
			out.Rates[i] = r.yarn(rate, i, width)
		case "longrope":
			factors := r.Short
			if sequence > r.Original {
				factors = r.Long
			}
			out.Rates[i] = rate / factors[i]
		default:
			demand(false, "rope scaling %q", r.Scaling)
		}
	}
	return out
}

// llama3 scales long wavelengths fully, short ones not at all, and interpolates in between (Llama 3.1's
// reference code).
func (r *RopeConfig) llama3(rate float64) float64 {
	turns := float64(r.Original) * rate / (2 * math.Pi)
	switch {
	case turns > r.High:
		return rate
	case turns < r.Low:
		return rate / r.Factor
	}
	smooth := (turns - r.Low) / (r.High - r.Low)
	return (1-smooth)*rate/r.Factor + smooth*rate
}

// yarn scales like llama3, but interpolates by the index of the pair (Peng et al., 2023).
func (r *RopeConfig) yarn(rate float64, pair, width int) float64 {
	pairOf := func(turns float64) float64 {
		return float64(width) * math.Log(float64(r.Original)/(turns*2*math.Pi)) / (2 * math.Log(r.Theta))
	}
	low, high := pairOf(r.Fast), pairOf(r.Slow)
	if r.Truncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = math.Max(low, 0), math.Min(high, float64(width-1))
	if low == high {
		high += 0.001
	}
	stretched := math.Min(math.Max((float64(pair)-low)/(high-low), 0), 1)
	return rate/r.Factor*stretched + rate*(1-stretched)
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

// Rotation rotates the pairs (i, i+len(Rates)) of every head, as GPT-NeoX and Llama's published weights pair
// them, by position times Rates[i]. It multiplies the rotated values by Scale and the rest of the head by Rest.
// If Beta is not 0, both are also multiplied by 1 + Beta ln(1 + floor(position/Period)).
type Rotation struct {
	Rates       []float64
	Scale, Rest float64
	Beta        float64
	Period      int64
}

// Rope applies a rotation to heads of headDim values. Row r is at position prefix + r/batch.
func Rope(x []float64, batch, heads, headDim, prefix int, r Rotation) []float64 {
	return rotate(x, batch, heads, headDim, prefix, r, 1)
}

// RopeGrad rotates backwards: the inverse of a rotation is its transpose.
func RopeGrad(dy []float64, batch, heads, headDim, prefix int, r Rotation) []float64 {
	return rotate(dy, batch, heads, headDim, prefix, r, -1)
}

func rotate(x []float64, batch, heads, headDim, prefix int, r Rotation, sign float64) []float64 {
	y := make([]float64, len(x))
	half := len(r.Rates)
	for start := 0; start < len(x); start += headDim { // for each head of a row
		position := float64(prefix + start/(heads*headDim)/batch)
		growth := 1.0
		if r.Beta != 0 {
			growth += r.Beta * math.Log(1+math.Floor(position/float64(r.Period)))
		}
		for i, rate := range r.Rates {
			sin, cos := math.Sincos(sign * position * rate)
			first, second := x[start+i], x[start+i+half]
			y[start+i] = growth * r.Scale * (first*cos - second*sin)
			y[start+i+half] = growth * r.Scale * (first*sin + second*cos)
		}
		for i := 2 * half; i < headDim; i++ {
			y[start+i] = growth * r.Rest * x[start+i]
		}
	}
	return y
}
