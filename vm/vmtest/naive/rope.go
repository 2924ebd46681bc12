package naive

import "math"

// RopeConfig says how fast positions turn.
type RopeConfig struct {
	Theta   float64 `json:"rope_theta"`
	Local   float64 `json:"rope_local_theta"` // in layers with a window, which are not stretched; 0: Theta
	Partial float64 `json:"rope_partial"`     // share of a head that turns
	Scaling string  `json:"rope_scaling"`     // none | linear | llama3 | yarn | longrope

	Factor    float64   `json:"rope_factor"`   // how many times longer than Original sequences may be
	Original  int       `json:"rope_original"` // tokens of the sequences that the model was first trained on
	Low       float64   `json:"rope_low"`      // llama3: what turns less often in Original tokens is stretched whole
	High      float64   `json:"rope_high"`     // what turns more often is not stretched
	Fast      float64   `json:"rope_fast"`     // yarn: likewise, counted in turns
	Slow      float64   `json:"rope_slow"`
	Truncate  bool      `json:"rope_truncate"` // yarn: to whole pairs
	Amplitude float64   `json:"rope_amplitude"`
	Short     []float64 `json:"rope_short"` // longrope: what each pair's wave is stretched by, up to Original tokens
	Long      []float64 `json:"rope_long"`  // and beyond
}

// rotation is that of heads of a width in sequences of a length.
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

// llama3 stretches long waves, leaves short ones and goes from one to the other in between (Llama 3.1's reference code).
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

// yarn does so by the numbers of the pairs (Peng et al., 2023).
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
