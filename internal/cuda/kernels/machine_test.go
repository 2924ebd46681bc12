package kernels_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/library"
)

// This file derives from compiled kernels the figures that TestCompile checks, to find slow machine code: instructions in
// an unfavourable order, or too many of them. On a GPU, such code would still give correct results. The text of this file is part
// of the keys of the record of compilations, so all kernels are compiled afresh after it has changed. Checks are in other files.

// figures are what is known about a compiled kernel.
type figures struct {
	Kernel string `json:"kernel"`
	use
	Code *machineCode `json:"code,omitempty"` // for Hopper and of attention
}

// machineCode holds figures of a kernel's machine code.
type machineCode struct {
	Local  string `json:"local,omitempty"` // the first instruction that accesses registers kept in memory
	OldMMA bool   `json:"mma,omitempty"`   // it uses the tensor core instructions of cards before Hopper
	Many   bool   `json:"many,omitempty"`  // it uses more registers than kernels for the copy engine have at their entry
	Moving cost   `json:"moving,omitzero"` // an iteration of the loop that moves the most bytes
	Wgmma  cost   `json:"wgmma,omitzero"`  // an iteration of each loop with the most products of wgmma, on the shortest way
	Apart  int    `json:"apart,omitempty"` // the number of these loops: more than one if warpgroups do different work
	Loops  []loop `json:"loops,omitempty"` // with at least fewestRecorded products
}

// loop is a loop: its first and its last instruction, in address order, its products, the events of an iteration and its cost.
type loop struct {
	First    int    `json:"first"`
	Last     int    `json:"last"`
	Products int    `json:"products"`
	Events   string `json:"events"`
	Cost     cost   `json:"cost"`
}

// fewestRecorded is the number of products of the smallest loops of machineCode.
const fewestRecorded = 8

// machineCodeOf returns the figures of a kernel's code.
func machineCodeOf(blocks []block) *machineCode {
	code := instructions(blocks)
	m := &machineCode{Many: slices.ContainsFunc(code, manyRegisters.MatchString), Moving: costOf(blocks), Loops: loopsOf(blocks)}
	m.Wgmma, m.Apart = wgmmaCost(blocks)
	for _, in := range code {
		if m.Local == "" && (strings.Contains(in, "LDL") || strings.Contains(in, "STL")) {
			m.Local = in
		}
		m.OldMMA = m.OldMMA || strings.Contains(in, "HMMA")
	}
	return m
}

// manyRegisters matches instructions that use registers above bulkRegisters.
var manyRegisters = regexp.MustCompile(`\bR(1[7-9]\d|2\d\d)\b`)

// disassembler returns the path of nvdisasm, or "" if there is none. `make kernels` installs it with the
// compiler.
func disassembler() string {
	for _, folder := range filepath.SplitList(os.Getenv(library.PathVariable)) {
		for _, pattern := range []string{"bin/nvdisasm", "cu1*/bin/nvdisasm"} {
			if found, _ := filepath.Glob(filepath.Join(folder, pattern)); len(found) > 0 {
				return found[len(found)-1]
			}
		}
	}
	path, _ := exec.LookPath("nvdisasm")
	return path
}

// block is a basic block: a run of instructions that is left only at its end.
type block struct {
	instructions []string
	next         []int
}

var (
	sectionLine     = regexp.MustCompile(`^\.text\.(\w+):`)
	labelLine       = regexp.MustCompile(`^(\.L_\w+):`)
	instructionLine = regexp.MustCompile(`^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;`)
	target          = regexp.MustCompile("`\\((\\.L_\\w+)\\)")
	leaving         = regexp.MustCompile(`^(@!?U?P\w+ )?(BRA|BRX|EXIT|RET)\b`)
)

