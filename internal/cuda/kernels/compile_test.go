package kernels_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/cuda/library"
	"sppo.dev/internal/cuda/nvrtc"
	"sppo.dev/internal/irtest"
)

// archs lists the architectures that the kernels must compile for, if the compiler supports them. Architectures
// with a letter are only for the sources that support no other.
var archs = []string{"80", "90", "100", "90a"}

// options are the options of the compiler, after the architecture.
var options = []string{"--std=c++17", "--ptxas-options=-v"}

// spillsAllowed is the number of bytes that a kernel may spill: a few bytes around the slow paths of f64
// functions and outside loops, where spills cost nothing.
const spillsAllowed = 64

// bulkRegisters is the number of registers at the entry of kernels for the copy engine: three warpgroups share 65536.
const bulkRegisters = 168

// compilation names a source and an architecture that it is compiled for.
type compilation struct{ source, arch string }

func (c compilation) String() string { return c.source + " for sm_" + c.arch }

// compilations lists what is compiled.
func compilations() (out []compilation) {
	for _, arch := range archs {
		for _, source := range kernels.Sources() {
			if target := kernels.Target(source); target == arch || target == "" && !strings.HasSuffix(arch, "a") {
				out = append(out, compilation{source, arch})
			}
		}
	}
	return out
}

// NVIDIA's own compiler needs no GPU. It must accept every source for every architecture that it supports, without
// a warning and without spilling registers in loops.
//
// Compiling everything takes minutes, so the figures of each compilation are recorded, together with a hash of everything that
// they depend on. The checks run on all figures, but only what is not in the record is compiled, and one recorded source, to
// compare. With SPPO_LONG=1, everything is compiled, and the figures are logged as tables. -update writes the record, which
// needs the compiler.
func TestCompile(t *testing.T) {
	all, rec := os.Getenv("SPPO_LONG") != "", readRecord(t)
	tools, err := openTools()
	missing := (*library.MissingError)(nil)
	if err != nil && !errors.As(err, &missing) {
		t.Fatal(err)
	}
	release := rec.release
	if tools != nil {
		release = tools.release
		t.Logf("%s, release %s", tools.api.Path, release)
	}
	results, out, sample := map[compilation][]figures{}, record{release: release, rows: map[compilation]row{}}, rec.sample()
	var compiled, lacking []string
	for _, c := range compilations() {
		hash := keyOf(c, release)
		old, recorded := rec.rows[c]
		recorded = recorded && old.hash == hash
		if recorded {
			results[c], out.rows[c] = old.figures, old
		}
		if recorded && !all && c != sample {
			continue
		}
		if tools == nil || !tools.knows(c.arch) {
			if !recorded {
				lacking = append(lacking, c.String())
			}
			continue
		}
		compiled = append(compiled, c.String())
		fresh := tools.compile(t, c)
		if recorded && !irtest.Update() {
			compareFigures(t, c, old.figures, fresh)
		}
		results[c], out.rows[c] = fresh, row{hash, fresh}
	}
	t.Logf("compiled %d of %d: %s", len(compiled), len(compilations()), strings.Join(compiled, ", "))
	if tables := checkFigures(t, results); all {
		t.Log(tables)
	}
	if len(lacking) > 0 && tools != nil {
		t.Logf("SKIPPED: release %s of the compiler does not know the architecture of %s", release, strings.Join(lacking, ", "))
	}
	if irtest.Update() && tools != nil && !t.Failed() {
		out.write(t)
	}
	if tools == nil {
		t.Skipf("SKIPPED: %v; make kernels gets it; it is looked for in %s; only recorded figures were checked, and these were missing: %q",
			err, library.Order, lacking)
	}
}

// toolchain holds the compiler and the disassembler.
type toolchain struct {
	api                   *nvrtc.API
	release, disassembler string
	archs                 []int
}

// openTools finds the compiler and the disassembler.
func openTools() (*toolchain, error) {
	api, err := nvrtc.Open()
	if err != nil {
		return nil, err
	}
	tools := &toolchain{api: api, disassembler: disassembler()}
	if tools.disassembler == "" {
		return nil, &library.MissingError{Wanted: &library.Wanted{Name: "NVIDIA's disassembler (nvdisasm)", Get: "pip install nvidia-cuda-nvdisasm"}}
	}
	if tools.archs, err = api.Archs(); err != nil {
		return nil, err
	}
	tools.release, err = releaseOf(api)
	return tools, err
}

func (c *toolchain) knows(arch string) bool {
	number, _ := strconv.Atoi(strings.TrimSuffix(arch, "a"))
	return slices.Contains(c.archs, number)
}

// compile compiles a source and returns the figures of its kernels.
func (c *toolchain) compile(t *testing.T, what compilation) []figures {
	t.Helper()
	out, err := c.api.Compile(nvrtc.Source{Name: what.source, Text: kernels.Text(what.source), Headers: kernels.Headers()},
		append([]string{"--gpu-architecture=sm_" + what.arch}, options...)...)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return nil
	}
	if strings.Contains(strings.ToLower(out.Log), "warning") || strings.Contains(out.Log, "serialized") {
		t.Errorf("%s: the compiler warns:\n%s", what, out.Log)
	}
	all := resources(out.Log)
	if len(all) == 0 {
		t.Logf("%s: %d bytes; this release reports no registers", what, len(out.Image))
	}
	if !strings.HasPrefix(what.arch, "90") && !strings.HasPrefix(what.source, "attention") {
		return all
	}
	code := disassemble(t, c.disassembler, out.Image)
	for i := range all {
		if code[all[i].Kernel] == nil {
			t.Errorf("%s: the disassembler does not show %s", what, all[i].Kernel)
		}
		all[i].Code = machineCodeOf(code[all[i].Kernel])
	}
	return all
}

