package kernels_test

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo/cuda/kernels"
	"sppo/cuda/library"
	"sppo/cuda/nvrtc"
)

// archs are those that the portable kernels must compile for, as far as the compiler found knows them.
var archs = []int{80, 90, 100}

// spillsAllowed is what a kernel may spill: a few bytes around the slow paths of f64 functions, which cost nothing.
const spillsAllowed = 64

// NVIDIA's own compiler needs no GPU. It must accept every source, for every architecture that it knows, without a warning
// and without spilling registers in its loops; -v shows what every kernel takes.
func TestCompile(t *testing.T) {
	api, err := nvrtc.Open()
	if missing := (*library.MissingError)(nil); errors.As(err, &missing) {
		t.Skipf("%v; it is looked for in %s", err, library.Order)
	}
	if err != nil {
		t.Fatal(err)
	}
	version, err := api.Version()
	if err != nil {
		t.Fatal(err)
	}
	known, err := api.Archs()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, release %s, architectures %v", api.Path, version, known)
	for _, arch := range archs {
		t.Run(fmt.Sprint("sm_", arch), func(t *testing.T) {
			if !slices.Contains(known, arch) {
				t.Skipf("release %s of the compiler does not know this architecture", version)
			}
			for _, source := range kernels.Sources() {
				t.Run(source, func(t *testing.T) { compile(t, api, source, arch) })
			}
		})
	}
}

func compile(t *testing.T, api *nvrtc.API, source string, arch int) {
	out, err := api.Compile(nvrtc.Source{Name: source, Text: kernels.Text(source),
		Headers: map[string]string{kernels.Header: kernels.Text(kernels.Header)}},
		fmt.Sprint("--gpu-architecture=sm_", arch), "--std=c++17", "--ptxas-options=-v")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(out.Log, "warning") {
		t.Errorf("the compiler warns:\n%s", out.Log)
	}
	report := resources(out.Log)
	if len(report) == 0 {
		t.Logf("%d bytes; this release reports no registers", len(out.Image))
	}
	for _, r := range report {
		t.Log(r)
		if r.spilled > spillsAllowed {
			t.Errorf("%s spills %d bytes of registers", r.kernel, r.spilled)
		}
	}
}

// use is what ptxas says that a kernel takes.
type use struct {
	kernel                    string
	registers, spilled, stack int
	shared                    int
}

func (u use) String() string {
	return fmt.Sprintf("%-32s %3d registers, %6d bytes of shared memory, %d spilled, %d stack", u.kernel, u.registers, u.shared, u.spilled, u.stack)
}

var (
	entryLine = regexp.MustCompile(`Compiling entry function '([^']+)'`)
	spillLine = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers(?:.*?(\d+) bytes smem)?`)
)

// resources reads ptxas's report.
func resources(log string) (out []use) {
	number := func(s string) int { n, _ := strconv.Atoi(s); return n }
	current := use{}
	for _, line := range strings.Split(log, "\n") {
		if m := entryLine.FindStringSubmatch(line); m != nil {
			current = use{kernel: m[1]}
		}
		if m := spillLine.FindStringSubmatch(line); m != nil {
			current.stack, current.spilled = number(m[1]), number(m[2])+number(m[3])
		}
		if m := usedLine.FindStringSubmatch(line); m != nil {
			current.registers, current.shared = number(m[1]), number(m[2])
			out = append(out, current)
		}
	}
	return out
}