// disassemble returns the machine code of an image: for each kernel, its blocks in address order.
func disassemble(t *testing.T, tool string, image []byte) map[string][]block {
	t.Helper()
	file := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(file, image, 0o644); err != nil {
		t.Fatal(err)
	}
	text, err := exec.Command(tool, "-c", file).Output()
	if err != nil {
		t.Fatalf("%s: %v", tool, err)
	}
	kernels, kernel := map[string][]block{}, ""
	labels := map[string]int{} // each label belongs to one kernel
	for line := range strings.Lines(string(text)) {
		if m := sectionLine.FindStringSubmatch(line); m != nil {
			kernel = m[1]
			kernels[kernel] = []block{{}}
			continue
		}
		all := kernels[kernel]
		if len(all) == 0 {
			continue
		}
		last := &all[len(all)-1]
		if m := labelLine.FindStringSubmatch(line); m != nil {
			if len(last.instructions) > 0 {
				all = append(all, block{})
			}
			labels[m[1]] = len(all) - 1
		} else if m := instructionLine.FindStringSubmatch(line); m != nil {
			last.instructions = append(last.instructions, m[1])
			if leaving.MatchString(m[1]) {
				all = append(all, block{})
			}
		}
		kernels[kernel] = all
	}
	for _, blocks := range kernels {
		connect(blocks, labels)
	}
	return kernels
}

func connect(blocks []block, labels map[string]int) {
	for i := range blocks {
		falls := i+1 < len(blocks)
		if n := len(blocks[i].instructions); n > 0 {
			last := blocks[i].instructions[n-1]
			if leaving.MatchString(last) {
				falls = falls && strings.HasPrefix(last, "@") || strings.Contains(last, "BRA.DIV")
				if m := target.FindStringSubmatch(last); m != nil {
					blocks[i].next = append(blocks[i].next, labels[m[1]])
				}
			}
		}
		if falls {
			blocks[i].next = append(blocks[i].next, i+1)
		}
	}
}

// instructions returns the instructions of all blocks, in order.
func instructions(blocks []block) (out []string) {
	for _, b := range blocks {
		out = append(out, b.instructions...)
	}
	return out
}

// cost counts the work of a warp's instructions, such as those of an iteration of a loop.
type cost struct {
	instructions, special, doubles int // in all; on the unit for special functions; in f64
	bytes                          int // of vectors of 16 bytes per thread, in device memory
	mma, wgmma                     int // multiplications, by either kind of instruction
	shared, tiles                  int // bytes of shared memory; of these, bytes of second operands of wgmma
}

// MarshalText writes the counts, in the order of their fields.
func (c cost) MarshalText() ([]byte, error) {
	return fmt.Append(nil, c.instructions, c.special, c.doubles, c.bytes, c.mma, c.wgmma, c.shared, c.tiles), nil
}

// UnmarshalText reads the counts.
func (c *cost) UnmarshalText(text []byte) error {
	_, err := fmt.Sscan(string(text), &c.instructions, &c.special, &c.doubles, &c.bytes, &c.mma, &c.wgmma, &c.shared, &c.tiles)
	return err
}

// times adds the cost of n repetitions of other work.
func (c *cost) times(n int, d cost) {
	c.instructions, c.special, c.doubles, c.bytes = c.instructions+n*d.instructions, c.special+n*d.special, c.doubles+n*d.doubles, c.bytes+n*d.bytes
	c.mma, c.wgmma, c.shared, c.tiles = c.mma+n*d.mma, c.wgmma+n*d.wgmma, c.shared+n*d.shared, c.tiles+n*d.tiles
}

// The model of an H200 consists of four figures per multiprocessor and cycle: the lanes that can issue, those
// of the special function unit, those of the f64 unit, and the bytes of device memory traffic (4.1 TB/s divided
// among 132 multiprocessors at 1.7 GHz).
const (
	issueLanes, specialLanes, doubleLanes = 128, 16, 64
	bytesPerCycle                         = 4.1e12 / 132 / 1.7e9
)

// share returns the time for which the busiest unit is needed, divided by the time that the memory traffic
// takes.
func (c cost) share() float64 {
	busiest := max(float64(c.instructions)/issueLanes, float64(c.special)/specialLanes, float64(c.doubles)/doubleLanes)
	return busiest / (float64(c.bytes) / bytesPerCycle)
}

