package ir_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

func TestFilesAreReadByContent(t *testing.T) {
	p := irtest.Random(7, 60)
	dir := t.TempDir()
	for _, name := range []string{"a.sppb", "a.sppir", "other"} {
		path := filepath.Join(dir, name)
		if err := ir.WriteFile(path, p); err != nil {
			t.Fatal(err)
		}
		renamed := filepath.Join(dir, "renamed.txt")
		if err := os.Rename(path, renamed); err != nil {
			t.Fatal(err)
		}
		back, err := ir.ReadFile(renamed)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !reflect.DeepEqual(p, back) {
			t.Errorf("%s: read back differs", name)
		}
	}
}

// If writing a file fails, its old contents remain, and no temporary file is left behind.
func TestFailedWriteLeavesWhatWasThere(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.sppb")
	if err := os.WriteFile(path, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := irtest.Random(7, 60)
	p.Run.LR = math.NaN()
	if err := ir.WriteFile(path, p); err == nil {
		t.Error("NaN has no JSON, but the file was written")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := os.ReadFile(path); len(entries) != 1 || string(got) != "before" {
		t.Errorf("%d files, %q", len(entries), got)
	}
	if err := ir.WriteFile(filepath.Join(dir, "none", "a.sppb"), p); err == nil {
		t.Error("wrote into a folder that does not exist")
	}
}

func TestDamagedFilesAreRefused(t *testing.T) {
	whole := encode(t, irtest.Random(3, 60))
	change := func(at int, b byte) []byte {
		data := bytes.Clone(whole)
		data[at] ^= b
		return data
	}
	cases := []struct {
		name string
		data []byte
		want string
	}{
		{"empty", nil, "does not have the signature of a .sppb file"},
		{"text", []byte("hello, world, this is no program"), "does not have the signature of a .sppb file"},
		{"only the start", whole[:12], "truncated"},
		{"version", change(8, 6), "format version 2, but this build reads version 4"},
		{"table", change(12, 1), "compile it again with this build"},
		{"a flipped bit", change(len(whole)/2, 16), "checksum"},
		{"cut short", whole[:len(whole)-7], "checksum"},
		{"too long", append(bytes.Clone(whole), 0), "checksum"},
	}
	for _, c := range cases {
		if _, err := ir.Decode(c.data); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, not %q", c.name, err, c.want)
		}
	}
	for n := range len(whole) {
		if _, err := ir.Decode(whole[:n]); err == nil {
			t.Fatalf("the first %d of %d bytes are a program", n, len(whole))
		}
		if _, err := ir.Decode(sealed(whole[:n], whole)); err == nil {
			t.Fatalf("the first %d of %d bytes, sealed, are a program", n, len(whole))
		}
	}
}

func TestReadFileNamesTheFile(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"a.sppb": "garbage", "b.sppb": "sppb\r\n\x1a\nbut no more than this here", "c.sppir": "garbage"} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := ir.ReadFile(path)
		if err == nil || !strings.HasPrefix(err.Error(), path+":") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ir.ReadFile(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// malformations are errors that only a program built in memory can have.
var malformations = []struct {
	name  string
	spoil func(p *ir.Program)
	want  string
}{
	{"opcode", func(p *ir.Program) { first(p).Op = ir.NumOps }, fmt.Sprintf("code stage0, init 0: opcode %[1]d of %[1]d", ir.NumOps)},
	{"stream", func(p *ir.Program) { first(p).Stream = ir.NumStreams }, "init_normal on stream 11 of 11"},
	{"phase", func(p *ir.Program) { first(p).Prov.Phase = ir.NumPhases }, "phase 6 of 6"},
	{"line", func(p *ir.Program) { first(p).Prov.Line = 99 }, "spec line 99 of 5"},
	{"operands", func(p *ir.Program) { first(p).Args = nil }, "init_normal has 0 operands and 5 attributes, not 1 and 5"},
	{"absent", func(p *ir.Program) { first(p).Args[0] = ir.Absent() }, "init_normal is missing operand w"},
	{"buffer", func(p *ir.Program) { first(p).Args[0].Buffer = 1 << 20 }, "w is in buffer 1048576 of"},
	{"element type", func(p *ir.Program) { first(p).Args[0].DType = ir.NumDTypes }, "w has element type 4 of 4"},
	{"type of an operand", func(p *ir.Program) { first(p).Args[0].DType = ir.U8 }, "w of init_normal is u8, not f32|bf16"},
	{"offset", func(p *ir.Program) { first(p).Args[0].Offset = -4 }, "w starts at byte -4"},
	{"shape", func(p *ir.Program) { first(p).Args[0].Shape = [ir.MaxDims]int64{4, 0, 4} }, "w has shape [4 0 4 0]"},
	{"negative shape", func(p *ir.Program) { first(p).Args[0].Shape[0] = -4 }, "w has shape [-4 4 0 0]"},
	{"tensor", func(p *ir.Program) { first(p).Attrs[0] = ir.Int(77) }, "attribute tensor: no such tensor (77)"},
	{"literal", func(p *ir.Program) { first(p).Attrs[0] = ir.ConstRef(0) }, "attribute tensor: no such tensor (constant 0)"},
	{"constant", func(p *ir.Program) { first(p).Attrs[1] = ir.ConstRef(77) }, "attribute row: no such int (constant 77)"},
	{"events", func(p *ir.Program) { p.Codes[0].Events[1] = 1 << 30 }, "1073741824 events in"},
	{"buffer name", func(p *ir.Program) { p.Codes[0].Buffers[1].Name = p.Codes[0].Buffers[0].Name }, `two buffers are named "b0"`},
	{"no name", func(p *ir.Program) { p.Groups[0] = "" }, "group 0 has no name"},
	{"not text", func(p *ir.Program) { p.Lines[0] = "\xff" }, "not UTF-8"},
	{"arena", func(p *ir.Program) { p.Codes[0].Buffers[0].Arena = ir.NumArenas }, "buffer b0 is in arena 2 of 2"},
	{"extent", func(p *ir.Program) { p.Codes[0].Buffers[0].Offset = math.MaxInt64 }, "buffer b0 has 256 bytes at 9223372036854775807"},
	{"state", func(p *ir.Program) { p.Codes[0].States[0].Tensor = 9 }, "state 0 is of tensor 9 of 3"},
	{"result", func(p *ir.Program) { p.Codes[0].Results[0].View = ir.Absent() }, "result loss has no view"},
	{"rank's code", func(p *ir.Program) { p.Ranks[0].Code = -1 }, "rank 0: code -1 of"},
	{"rank's constants", func(p *ir.Program) { p.Ranks[0].Consts = nil }, "rank 0: 0 values for 4 constants"},
	{"rank's groups", func(p *ir.Program) { p.Ranks[0].Groups = nil }, "rank 0: 0 lists for 3 groups"},
	{"member", func(p *ir.Program) { p.Ranks[0].Groups[0] = []int32{99} }, "rank 0: member 99 of group 0"},
}

func first(p *ir.Program) *ir.Instr { return &p.Codes[0].Sections[ir.SectionInit][0] }

func TestMalformedProgramsAreRefused(t *testing.T) {
	for _, m := range malformations {
		p := irtest.Random(3, 60)
		m.spoil(p)
		err := p.Check()
		if err == nil || !strings.Contains(err.Error(), m.want) {
			t.Errorf("%s: %v, not %q", m.name, err, m.want)
			continue
		}
		var found *ir.VerifyError
		if !errors.As(ir.Verify(p), &found) || !found.Has(ir.FindMalformed) || found.Findings[0].Msg != err.Error() {
			t.Errorf("%s: the verifier says %v", m.name, found)
		}
		if ir.Encode(&bytes.Buffer{}, p) == nil || ir.Print(&bytes.Buffer{}, p) == nil {
			t.Errorf("%s: was written", m.name)
		}
	}
}
