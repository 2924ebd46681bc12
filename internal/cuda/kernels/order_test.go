package kernels_test

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// orderCases lists the kernels for Hopper, each with an instruction that has enough tiles to reuse every slot
// in shared memory.
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

// orderVariants lists the columns of the table: the head dimensions of models.
var orderVariants = []struct {
	name  string
	fixed map[string]int64
}{
	{"heads of 64", map[string]int64{"head_dim": 64}},
	{"heads of 128", map[string]int64{"head_dim": 128}},
	{"heads of 256", map[string]int64{"head_dim": 256}},
}

// alikeInOrder lists variants whose kernels have the same waits, fences and barriers as those of the given head dimensions
// together: another head dimension, skipped and masked tiles, capped scores.
var alikeInOrder = []struct {
	name  string
	fixed map[string]int64
	like  []int64
}{
	{"heads of 80", map[string]int64{"head_dim": 80}, []int64{128}},
	{"heads of 96", map[string]int64{"head_dim": 96}, []int64{128}},
	{"heads of 192", map[string]int64{"head_dim": 192}, []int64{128, 256}},
	{"window", map[string]int64{"head_dim": 128, "window": 260}, []int64{128}},
	{"documents", map[string]int64{"head_dim": 128, "positions": 1}, []int64{128}},
	{"soft cap", map[string]int64{"head_dim": 128, "softcap": 2}, []int64{128}},
	{"documents and soft cap", map[string]int64{"head_dim": 128, "positions": 1, "softcap": 2}, []int64{128}},
	{"heads of 256, window", map[string]int64{"head_dim": 256, "window": 260}, []int64{256}},
	{"heads of 256, documents and soft cap", map[string]int64{"head_dim": 256, "positions": 1, "softcap": 2}, []int64{256}},
}

