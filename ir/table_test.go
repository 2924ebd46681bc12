package ir_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

var (
	wordPattern = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	dimsPattern = regexp.MustCompile(`^([a-z_]+|[0-9]+)(\*([a-z_]+|[0-9]+))*(,([a-z_]+|[0-9]+)(\*([a-z_]+|[0-9]+))*)*$`)
)

func TestTableIsComplete(t *testing.T) {
	seen := map[string]bool{}
	for op := range ir.NumOps {
		row := &ir.Ops[op]
		bad := func(format string, args ...any) {
			t.Errorf("opcode %d %s: %s", op, row.Name, fmt.Sprintf(format, args...))
		}
		if !wordPattern.MatchString(row.Name) || seen[row.Name] {
			bad("a name of its own, in small letters")
		}
		seen[row.Name] = true
		if !strings.HasSuffix(row.Doc, ".") {
			bad("a sentence that says what it does")
		}
		if (len(row.Streams) == 0) != (row.Class == ir.ClassSync) {
			bad("streams %v", row.Streams)
		}
		if (row.Work == ir.WorkNone) != (row.Class == ir.ClassSync) {
			bad("work kind %d", row.Work)
		}
		if len(row.Attrs) > 16 {
			bad("%d attributes do not fit into the mask of the file form", len(row.Attrs))
		}
		checkOperands(row, bad)
		names := map[string]bool{}
		for _, a := range row.Attrs {
			if !wordPattern.MatchString(a.Name) || names[a.Name] {
				bad("attribute %q", a.Name)
			}
			names[a.Name] = true
		}
	}
}

func checkOperands(row *ir.OpInfo, bad func(string, ...any)) {
	known := map[string]bool{}
	for _, a := range row.Attrs {
		known[a.Name] = true
	}
	free := map[string]bool{}
	for i := range row.Operands {
		o := &row.Operands[i]
		if !wordPattern.MatchString(o.Name) {
			bad("operand %q", o.Name)
		}
		if (o.Dir != ir.Read) != (i < row.Written()) {
			bad("operand %s: what is written stands first", o.Name)
		}
		if !strings.Contains(" f32 bf16 i32 u8 T F any ", " "+o.Types+" ") {
			bad("operand %s: types %q", o.Name, o.Types)
		}
		if o.Dir == ir.WriteOrAdd && !known[o.AddsBy()] || o.Dir != ir.WriteOrAdd && o.Adds != "" {
			bad("operand %s is accumulated by %q, which is no attribute, or not at all", o.Name, o.AddsBy())
		}
		if o.Dims == "" {
			continue
		}
		if !dimsPattern.MatchString(o.Dims) || strings.Count(o.Dims, ",") >= ir.MaxDims {
			bad("operand %s: dimensions %q", o.Name, o.Dims)
		}
		for dim := range strings.SplitSeq(o.Dims, ",") {
			open := 0
			for word := range strings.SplitSeq(dim, "*") {
				if !known[word] && word[0] > '9' {
					open++
					known[word] = true
					free[word] = true
				}
			}
			if open > 1 {
				bad("operand %s: dimension %q leaves two names open", o.Name, dim)
			}
		}
	}
	if len(free) > 8 {
		bad("%d names in dimensions", len(free))
	}
}

func TestReferencePageIsTheTable(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Opcodes

Generated from the table in ` + "`op.go`" + ` by ` + "`go test ./ir -update`" + `; do not edit.

Dimensions with the same name agree within an instruction; the name of an attribute stands for its value. Type T is f32 or bf16, the
same for every T of the instruction; F is f32 or bf16, chosen independently. Directions: in is read; out is overwritten completely;
inout is updated; acc is written, or added to if accumulate, or the named attribute, is set. An operand in brackets is optional.
`)
	for op := range ir.NumOps {
		row := &ir.Ops[op]
		fmt.Fprintf(&b, "\n## %s\n\n%s", row.Name, row.Doc)
		if row.Source != "" {
			fmt.Fprintf(&b, " See %s.", row.Source)
		}
		fmt.Fprintf(&b, "\n\n`%s`\n\n%s on %s.", row.Usage(), row.Class, row.StreamNames())
		if row.InPlace {
			b.WriteString(" In place: an output may use the same view as an input.")
		}
		b.WriteString("\n")
		if len(row.Operands) > 0 {
			b.WriteString("\n| operand | | type | shape | |\n| --- | --- | --- | --- | --- |\n")
		}
		for _, o := range row.Operands {
			name, dir, doc := o.Name, o.Dir.String(), o.Doc
			if o.Adds != "" {
				dir += " by " + o.Adds
			}
			if o.Optional {
				name = "(" + name + ")"
			}
			if o.Arena != ir.Device {
				doc = strings.TrimSuffix(o.Arena.String()+" arena; "+doc, "; ")
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", name, dir, o.Types, o.Dims, doc)
		}
		if len(row.Attrs) > 0 {
			b.WriteString("\n| attribute | kind | |\n| --- | --- | --- |\n")
		}
		for _, a := range row.Attrs {
			fmt.Fprintf(&b, "| %s | %s | %s |\n", a.Name, a.Kind, a.Doc)
		}
	}
	irtest.Golden(t, "OPCODES.md", []byte(strings.ReplaceAll(b.String(), "  |", " |")))
}

func TestExplain(t *testing.T) {
	for _, op := range []string{"matmul", "attention_grad", "d2h", "send", "record"} {
		text, err := ir.Explain(op)
		if err != nil {
			t.Fatal(err)
		}
		irtest.Golden(t, filepath.Join("testdata", "explain", op+".want"), []byte(text))
	}
	if _, err := ir.Explain("matmull"); err == nil || !strings.Contains(err.Error(), "did you mean matmul?") {
		t.Errorf("no hint at matmul: %v", err)
	}
	for _, op := range ir.Opcodes() {
		if _, err := ir.Explain(op); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat("OPCODES.md"); err != nil {
		t.Error(err)
	}
}
