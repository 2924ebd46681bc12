package kernels_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/cuda/kernels"
	"sppo.dev/cuda/library"
	"sppo.dev/cuda/nvrtc"
)

// archs lists the architectures that the kernels must compile for, if the compiler supports them. Architectures
// with a letter are only for the sources that support no other.
var archs = []string{"80", "90", "100", "90a"}

// spillsAllowed is the number of bytes that a kernel may spill: a few bytes around the slow paths of f64
// functions and outside loops, where spills cost nothing.
const spillsAllowed = 64

// bulkRegisters is the number of registers at the entry of kernels for the copy engine: three warpgroups share 65536.
const bulkRegisters = 168

// NVIDIA's own compiler needs no GPU. It must accept every source for every architecture that it supports, without
// a warning and without spilling registers in loops. The resources of every kernel are logged as a table.
func TestCompile(t *testing.T) {
	api, err := nvrtc.Open()
	if missing := (*library.MissingError)(nil); errors.As(err, &missing) {
		t.Skipf("SKIPPED: %v; make kernels gets it; it is looked for in %s", err, library.Order)
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
	t.Logf("%s, release %s", api.Path, version)
	uses, costs := map[string]map[string]use{}, map[string]cost{} // by kernel and architecture; by kernel
	rates, onHopper := map[string]speed{}, map[string]speed{}     // by kernel
	tool := disassembler()
	if tool == "" {
		t.Logf("SKIPPED: there is no nvdisasm to read machine code with")
	}
	for _, arch := range archs {
		if number, _ := strconv.Atoi(strings.TrimSuffix(arch, "a")); !slices.Contains(known, number) {
			t.Logf("SKIPPED: release %s of the compiler does not know sm_%s", version, arch)
			continue
		}
		for _, source := range kernels.Sources() {
			if only := os.Getenv("SPPO_CUDA_SOURCES"); !strings.Contains(source, only) {
				continue // while a developer changes one source
			}
			if target := kernels.Target(source); target != arch && (target != "" || strings.HasSuffix(arch, "a")) {
				continue
			}
			report, image := compile(t, api, source, arch)
			for _, u := range report {
				if uses[u.kernel] == nil {
					uses[u.kernel] = map[string]use{}
				}
				uses[u.kernel][arch] = u
			}
			if tool != "" && (strings.HasPrefix(arch, "90") || strings.HasPrefix(source, "attention")) {
				readMachineCode(t, arch, disassemble(t, tool, image), costs, rates, onHopper)
			}
		}
	}
	t.Log(useTable(uses))
	if len(costs) > 0 {
		t.Log(costTable(t, costs))
	}
	if rates["attention_tensor_dkv_128"].rate > 0 {
		t.Log(rateTable(t, rates))
	}
	if rates["attention_tensor_dkv_128"].rate > 0 && onHopper["attention_bulk_dkv_128"].rate > 0 {
		t.Log(hopperTable(t, onHopper))
	}
}

// readMachineCode checks attention kernels, and adds the costs of kernels for sm_90 and their speeds on both cards.
func readMachineCode(t *testing.T, arch string, code map[string][]block, costs map[string]cost, rates, onHopper map[string]speed) {
	t.Helper()
	for kernel, blocks := range code {
		attends := strings.HasPrefix(kernel, "attention")
		if attends || strings.HasSuffix(arch, "a") {
			checkRegisterUse(t, arch, kernel, instructions(blocks))
		}
		if attends {
			checkAttention(t, arch, kernel, blocks)
		} else if c := costOf(blocks); c.bytes > 0 && !exempt.MatchString(kernel) {
			costs[kernel] = c
		}
		if m := tensorKernel.FindStringSubmatch(kernel); m != nil && arch == "90" {
			dim, _ := strconv.Atoi(m[2])
			loops := tensorCosts(blocks, dim)
			rates[kernel], onHopper[kernel] = a100.speedOf(loops, m[1], dim), h200.speedOf(loops, m[1], dim)
		}
		if m := engineKernel.FindStringSubmatch(kernel); m != nil {
			dim, _ := strconv.Atoi(m[2])
			onHopper[kernel] = h200.speedOf(engineCosts(blocks, m[1]), m[1], dim)
		}
	}
}

func compile(t *testing.T, api *nvrtc.API, source, arch string) ([]use, []byte) {
	t.Helper()
	out, err := api.Compile(nvrtc.Source{Name: source, Text: kernels.Text(source), Headers: kernels.Headers()},
		"--gpu-architecture=sm_"+arch, "--std=c++17", "--ptxas-options=-v")
	if err != nil {
		t.Errorf("%s for sm_%s: %v", source, arch, err)
		return nil, nil
	}
	if strings.Contains(strings.ToLower(out.Log), "warning") || strings.Contains(out.Log, "serialized") {
		t.Errorf("%s for sm_%s: the compiler warns:\n%s", source, arch, out.Log)
	}
	report := resources(out.Log)
	if len(report) == 0 {
		t.Logf("%s for sm_%s: %d bytes; this release reports no registers", source, arch, len(out.Image))
	}
	for _, r := range report {
		if kernels.Target(source) != "" || strings.HasPrefix(r.kernel, "attention") {
			checkRegisters(t, arch, r)
		}
		if strings.HasPrefix(r.kernel, "attention_bulk") && r.registers != bulkRegisters {
			t.Errorf("%s for sm_%s has %d registers at its entry, want %d, which its warpgroups redistribute", r.kernel, arch, r.registers, bulkRegisters)
		}
		if r.spilled > spillsAllowed {
			t.Errorf("%s for sm_%s spills %d bytes of registers, more than the %d that are allowed", r.kernel, arch, r.spilled, spillsAllowed)
		}
	}
	return report, out.Image
}

// useTable returns a line for each kernel, with its registers, bytes spilled and bytes of stack on each
// architecture.
func useTable(uses map[string]map[string]use) string {
	text := strings.Builder{}
	fmt.Fprintf(&text, "registers, bytes spilled (at most %d) and of stack, by architecture\n%-28s %8s", spillsAllowed, "kernel", "shared")
	for _, arch := range archs {
		fmt.Fprintf(&text, " %14s", "sm_"+arch)
	}
	for _, kernel := range slices.Sorted(maps.Keys(uses)) {
		shared := 0
		for _, u := range uses[kernel] {
			shared = max(shared, u.shared)
		}
		fmt.Fprintf(&text, "\n%-28s %8d", kernel, shared)
		for _, arch := range archs {
			cell := "-"
			if u, ok := uses[kernel][arch]; ok {
				cell = fmt.Sprintf("%4d %4d %4d", u.registers, u.spilled, u.stack)
			}
			fmt.Fprintf(&text, " %14s", cell)
		}
	}
	return text.String()
}

// use holds the resources of a kernel, as ptxas reports them.
type use struct {
	kernel                    string
	registers, spilled, stack int
	shared                    int
}

var (
	entryLine = regexp.MustCompile(`Compiling entry function '([^']+)'`)
	spillLine = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers(?:.*?(\d+) bytes smem)?`)
)

// resources parses ptxas's report.
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