// paragraphs gives, for each instruction, the title of the section in the PTX ISA that defines its ordering.
// Sections about wgmma also have their numbers in release 9.0.
var paragraphs = map[string]string{
	"wgmma.fence":               "9.7.15.7.1, wgmma.fence",
	"wgmma.commit_group":        "9.7.15.7.2, wgmma.commit_group",
	"wgmma.wait_group":          "9.7.15.7.3, wgmma.wait_group",
	"settle":                    "9.7.15.7.3, which the compiler must respect",
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

const clusterFence = "it makes the initialisation visible to other blocks of a cluster, of which there are none; it costs one instruction per block"

// redundant lists the places that the ISA lets us omit, by pass and name, and why they stay.
var redundant = map[string]string{
	"forward attend 2: settle":                    "the product overwrites the scores; settle keeps uses of the old scores before the fence",
	"backward change_queries: settle":             "the product overwrites the scores; settle keeps uses of the old scores before the fence",
	"backward change_queries 2: settle":           "the product overwrites dp; settle keeps uses of the old dp before the fence",
	"backward change_queries 9: settle":           "the next call of settle returns the sum, and nothing reads the sum before that; this settle is an empty asm",
	"backward change_queries 11: settle":          "the sum was settled before and has not changed; this settle is an empty asm that makes the compiler keep the order",
	"backward ByThreads.soon: cp.async.wait_all":  "`before` waits again, ahead of the products; this wait ends a basic block, so that the exponentials stay next to the products",
	"backward ByThreads.soon: fence.proxy.async":  "`before` has the same fence, ahead of the products",
	"backward ByEngine.used: __syncwarp":          "the values that the lanes read went into products that have been waited for, so no read is in progress; without __syncwarp, the arrival would not formally follow the reads of other lanes",
	"forward attention_bulk: fence.mbarrier_init": clusterFence,
	"backward barriers_of: fence.mbarrier_init":   clusterFence,
	"forward attention_bulk: setmaxnreg.inc":      "the kernel is correct with the 168 registers of its launch, but with heads of 128, products alone occupy 160",
	"backward bulk_dq: setmaxnreg.inc":            "the kernel is correct with the 168 registers of its launch, but with heads of 128, the products of the gradients alone occupy 224",
	"backward bulk_dkv: setmaxnreg.inc":           "the kernel is correct with the 168 registers of its launch, but with heads of 128, the products of the gradients alone occupy 224",
}

// orderPath is the file with the table of all places that order memory accesses and the effects of omitting
// each.
const orderPath = "ORDER.md"

// place is a site with its name in the table. Edits elsewhere in the source do not change the name.
type place struct {
	emu.Site
	name, kernels string
}

// TestOrder omits each wait, fence and barrier of the kernels for Hopper in turn, for each head dimension. Each
// omission that violates the ISA must show as an error or as a different result in some order of lanes, warps,
// copies and products. Without -update or SPPO_LONG, only a sample is omitted, but all must be in the table.
func TestOrder(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	library := emu.Need(t)
	text, err := os.ReadFile(orderPath)
	if err != nil {
		t.Fatal(err)
	}
	committed := readOrder(string(text))
	found := orderTable{verdicts: map[orderCell]string{}}
	long := irtest.Update() || os.Getenv("SPPO_LONG") != ""
	for _, c := range orderCases {
		for i, v := range orderVariants {
			t.Run(c.name+", "+v.name, func(t *testing.T) {
				run := orderRun(t, library, c.op, c.engine, c.n, c.prefix, v.fixed)
				library.Sites()
				right, err := run(0)
				if err != nil {
					t.Fatal(err)
				}
				for j, p := range named(c.name, library.Sites()) {
					cell := orderCell{p.row(), v.name}
					if _, known := committed.verdicts[cell]; !known && !long {
						t.Errorf("%s has no verdict for %q (-update writes it)", orderPath, cell)
					} else if !long && j%(9*len(orderVariants)) != 9*i+4 { // a sample of each case
						continue
					}
					found.set(cell, omitted(t, library, &p, run, right))
					if !long && found.verdicts[cell] != committed.verdicts[cell] {
						t.Errorf("%q: %s, and %s says %s", cell, found.verdicts[cell], orderPath, committed.verdicts[cell])
					}
				}
			})
		}
	}
	if long {
		irtest.Golden(t, orderPath, []byte(found.text()))
	}
}

// TestOrderOfVariants checks that the places of a variant are those of head dimensions in the table, line by line, so
// that the verdicts for these dimensions hold for the variant, too.
func TestOrderOfVariants(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	library := emu.Need(t)
	places := func(t *testing.T, op ir.Op, engine bool, n, prefix int64, fixed map[string]int64) (out []string) {
		run := orderRun(t, library, op, engine, n, prefix, fixed)
		library.Sites()
		if _, err := run(0); err != nil {
			t.Fatal(err)
		}
		for _, p := range named("", library.Sites()) {
			out = append(out, fmt.Sprintf("%s of %s, line %d", p.Kind, p.name, p.Line))
		}
		slices.Sort(out)
		return out
	}
	for _, c := range orderCases {
		of := map[int64][]string{}
		for _, dim := range []int64{128, 256} {
			of[dim] = places(t, c.op, c.engine, c.n, c.prefix, map[string]int64{"head_dim": dim})
		}
		for _, v := range alikeInOrder {
			var want []string
			for _, dim := range v.like {
				want = append(want, of[dim]...)
			}
			slices.Sort(want)
			want = slices.Compact(want)
			if got := places(t, c.op, c.engine, c.n, c.prefix, v.fixed); len(got) == 0 || !slices.Equal(got, want) {
				t.Errorf("%s, %s: places %q, want %q", c.name, v.name, got, want)
			}
		}
	}
}

// orderTable holds all verdicts.
type orderTable struct {
	rows     []string // "kernels | place | omitted", in the order in which they were found
	verdicts map[orderCell]string
}

// orderCell is a cell of the table: a row, and the variant of its column.
type orderCell struct{ row, variant string }

func (o *orderTable) set(c orderCell, verdict string) {
	if !slices.Contains(o.rows, c.row) {
		o.rows = append(o.rows, c.row)
	}
	o.verdicts[c] = verdict
}

const orderHead = `# Ordering of memory accesses in the kernels for Hopper

This table lists every wait, fence and barrier in the kernels for Hopper that orders memory accesses. It shows what the emulator
(internal/cuda/emu) detects if a test omits one: an error, another result, or nothing (allowed). If nothing is detected, the ISA allows the
omission, and the row explains why the operation is kept. There is a column for each head dimension; a dash means that the kernel does
not have the operation. With heads of dimension 80 or 96, windows, documents or bounded scores, the kernels have the same operations
as with heads of 128 or 256, and with heads of dimension 192 those of both, as TestOrderOfVariants checks. Sections of the PTX ISA are
named by their titles, and those of wgmma also by their numbers in release 9.0. TestOrder checks this table, and writes it if -update is
given.

`

func (o *orderTable) text() string {
	out := strings.Builder{}
	out.WriteString(orderHead)
	out.WriteString("| kernels | place | omitted |")
	for _, v := range orderVariants {
		fmt.Fprintf(&out, " %s |", v.name)
	}
	out.WriteString(" PTX ISA | why it is kept |\n| --- | --- | --- |" + strings.Repeat(" --- |", len(orderVariants)+2) + "\n")
	for _, row := range o.rows {
		cells := strings.Split(row, " | ")
		why := ""
		fmt.Fprintf(&out, "| %s |", row)
		for _, v := range orderVariants {
			verdict, known := o.verdicts[orderCell{row, v.name}]
			if !known {
				verdict = "-"
			}
			if verdict == allowed {
				pass, _, _ := strings.Cut(cells[0], ",")
				why = redundant[pass+" "+strings.Trim(cells[1], "`")+": "+strings.Trim(cells[2], "`")]
			}
			fmt.Fprintf(&out, " %s |", verdict)
		}
		fmt.Fprintf(&out, " %s | %s |\n", paragraphs[strings.Trim(cells[2], "`")], why)
	}
	return out.String()
}

// readOrder parses the table.
func readOrder(text string) orderTable {
	o := orderTable{verdicts: map[orderCell]string{}}
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.Trim(line, "|\n "), " | ")
		if len(cells) < 3+len(orderVariants) || !strings.HasPrefix(cells[1], "`") {
			continue
		}
		for i, v := range orderVariants {
			if verdict := cells[3+i]; verdict != "-" {
				o.set(orderCell{strings.Join(cells[:3], " | "), v.name}, verdict)
			}
		}
	}
	return o
}

