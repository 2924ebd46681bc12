package ir

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"sppo.dev/internal/near"
)

// This file finds opcodes by name, and suggests corrections for unknown names.

var opByName = sync.OnceValue(func() map[string]Op {
	m := make(map[string]Op, NumOps)
	for op := range NumOps {
		m[Ops[op].Name] = op
	}
	return m
})

func opNames() []string {
	names := make([]string, NumOps)
	for i := range names {
		names[i] = Ops[i].Name
	}
	return names
}

// findAttr returns the index of the first attribute of the given kind, or -1.
func (o *OpInfo) findAttr(kind AttrKind) int {
	return slices.IndexFunc(o.Attrs, func(a AttrInfo) bool { return a.Kind == kind })
}

// Usage returns the syntax of an instruction with this opcode, in one line.
func (o *OpInfo) Usage() string {
	var b strings.Builder
	b.WriteString(o.Name)
	for i := range o.Operands {
		switch {
		case i == 0:
			b.WriteString(" ")
		case i == o.Written():
			b.WriteString(" = ")
		default:
			b.WriteString(", ")
		}
		b.WriteString(o.Operands[i].usage())
	}
	for _, a := range o.Attrs {
		switch a.Kind {
		case KindBool:
			fmt.Fprintf(&b, " [%s]", a.Name)
		case KindGroup:
			b.WriteString(" @group")
		case KindEvent:
			b.WriteString(" e0")
		case KindOption:
			fmt.Fprintf(&b, " [%s=%s]", a.Name, KindInt)
		case KindFactor:
			fmt.Fprintf(&b, " [%s=%s]", a.Name, KindFloat)
		default:
			fmt.Fprintf(&b, " %s=%s", a.Name, a.Kind)
		}
	}
	return b.String()
}

func (o *Operand) usage() string {
	s := o.Name + ":" + o.typeText()
	if o.Dims != "" {
		s += "[" + o.Dims + "]"
	}
	if o.Optional {
		s = "(" + s + ")"
	}
	return s
}

// suggest returns a hint with the name in the table that is most similar to the given one, or "" if none is
// similar.
func suggest(name string, table map[string]int) string {
	return nearest(name, slices.Sorted(maps.Keys(table)))
}

// nearest returns a hint with the word that was probably meant, or "" if no word is similar.
func nearest(name string, words []string) string {
	meant := near.Word(name, words)
	if meant == "" {
		return ""
	}
	return "did you mean " + meant + "?"
}
