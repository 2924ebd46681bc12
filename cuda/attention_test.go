package cuda

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/cuda/emu"
	"sppo.dev/cuda/kernels"
	"sppo.dev/ir"
	"sppo.dev/vm"
	"sppo.dev/vm/cpu"
	"sppo.dev/vm/probe"
)

// attentionCase is a shape of bf16 attention, with a head width for which some architecture has its own
// kernels.
type attentionCase struct {
	n, prefix           int64
	heads, kvHeads, dim int64
	accumulatesKeys     bool
	softcap             float64 // 0: none
	documents           bool
}

var attentionCases = []attentionCase{
	{n: 70, prefix: 0, heads: 2, kvHeads: 1, dim: 128}, {n: 129, prefix: 61, heads: 1, kvHeads: 1, dim: 96, accumulatesKeys: true},
	{n: 5, prefix: 300, heads: 4, kvHeads: 2, dim: 128}, {n: 129, prefix: 61, heads: 1, kvHeads: 1, dim: 64, accumulatesKeys: true},
	{n: 150, prefix: 70, heads: 2, kvHeads: 1, dim: 128, softcap: 1}, {n: 150, prefix: 70, heads: 1, kvHeads: 1, dim: 64, documents: true},
	{n: 150, prefix: 70, heads: 2, kvHeads: 2, dim: 96, softcap: 1, documents: true},
}

// items returns the forward and the backward pass of a case.
func (c attentionCase) items() []probe.Item {
	h := probe.Heads{Heads: c.heads, KVHeads: c.kvHeads, Dim: c.dim}
	forward, backward := probe.Attention(c.n, c.prefix, h, ir.BF16), probe.AttentionGrad(c.n, c.prefix, h, ir.BF16)
	if c.accumulatesKeys {
		backward.Attrs["accumulate"] = 1
	}
	items := []probe.Item{forward, backward}
	for i := range items {
		c.vary(&items[i])
	}
	return items
}

// vary adds the softcap and documents of a case to an item.
func (c attentionCase) vary(item *probe.Item) {
	if c.softcap != 0 {
		item.Name += fmt.Sprint(", softcap ", c.softcap)
		item.Attrs["softcap"] = c.softcap
	}
	if !c.documents {
		return
	}
	item.Name += ", documents"
	for i, o := range ir.Ops[item.Op].Operands {
		for o.Name == "positions" && i >= len(item.Args) {
			item.Args = append(item.Args, probe.Arg{})
		}
		if o.Name == "positions" {
			item.Args[i] = probe.Arg{Type: ir.I32, Shape: []int64{c.n, 1}}
		}
	}
}

// execute runs an item once and returns the contents of its operands.
func execute(t *testing.T, item probe.Item, device vm.Device, transport vm.Transport) [][]byte {
	t.Helper()
	b := &builder{}
	in := ir.Instr{Op: item.Op, Stream: ir.Compute}
	for i, a := range ir.Ops[item.Op].Operands {
		if i >= len(item.Args) || item.Args[i].Shape == nil {
			in.Args = append(in.Args, ir.Absent())
			continue
		}
		in.Args = append(in.Args, b.buffer(a.Arena, item.Args[i].Type, item.Args[i].Shape...))
	}
	for _, a := range ir.Ops[item.Op].Attrs {
		value := ir.Int(int64(item.Attrs[a.Name]))
		if a.Kind.IsFloat() {
			value = ir.Float(item.Attrs[a.Name])
		}
		in.Attrs = append(in.Attrs, value)
	}
	b.code.Sections[ir.SectionStep] = []ir.Instr{in}
	p := &ir.Program{Name: item.Name, Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
	if transport == nil {
		transport = vm.NewLocal()
	}
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatalf("%s: %v", item.Name, err)
		}
	}
	must(device.Load(p, 0, &vm.Env{Transport: transport}))
	rng := rand.New(rand.NewPCG(1, uint64(item.Op)))
	for i, v := range in.Args {
		if v.Present() {
			must(device.Write(v, normal(rng, v, item.Args[i].Value)))
		}
	}
	must(device.Begin(ir.SectionStep, 1))
	device.Launch(0)
	must(device.Join())
	var out [][]byte
	for i, v := range in.Args {
		if _, writes := in.Access(i); writes {
			bytes := make([]byte, v.Bytes())
			must(device.Read(v, bytes))
			out = append(out, bytes)
		}
	}
	must(device.Close())
	return out
}