// costOf returns the cost of an iteration of the kernel loop that moves the most bytes with vector
// instructions. It follows the path through the loop that moves the most bytes with the fewest instructions,
// that is, with aligned accesses and without the slow branches of functions.
func costOf(blocks []block) (best cost) {
	tails := backEdges(blocks)
	for _, edge := range tails {
		if c := wayThrough(blocks, edge[1], edge[0], tails); better(c, best) {
			best = c
		}
	}
	return best
}

// wgmmaCost returns the cost of an iteration of the loop with the most products of wgmma, on the shortest way through it, where
// no score is masked. If several loops have as many, it returns the sum; number says how many they are.
func wgmmaCost(blocks []block) (sum cost, number int) {
	back, loops, most := backEdges(blocks), map[int]cost{}, 1
	for _, edge := range back {
		if c := wayThrough(blocks, edge[1], edge[0], back); c.wgmma > loops[edge[1]].wgmma {
			loops[edge[1]], most = c, max(most, c.wgmma)
		}
	}
	for _, c := range loops {
		if c.wgmma == most {
			sum.times(1, c)
			number++
		}
	}
	return sum, number
}

// backEdges returns the last and the first block of each loop.
func backEdges(blocks []block) (tails [][2]int) {
	state := make([]int, len(blocks)) // 1: on the current path; 2: finished
	var walk func(int)
	walk = func(i int) {
		state[i] = 1
		for _, next := range blocks[i].next {
			switch state[next] {
			case 0:
				walk(next)
			case 1:
				tails = append(tails, [2]int{i, next})
			}
		}
		state[i] = 2
	}
	if len(blocks) > 0 {
		walk(0)
	}
	return tails
}

func better(a, b cost) bool {
	return a.bytes > b.bytes || a.bytes == b.bytes && a.instructions < b.instructions
}

// wayThrough returns the cost of the best path from the head of a loop to its tail that enters no loop twice.
func wayThrough(blocks []block, head, tail int, back [][2]int) cost {
	known := map[int]*cost{}
	var from func(int) *cost
	from = func(i int) *cost {
		if c, ok := known[i]; ok {
			return c
		}
		known[i] = nil
		var best *cost
		for _, next := range blocks[i].next {
			if i == tail || slices.Contains(back, [2]int{i, next}) {
				continue
			}
			if c := from(next); c != nil && (best == nil || better(*c, *best)) {
				best = c
			}
		}
		if i == tail {
			best = &cost{}
		}
		if best == nil {
			return nil
		}
		c := *best
		for _, in := range blocks[i].instructions {
			c.add(in)
		}
		known[i] = &c
		return &c
	}
	if c := from(head); c != nil {
		return *c
	}
	return cost{}
}

var (
	wgmmas  = regexp.MustCompile(`^HGMMA\.64x(\d+)x16\S* R\d+, (gdesc)?`)
	sharing = regexp.MustCompile(`\b(LDS|STS|SHFL|LDSM|LDGSTS)\b(?:\S*\.(64|128|4)\b)?`)
	vectors = regexp.MustCompile(`\b(LDG?|STG?)\.E(\.\w+)*\.128\b`)
	doubles = regexp.MustCompile(`\b(DADD|DMUL|DFMA|DSETP)\b`)
)

func (c *cost) add(instruction string) {
	c.instructions++
	switch {
	case vectors.MatchString(instruction):
		c.bytes += 16
	case strings.Contains(instruction, "HMMA.16816"):
		c.mma += 16 * 8 * 16
	case strings.HasPrefix(instruction, "HGMMA"):
		m := wgmmas.FindStringSubmatch(instruction)
		columns, _ := strconv.Atoi(m[1])
		c.wgmma += 64 * columns * 16 / 4 // a quarter of a warpgroup's
		c.tiles += columns * 32 / 4
		c.shared += columns * 32 / 4
		if m[2] != "" { // the first operand is in shared memory, too
			c.shared += 64 * 32 / 4
		}
	case sharing.MatchString(instruction):
		m := sharing.FindStringSubmatch(instruction)
		c.shared += 32 * map[string]int{"": 4, "64": 8, "128": 16, "4": 16}[m[2]]
	case strings.Contains(instruction, "MUFU"):
		c.special++
	case doubles.MatchString(instruction):
		c.doubles++
	}
}

