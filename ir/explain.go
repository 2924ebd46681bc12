package ir

import (
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
)

// Explain returns the reference entry of an opcode, generated from its row.
func Explain(name string) (string, error) {
	op, ok := opByName()[name]
	if !ok {
		msg := fmt.Sprintf("no opcode is named %s", name)
		if hint := nearest(name, opNames()); hint != "" {
			msg += ": " + hint
		}
		return "", errors.New(msg)
	}
	row := &Ops[op]
	var b strings.Builder
	fmt.Fprintf(&b, "%s (%s)\n\n%s\n", row.Name, row.Class, row.Doc)
	if row.Source != "" {
		fmt.Fprintf(&b, "See %s.\n", row.Source)
	}
	fmt.Fprintf(&b, "\nwritten   %s\nstreams   %s\n", row.Usage(), row.StreamNames())
	if row.InPlace {
		b.WriteString("in place  an output may be the same view as an input\n")
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	if len(row.Operands) > 0 {
		fmt.Fprint(w, "\noperands\n")
	}
	for i := range row.Operands {
		o := &row.Operands[i]
		fmt.Fprintf(w, "  %s\t%s\t%s\t%s\n", o.Name, o.Dir, strings.TrimSpace(o.Types+" "+o.shapeText()), strings.Join(o.notes(), "; "))
	}
	w.Flush()
	if len(row.Attrs) > 0 {
		fmt.Fprint(w, "\nattributes\n")
	}
	for _, a := range row.Attrs {
		fmt.Fprintf(w, "  %s\t%s\t%s\n", a.Name, a.Kind, a.Doc)
	}
	w.Flush()
	return trimLines(b.String()), nil
}

// Opcodes returns the names of all opcodes, in the order of the table.
func Opcodes() []string { return opNames() }

// StreamNames returns the streams that an opcode may run on.
func (o *OpInfo) StreamNames() string {
	if len(o.Streams) == 0 {
		return "all"
	}
	var names []string
	for _, s := range o.Streams {
		names = append(names, s.String())
	}
	return strings.Join(names, ", ")
}

func (o *Operand) shapeText() string {
	if o.Dims == "" {
		return ""
	}
	return "[" + o.Dims + "]"
}

// notes returns the properties of an operand other than its name, direction, type and shape.
func (o *Operand) notes() []string {
	var notes []string
	if o.Adds != "" {
		notes = append(notes, "added to by "+o.Adds)
	}
	if o.Optional {
		notes = append(notes, "optional")
	}
	if o.Arena != Device {
		notes = append(notes, "in the "+o.Arena.String()+" arena")
	}
	if o.Doc != "" {
		notes = append(notes, o.Doc)
	}
	return notes
}

// trimLines removes spaces at the ends of lines.
func trimLines(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.Join(lines, "\n")
}
