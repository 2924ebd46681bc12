package kernels_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/ir"
)

// TestCompile uses the checks in this file for the machine code of attention: registers, the order of products, waits and
// exponentials, and the speed of wide heads by a model.

// waits lists the families of attention kernels with the events of an iteration of their main loop, in order. In a kernel
// for heads of D elements, R stands for D/16, the number of products that reduce over the elements of a head: of `own`
// products, the first operand is in registers, of `rows` in shared memory. The number of exponentials is the least.
var waits = []struct{ kernel, order string }{
	{`^attention_bulk_(\d+)_\w`, "here turn begin rows*R columns*8 pass wait1 exp*64 here wait0"},
	{`^attention_hopper_(\d+)_\w`, "begin rows*R columns*8 wait1 exp*64 wait0"},
	{`^attention_bulk_dq_(\d+)_\w`, "here begin own*R rows*R columns*4 wait2 exp*32 here wait1 wait0 used"},
	{`^attention_hopper_dq_(\d+)_\w`, "copied turn copies begin own*R rows*R columns*4 wait2 exp*32 copied wait1 wait0"},
	{`^attention_bulk_dkv_(\d+)`, "here begin rows*2R wait1 exp*32 begin columns*4 wait1 begin columns*4 wait0 used"},
	{`^attention_hopper_dkv_(\d+)`, "copied turn copies begin rows*2R wait1 exp*32 begin columns*4 wait1 begin columns*4 wait0"},
	{`^attention_tensor_(?:dq_|dkv_)?(\d+)`, "copied turn copies products"},
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

// orderOf returns those events of the code that are among the given names, in order.
func orderOf(code []string, among []event) (out []event) {
	for _, in := range code {
		for _, e := range events {
			m := e.pattern.FindStringSubmatch(in)
			if m == nil {
				continue
			}
			name := e.name + strings.Join(m[1:], "")
			if !slices.ContainsFunc(among, func(e event) bool {
				return e.name == name || strings.HasPrefix(e.name, "wait") && strings.HasPrefix(name, "wait")
			}) {
				break
			}
			if n := len(out); n > 0 && out[n-1].name == name && e.name != "wait" {
				out[n-1].count++
			} else {
				out = append(out, event{name, 1})
			}
			break
		}
	}
	return out
}

// parsed returns the events of an order for heads of a dimension.
func parsed(order string, dim int) (out []event) {
	for word := range strings.FieldsSeq(order) {
		name, count, counted := strings.Cut(word, "*")
		e := event{name, 0}
		if times, ok := strings.CutSuffix(count, "R"); counted && ok {
			e.count, _ = strconv.Atoi("0" + times)
			e.count = max(1, e.count) * dim / 16
		} else if counted {
			e.count, _ = strconv.Atoi(count)
		}
		out = append(out, e)
	}
	return out
}

// agrees reports whether the events of a loop are those of an order. A count of 0 is any; exponentials may be more.
func agrees(got, want []event) bool {
	return slices.EqualFunc(got, want, func(g, w event) bool {
		return g.name == w.name && (w.count == 0 || g.count == w.count || w.name == "exp" && g.count > w.count)
	})
}

// span is a loop: its first and its last instruction, in address order.
type span struct{ first, last int }

// loopsOf returns the loops of a kernel that contain at least the given number of products, and the code. Of loops that
// overlap, it returns the shortest: waits that are retried behind the kernel's end look like long loops.
func loopsOf(blocks []block, products int) (loops []span, code []string) {
	starts := make([]int, len(blocks)+1)
	for i, b := range blocks {
		starts[i+1] = starts[i] + len(b.instructions)
	}
	code = instructions(blocks)
	var all []span
	for i, b := range blocks {
		for _, next := range b.next {
			if s := (span{starts[next], starts[i+1] - 1}); next <= i && countIn(code, s, "MMA") >= products {
				all = append(all, s)
			}
		}
	}
	slices.SortFunc(all, func(a, b span) int { return (a.last - a.first) - (b.last - b.first) })
	for _, s := range all {
		if !slices.ContainsFunc(loops, func(o span) bool { return o.first <= s.last && s.first <= o.last }) {
			loops = append(loops, s)
		}
	}
	return loops, code
}

func countIn(code []string, s span, word string) (n int) {
	for _, in := range code[s.first : s.last+1] {
		if strings.Contains(in, word) {
			n++
		}
	}
	return n
}

// manyRegisters matches instructions that use registers above bulkRegisters.
var manyRegisters = regexp.MustCompile(`\bR(1[7-9]\d|2\d\d)\b`)

// checkRegisterUse reports a kernel that keeps values in memory, or, for Hopper, uses the tensor core instructions of older
// cards.
func checkRegisterUse(t *testing.T, arch, kernel string, code []string) {
	t.Helper()
	for _, in := range code {
		if strings.Contains(in, "LDL") || strings.Contains(in, "STL") || strings.HasSuffix(arch, "a") && strings.Contains(in, "HMMA") {
			t.Errorf("%s for sm_%s: %s: registers that lie in memory, or tensor cores in the way of older cards", kernel, arch, in)
			break
		}
	}
	if kernel == "primitive_registers" && !slices.ContainsFunc(code, manyRegisters.MatchString) {
		t.Errorf("%s holds no more registers than it has at its entry", kernel)
	}
}

// checkAttention reports an attention kernel whose main loop has another order of events than its family.
func checkAttention(t *testing.T, arch, kernel string, blocks []block) {
	t.Helper()
	for _, w := range waits {
		m := regexp.MustCompile(w.kernel).FindStringSubmatch(kernel)
		if m == nil {
			continue
		}
		dim, _ := strconv.Atoi(m[1])
		want, products := parsed(w.order, dim), 0
		for _, e := range want {
			if e.name == "own" || e.name == "rows" || e.name == "columns" {
				products += e.count
			}
		}
		if products == 0 {
			products = fewestProducts(dim)
		}
		loops, code := loopsOf(blocks, products)
		if len(loops) == 0 {
			t.Errorf("%s for sm_%s: no loop contains %d products", kernel, arch, products)
		}
		for _, s := range loops {
			if got := orderOf(code[s.first:s.last+1], want); !agrees(got, want) {
				t.Errorf("%s for sm_%s: the order of its main loop is %v, want %v: softmax, copies or products wait for each other",
					kernel, arch, got, want)
			}
		}
		return
	}
	if !strings.HasPrefix(kernel, "attention_") || regexp.MustCompile(`_\d+`).MatchString(kernel) {
		t.Errorf("%s: nothing says in which order it must wait", kernel)
	}
}

// fewestProducts returns a number of products that is less than that of a main loop with mma.sync but more than that of a
// loop inside it, which reduces over part of a head.
func fewestProducts(dim int) int {
	if dim > 128 {
		return 17
	}
	return 33
}

// mostRegisters lists the most registers of attention kernels: those with which a multiprocessor still holds the given
// number of blocks. The others have the limits of their launch bounds.
var mostRegisters = []struct {
	kernel         string
	threads, holds int
}{
	{`^attention_tensor_(dq_|dkv_)?64`, 128, 3},
	{`^attention_tensor_(dq_|dkv_)?\d+`, 128, 2},
	{`^attention_hopper_`, 256, 1},
	{`^attention_bulk_`, 384, 1},
	{`^attention_`, 256, 2},
}

// checkRegisters reports a kernel that spills, has a stack or, if it computes attention, has too many registers.
func checkRegisters(t *testing.T, arch string, u use) {
	t.Helper()
	if u.spilled > 0 || u.stack > 0 {
		t.Errorf("%s for sm_%s spills %d bytes and has %d bytes of stack; kernels for one architecture and attention must have none", u.kernel, arch, u.spilled, u.stack)
	}
	for _, m := range mostRegisters {
		if !regexp.MustCompile(m.kernel).MatchString(u.kernel) {
			continue
		}
		if most := 65536 / (m.threads * m.holds) / 8 * 8; u.registers > most {
			t.Errorf("%s for sm_%s has %d registers, more than the %d with which a multiprocessor holds %d blocks", u.kernel, arch, u.registers, most, m.holds)
		}
		return
	}
}

// tensorNames gives the products of the loops of the kernels for mma.sync: counted products, and those of each loop. Wide
// heads compute the scores for dk and dv twice.
var tensorNames = map[string]struct {
	counted      int
	narrow, wide []int
}{
	"":     {2, []int{2}, []int{2}},
	"dq_":  {3, []int{3}, []int{3}},
	"dkv_": {4, []int{4}, []int{3, 2}},
}

var tensorKernel = regexp.MustCompile(`^attention_tensor_(dq_|dkv_)?(\d+)(.*)`)

// tensorRate returns a kernel's multiplications per cycle of a quarter of a multiprocessor, by a model of an A100: a quarter
// issues one instruction per cycle, a product of 16 by 8 by 16 takes 8 cycles, and loading four fragments takes 16 cycles of
// its share of shared memory. For kernels with two main loops, the time of both counts.
func tensorRate(blocks []block, name string, dim int) float64 {
	loops, code := loopsOf(blocks, fewestProducts(dim))
	rounds, inner := 1, []span(nil)
	if dim > 128 {
		inner, _ = loopsOf(blocks, 8)
		rounds = dim / 64
	}
	count := func(s span, word string) (n int) {
		n = countIn(code, s, word)
		for _, i := range inner {
			if i.first >= s.first && i.last <= s.last {
				n += (rounds - 1) * countIn(code, i, word)
			}
		}
		return n
	}
	products := tensorNames[name].narrow
	if dim > 128 {
		products = tensorNames[name].wide
	}
	cycles, tile := 0.0, 0.0
	found := 0
	for _, s := range loops {
		found += count(s, "HMMA")
		cycles += max(float64(count(s, "")), 8*float64(count(s, "HMMA")), 16*float64(count(s, "LDSM")))
	}
	sum := 0
	for _, p := range products {
		sum += p
	}
	tile = float64(found) / float64(sum) / float64(dim) * 128 // tokens: a product of 16 rows has tile/8 * dim/16 instructions
	return float64(tensorNames[name].counted) * 16 * tile * float64(dim) / cycles
}

// slowest is the least rate of a head dimension, relative to that of heads of 128. The cost model assumes it.
const slowest = 1.0 / 3

// rateTable returns a line for each kernel with mma.sync, and reports those that are slower than the rate of heads of 128
// allows.
func rateTable(t *testing.T, rates map[string]float64) string {
	text := strings.Builder{}
	for _, row := range ir.HeadKernels {
		if name := fmt.Sprintf("attention_tensor_dkv_%d", row.Dim); rates[name] == 0 {
			t.Errorf("there is no %s", name)
		}
	}
	fmt.Fprintf(&text, "multiplications per cycle of a quarter of a multiprocessor (256 at most), and relative to heads of 128, by model\n")
	for _, kernel := range slices.Sorted(maps.Keys(rates)) {
		m := tensorKernel.FindStringSubmatch(kernel)
		relative := rates[kernel] / rates["attention_tensor_"+m[1]+"128"+m[3]]
		fmt.Fprintf(&text, "%-34s %6.0f %6.2f\n", kernel, rates[kernel], relative)
		if !(relative >= slowest) {
			t.Errorf("%s reaches %.2f of the rate of heads of 128, less than %.2f", kernel, relative, slowest)
		}
	}
	return text.String()
}
