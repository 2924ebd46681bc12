package ir_test

import (
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// mistakes are edits after which the small program must not parse. A golden file contains the message for each.
var mistakes = []struct{ name, old, new string }{
	{"not-a-program", "sppir 4", "program"},
	{"version", "sppir 4", "sppir 5"},
	{"entry", "line 0 ", "lien 0 "},
	{"entry-twice", "line 0", "program \"again\"\nline 0"},
	{"name", `program "small"`, "program small"},
	{"key", "gpus_per_node", "gpus_per_nod"},
	{"key-value", "nodes = 1", "nodes = many"},
	{"key-twice", "nodes = 1", "nodes = 1\n  nodes = 2"},
	{"line-number", "line 1 ", "line 2 "},
	{"string", `line 1 "small`, `line 1 "small\`},
	{"const-twice", "const prev", "const next"},
	{"tensor-shape", "tensor w [8,4]", "tensor w [8]"},
	{"arena", "arena device 588", "arena devise 588"},
	{"buffer-size", "buffer m      device 0x040 64", "buffer m device 0x040 64.5"},
	{"buffer-negative", "buffer m      device 0x040 64", "buffer m device -64 64"},
	{"buffer-twice", "buffer m ", "buffer w "},
	{"state-role", "w moment1 m", "w velocity m"},
	{"section", "section eval", "section evil"},
	{"section-events", "section eval events=0", "section eval"},
	{"stream", "    d2h       F m0 s0 l0 p0 d2h", "    d2g       F m0 s0 l0 p0 d2h"},
	{"phase", "    d2h       F m0 s0 l0 p0 d2h", "    d2h       m0 s0 l0 p0 d2h"},
	{"opcode", "matmul y", "matmull y"},
	{"buffer", "matmul y", "matmul yy"},
	{"element-type", "matmul y:f32", "matmul y:f16"},
	{"element-type-of-operand", "= tokens:i32[4]", "= tokens:f32[4]"},
	{"shape", "matmul y:f32[4,4]", "matmul y:f32[4,0]"},
	{"shape-missing", "matmul y:f32[4,4]", "matmul y"},
	{"dimensions", "matmul y:f32[4,4]", "matmul y:f32[4,4,1,1,1]"},
	{"too-few-operands", "matmul y:f32[4,4] = x:f32[4,4], w:f32[4,4]", "matmul y:f32[4,4] = x:f32[4,4]"},
	{"too-many-operands", "init_normal w:f32[4,4]", "init_normal w:f32[4,4], m:f32[4,4]"},
	{"no-equals", "matmul y:f32[4,4] = x", "matmul y:f32[4,4] x"},
	{"not-optional", "matmul y:f32[4,4] = x:f32[4,4], w", "matmul y:f32[4,4] = -, w"},
	{"attribute", "dy:f32[4,4] trans_a\n", "dy:f32[4,4] transposed\n"},
	{"attribute-missing", "row=$first col=0 std=0.02", "row=$first col=0"},
	{"attribute-twice", "row=$first col=0 std=0.02", "row=$first row=1 col=0 std=0.02"},
	{"attribute-value", "std=0.02", "std=small"},
	{"constant", "peer=$next", "peer=$nxt"},
	{"group", "dw:f32[4,4] @sp", "dw:f32[4,4] @spp"},
	{"group-missing", "dw:f32[4,4] @sp", "dw:f32[4,4]"},
	{"event", "record e7", "record e8"},
	{"pass", "!offload:1", "!offlaod:1"},
	{"spec-line", "!offload:1", "!offload:2"},
	{"end-of-line", "record e7 !sync:0", "record e7 !sync:0 and more"},
	{"block", "code stage1 {", "code stage1 {\n  section step events=0 {"},
	{"rank-number", "rank 1 stage0", "rank 2 stage0"},
	{"rank-code", "rank 1 stage0", "rank 1 stage3"},
	{"rank-constant", "$prev=-1 $first=4", "$first=4"},
	{"rank-group", "@sp=[2,3]", "@sp=[2;3]"},
	{"rank-member", "@sp=[2,3]", "@sp=[2,9]"},
}

func TestMistakesAreExplained(t *testing.T) {
	src := small(t)
	for _, m := range mistakes {
		t.Run(m.name, func(t *testing.T) {
			if !strings.Contains(src, m.old) {
				t.Fatalf("no %q to replace", m.old)
			}
			_, err := ir.ParseText("small.sppir", []byte(strings.Replace(src, m.old, m.new, 1)))
			if err == nil {
				t.Fatal("it parses")
			}
			if _, ok := err.(*ir.SyntaxError); !ok {
				t.Fatalf("%T", err)
			}
			irtest.Golden(t, filepath.Join("testdata", "syntax", m.name+".want"), []byte(err.Error()+"\n"))
		})
	}
}

// Text that can be written by hand in several ways is printed in only one.
func TestTextIsCanonical(t *testing.T) {
	src := small(t)
	p, err := ir.ParseText("small.sppir", []byte(src))
	if err != nil {
		t.Fatal(err)
	}
	want := text(t, p)
	irtest.Golden(t, filepath.Join("testdata", "small.want"), want)
	for _, edit := range [][2]string{
		{"w:f32[4,4]\n    compute   F m0 s0 l0 p0 record", "w:f32[4,4], -\n    compute   F m0 s0 l0 p0 record"},
		{"trans_a\n", "trans_a trans_b=0 accumulate=0 # by hand\n"},
		{"row=$first col=0 std=0.02", "std=2e-2 col=0x0 row = $first"},
		{"matmul y:f32[4,4] = x:f32[4,4], w:f32[4,4]", "matmul \"y\" : f32 [ 4 , 4 ]=x+0:f32[4,4],w:f32[4,4]"},
		{"\n", "\r\n"},
		{"    compute", "\t compute"},
	} {
		edited := strings.ReplaceAll(src, edit[0], edit[1])
		if edited == src {
			t.Fatalf("no %q to replace", edit[0])
		}
		q, err := ir.ParseText("small.sppir", []byte(edited))
		if err != nil {
			t.Errorf("%q: %v", edit[1], err)
			continue
		}
		if string(text(t, q)) != string(want) {
			t.Errorf("%q means something else", edit[1])
		}
	}
}

// Annotations are comments, and a program printed for one rank has that rank's constants filled in.
func TestAnnotatedTextParses(t *testing.T) {
	p, err := ir.ParseText("small.sppir", []byte(small(t)))
	if err != nil {
		t.Fatal(err)
	}
	var b, rank strings.Builder
	if err := (ir.Printer{Annotate: true}).Print(&b, p); err != nil {
		t.Fatal(err)
	}
	q, err := ir.ParseText("annotated.sppir", []byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	if string(text(t, q)) != string(text(t, p)) {
		t.Error("annotations change the program")
	}
	if err := (ir.Printer{Annotate: true}).PrintRank(&rank, p, 1); err != nil {
		t.Fatal(err)
	}
	irtest.Golden(t, filepath.Join("testdata", "rank1.want"), []byte(rank.String()))
	if err := (ir.Printer{}).PrintRank(&rank, p, 4); err == nil {
		t.Error("printed a rank that is not there")
	}
}
