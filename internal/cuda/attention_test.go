package cuda

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/ir"
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
	{n: 150, prefix: 70, heads: 2, kvHeads: 2, dim: 96, softcap: 1, documents: true}, {n: 150, prefix: 70, heads: 2, kvHeads: 1, dim: 80},
	{n: 150, prefix: 70, heads: 2, kvHeads: 1, dim: 192}, {n: 150, prefix: 70, heads: 2, kvHeads: 1, dim: 256},
	{n: 129, prefix: 61, heads: 1, kvHeads: 1, dim: 256, accumulatesKeys: true, softcap: 1, documents: true},
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

// programOf returns a program whose only instruction is an item.
func programOf(item probe.Item) *ir.Program {
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
	return &ir.Program{Name: item.Name, Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""}}
}

// executeOn runs an item once on a machine. It returns the contents of its operands and the launches.
func executeOn(t *testing.T, m *Machine, item probe.Item) ([][]byte, []kernels.Launch) {
	t.Helper()
	p := programOf(item)
	d := &Device{machine: m, gpu: m.gpus[0], program: p}
	plan, err := d.plan(&p.Codes[0].Sections[ir.SectionStep][0])
	if err != nil {
		t.Fatalf("%s: %v", item.Name, err)
	}
	return execute(t, item, m.New(0), m), plan.Launches
}

// compare runs an item on a machine and on the cpu device, and compares the results, the first of which it returns.
func compare(t *testing.T, m *Machine, item probe.Item) [][]byte {
	t.Helper()
	got, launches := executeOn(t, m, item)
	checkAttention(t, item, launches, got, execute(t, item, cpu.New(nil), nil))
	return got
}