// checkFigures checks the figures of all kernels, and returns them as tables.
func checkFigures(t *testing.T, results map[compilation][]figures) string {
	t.Helper()
	uses, costs := map[string]map[string]use{}, map[string]cost{} // by kernel and architecture; by kernel
	rates, onHopper := map[string]speed{}, map[string]speed{}     // by kernel
	for _, c := range compilations() {
		for _, f := range results[c] {
			checkUse(t, c, f)
			if uses[f.Kernel] == nil {
				uses[f.Kernel] = map[string]use{}
			}
			uses[f.Kernel][c.arch] = f.use
			if f.Code != nil {
				checkMachineCode(t, c.arch, f, costs, rates, onHopper)
			}
		}
	}
	tables := []string{useTable(uses)}
	if len(costs) > 0 {
		tables = append(tables, costTable(t, costs))
	}
	if rates["attention_tensor_dkv_128"].rate > 0 {
		tables = append(tables, rateTable(t, rates))
	}
	if rates["attention_tensor_dkv_128"].rate > 0 && onHopper["attention_bulk_dkv_128"].rate > 0 {
		tables = append(tables, hopperTable(t, onHopper))
	}
	return strings.Join(tables, "\n")
}

// checkUse reports a kernel with too many registers or spills.
func checkUse(t *testing.T, c compilation, f figures) {
	t.Helper()
	if kernels.Target(c.source) != "" || strings.HasPrefix(f.Kernel, "attention") {
		checkRegisters(t, c.arch, f)
	}
	if strings.HasPrefix(f.Kernel, "attention_bulk") && f.Registers != bulkRegisters {
		t.Errorf("%s for sm_%s has %d registers at its entry, want %d, which its warpgroups redistribute", f.Kernel, c.arch, f.Registers, bulkRegisters)
	}
	if f.Spilled > spillsAllowed {
		t.Errorf("%s for sm_%s spills %d bytes of registers, more than the %d that are allowed", f.Kernel, c.arch, f.Spilled, spillsAllowed)
	}
}

// checkMachineCode checks attention kernels, and adds the costs of kernels for sm_90 and their speeds on both cards.
func checkMachineCode(t *testing.T, arch string, f figures, costs map[string]cost, rates, onHopper map[string]speed) {
	t.Helper()
	attends := strings.HasPrefix(f.Kernel, "attention")
	if attends || strings.HasSuffix(arch, "a") {
		checkRegisterUse(t, arch, f)
	}
	if attends {
		checkAttention(t, arch, f)
	} else if f.Code.Moving.bytes > 0 && !exempt.MatchString(f.Kernel) {
		costs[f.Kernel] = f.Code.Moving
	}
	if m := tensorKernel.FindStringSubmatch(f.Kernel); m != nil && arch == "90" {
		dim, _ := strconv.Atoi(m[2])
		loops, products := tensorCosts(f.Code, dim), passes[m[1]].narrow
		if dim > 128 {
			products = passes[m[1]].wide
		}
		rates[f.Kernel] = a100.speedOf(loops, m[1], products)
	}
	if m := engineKernel.FindStringSubmatch(f.Kernel); m != nil {
		onHopper[f.Kernel] = h200.speedOf(engineCosts(f.Code, m[1]), m[1], passes[m[1]].narrow)
	}
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
			shared = max(shared, u.Shared)
		}
		fmt.Fprintf(&text, "\n%-28s %8d", kernel, shared)
		for _, arch := range archs {
			cell := "-"
			if u, ok := uses[kernel][arch]; ok {
				cell = fmt.Sprintf("%4d %4d %4d", u.Registers, u.Spilled, u.Stack)
			}
			fmt.Fprintf(&text, " %14s", cell)
		}
	}
	return text.String()
}

// mostIssue is the maximum share of cycles in which a memory-bound kernel may issue instructions or use one of
// the units.
const mostIssue = 0.85

// exempt matches kernels that are bound by arithmetic rather than by memory, although they move vectors in a
// loop.
var exempt = regexp.MustCompile(`^(attention|matmul|primitive)`)

// costTable returns a line for each kernel that moves vectors, the busiest kernel first.
func costTable(t *testing.T, costs map[string]cost) string {
	text := strings.Builder{}
	fmt.Fprintf(&text, "estimated from machine code: of the cycles that its bytes take on an H200, those in which a kernel issues or has its busiest unit at work\n")
	fmt.Fprintf(&text, "%-28s %12s %8s %6s %6s %8s", "kernel", "instructions", "special", "f64", "bytes", "share")
	names := slices.SortedFunc(maps.Keys(costs), func(a, b string) int {
		return cmp.Or(cmp.Compare(costs[b].share(), costs[a].share()), cmp.Compare(a, b))
	})
	for _, name := range names {
		c := costs[name]
		fmt.Fprintf(&text, "\n%-28s %12d %8d %6d %6d %7.0f%%", name, c.instructions, c.special, c.doubles, c.bytes, 100*c.share())
		if c.share() > mostIssue {
			t.Errorf("%s: %d instructions for %d bytes take %.0f%% of the cycles of those bytes, more than %.0f%%",
				name, c.instructions, c.bytes, 100*c.share(), 100*mostIssue)
		}
	}
	return text.String()
}
