package kernels_test

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/ir"
)

// TestCompile uses the checks in this file for the machine code of attention: registers, the order of products, waits and
// exponentials, and the speed of wide heads by a model.

// waits lists the families of attention kernels with the events of an iteration of their main loop, in order, or of their
// two main loops. In a kernel for heads of D elements whose tiles have N tokens, R stands for D/16, the number of products
// that reduce over the elements of a head, and T for N/16, that of products that reduce over tokens: of `own` products, the
// first operand is in registers, of `rows` in shared memory. The number of exponentials is the least. The tokens are those
// of heads of up to 128 elements, of 192, and of 256.
var waits = []struct {
	kernel string
	tokens [3]int
	orders []string
}{
	{`^attention_bulk_(\d+)_\w`, forwardTokens, []string{"here turn begin rows*R columns*T pass wait1 exp*8T here wait0"}},
	{`^attention_hopper_(\d+)_\w`, forwardTokens, []string{"begin rows*R columns*T wait1 exp*8T wait0"}},
	{`^attention_bulk_dq_(256)`, dqTokens, []string{"here begin rows*2R columns*T wait2 exp*8T here wait1 wait0 used"}},
	{`^attention_hopper_dq_(256)`, dqTokens, []string{"copied turn copies begin rows*2R columns*T wait2 exp*8T copied wait1 wait0"}},
	{`^attention_bulk_dq_(\d+)_\w`, dqTokens, []string{"here begin own*R rows*R columns*T wait2 exp*8T here wait1 wait0 used"}},
	{`^attention_hopper_dq_(\d+)_\w`, dqTokens, []string{"copied turn copies begin own*R rows*R columns*T wait2 exp*8T copied wait1 wait0"}},
	{`^attention_bulk_dkv_(192|256)`, dkvTokens, []string{
		"here begin rows*R wait0 exp*8T begin columns*T turn pass wait0 used",
		"here begin rows*R wait0 turn pass begin columns*T wait0 used"}},
	{`^attention_hopper_dkv_(192|256)`, dkvTokens, []string{
		"copied turn copies begin rows*R wait0 exp*8T begin columns*T turn pass wait0",
		"copied turn copies begin rows*R wait0 turn pass begin columns*T wait0"}},
	{`^attention_bulk_dkv_(\d+)`, dkvTokens, []string{"here begin rows*2R wait1 exp*8T begin columns*T wait1 begin columns*T wait0 used"}},
	{`^attention_hopper_dkv_(\d+)`, dkvTokens, []string{"copied turn copies begin rows*2R wait1 exp*8T begin columns*T wait1 begin columns*T wait0"}},
	{`^attention_tensor_(?:dq_|dkv_)?(\d+)`, [3]int{}, []string{"copied turn copies products"}},
}

var forwardTokens, dqTokens, dkvTokens = [3]int{128, 112, 80}, [3]int{64, 48, 32}, [3]int{64, 64, 64}