// normal returns the bytes of an operand: normally distributed numbers around a value or, if they are i32,
// positions in documents of 64 tokens.
func normal(rng *rand.Rand, v ir.View, around float64) []byte {
	out := make([]byte, v.Bytes())
	if v.DType == ir.I32 {
		for i := range vm.Int32s(out) {
			vm.Int32s(out)[i] = int32(i+triedPrefix) % 64
		}
		return out
	}
	for e := range int(v.Elements()) {
		x := float32(rng.NormFloat64()/2 + around)
		if v.DType == ir.BF16 {
			vm.Uint16s(out)[e] = vm.BF16(x)
		} else {
			vm.Float32s(out)[e] = x
		}
	}
	return out
}

// distance returns the norm of the difference between two results, divided by the norm of the second.
func distance(t ir.DType, got, want []byte) float64 {
	at := func(b []byte, e int) float64 {
		if t == ir.BF16 {
			return float64(vm.FromBF16(vm.Uint16s(b)[e]))
		}
		return float64(vm.Float32s(b)[e])
	}
	difference, size := 0.0, 0.0
	for e := range len(want) / int(t.Bytes()) {
		w := at(want, e)
		d := at(got, e) - w
		difference, size = difference+d*d, size+w*w
	}
	return math.Sqrt(difference / size)
}

// checkAttention compares the results of two implementations. Both round probabilities to bf16, but at different
// points in the sum.
func checkAttention(t *testing.T, item probe.Item, got, want [][]byte) {
	t.Helper()
	for i := range want {
		if d := distance(item.Args[i].Type, got[i], want[i]); !(d <= 1e-2) { // also true for NaN
			t.Errorf("%s: %s is off by %.2g of its norm", item.Name, ir.Ops[item.Op].Operands[i].Name, d)
		}
	}
}

// ways lists the ways to run attention: with the kernels for the card's architecture, whose tiles are loaded by
// the copy engine or by the threads, and with the portable kernels.
var ways = []Options{{OwnProducts: true}, {OwnProducts: true, ThreadsCopy: true}, {OwnProducts: true, Portable: true}}

func attentionOf(o Options) string {
	switch {
	case o.Portable:
		return "portable"
	case o.ThreadsCopy:
		return "for the card, copied by threads"
	}
	return "for the card"
}

// Attention on the GPU agrees with the CPU, with the kernels for the card and with the portable ones.
func TestGPUAttention(t *testing.T) {
	for _, o := range ways {
		m := needGPU(t, o)
		for _, c := range attentionCases {
			for _, item := range c.items() {
				t.Run(fmt.Sprint(attentionOf(o), " ", item.Name), func(t *testing.T) {
					checkAttention(t, item, execute(t, item, m.New(0), m), execute(t, item, cpu.New(nil), nil))
				})
			}
		}
	}
}

// Where the CPU would take too long, the kernels for the card are compared with the portable ones.
func TestGPUAttentionOfManyTokens(t *testing.T) {
	cases := []attentionCase{
		{n: 4096, prefix: 0, heads: 8, kvHeads: 2, dim: 128}, {n: 1000, prefix: 7191, heads: 4, kvHeads: 4, dim: 128, accumulatesKeys: true},
		{n: 2048, prefix: 1024, heads: 4, kvHeads: 2, dim: 96},
	}
	if rehearsed() {
		cases = attentionCases[:1]
	}
	for _, c := range cases {
		for _, item := range c.items() {
			t.Run(item.Name, func(t *testing.T) {
				got := make([][][]byte, len(ways))
				for i, o := range ways {
					m := needGPU(t, o)
					got[i] = execute(t, item, m.New(0), m)
				}
				for i := range got[:len(got)-1] {
					checkAttention(t, item, got[i], got[len(got)-1])
				}
			})
		}
	}
}

// smallTrial is for tests of other features; TestAttentionForTheCard runs the full trial.
var smallTrial = attentionShape{n: 20, prefix: 10, heads: 1, kvHeads: 1}

