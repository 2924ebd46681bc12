package vmtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"sppo.dev/ir"
	"sppo.dev/vm/vmtest/naive"
)

// formula computes the results of an opcode from the operands that it reads. All have the same length.
type formula func(in map[string][]float64, a naive.Attrs) (out map[string][]float64)

// elementwiseSize is the shape of operands in derived cases: odd, so that vectors end inside rows.
var elementwiseSize = map[string]int{"r": 9, "c": 41}

// elementwise derives the cases of an opcode from its row and its formula in package naive: for all functions, with and
// without each optional operand, with a different type for each operand whose type is free, and in place. It
// returns nil if there is no formula.
func elementwise(op ir.Op) func(*suite) {
	info, f := &ir.Ops[op], formulaOf(op)
	if f == nil {
		return nil
	}
	return func(s *suite) {
		for _, a := range s.attributes(info) {
			for _, present := range presences(info) {
				for _, types := range s.types(present) {
					s.elementwise(op, f, a, present, types)
				}
			}
		}
	}
}

// formulaOf returns the formula of an elementwise opcode, or of the gradient of one, or nil.
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

// attributes returns every function and factor that the opcode may have, with random numbers for other attributes.
func (s *suite) attributes(info *ir.OpInfo) []attrs {
	list := []attrs{{}}
	for _, a := range info.Attrs {
		choices := []float64{s.rng.NormFloat64()}
		switch a.Kind {
		case ir.KindFactor:
			choices = append(choices, 0)
		case ir.KindFunction:
			choices = nil
			for i := range ir.Functions {
				choices = append(choices, float64(i))
			}
		}
		var longer []attrs
		for _, before := range list {
			for _, v := range choices {
				with := maps.Clone(before)
				with[a.Name] = v
				longer = append(longer, with)
			}
		}
		list = longer
	}
	return list
}

// presences returns all choices of operands that an instruction may have.
func presences(info *ir.OpInfo) [][]ir.Operand {
	list := [][]ir.Operand{nil}
	for _, o := range info.Operands {
		with := slices.Clone(list)
		for i := range with {
			with[i] = append(slices.Clone(with[i]), o)
		}
		if o.Optional {
			with = append(with, list...)
		}
		list = with
	}
	return list
}

// types returns the types of operands by name: the round's for all, and the other type for each that may have it.
func (s *suite) types(operands []ir.Operand) []map[string]ir.DType {
	same, other := map[string]ir.DType{}, ir.F32
	if s.dtype == ir.F32 {
		other = ir.BF16
	}
	for _, o := range operands {
		same[o.Name] = s.dtype
	}
	list := []map[string]ir.DType{same}
	for _, o := range operands {
		if o.Types == "F" {
			different := maps.Clone(same)
			different[o.Name] = other
			list = append(list, different)
		}
	}
	return list
}

// elementwise checks one choice of attributes, operands and types, with separate results and with results in place.
func (s *suite) elementwise(op ir.Op, f formula, a attrs, operands []ir.Operand, types map[string]ir.DType) {
	info, in, inputs, results := &ir.Ops[op], map[string][]float64{}, args{}, args{}
	for i, o := range operands {
		var shape []int
		for dim := range strings.SplitSeq(o.Dims, ",") {
			shape = append(shape, elementwiseSize[dim])
		}
		if i < info.Written() {
			results[o.Name] = nothing(types[o.Name], shape)
			continue
		}
		v := s.typed(types[o.Name], shape...)
		inputs[o.Name], in[o.Name] = v, v.data
		for len(in[o.Name]) < elementwiseSize["r"]*elementwiseSize["c"] { // one row for all
			in[o.Name] = append(in[o.Name], v.data...)
		}
	}
	want := f(in, naive.Attrs{Function: ir.Functions[int(a["function"])], Numbers: a})
	for _, alias := range s.places(info, inputs, results) {
		c := call{op: op, args: maps.Clone(inputs), attrs: a, alias: alias}
		for name, v := range results {
			if alias[name] == "" {
				c.args[name] = v
			}
		}
		s.sub(fmt.Sprint(a, types, alias), func(s *suite) {
			out := s.run(c)
			for name, v := range results {
				if place := alias[name]; place != "" {
					out[name] = out[place]
				}
				s.equal(name, out[name], want[name], v.dtype)
			}
		})
	}
}

// places returns all ways to put results in the place of operands with the same shape and type, each in another's.
func (s *suite) places(info *ir.OpInfo, inputs, results args) []map[string]string {
	list := []map[string]string{{}}
	for name, result := range results {
		for _, before := range slices.Clone(list) {
			for place, v := range inputs {
				taken := slices.Contains(slices.Collect(maps.Values(before)), place)
				if info.InPlace && !taken && v.dtype == result.dtype && slices.Equal(v.shape, result.shape) {
					with := maps.Clone(before)
					with[name] = place
					list = append(list, with)
				}
			}
		}
	}
	return list
}