// allowed is the verdict for an omission without effect.
const allowed = "allowed"

// omitted runs an instruction with a place omitted and returns the effect.
func omitted(t *testing.T, library *emu.Library, p *place, run func(uint64) ([]byte, error), right []byte) string {
	library.Omit(p.Site)
	defer library.Omit(emu.Site{})
	shown := shows(run, right)
	pass, _, _ := strings.Cut(p.kernels, ",")
	_, redundant := redundant[pass+" "+p.name+": "+p.Kind]
	switch {
	case shown == "" && !redundant:
		t.Errorf("without %s of %s (line %d) nothing shows", p.Kind, p.name, p.Line)
	case shown != "" && redundant:
		t.Errorf("without %s of %s: %s, but it is among the redundant", p.Kind, p.name, shown)
	}
	if shown == "" {
		return allowed
	}
	return shown
}

// row returns the start of the place's row in the table.
func (p *place) row() string { return fmt.Sprintf("%s | `%s` | `%s`", p.kernels, p.name, p.Kind) }

// orderRun returns a function that runs an instruction with a seed and returns its results.
func orderRun(t *testing.T, library *emu.Library, op ir.Op, engine bool, n, prefix int64, with map[string]int64) func(seed uint64) ([]byte, error) {
	rng := rand.New(rand.NewPCG(1, 2))
	fixed := map[string]int64{"": 3, "n": n, "prefix": prefix, "keys": prefix + n, "window": prefix + n, "heads": 1, "kv_heads": 1,
		"batch": 1, "T": 1, "softcap": 0, "positions": 0}
	maps.Copy(fixed, with)
	p := drawn(t, rng, op, fixed)
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

// shows describes how runs in several orders differ from the right result: by an error, by a different result,
// or not at all ("").
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

// named names sites by their function and, within it, by their number among sites of the same kind.
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

// enclosing returns the name of the function or method that contains the last of the lines.
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

// results runs a program's instruction and returns the bytes of the operands that it writes.
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
