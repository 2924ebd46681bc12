package kernels_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/cuda/emu"
	"sppo.dev/cuda/kernels"
	"sppo.dev/ir"
	"sppo.dev/ir/irtest"
	"sppo.dev/vm"
)

// orderCases are the kernels for Hopper, with instructions that have enough tiles to reuse each slot in shared
// memory.
var orderCases = []struct {
	name      string
	op        ir.Op
	engine    bool
	n, prefix int64
}{
	{"forward, by threads", ir.Attention, false, 20, 600},
	{"forward, by engine", ir.Attention, true, 20, 600},
	{"backward, by threads", ir.AttentionGrad, false, 260, 1},
	{"backward, by engine", ir.AttentionGrad, true, 260, 1},
}

// paragraphs names the sections of the PTX ISA that define the ordering of an instruction, by title; those of
// wgmma have the numbers of release 9.0.
var paragraphs = map[string]string{
	"wgmma.fence":               "9.7.15.7.1, wgmma.fence",
	"wgmma.commit_group":        "9.7.15.7.2, wgmma.commit_group",
	"wgmma.wait_group":          "9.7.15.7.3, wgmma.wait_group",
	"settle":                    "9.7.15.7.3, as the compiler must keep it",
	"fence.proxy.async":         "9.7.15.4, Async Proxy",
	"fence.mbarrier_init":       "membar, fence: fence.mbarrier_init",
	"fence.proxy.tensormap":     "membar, fence: proxy fences",
	"cp.async.wait_all":         "cp.async.wait_group, cp.async.wait_all",
	"mbarrier.init":             "mbarrier.init",
	"mbarrier.arrive":           "mbarrier.arrive",
	"mbarrier.arrive.expect_tx": "mbarrier.arrive; expect-tx operation",
	"mbarrier.try_wait":         "mbarrier.test_wait, mbarrier.try_wait",
	"__syncthreads":             "bar, barrier",
	"__syncwarp":                "bar.warp.sync",
	"bar.sync":                  "bar, barrier",
	"bar.arrive":                "bar, barrier",
	"setmaxnreg.dec":            "setmaxnreg",
	"setmaxnreg.inc":            "setmaxnreg",
}

const clusterFence = "it orders the initialisation for other blocks of a cluster, and there are none; it costs one instruction of a block"

// redundant lists the places that the ISA lets us omit, by pass and name, and why they stay.
var redundant = map[string]string{
	"forward attend 2: settle":                    "the product overwrites the scores; it keeps uses of the old ones before the fence",
	"backward change_queries: settle":             "the product overwrites the scores; it keeps uses of the old ones before the fence",
	"backward change_queries 2: settle":           "the product overwrites dp; it keeps uses of the old one before the fence",
	"backward change_queries 9: settle":           "the next call of settle hands the sum back, and nothing reads it before; it is an empty asm",
	"backward change_queries 11: settle":          "the sum was settled before and has not changed; it is an empty asm, for the compiler to keep that order",
	"backward ByThreads.soon: cp.async.wait_all":  "before waits again, ahead of the products; here it ends a basic block, so that the exponentials stay beside the products",
	"backward ByThreads.soon: fence.proxy.async":  "before has the same fence, ahead of the products",
	"backward ByEngine.used: __syncwarp":          "the values that the lanes read went into products that were waited for, so no read is under way; without it the arrival would not formally follow the reads of other lanes",
	"forward attention_bulk: fence.mbarrier_init": clusterFence,
	"backward barriers_of: fence.mbarrier_init":   clusterFence,
	"forward attention_bulk: setmaxnreg.inc":      "the kernel is right with the 168 registers of its launch, but heads of 128 hold 160 in products alone",
	"backward bulk_dq: setmaxnreg.inc":            "the kernel is right with the 168 registers of its launch, but gradients with heads of 128 hold 224 in products alone",
	"backward bulk_dkv: setmaxnreg.inc":           "the kernel is right with the 168 registers of its launch, but gradients with heads of 128 hold 224 in products alone",
}

// orderPath is the table of all places that order memory accesses, with the effects of omitting each.
const orderPath = "ORDER.md"

// place is a site with its name in the table, which edits elsewhere in the source do not change.
type place struct {
	emu.Site
	name, kernels string
}

// TestOrder omits each wait, fence and barrier of the kernels for Hopper in turn. Each omission that violates the
// ISA must show as an error or as a different result in some order of lanes, warps, copies and products. Without
// -update and SPPO_LONG only some are tried, but all must be in the table.
func TestOrder(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	library := needEmulator(t)
	long := irtest.Update() || os.Getenv("SPPO_LONG") != ""
	table := strings.Builder{}
	table.WriteString(orderHead)
	committed, _ := os.ReadFile(orderPath)
	for _, c := range orderCases {
		t.Run(c.name, func(t *testing.T) {
			run := orderRun(t, library, c.op, c.engine, c.n, c.prefix)
			library.Sites()
			right, err := run(0)
			if err != nil {
				t.Fatal(err)
			}
			for i, p := range named(c.name, library.Sites()) {
				begin := p.row("")
				if !long && i%9 != 4 { // a sample of each case
					if !strings.Contains(string(committed), begin) {
						t.Errorf("%s has no row for %s (-update writes it)", orderPath, begin)
					}
					continue
				}
				row := p.row(omitted(t, library, &p, run, right))
				table.WriteString(row)
				if !long && !strings.Contains(string(committed), row) {
					t.Errorf("%s lacks the row %s", orderPath, row)
				}
			}
		})
	}
	if long {
		irtest.Golden(t, orderPath, []byte(table.String()))
	}
}

