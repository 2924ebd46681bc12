package cuda

import (
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/ir"
)

// A profiler receives each section and, inside it, every task and layer of the compute stream in order, and
// every range ends.
func TestRanges(t *testing.T) {
	fake, kernels := useFake(t), emu.Need(t)
	m := fake.open(t, Options{OwnProducts: true})
	m.code = fixedCode(kernels.Path)
	p := trainingProgram(t, "gpt", "f32", "pp=1", "sp=1")
	p.Run.Steps = 1
	fake.forget()
	if _, err := losses(p, wordsFolder(t), m.New, m); err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, s := range []ir.Section{ir.SectionInit, ir.SectionStep} {
		want = append(want, "+rank 0 "+s.String())
		last := ""
		for _, in := range p.Codes[0].Sections[s] {
			if text := in.Prov.String(); in.Stream == ir.Compute && text != last {
				if last != "" {
					want = append(want, "-")
				}
				want, last = append(want, "+"+text), text
			}
		}
		if last != "" {
			want = append(want, "-")
		}
		want = append(want, "-")
	}
	got := strings.Fields(strings.ReplaceAll(strings.ReplaceAll(fake.heard(), " ", "_"), "\n", " "))
	for i := range want {
		want[i] = strings.ReplaceAll(want[i], " ", "_")
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("the profiler hears\n%s\nand not\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if !strings.Contains(fake.heard(), "+F m0 s2 l1 p0\n") {
		t.Error("it hears nothing of layer 1 in the forward of subsequence 2")
	}
}
