package kernels_test

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/cuda/library"
)

// TestCompile uses the checks in this file to find slow machine code: instructions in an unfavourable order, or
// too many of them. On a GPU, such code would still give correct results.

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
