package ir_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// TestOpcodesForPrograms keeps opcodes.json, from which other machines read what docs/bytecode.md refers to.
func TestOpcodesForPrograms(t *testing.T) {
	type operand struct {
		Name     string `json:"name"`
		Dir      string `json:"dir"`
		Types    string `json:"types"`
		Dims     string `json:"dims,omitempty"`
		Adds     string `json:"adds,omitempty"`
		Optional bool   `json:"optional,omitempty"`
	}
	type attribute struct {
		Name string `json:"name"`
		Kind string `json:"kind"`
	}
	type opcode struct {
		Name     string      `json:"name"`
		Class    string      `json:"class"`
		Operands []operand   `json:"operands"`
		Attrs    []attribute `json:"attributes"`
	}
	var file bytes.Buffer
	if err := ir.Encode(&file, irtest.Random(1, 10)); err != nil {
		t.Fatal(err)
	}
	page := struct {
		Version   uint32   `json:"version"`
		Table     string   `json:"table"`
		Streams   []string `json:"streams"`
		Functions []string `json:"functions"`
		Opcodes   []opcode `json:"opcodes"`
	}{
		Version: binary.LittleEndian.Uint32(file.Bytes()[8:]), Table: fmt.Sprintf("%016x", binary.LittleEndian.Uint64(file.Bytes()[12:])),
		Functions: ir.Functions,
	}
	for s := range ir.NumStreams {
		page.Streams = append(page.Streams, s.String())
	}
	for i := range ir.Ops {
		row := &ir.Ops[i]
		op := opcode{row.Name, row.Class.String(), []operand{}, []attribute{}}
		for j := range row.Operands {
			o := &row.Operands[j]
			adds := ""
			if o.Dir == ir.WriteOrAdd {
				adds = o.AddsBy()
			}
			op.Operands = append(op.Operands, operand{o.Name, o.Dir.String(), o.Types, o.Dims, adds, o.Optional})
		}
		for _, a := range row.Attrs {
			op.Attrs = append(op.Attrs, attribute{a.Name, a.Kind.String()})
		}
		page.Opcodes = append(page.Opcodes, op)
	}
	var text strings.Builder
	encoder := json.NewEncoder(&text)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(page); err != nil {
		t.Fatal(err)
	}
	irtest.Golden(t, "opcodes.json", []byte(text.String()))
	// The Python package has a copy, not a link, so that its folder can be copied and installed anywhere.
	irtest.Golden(t, filepath.Join("..", "interop", "torch", "sppo_torch", "opcodes.json"), []byte(text.String()))
}
