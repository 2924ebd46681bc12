package sim_test

import (
	"bytes"
	"math"
	"strings"
	"testing"

	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// TestSizesBeyond32Bits builds two jobs whose largest operands have more bytes than 32 bits can count; one of
// them also has operands with more elements than that. The programs must verify, survive encoding in both file
// formats, and run.
func TestSizesBeyond32Bits(t *testing.T) {
	for file, least := range map[string]int64{"8b-1m.sppo": 0, "one-layer-16m.sppo": math.MaxUint32} {
		_, p := compile(t, "../internal/vm/sim/testdata/"+file, "cluster.device_memory=2TiB", "cluster.host_memory=16TiB")
		if err := ir.Verify(p); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		size, elements := largestView(p)
		if size <= math.MaxUint32 || elements <= least {
			t.Errorf("%s: the largest view has %d elements and %d bytes: no test of large sizes", file, elements, int64(size))
		}
		checkFiles(t, p)
		run(t, p, sim.Options{})
	}
}

// TestViewsOutsideAreRefused runs unverified programs with a view that overflows or has no buffer.
func TestViewsOutsideAreRefused(t *testing.T) {
	for want, spoil := range map[string]func(v *ir.View){
		"[4611686018427387905 4] of f32 does not fit":             func(v *ir.View) { v.DType, v.Shape = ir.F32, [ir.MaxDims]int64{1<<62 + 1, 4} },
		"bytes 9223372036854775804 to 9223372036854775807 of the": func(v *ir.View) { v.Offset = 1<<63 - 4 },
		"buffer 7 of 2": func(v *ir.View) { v.Buffer = 7 },
	} {
		s := &script{}
		s.work(ir.Compute, 8)
		spoil(&s.code.Sections[ir.SectionStep][0].Args[1])
		p := &ir.Program{Name: "spoilt", Codes: []ir.Code{s.code}, Ranks: []ir.Rank{{}}}
		if _, err := sim.Run(p, ir.SectionStep, sim.Options{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not %q", err, want)
		}
	}
}

// largestView returns the largest size in bytes and the largest number of elements of any operand in a program.
func largestView(p *ir.Program) (size ir.Bytes, elements int64) {
	for i := range p.Codes {
		for _, section := range p.Codes[i].Sections {
			for j := range section {
				for _, v := range section[j].Args {
					size, elements = max(size, v.Bytes()), max(elements, v.Elements())
				}
			}
		}
	}
	return size, elements
}

// checkFiles checks that both file formats represent a program exactly.
func checkFiles(t *testing.T, p *ir.Program) {
	t.Helper()
	encode := func(p *ir.Program) []byte {
		var out bytes.Buffer
		if err := ir.Encode(&out, p); err != nil {
			t.Fatal(err)
		}
		return out.Bytes()
	}
	data := encode(p)
	decoded, err := ir.Decode(data)
	if err != nil || !bytes.Equal(encode(decoded), data) {
		t.Errorf("the binary form does not hold %s: %v", p.Name, err)
	}
	var text bytes.Buffer
	if err := ir.Print(&text, p); err != nil {
		t.Fatal(err)
	}
	parsed, err := ir.ParseText("large.sppir", text.Bytes())
	if err != nil || !bytes.Equal(encode(parsed), data) {
		t.Errorf("the text form does not hold %s: %v", p.Name, err)
	}
}