// TestAttentionForTheCard compares attention with the CPU's results as TestGPUAttention does, but on the stand-in
// driver, whose card claims to be a Hopper. It tests that comparison itself, and which kernels are selected.
func TestAttentionForTheCard(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, emulated := useFake(t), emu.Need(t)
	ours := make([][][][]byte, len(ways))
	for i, o := range ways {
		m, err := open(o, fixedCode(emulated.Path))
		if err != nil {
			t.Fatal(err)
		}
		if card := m.card(m.gpus[0]); card.Hopper == o.Portable || card.CopyEngine != (card.Hopper && !o.ThreadsCopy) {
			t.Errorf("%s: kernels for %+v", attentionOf(o), card)
		}
		for _, item := range slices.Concat(attentionCases[1].items(), attentionCases[6].items()) {
			got := execute(t, item, m.New(0), m)
			checkAttention(t, item, got, execute(t, item, cpu.New(nil), nil))
			ours[i] = append(ours[i], got)
		}
	}
	if !reflect.DeepEqual(ours[0], ours[1]) {
		t.Error("attention or its gradient is other bits where threads copy than where the copy engine does")
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// If the kernels for a card compute wrong results on it, nothing runs, and the error names the remedy.
func TestTrial(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, _ := useFake(t), emu.Need(t)
	sources := map[string]string{}
	for _, name := range []string{"attention.cu", "attention_tensor.cu", "attention_hopper.cu", "attention_hopper_grad.cu"} {
		sources[name] = kernels.Text(name)
	}
	wider := regexp.MustCompile(`(?m)^(FORWARD|GRADIENTS)\((96|128).*\n`) // the trial fails at width 64
	for _, name := range []string{"attention_hopper.cu", "attention_hopper_grad.cu"} {
		sources[name] = wider.ReplaceAllString(sources[name], "")
	}
	right := sources["attention_hopper_grad.cu"]
	sources["attention_hopper_grad.cu"] = strings.ReplaceAll(right, "sum_k[c][2 * half] * factor", "sum_k[c][2 * half]")
	if sources["attention_hopper_grad.cu"] == right {
		t.Fatal("nothing was broken")
	}
	broken, err := emu.BuildSources(t.TempDir(), sources)
	if err != nil {
		t.Fatal(err)
	}
	item := attentionCases[0].items()[0]
	for _, o := range ways {
		m, err := open(o, fixedCode(broken.Path))
		if err != nil {
			t.Fatal(err)
		}
		if o.Portable {
			checkAttention(t, item, execute(t, item, m.New(0), m), execute(t, item, cpu.New(nil), nil))
			continue
		}
		bench := probe.Bench{Open: func(*ir.Program) (func(int) vm.Device, vm.Transport, error) { return m.New, m, nil }}
		_, err = bench.Measure(t.Context(), item, 1)
		if err == nil || !strings.Contains(err.Error(), "failed their trial: result 3 of attention and its gradient is off by") || !strings.Contains(err.Error(), PortableVariable+"=1") {
			t.Errorf("%v", err)
		}
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// Each variant of the kernels is tried when it is first used.
func TestTrialOfVariants(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	useFake(t)
	emulated := emu.Need(t)
	for _, variant := range []attentionShape{{}, {softcap: triedSoftcap}, {documents: true}, {softcap: triedSoftcap, documents: true}} {
		m, err := open(Options{OwnProducts: true}, fixedCode(emulated.Path))
		if err != nil {
			t.Fatal(err)
		}
		m.tried = smallTrial
		shape := smallTrial
		shape.dim, shape.softcap, shape.documents = 64, variant.softcap, variant.documents
		if _, err := attempt(m, shape); err != nil {
			t.Error(err)
		}
		if want := fmt.Sprint(m.gpus[0].name, ", capped: ", variant.softcap != 0, ", packed: ", variant.documents); m.trials.done[want] == nil {
			t.Errorf("there was no trial of%s", shape.variant())
		}
	}
}

// A kernel that gives up waiting leaves the source line of the wait in pinned memory, and the error names that line.
func TestEndlessWaitIsNamed(t *testing.T) {
	fake, emulated := useFake(t), emu.Need(t)
	m, err := open(Options{OwnProducts: true, Check: true}, fixedCode(emulated.Path))
	if err != nil {
		t.Fatal(err)
	}
	m.tried = smallTrial
	source := "attention_hopper.cu"
	before, _, found := strings.Cut(kernels.Text(source), "barrier_wait(barriers + KEYS_HERE")
	if !found {
		t.Fatal("the source has no such wait")
	}
	p, _, _ := attentionProgram(attentionShape{n: 5, heads: 1, kvHeads: 1, dim: 64})
	d := m.New(0).(*Device)
	if err := d.Load(p, 0, &vm.Env{Transport: m}); err != nil {
		t.Fatal(err)
	}
	slot := slices.Index(d.recorded, source)
	if slot < 0 {
		t.Fatalf("records are of %v", d.recorded)
	}
	vm.Uint16s(d.records.memory[slot*recordBytes:])[0] = uint16(strings.Count(before, "\n") + 1)
	want := "endless wait at attention_hopper.cu:"
	if err := d.Join(); err == nil || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), "KEYS_HERE + tile % 2") ||
		!strings.HasSuffix(err.Error(), "in thread 0 of block (0,0,0)") {
		t.Errorf("%v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}