const orderHead = `# What orders the kernels for Hopper

Every place in the kernels for Hopper that calls for order, and what the emulator (cuda/emu) shows when a test omits it:
an error, another result, or nothing. Where nothing shows, the ISA allows the omission, and the row says why the call
stays. Paragraphs of the PTX ISA are named by their titles, those of wgmma with their numbers in release 9.0. The test TestOrder keeps this table true and writes it.

| kernels | place | omitted | without it | PTX ISA |
| --- | --- | --- | --- | --- |
`

// omitted runs without a place and returns the effect.
func omitted(t *testing.T, library *emu.Library, p *place, run func(uint64) ([]byte, error), right []byte) string {
	library.Omit(p.Site)
	defer library.Omit(emu.Site{})
	shown := shows(run, right)
	pass, _, _ := strings.Cut(p.kernels, ",")
	why, allowed := redundant[pass+" "+p.name+": "+p.Kind]
	switch {
	case shown == "" && !allowed:
		t.Errorf("without %s of %s (line %d) nothing shows", p.Kind, p.name, p.Line)
	case shown != "" && allowed:
		t.Errorf("without %s of %s: %s, but it is among the redundant", p.Kind, p.name, shown)
	}
	if shown == "" {
		return "allowed: " + why
	}
	return shown
}

// row returns the row of the table, or its start if there is no verdict.
func (p *place) row(verdict string) string {
	begin := fmt.Sprintf("| %s | `%s` | `%s` | ", p.kernels, p.name, p.Kind)
	if verdict == "" {
		return begin
	}
	return fmt.Sprintf("%s%s | %s |\n", begin, verdict, paragraphs[p.Kind])
}

// orderRun returns a function that runs an instruction with a seed and returns its results.
func orderRun(t *testing.T, library *emu.Library, op ir.Op, engine bool, n, prefix int64) func(seed uint64) ([]byte, error) {
	rng := rand.New(rand.NewPCG(1, 2))
	p := drawn(t, rng, op, map[string]int64{"": 3, "n": n, "prefix": prefix, "keys": prefix + n, "heads": 1, "kv_heads": 1,
		"head_dim": 64, "batch": 1, "T": 1, "softcap": 0, "positions": 0})
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	var before [][]byte
	for i, v := range in.Args {
		before = append(before, nil)
		if v.Present() {
			before[i] = values(rng, in, i)
		}
	}
	return func(seed uint64) ([]byte, error) {
		return results(p, before, &device{library: library, seed: seed, hopper: true, engine: engine})
	}
}

// shows describes how runs in several orders differ from the right result: by an error, by a different result, or
// not at all. It removes block and warp from errors.
func shows(run func(uint64) ([]byte, error), right []byte) string {
	for seed := range uint64(12) {
		got, err := run(77 * seed)
		if err != nil {
			return "error"
		}
		if !bytes.Equal(got, right) {
			return "another result"
		}
	}
	return ""
}

var (
	variantEnding = regexp.MustCompile(`(_capped)?(_packed)?\b`)
	functionLine  = regexp.MustCompile(`^(?:template <.*> )?DEV .*?(\w+)\(`)
	structLine    = regexp.MustCompile(`^(?:template <.*> )?struct (\w+)`)
	methodLine    = regexp.MustCompile(`^    METHOD \w+ (\w+)\(`)
)

// named names sites by their function and by their number among sites of their kind there.
func named(kernelsOf string, sites []emu.Site) (out []place) {
	count := map[string]int{}
	for _, s := range sites {
		file := variantEnding.ReplaceAllString(s.Source, "")
		lines := strings.Split(kernels.Text(file), "\n") // line numbers of a variant are those of the file
		if kernels.Target(s.Source) == "" || s.Line > len(lines) {
			continue
		}
		name := enclosing(lines[:s.Line])
		key := name + s.Kind
		count[key]++
		if count[key] > 1 {
			name += fmt.Sprintf(" %d", count[key])
		}
		out = append(out, place{s, name, kernelsOf})
	}
	return out
}

// enclosing returns the name of the function or method that contains the last line.
func enclosing(lines []string) string {
	method := ""
	for _, line := range slices.Backward(lines) {
		if m := methodLine.FindStringSubmatch(line); m != nil && method == "" {
			method = "." + m[1]
		}
		if m := structLine.FindStringSubmatch(line); m != nil && method != "" {
			return m[1] + method
		}
		if m := functionLine.FindStringSubmatch(line); m != nil {
			return m[1]
		}
	}
	return "?"
}

// results returns the bytes of the operands that an instruction writes.
func results(p *ir.Program, before [][]byte, d *device) (out []byte, err error) {
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	if err := d.Load(p, 0, &vm.Env{Transport: vm.NewLocal()}); err != nil {
		return nil, err
	}
	for i, b := range before {
		if b != nil {
			copy(d.view(in.Args[i]), b)
		}
	}
	if err := d.Begin(ir.SectionStep, 1); err != nil {
		return nil, err
	}
	d.Launch(0)
	for i, v := range in.Args {
		if _, writes := in.Access(i); writes && v.Present() {
			out = append(out, d.view(v)...)
		}
	}
	if err := d.Join(); err != nil {
		return nil, err
	}
	return out, d.Close()
}