// events lists the instructions that show in an order. A group in the pattern is part of the event's name.
var events = []struct {
	pattern *regexp.Regexp
	name    string
}{
	{regexp.MustCompile(`^WARPGROUP\.ARRIVE`), "begin"},
	{regexp.MustCompile(`^HGMMA.*tnspB`), "columns"},
	{regexp.MustCompile(`^HGMMA\S+ R\d+, R`), "own"},
	{regexp.MustCompile(`^HGMMA`), "rows"},
	{regexp.MustCompile(`^WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)`), "wait"},
	{regexp.MustCompile(`\bMUFU\.EX2`), "exp"},
	{regexp.MustCompile(`\bLDGSTS`), "copies"},
	{regexp.MustCompile(`\bDEPBAR\.LE SB0`), "copied"},
	{regexp.MustCompile(`\bSYNCS\.PHASECHK`), "here"},
	{regexp.MustCompile(`\bSYNCS\.ARRIVE`), "used"},
	{regexp.MustCompile(`\bBAR\.ARV`), "pass"},
	{regexp.MustCompile(`\bBAR\.SYNC`), "turn"},
	{regexp.MustCompile(`\bHMMA`), "products"},
}

// event is a run of equal events.
type event struct {
	name  string
	count int
}

// eventsOf returns the events of the code, in order, as words like rows*8. Every wait has its own word.
func eventsOf(code []string) string {
	var out []event
	for _, in := range code {
		for _, e := range events {
			if m := e.pattern.FindStringSubmatch(in); m != nil {
				out = appendEvent(out, event{e.name + strings.Join(m[1:], ""), 1})
				break
			}
		}
	}
	var words []string
	for _, e := range out {
		words = append(words, fmt.Sprintf("%s*%d", e.name, e.count))
	}
	return strings.Join(words, " ")
}

// appendEvent appends an event, or adds it to the last one if that is of the same kind.
func appendEvent(to []event, e event) []event {
	if n := len(to); n > 0 && to[n-1].name == e.name && !strings.HasPrefix(e.name, "wait") {
		to[n-1].count += e.count
		return to
	}
	return append(to, e)
}

// loopsOf returns the loops of a kernel that contain at least fewestRecorded products, shortest first.
func loopsOf(blocks []block) (loops []loop) {
	starts := make([]int, len(blocks)+1)
	for i, b := range blocks {
		starts[i+1] = starts[i] + len(b.instructions)
	}
	code := instructions(blocks)
	for i, b := range blocks {
		for _, next := range b.next {
			if next > i {
				continue
			}
			l := loop{First: starts[next], Last: starts[i+1] - 1}
			for _, in := range code[l.First : l.Last+1] {
				l.Cost.add(in)
				if strings.Contains(in, "MMA") {
					l.Products++
				}
			}
			if l.Products >= fewestRecorded {
				l.Events = eventsOf(code[l.First : l.Last+1])
				loops = append(loops, l)
			}
		}
	}
	slices.SortStableFunc(loops, func(a, b loop) int { return (a.Last - a.First) - (b.Last - b.First) })
	return loops
}

// use holds the resources of a kernel, as ptxas reports them. All but the registers are in bytes.
type use struct {
	Registers int `json:"registers"`
	Spilled   int `json:"spilled"`
	Stack     int `json:"stack"`
	Shared    int `json:"shared"`
}

var (
	entryLine = regexp.MustCompile(`Compiling entry function '([^']+)'`)
	spillLine = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers(?:.*?(\d+) bytes smem)?`)
)

// resources parses ptxas's report.
func resources(log string) (out []figures) {
	number := func(s string) int { n, _ := strconv.Atoi(s); return n }
	current := figures{}
	for _, line := range strings.Split(log, "\n") {
		if m := entryLine.FindStringSubmatch(line); m != nil {
			current = figures{Kernel: m[1]}
		}
		if m := spillLine.FindStringSubmatch(line); m != nil {
			current.Stack, current.Spilled = number(m[1]), number(m[2])+number(m[3])
		}
		if m := usedLine.FindStringSubmatch(line); m != nil {
			current.Registers, current.Shared = number(m[1]), number(m[2])
			out = append(out, current)
		}
	}
	return out
}
