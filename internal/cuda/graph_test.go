package cuda

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// alone is a program of one rank that moves its tokens through host memory, on three streams; none of its
// instructions is a kernel.
func alone() *ir.Program {
	b := &builder{}
	tokens := b.buffer(ir.Device, ir.I32, 12)
	b.put(ir.LoadTokens, ir.Compute, []ir.View{tokens}, ir.Int(1), ir.Int(0), ir.Int(5), ir.Int(3), ir.Int(0), ir.Int(0))
	b.event(ir.Compute, ir.D2H)
	away, back, copied := b.buffer(ir.Host, ir.I32, 12), b.buffer(ir.Device, ir.I32, 12), b.buffer(ir.Device, ir.I32, 12)
	b.put(ir.CopyD2H, ir.D2H, []ir.View{away, tokens})
	b.event(ir.D2H, ir.H2D)
	b.put(ir.CopyH2D, ir.H2D, []ir.View{back, away})
	b.event(ir.H2D, ir.Compute)
	b.put(ir.CopyD2D, ir.Compute, []ir.View{copied, back})
	return &ir.Program{Name: "alone", Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Run: ir.Run{Sequence: 64, Batch: 8, Vocab: 1000, Steps: 3}}
}

// A replayed section has the same effect as its individual calls, with the current tokens.
func TestGraphsReplay(t *testing.T) {
	fake := useFake(t)
	var all [2][][][]byte
	for i, graphs := range []bool{false, true} {
		fake.reset(1, 1<<30, 100)
		m := fake.open(t, Options{OwnProducts: true, Graphs: graphs})
		within(t, func() {
			var err error
			if all[i], err = runSteps(alone(), 4, m.New, m); err != nil {
				t.Error(err)
			}
		})
		if n := fake.live(); n != 0 {
			t.Errorf("%d things were not given back", n)
		}
	}
	for step := range all[0] {
		if !bytes.Equal(all[0][step][0], all[1][step][0]) {
			t.Errorf("step %d: memory is not what calls make it", step+1)
		}
	}
	if bytes.Equal(all[1][2][0], all[1][3][0]) {
		t.Error("two steps leave the same memory behind")
	}
}

// Training with graphs is bitwise equal to training with calls, including offload and validation; with graphs,
// a step takes few driver calls.
func TestGraphsTrain(t *testing.T) {
	fake, kernels := useFake(t), emu.Need(t)
	dir := wordsFolder(t)
	p := trainingProgram(t, "gpt", "f32", "pp=1", "sp=1", "offload=full")
	var all [2][]probe.TrainingStep
	var calls [2]int64
	for i, graphs := range []bool{false, true} {
		m := fake.open(t, Options{Graphs: graphs})
		m.code = fixedCode(kernels.Path)
		last := func(rank int) vm.Device {
			return &counted{Device: m.New(rank), fake: fake, calls: &calls[i]}
		}
		within(t, func() {
			var err error
			if all[i], err = losses(p, dir, last, m); err != nil {
				t.Error(err)
			}
		})
		if n := fake.live(); n != 0 {
			t.Errorf("%d things were not given back", n)
		}
	}
	if !slices.Equal(all[0], all[1]) {
		t.Errorf("by calls %v, by graphs %v", all[0], all[1])
	}
	streams := int64(ir.NumStreams)
	if calls[1] > 2*streams || calls[0] < 100 {
		t.Errorf("the last step takes %d calls, and %d by graphs", calls[0], calls[1])
	}
}

// counted counts the driver calls of the last step, including its Join.
type counted struct {
	vm.Device
	fake  *fake
	calls *int64
	begun int64
}

func (c *counted) Begin(s ir.Section, round int64) error {
	c.begun = c.fake.calls()
	return c.Device.Begin(s, round)
}

func (c *counted) Join() error {
	err := c.Device.Join()
	*c.calls = c.fake.calls() - c.begun
	return err
}

func TestGraphsAreForOneRank(t *testing.T) {
	fake := useFake(t)
	m := fake.open(t, Options{OwnProducts: true, Graphs: true})
	_, err := runSteps(meeting(), 1, m.New, m)
	if err == nil || !strings.Contains(err.Error(), "graphs need a program of a single rank, but this one has 4") {
		t.Errorf("opening says %v", err)
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}