// execute runs an item once and returns the contents of its operands.
func execute(t *testing.T, item probe.Item, device vm.Device, transport vm.Transport) [][]byte {
	t.Helper()
	p := programOf(item)
	in := &p.Codes[0].Sections[ir.SectionStep][0]
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
			must(device.Write(v, normal(rng, v, item.Args[i].Value, int(item.Attrs["prefix"]))))
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
// positions in documents, the first of which began with the prefix.
func normal(rng *rand.Rand, v ir.View, around float64, prefix int) []byte {
	out := make([]byte, v.Bytes())
	if v.DType == ir.I32 {
		for i := range vm.Int32s(out) {
			vm.Int32s(out)[i] = int32((i + prefix) % (prefix + 90))
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

// tolerance is the largest relative distance between the results of two implementations. Both round probabilities to
// bf16, but at different points in the sum.
const tolerance = 1e-2

// checkAttention compares the results of two implementations. The kernels are those that computed the first.
func checkAttention(t *testing.T, item probe.Item, launches []kernels.Launch, got, want [][]byte) {
	t.Helper()
	for i := range want {
		name, a := ir.Ops[item.Op].Operands[i].Name, item.Args[i]
		if text := differs(floats(a.Type, got[i]), floats(a.Type, want[i]), a.Shape[1], int64(item.Attrs["head_dim"]), tolerance); text != "" {
			t.Errorf("%s: %s of %s %s", item.Name, name, kernelOf(launches, name), text)
		}
	}
}

// floats converts the bytes of an operand.
func floats(t ir.DType, b []byte) []float32 {
	if t != ir.BF16 {
		return vm.Float32s(b)
	}
	out := make([]float32, len(b)/2)
	for i, x := range vm.Uint16s(b) {
		out[i] = vm.FromBF16(x)
	}
	return out
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

// Attention on the GPU agrees with the CPU, with the kernels for the card and with the portable ones. No trial
// precedes the kernels for the card, so that every wrong case is named.
func TestGPUAttention(t *testing.T) {
	for _, o := range ways {
		m := needGPU(t, o)
		m.trying = true
		for _, c := range attentionCases {
			for _, item := range c.items() {
				t.Run(fmt.Sprint(attentionOf(o), " ", item.Name), func(t *testing.T) {
					compare(t, m, item)
				})
			}
		}
	}
}

// Where the CPU would take too long, the kernels for the card are compared with the portable ones.
func TestGPUAttentionOfManyTokens(t *testing.T) {
	cases := []attentionCase{
		{n: 4096, prefix: 0, heads: 8, kvHeads: 2, dim: 128}, {n: 1000, prefix: 7191, heads: 4, kvHeads: 4, dim: 128, accumulatesKeys: true},
		{n: 2048, prefix: 1024, heads: 4, kvHeads: 2, dim: 96}, {n: 2048, prefix: 1024, heads: 4, kvHeads: 2, dim: 80},
		{n: 2048, prefix: 1024, heads: 4, kvHeads: 2, dim: 192}, {n: 2048, prefix: 1024, heads: 4, kvHeads: 2, dim: 256}, {n: 2048, prefix: 1024, heads: 8, kvHeads: 2, dim: 64},
	}
	if rehearsed() {
		cases = attentionCases[:1]
	}
	for _, c := range cases {
		for _, item := range c.items() {
			t.Run(item.Name, func(t *testing.T) {
				portable := needGPU(t, ways[len(ways)-1])
				want := execute(t, item, portable.New(0), portable)
				for _, o := range ways[:len(ways)-1] {
					m := needGPU(t, o)
					m.trying = true
					got, launches := executeOn(t, m, item)
					checkAttention(t, item, launches, got, want)
				}
			})
		}
	}
}

// bitsShape keeps all multiprocessors of a GPU busy and reuses every slot in shared memory many times.
var bitsShape = attentionShape{n: 1024, prefix: 3072, heads: 16, kvHeads: 4}

// sameBits runs attention, or its gradient, several times on equal operands. It returns a hash of the results, or an error
// that names the first launch with other results. The function before is called before each launch; it may be nil.
func sameBits(m *Machine, op ir.Op, shape attentionShape, launches int, before func(launch int)) (sum [32]byte, err error) {
	p, inputs := attentionProgram(shape)
	code := p.Codes[0].Sections[ir.SectionStep]
	pc := slices.IndexFunc(code, func(in ir.Instr) bool { return in.Op == op })
	err = m.runAlone(p, inputs, shape.prefix, func(d *Device) error {
		var first []([32]byte)
		for launch := range launches {
			if before != nil {
				before(launch)
			}
			if err := d.Begin(ir.SectionStep, 1); err != nil {
				return err
			}
			for i := min(pc, launch); i <= pc; i++ { // the gradient needs the forward pass once
				d.Launch(i)
			}
			if err := d.Join(); err != nil {
				return err
			}
			var all []([32]byte)
			for i, v := range code[pc].Args {
				if _, writes := code[pc].Access(i); writes {
					bytes := make([]byte, v.Bytes())
					if err := d.Read(v, bytes); err != nil {
						return err
					}
					all = append(all, sha256.Sum256(bytes))
				}
			}
			for i := range all {
				if launch > 0 && all[i] != first[i] {
					plan, _ := d.plan(&code[pc]) // it has been made before
					name := code[pc].Info().Operands[i].Name
					return fmt.Errorf("launch %d gives other bits than the first for %s of %s", launch+1, name, kernelOf(plan.Launches, name))
				}
			}
			if launch == 0 {
				first = all
			}
		}
		sum = sha256.Sum256(fmt.Append(nil, first))
		return nil
	})
	return sum, err
}

// Attention and its gradient give the same bits in 200 launches, whether the copy engine or threads load tiles. A race
// between copies, products and barriers would show here first.
func TestGPUBits(t *testing.T) {
	launches, shape := 200, bitsShape
	if rehearsed() {
		launches, shape = 2, smallTrial
	}
	for _, row := range ir.HeadKernels {
		if shape.dim = row.Dim; !kernels.OnHopper(row.Dim, row.Value) {
			continue
		}
		for _, op := range []ir.Op{ir.Attention, ir.AttentionGrad} {
			t.Run(fmt.Sprintf("%s, heads of %d", ir.Ops[op].Name, row.Dim), func(t *testing.T) {
				checkBits(t, func(o Options) *Machine { return needGPU(t, o) }, op, shape, launches)
			})
		}
	}
}

func checkBits(t *testing.T, open func(Options) *Machine, op ir.Op, shape attentionShape, launches int) {
	var sums [2][32]byte
	for i, o := range ways[:2] {
		m := open(o)
		m.trying = true
		var err error
		if sums[i], err = sameBits(m, op, shape, launches, nil); err != nil {
			t.Errorf("%s: %v", attentionOf(o), err)
		}
	}
	if sums[0] != sums[1] {
		t.Error("the results have other bits if threads copy tiles")
	}
}

// The check of bits accepts right kernels, and reports a kernel whose results change from one launch to another.
func TestPlantedBits(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake := useFake(t)
	broken, choose := buildPlanted(t)
	open := func(o Options) *Machine {
		m, err := open(o, fixedCode(broken.Path))
		if err != nil {
			t.Fatal(err)
		}
		m.trying = true
		return m
	}
	shape := attentionShape{n: 140, prefix: 20, heads: 2, kvHeads: 1, dim: 64}
	for _, op := range []ir.Op{ir.Attention, ir.AttentionGrad} {
		checkBits(t, open, op, shape, 2)
	}
	_, err := sameBits(open(ways[0]), ir.AttentionGrad, shape, 3, func(launch int) { choose(5 * (launch / 2)) })
	choose(0)
	if err == nil || err.Error() != "launch 3 gives other bits than the first for dk of attention_bulk_dkv_64" {
		t.Errorf("%v", err)
	} else {
		told(t, "bits", "another factor of dk from the third launch on", err.Error())
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// smallTrial is for tests of other features; TestAttentionForTheCard runs the full trial, with SPPO_LONG also of a variant.
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
		for _, item := range attentionCases[1].items() {
			ours[i] = append(ours[i], compare(t, m, item))
		}
		if os.Getenv("SPPO_LONG") == "" {
			m.tried = smallTrial // that of the variant of the same kernels
		}
		for _, item := range attentionCases[6].items() {
			ours[i] = append(ours[i], compare(t, m, item))
		}
	}
	if !reflect.DeepEqual(ours[0], ours[1]) {
		t.Error("attention or its gradient is other bits where threads copy than where the copy engine does")
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// If the kernels for a card compute wrong results on it, portable kernels replace those that failed their trial, and
// only those. A note names them.
func TestFailedKernelsAreReplaced(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake := useFake(t)
	broken, choose := buildPlanted(t)
	choose(5) // only dk of heads of 64 is tried
	defer choose(0)
	m, err := open(Options{OwnProducts: true}, fixedCode(broken.Path))
	if err != nil {
		t.Fatal(err)
	}
	m.tried = smallTrial
	for i, item := range attentionCases[3].items() { // heads of 64
		_, launches := executeOn(t, m, item)
		if portable := kernels.Target(launches[len(launches)-1].Source) == ""; portable != (i == 1) {
			t.Errorf("%s: portable kernels %t", item.Name, portable)
		}
		compare(t, m, item)
	}
	want := "portable kernels compute attention_grad of heads of 64, because those for the architecture of the "
	if notes := m.Notes(); len(notes) != 1 || !strings.HasPrefix(notes[0], want) || !strings.Contains(notes[0], "dk of attention_bulk_dkv_64 is off by") {
		t.Errorf("notes: %q", notes)
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// The portable kernels can be requested for some head dimensions only.
func TestPortableHeads(t *testing.T) {
	fake := useFake(t)
	for value, want := range map[string][]int64{"": nil, "1": nil, "64": {64}, "64,96": {64, 96}, "all": {}, "64,": {}} {
		var o Options
		if err := o.portableHeads(value); (err != nil) != (want != nil && len(want) == 0) || err == nil && !slices.Equal(o.PortableHeads, want) {
			t.Errorf("%q: %v, %v", value, o.PortableHeads, err)
		}
	}
	m := fake.open(t, Options{PortableHeads: []int64{96}})
	m.trying = true
	for dim, want := range map[int64]bool{64: true, 96: false, 128: true} {
		p, _ := attentionProgram(attentionShape{n: 5, heads: 1, kvHeads: 1, dim: dim})
		d := &Device{machine: m, gpu: m.gpus[0], program: p}
		plan, err := d.plan(&p.Codes[0].Sections[ir.SectionStep][0])
		if err != nil || (kernels.Target(plan.Launches[0].Source) != "") != want {
			t.Errorf("heads of %d: %v, %v", dim, plan.Launches, err)
		}
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
		if _, err := attempt(m, ir.AttentionGrad, shape); err != nil {
			t.Error(err)
		}
		for _, op := range []string{"attention", "attention_grad"} {
			want := fmt.Sprintf("%s, %s of heads of 64%s, copy engine", m.gpus[0].name, op, shape.variant())
			if m.trials.done[want] == nil {
				t.Errorf("there was no trial of %s among %v", want, m.trials.done)
			}
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
	p, _ := attentionProgram(attentionShape{n: 5, heads: 1, kvHeads: 1, dim: 64})
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