// parsed returns the events of an order for heads of a dimension and tiles of some tokens.
func parsed(order string, dim, tokens int) (out []event) {
	for word := range strings.FieldsSeq(order) {
		name, count, _ := strings.Cut(word, "*")
		e := event{name, 0}
		digits := strings.TrimRight(count, "RT")
		e.count, _ = strconv.Atoi("0" + digits)
		switch count[len(digits):] {
		case "R":
			e.count = max(1, e.count) * dim / 16
		case "T":
			e.count = max(1, e.count) * tokens / 16
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

// among returns those of the events whose names are also among others, in order.
func among(all, others []event) (out []event) {
	for _, e := range all {
		if slices.ContainsFunc(others, func(o event) bool {
			return o.name == e.name || strings.HasPrefix(o.name, "wait") && strings.HasPrefix(e.name, "wait")
		}) {
			out = appendEvent(out, e)
		}
	}
	return out
}

// loops returns the loops that contain at least the given number of products. Of loops that overlap, it returns the shortest:
// waits that are retried behind the kernel's end look like long loops.
func (m *machineCode) loops(products int) (loops []loop) {
	if products < fewestRecorded {
		panic("internal: loops with fewer products are not recorded")
	}
	for _, l := range m.Loops {
		if l.Products >= products && !slices.ContainsFunc(loops, func(o loop) bool { return o.First <= l.Last && l.First <= o.Last }) {
			loops = append(loops, l)
		}
	}
	return loops
}

// checkRegisterUse reports a kernel that keeps values in memory, or, for Hopper, uses the tensor core instructions of older
// cards.
func checkRegisterUse(t *testing.T, arch string, f figures) {
	t.Helper()
	if f.Code.Local != "" {
		t.Errorf("%s for sm_%s: %s: registers that lie in memory", f.Kernel, arch, f.Code.Local)
	}
	if strings.HasSuffix(arch, "a") && f.Code.OldMMA {
		t.Errorf("%s for sm_%s: tensor cores in the way of older cards", f.Kernel, arch)
	}
	if f.Kernel == "primitive_registers" && !f.Code.Many {
		t.Errorf("%s holds no more registers than it has at its entry", f.Kernel)
	}
}

// checkAttention reports an attention kernel whose main loop has another order of events than its family.
func checkAttention(t *testing.T, arch string, f figures) {
	t.Helper()
	kernel := f.Kernel
	for _, w := range waits {
		m := regexp.MustCompile(w.kernel).FindStringSubmatch(kernel)
		if m == nil {
			continue
		}
		dim, _ := strconv.Atoi(m[1])
		var want [][]event
		products := fewestProducts(dim)
		for _, order := range w.orders {
			one, n := parsed(order, dim, w.tokens[max(0, dim/64-2)]), 0
			for _, e := range one {
				if e.name == "own" || e.name == "rows" || e.name == "columns" {
					n += e.count
				}
			}
			if want = append(want, one); n > 0 {
				products = n // the same in both loops
			}
		}
		loops := f.Code.loops(products)
		matched := make([]bool, len(want))
		for _, l := range loops {
			got := among(parsed(l.Events, 0, 0), slices.Concat(want...))
			i := slices.IndexFunc(want, func(want []event) bool { return agrees(got, want) })
			if i < 0 {
				t.Errorf("%s for sm_%s: the order of a main loop is %v, want %v: softmax, copies or products wait for each other",
					kernel, arch, got, want)
				return
			}
			matched[i] = true
		}
		if i := slices.Index(matched, false); i >= 0 {
			t.Errorf("%s for sm_%s: none of %d loops with %d products has the order %v", kernel, arch, len(loops), products, want[i])
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
func checkRegisters(t *testing.T, arch string, u figures) {
	t.Helper()
	if u.Spilled > 0 || u.Stack > 0 {
		t.Errorf("%s for sm_%s spills %d bytes and has %d bytes of stack; kernels for one architecture and attention must have none", u.Kernel, arch, u.Spilled, u.Stack)
	}
	for _, m := range mostRegisters {
		if !regexp.MustCompile(m.kernel).MatchString(u.Kernel) {
			continue
		}
		if most := 65536 / (m.threads * m.holds) / 8 * 8; u.Registers > most {
			t.Errorf("%s for sm_%s has %d registers, more than the %d with which a multiprocessor holds %d blocks", u.Kernel, arch, u.Registers, most, m.holds)
		}
		return
	}
}

// passes gives the products of attention and of its gradients: counted products, those of each loop of the kernels for
// mma.sync, and which part of the second operands of wgmma arrives anew with each iteration, because two products share
// a tile or not. With mma.sync, wide heads compute the scores for dk and dv twice.
var passes = map[string]struct {
	counted      int
	narrow, wide []int
	arrives      float64
}{
	"":     {2, []int{2}, []int{2}, 1},
	"dq_":  {3, []int{3}, []int{3}, 2.0 / 3},
	"dkv_": {4, []int{4}, []int{3, 2}, 1.0 / 2},
}

var (
	tensorKernel = regexp.MustCompile(`^attention_tensor_(dq_|dkv_)?(\d+)(?:x\d+)?(.*)`)
	engineKernel = regexp.MustCompile(`^attention_bulk_(dq_|dkv_)?(\d+)(.*)`)
)

// A quarter of a multiprocessor issues an instruction per cycle, computes four special functions, and has 32 bytes of
// the bandwidth of shared memory; shuffles use the same path. The type is the number of its multiplications per cycle: on an
// A100 with mma.sync, on an H200 with wgmma.
type quarter float64

const a100, h200 quarter = 256, 512

// uses returns the cycles that a warp's work takes on each unit: products, shared memory, issue, special functions.
func (q quarter) uses(c cost) [4]float64 {
	return [4]float64{float64(c.mma+c.wgmma) / float64(q), float64(c.shared) / 32, float64(c.instructions), float64(c.special) * 8}
}

// tensorCosts returns the costs of the main loops of a kernel for mma.sync.
func tensorCosts(m *machineCode, dim int) (all []cost) {
	inner := []loop(nil)
	if dim > 128 {
		inner = m.loops(fewestRecorded)
	}
	for _, l := range m.loops(fewestProducts(dim)) {
		c := l.Cost
		for _, i := range inner {
			if i.First >= l.First && i.Last <= l.Last {
				c.times(dim/64-1, i.Cost)
			}
		}
		all = append(all, c)
	}
	return all
}

// engineCosts returns the cost of the main loop of a kernel for Hopper's copy engine, and the tiles that arrive, which two
// warpgroups share. If each of the two has a main loop of its own, it returns the sum.
func engineCosts(m *machineCode, name string) []cost {
	sum := m.Wgmma
	sum.shared += int(passes[name].arrives * float64(sum.tiles*m.Apart) / 2)
	return []cost{sum}
}

// speed is what a model says about a kernel: multiplications per cycle of a quarter, without those that repeat others, and
// the share of the cycles in which each unit is busy.
type speed struct {
	rate   float64
	shares [4]float64
}

// speedOf returns the speed of loops that run one after the other and compute the given numbers of products.
func (q quarter) speedOf(costs []cost, name string, products []int) (s speed) {
	done, cycles, multiplications := 0, 0.0, 0
	for _, p := range products {
		done += p
	}
	for _, c := range costs {
		uses := q.uses(c)
		cycles += slices.Max(uses[:])
		multiplications += c.mma + c.wgmma
		for i, u := range uses {
			s.shares[i] += u
		}
	}
	for i := range s.shares {
		s.shares[i] /= cycles
	}
	s.rate = float64(multiplications) * float64(passes[name].counted) / float64(done) / cycles
	return s
}

// slowest is the least rate of a head dimension on either card, relative to that of heads of 128.
const slowest = 1.0 / 3

// nameOf is how the names of kernels end.
func nameOf(row ir.HeadKernel) string {
	if row.Value != row.Dim {
		return fmt.Sprintf("%dx%d", row.Dim, row.Value)
	}
	return fmt.Sprint(row.Dim)
}

// rateTable returns a line for each kernel with mma.sync, and reports those that are slower than the rate of heads of 128
// allows.
func rateTable(t *testing.T, rates map[string]speed) string {
	text := strings.Builder{}
	for _, row := range ir.HeadKernels {
		if name := "attention_tensor_dkv_" + nameOf(row); rates[name].rate == 0 {
			t.Errorf("there is no %s", name)
		}
	}
	fmt.Fprintf(&text, "multiplications per cycle of a quarter of a multiprocessor of an A100 (256 at most), and relative to heads of 128, by model\n")
	for _, kernel := range slices.Sorted(maps.Keys(rates)) {
		m := tensorKernel.FindStringSubmatch(kernel)
		relative := rates[kernel].rate / rates["attention_tensor_"+m[1]+"128"+m[3]].rate
		fmt.Fprintf(&text, "%-34s %6.0f %6.2f\n", kernel, rates[kernel].rate, relative)
		if !(relative >= slowest) {
			t.Errorf("%s reaches %.2f of the rate of heads of 128, less than %.2f", kernel, relative, slowest)
		}
	}
	return text.String()
}

// asFast is the least rate on a Hopper card, relative to that of heads of 128, that the cost model takes for the same speed.
const asFast = 0.9

// hopperTable returns a line for each kernel that a Hopper card runs for a head dimension, without soft cap and documents. It
// reports head dimensions that are slower than the cost model assumes.
func hopperTable(t *testing.T, rates map[string]speed) string {
	text := strings.Builder{}
	fmt.Fprintf(&text, "the same on an H200 (512 at most), and how busy it is: products, shared memory, issue, special functions\n")
	each := func(names ...string) {
		for _, row := range ir.HeadKernels {
			if !kernels.OnHopper(row.Dim, row.Value) {
				continue
			}
			relative, all := 0.0, 0.0
			for _, name := range names {
				ending := map[string]string{"": "_b", "dq_": "_b"}[name]
				kernel := fmt.Sprintf("attention_bulk_%s%d%s", name, row.Dim, ending)
				s, best := rates[kernel], rates["attention_bulk_"+name+"128"+ending]
				fmt.Fprintf(&text, "%-34s %6.0f %6.2f  ", kernel, s.rate, s.rate/best.rate)
				if !(s.rate/best.rate >= slowest) {
					t.Errorf("%s reaches %.2f of the rate of heads of 128, less than %.2f", kernel, s.rate/best.rate, slowest)
				}
				for _, share := range s.shares {
					fmt.Fprintf(&text, " %4.0f%%", 100*share)
				}
				text.WriteString("\n")
				relative += float64(passes[name].counted) / s.rate
				all += float64(passes[name].counted) / best.rate
			}
			assumed := map[bool]float64{true: row.Forward, false: row.Backward}[len(names) == 1]
			if relative = all / relative; assumed < 1 && math.Abs(relative-assumed) > 0.01 || assumed == 1 && relative < asFast {
				t.Errorf("%v of heads of %d reach %.3f of the rate of heads of 128 on an H200; the cost model assumes %.2f", names, row.Dim, relative, assumed)
			}
		}
	}
	each("")
	each("dkv_", "dq_")
	return text.String()
}
