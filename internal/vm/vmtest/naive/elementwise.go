package naive

import "math"

// Attrs holds the attributes of an elementwise opcode.
type Attrs struct {
	Function string             // argument of Activate
	Numbers  map[string]float64 // by the attribute's name
}

// Elementwise holds, by name, the formulas of opcodes that compute each element of the result from the same
// element of the operands. x holds one number for each operand that the opcode reads, in the order of the
// opcode table, or 0 if the operand is absent. Package vmtest derives the cases of the opcode from the formula,
// and those of its gradient, NAME_grad, from the formula's derivative.
var Elementwise = map[string]func(x []float64, a Attrs) float64{
	"activation": func(x []float64, a Attrs) float64 { return Activate(a.Function, x)[0] },
	"glu":        func(x []float64, a Attrs) float64 { return GLU(a.Function, x[:1], x[1:])[0] },
	"add":        func(x []float64, _ Attrs) float64 { return x[0] + x[1] + x[2] },
	"axpby":      func(x []float64, a Attrs) float64 { return a.Numbers["alpha"]*x[0] + a.Numbers["beta"]*x[1] },
}

// functions holds the activation functions by name. Each returns the function's value and slope.
var functions = map[string]func(x float64) (y, slope float64){
	"gelu": func(x float64) (y, slope float64) { // Hendrycks and Gimpel, 2016
		return x * normalCDF(x), normalCDF(x) + x*math.Exp(-x*x/2)/math.Sqrt(2*math.Pi)
	},
	"gelu_tanh": func(x float64) (y, slope float64) { // its approximation in GPT-2
		const cubic = 0.044715
		tanh := math.Tanh(math.Sqrt(2/math.Pi) * (x + cubic*x*x*x))
		return 0.5 * x * (1 + tanh), 0.5*(1+tanh) + 0.5*x*(1-tanh*tanh)*math.Sqrt(2/math.Pi)*(1+3*cubic*x*x)
	},
	"silu":  func(x float64) (y, slope float64) { return x * sigmoid(x), sigmoid(x) + x*sigmoid(x)*(1-sigmoid(x)) },
	"relu2": func(x float64) (y, slope float64) { return math.Max(x, 0) * math.Max(x, 0), 2 * math.Max(x, 0) }, // So et al., 2021

	"clamped_silu": func(x float64) (y, slope float64) { // gpt-oss
		s := sigmoid(1.702 * math.Min(x, 7))
		if x > 7 {
			return 7 * s, 0
		}
		return x * s, s + 1.702*x*s*(1-s)
	},
	"sigmoid": func(x float64) (y, slope float64) { return sigmoid(x), sigmoid(x) * (1 - sigmoid(x)) },
}

func normalCDF(x float64) float64 { return 0.5 * math.Erfc(-x/math.Sqrt2) }

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// Activate applies an activation function.
func Activate(function string, x []float64) []float64 {
	f, y := functions[function], make([]float64, len(x))
	demand(f != nil, "function %q", function)
	for i := range x {
		y[i], _ = f(x[i])
	}
	return y
}

// ActivateGrad returns the gradient of Activate.
func ActivateGrad(function string, x, dy []float64) []float64 {
	f, dx := functions[function], make([]float64, len(x))
	demand(f != nil, "function %q", function)
	for i := range x {
		_, slope := f(x[i])
		dx[i] = dy[i] * slope
	}
	return dx
}

// GLU (Shazeer, 2020) returns function(gate) * up. With clamped_silu, it bounds up by 7 and adds 1.
func GLU(function string, gate, up []float64) []float64 {
	up, _ = clamped(function, up)
	return times(Activate(function, gate), up)
}

// clamped returns by what GLU multiplies, and its slope.
func clamped(function string, up []float64) (y, slope []float64) {
	for _, u := range up {
		v, d := u, 1.0
		if function == "clamped_silu" {
			if v = math.Max(-7, math.Min(u, 7)); v != u {
				d = 0
			}
			v++
		}
		y, slope = append(y, v), append(slope, d)
	}
	return y, slope
}

// GLUGrad returns the gradients of GLU.
func GLUGrad(function string, gate, up, dy []float64) (dgate, dup []float64) {
	up, slope := clamped(function, up)
	return ActivateGrad(function, gate, times(dy, up)), times(times(dy, slope), Activate(function, gate))
}

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

// SoftcapGrad returns the gradient of Softcap, given its result y.
func SoftcapGrad(y, dy []float64, limit float64) []float64 {
	if limit == 0 {
		return dy
	}
	dx := make([]float64, len(y))
	for i, v := range y {
		dx[i] = dy[i] * (1 - v/limit*v/limit)
	}
	return dx
}
