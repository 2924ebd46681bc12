package ir

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
)

// This file compiles the rules that a row gives, as text, for the shapes of its operands. It does so only once.
// It also checks instructions against these rules and those for element types.

// factor is one part of a dimension: a number, an attribute, or a name that the instruction binds.
type factor struct {
	kind  factorKind
	value int64 // number, index of the attribute, or index of the name
}

type factorKind uint8

const (
	factorNumber factorKind = iota
	factorAttr
	factorName
)

// shapeRule is the compiled form of a row's rules for its operands.
type shapeRule struct {
	dims  [][][]factor // by operand and dimension; nil accepts any shape
	sizes []int        // attributes that shapes depend on
	names int
}

// maxDimNames limits the number of names in the dimensions of a row; a test of the table enforces it.
const maxDimNames = 8

var shapeRules = sync.OnceValue(func() *[NumOps]shapeRule {
	var rules [NumOps]shapeRule
	for op := range rules {
		rules[op] = newShapeRule(&Ops[op])
	}
	return &rules
})

func newShapeRule(row *OpInfo) shapeRule {
	r := shapeRule{dims: make([][][]factor, len(row.Operands))}
	names := map[string]int{}
	inShape := map[int]bool{}
	for i := range row.Operands {
		if row.Operands[i].Dims == "" {
			continue
		}
		for dim := range strings.SplitSeq(row.Operands[i].Dims, ",") {
			var product []factor
			for word := range strings.SplitSeq(dim, "*") {
				f := newFactor(row, names, word)
				if f.kind == factorAttr {
					inShape[int(f.value)] = true
				}
				product = append(product, f)
			}
			r.dims[i] = append(r.dims[i], product)
		}
	}
	r.names = len(names)
	for i := range row.Attrs {
		// attention and collectives also use integer attributes in rules that dimensions cannot express
		if inShape[i] || (row.Rule == RuleAttention || row.Rule == RuleCollective) && row.Attrs[i].Kind == KindInt {
			r.sizes = append(r.sizes, i)
		}
	}
	return r
}

func newFactor(row *OpInfo, names map[string]int, word string) factor {
	if v, err := strconv.ParseInt(word, 10, 32); err == nil {
		return factor{factorNumber, v}
	}
	for i := range row.Attrs {
		if row.Attrs[i].Name == word {
			return factor{factorAttr, int64(i)}
		}
	}
	if _, ok := names[word]; !ok {
		names[word] = len(names)
	}
	return factor{factorName, int64(names[word])}
}

// checkSizes checks that attributes in shapes are literals, not constants of the rank, and in range.
func (in *Instr) checkSizes() error {
	for _, i := range shapeRules()[in.Op].sizes {
		a, least := in.Attrs[i], int64(1)
		name := in.Info().Attrs[i].Name
		if name == attrPrefix.Name {
			least = 0
		}
		if a.Const != 0 {
			return fmt.Errorf("attribute %s is part of a shape and must be literal", name)
		}
		if v := int64(a.Bits); v < least {
			return fmt.Errorf("attribute %s is %d, but must be at least %d", name, v, least)
		}
	}
	return nil
}

// CheckShapes applies the dimensions and element types of the row, then its rule.
func (in *Instr) CheckShapes() error {
	if err := in.checkSizes(); err != nil {
		return err
	}
	rule := &shapeRules()[in.Op]
	var bound [maxDimNames]int64
	for i := range in.Args {
		if rule.dims[i] == nil || !in.Args[i].Present() {
			continue
		}
		if err := in.checkDims(i, rule.dims[i], &bound); err != nil {
			return err
		}
	}
	if err := in.checkTypes(); err != nil {
		return err
	}
	return in.CheckRule()
}

func (in *Instr) checkDims(i int, rule [][]factor, bound *[maxDimNames]int64) error {
	v := &in.Args[i]
	dims := v.Dims()
	if len(dims) != len(rule) {
		return in.badShape(i, "")
	}
	for j, product := range rule {
		size, known, open := dims[j], int64(1), -1
		for _, f := range product {
			n := f.value
			switch f.kind {
			case factorAttr:
				n = int64(in.Attrs[f.value].Bits)
			case factorName:
				if n = bound[f.value]; n == 0 {
					open, n = int(f.value), 1
				}
			}
			known = times(known, n)
		}
		switch {
		case open < 0 && known != size:
			return in.badShape(i, fmt.Sprintf(": dimension %d must be %d", j, known))
		case open >= 0 && size%known != 0:
			return in.badShape(i, fmt.Sprintf(": dimension %d must be a multiple of %d", j, known))
		case open >= 0:
			bound[open] = size / known
		}
	}
	return nil
}

func (in *Instr) badShape(i int, why string) error {
	o := &in.Info().Operands[i]
	return fmt.Errorf("%s has shape %v, not [%s]%s", o.Name, in.Args[i].Dims(), o.Dims, why)
}

// checkTypes applies the rule of the row for element types.
func (in *Instr) checkTypes() error {
	row, first := in.Info(), -1
	for i := range in.Args {
		v, o := &in.Args[i], &row.Operands[i]
		if !v.Present() {
			continue
		}
		if !o.allows(v.DType) {
			return fmt.Errorf("%s is %s, not %s", o.Name, v.DType, o.typeText())
		}
		if o.Types != "T" {
			continue
		}
		if first >= 0 && in.Args[first].DType != v.DType {
			return fmt.Errorf("%s is %s and %s is %s, but they must be equal", row.Operands[first].Name, in.Args[first].DType, o.Name, v.DType)
		}
		first = i
	}
	if row.Class == ClassMove && in.Args[0].DType != in.Args[1].DType {
		return fmt.Errorf("a copy from %s to %s", in.Args[1].DType, in.Args[0].DType)
	}
	return nil
}
