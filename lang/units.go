package lang

import (
	"math"
	"strconv"
	"strings"
)

// dim is the dimension of a number: its powers of bytes, floating-point operations and seconds.
type dim struct{ bytes, flops, seconds int8 }

var (
	dimCount    = dim{} // plain numbers, including token counts
	dimBytes    = dim{bytes: 1}
	dimRate     = dim{bytes: 1, seconds: -1}
	dimCompute  = dim{flops: 1, seconds: -1}
	dimDuration = dim{seconds: 1}
)

// dimensions describes each dimension that the value of a key can have, with an example.
var dimensions = []struct {
	dim           dim
	name, example string
}{
	{dimCount, "a plain number", "8"},
	{dimBytes, "a number of bytes", "80GiB"},
	{dimRate, "bytes per second", "32GB/s"},
	{dimCompute, "operations per second", "312TFLOPS"},
	{dimDuration, "a time", "5us"},
}

func (d dim) String() string {
	for _, known := range dimensions {
		if known.dim == d {
			return known.name
		}
	}
	var parts []string
	for _, p := range []struct {
		unit  string
		power int8
	}{{"byte", d.bytes}, {"flop", d.flops}, {"second", d.seconds}} {
		if p.power == 1 {
			parts = append(parts, p.unit)
		} else if p.power != 0 {
			parts = append(parts, p.unit+"^"+strconv.Itoa(int(p.power)))
		}
	}
	return "a value in " + strings.Join(parts, " ")
}

// times returns the dimension of a product (sign 1) or quotient (sign -1). It returns false if an
// exponent becomes too large.
func (d dim) times(e dim, sign int8) (dim, bool) {
	out := dim{d.bytes + sign*e.bytes, d.flops + sign*e.flops, d.seconds + sign*e.seconds}
	for _, p := range []int8{out.bytes, out.flops, out.seconds} {
		if p < -8 || p > 8 {
			return d, false
		}
	}
	return out, true
}

type unit struct {
	scale float64 // in base units: counts, bytes, bytes/s, FLOP/s, seconds
	dim   dim
}

// of converts a number in this unit to base units. It divides if the unit is smaller than the base unit,
// because 5 / 1e6 is the float nearest to 5us, whereas 5 * 1e-6 is not.
func (u unit) of(x float64) float64 {
	if u.scale < 1 {
		return x / math.Round(1/u.scale)
	}
	return x * u.scale
}

// units lists the units of numbers by name. K and M count tokens, so they are powers of 1024.
var units = map[string]unit{
	"K": {1 << 10, dimCount}, "M": {1 << 20, dimCount},
	"B":   {1, dimBytes},
	"KiB": {1 << 10, dimBytes}, "MiB": {1 << 20, dimBytes}, "GiB": {1 << 30, dimBytes}, "TiB": {1 << 40, dimBytes},
	"KB": {1e3, dimBytes}, "MB": {1e6, dimBytes}, "GB": {1e9, dimBytes}, "TB": {1e12, dimBytes},
	"MB/s": {1e6, dimRate}, "GB/s": {1e9, dimRate}, "TB/s": {1e12, dimRate},
	"MiB/s": {1 << 20, dimRate}, "GiB/s": {1 << 30, dimRate}, "TiB/s": {1 << 40, dimRate},
	"Mb/s": {1e6 / 8, dimRate}, "Gb/s": {1e9 / 8, dimRate}, "Tb/s": {1e12 / 8, dimRate},
	"GFLOPS": {1e9, dimCompute}, "TFLOPS": {1e12, dimCompute}, "PFLOPS": {1e15, dimCompute},
	"ns": {1e-9, dimDuration}, "us": {1e-6, dimDuration}, "µs": {1e-6, dimDuration}, "ms": {1e-3, dimDuration}, "s": {1, dimDuration},
}

// unitsOf lists the units of a dimension, smallest first.
func unitsOf(d dim) []string {
	var names []string
	for _, name := range sortedKeys(units) {
		if units[name].dim == d && name != "µs" {
			names = append(names, name)
		}
	}
	sortBy(names, func(n string) float64 { return units[n].scale })
	return names
}

// splitNumber cuts a literal such as 1_000.5e3GB/s into its value and unit.
func splitNumber(literal string) (value float64, unitName string, ok bool) {
	end := len(literal)
	for i, r := range literal {
		if r >= '0' && r <= '9' || r == '.' || r == '_' {
			continue
		}
		if (r == 'e' || r == 'E') && exponentFollows(literal[i+1:]) {
			continue
		}
		if (r == '+' || r == '-') && i > 0 && strings.ContainsRune("eE", rune(literal[i-1])) {
			continue
		}
		end = i
		break
	}
	value, err := strconv.ParseFloat(strings.ReplaceAll(literal[:end], "_", ""), 64)
	return value, literal[end:], err == nil && !math.IsInf(value, 0)
}

func exponentFollows(rest string) bool {
	rest = strings.TrimLeft(rest, "+-")
	return rest != "" && rest[0] >= '0' && rest[0] <= '9'
}

// decimal writes a number without its last digits, which may contain errors from unit conversion.
func decimal(x float64) string {
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(x, 'g', 12, 64), 64)
	if err != nil {
		panic("internal: " + err.Error())
	}
	return strconv.FormatFloat(rounded, 'f', -1, 64)
}

// leastK is the smallest plain number that is written with K or M.
const leastK = 8 << 10

// showNumber writes a number in base units as a user would: 80GiB, 1M, 0.5.
func showNumber(x float64, d dim) string {
	best, text := "", strconv.FormatFloat(x, 'g', -1, 64)
	if d == dimCount && x == math.Trunc(x) && math.Abs(x) < 1<<53 {
		text = strconv.FormatInt(int64(x), 10)
	}
	for _, name := range unitsOf(d) {
		scaled := x / units[name].scale
		short := decimal(scaled)
		whole := len(short) <= 4 && scaled >= 1
		if whole && (best == "" || len(short)+len(name) <= len(best)) && (d != dimCount || x >= leastK) {
			best = short + name
		}
	}
	if best != "" {
		return best
	}
	if x == 0 || d == dimCount {
		return text
	}
	return text + " (base unit)"
}
