package vmtest

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// formula computes the results of an opcode from the operands that it reads. All operands and results have the
// same length.
type formula func(in map[string][]float64, a naive.Attrs) (out map[string][]float64)

// elementwiseSize gives the dimensions of operands in derived cases. They are odd, so that the length of a row
// is not a multiple of a kernel's vector length. Opcodes whose rows may be in the order of experts have n of them.
var elementwiseSize = map[string]int{"r": 9, "n": 9, "c": 41}

// elementwiseEnds are ends in derived cases: some rows, none, and all.
var elementwiseEnds = [][]int{{2, 2, 5}, {0}, {1, 9}}

// elementwise derives the cases of an opcode from its row in the opcode table and its formula in package naive:
// for all functions, with and without each optional operand, with another type for each operand whose type is
// free, and in place. It returns nil if there is no formula.
func elementwise(op ir.Op) func(*suite) {
	info, f := &ir.Ops[op], formulaOf(op)
	if f == nil {
		return nil
	}
	return func(s *suite) {
		for _, a := range s.attributes(info) {
			for _, types := range s.types(info) {
				s.elementwise(op, f, a, types)
			}
		}
	}
}

// formulaOf returns the formula of an elementwise opcode or of the gradient of one, or nil if the opcode is
// neither.
func formulaOf(op ir.Op) formula {
	name, gradient := strings.CutSuffix(ir.Ops[op].Name, "_grad")
	f := naive.Elementwise[name]
	if f == nil {
		return nil
	}
	forward := slices.IndexFunc(ir.Ops[:], func(o ir.OpInfo) bool { return o.Name == name })
	reads := ir.Ops[forward].Operands[ir.Ops[forward].Written():]
	return func(in map[string][]float64, a naive.Attrs) map[string][]float64 {
		out := map[string][]float64{}
		for i := range elementwiseSize["r"] * elementwiseSize["c"] {
			x := make([]float64, len(reads))
			for k, o := range reads {
				if values := in[o.Name]; values != nil {
					x[k] = values[i]
				}
			}
			if !gradient {
				out["y"] = append(out["y"], f(x, a))
				continue
			}
			for k, slope := range naive.NumericGrad(func(x []float64) float64 { return f(x, a) }, x) {
				dx := "d" + reads[k].Name
				out[dx] = append(out[dx], in["dy"][i]*slope)
			}
		}
		return out
	}
}

// attributes returns all combinations of the attribute values to test: every function, a random number for any
// other attribute, and for factors also 0.
func (s *suite) attributes(info *ir.OpInfo) []attrs {
	list := []attrs{{}}
	for _, a := range info.Attrs {
		choices := []float64{s.rng.NormFloat64()}
		switch {
		case a.Name == "share":
			choices = []float64{0}
		case a.Kind == ir.KindFactor:
			choices = append(choices, 0)
		case a.Kind == ir.KindFunction:
			choices = nil
			for i := range ir.Functions {
				choices = append(choices, float64(i))
			}
		}
		before := list
		list = nil
		for _, v := range choices {
			for _, a0 := range before {
				list = append(list, with(a0, a.Name, v))
			}
		}
	}
	return list
}

func with[V any](m map[string]V, key string, v V) map[string]V {
	m = maps.Clone(m)
	m[key] = v
	return m
}

// types returns the choices of operand types to test: all operands have the round's type, or one whose type is
// free has the other type; each with and without every optional operand.
func (s *suite) types(info *ir.OpInfo) []map[string]ir.DType {
	list := []map[string]ir.DType{{}}
	for _, o := range info.Operands {
		list[0][o.Name] = s.dtype
	}
	for _, o := range info.Operands {
		if o.Types == "F" {
			list = append(list, with(list[0], o.Name, s.otherType()))
		}
	}
	for _, o := range info.Operands {
		for _, types := range slices.Clone(list) {
			if o.Optional {
				types = maps.Clone(types)
				delete(types, o.Name)
				list = append(list, types)
			}
		}
	}
	return list
}

// elementwise checks one choice of attributes and types.
func (s *suite) elementwise(op ir.Op, f formula, a attrs, types map[string]ir.DType) {
	if _, given := types["ends"]; !given {
		s.upTo(op, f, a, types, nil)
		return
	}
	types = maps.Clone(types)
	delete(types, "ends")
	for _, ends := range elementwiseEnds {
		s.upTo(op, f, a, types, ends)
	}
}

// upTo checks an instruction with ends, unless they are nil, with separate results and with results in place.
func (s *suite) upTo(op ir.Op, f formula, a attrs, types map[string]ir.DType, ends []int) {
	info, in, inputs, results := &ir.Ops[op], map[string][]float64{}, args{}, args{}
	for i, o := range info.Operands {
		t, present := types[o.Name]
		if !present {
			continue
		}
		var shape []int
		for dim := range strings.SplitSeq(o.Dims, ",") {
			shape = append(shape, elementwiseSize[dim])
		}
		if i < info.Written() {
			if results[o.Name] = nothing(t, shape); ends != nil { // of which some remain
				results[o.Name] = s.typed(t, shape...)
			}
			continue
		}
		v := s.typed(t, shape...)
		if int64(a["function"]) == ir.ClampedSilu { // beyond its bounds, but not about them, where it has no slope
			for i := range v.data {
				if v.data[i] *= 4; math.Abs(math.Abs(v.data[i])-7) < 0.01 {
					v.data[i] = 0
				}
			}
		}
		inputs[o.Name] = v
		for len(in[o.Name]) < elementwiseSize["r"]*elementwiseSize["c"] { // an operand of one row is repeated for all rows
			in[o.Name] = append(in[o.Name], v.data...)
		}
	}
	want := f(in, naive.Attrs{Function: ir.Functions[int(a["function"])], Numbers: a})
	if ends != nil {
		inputs["ends"] = indices(ends, len(ends))
	}
	for _, alias := range places(info, inputs, results) {
		c := call{op: op, args: maps.Clone(inputs), attrs: a, alias: alias}
		maps.Copy(c.args, results)
		maps.DeleteFunc(c.args, func(name string, _ *value) bool { return alias[name] != "" })
		s.sub(fmt.Sprint(a, types, alias, ends), func(s *suite) {
			out := s.run(c)
			for name, v := range results {
				place := cmp.Or(alias[name], name)
				expected := want[name]
				if ends != nil {
					expected = onto(c.args[place], slices.Clone(expected[:ends[len(ends)-1]*elementwiseSize["c"]]))
				}
				s.equal(name, out[place], expected, v.dtype)
			}
		})
	}
}

// places returns all ways to put results in place of operands with the same shape and type, each in place of a
// different operand.
func places(info *ir.OpInfo, inputs, results args) []map[string]string {
	list := []map[string]string{{}}
	for name, result := range results {
		for _, before := range slices.Clone(list) {
			for place, v := range inputs {
				taken := slices.Contains(slices.Collect(maps.Values(before)), place)
				if info.InPlace && !taken && v.dtype == result.dtype && slices.Equal(v.shape, result.shape) {
					list = append(list, with(before, name, place))
				}
			}
		}
	}
	return list
}
