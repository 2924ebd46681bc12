package cuda

import (
	"bytes"
	"errors"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// oneRank returns a program for one rank, whose collectives therefore return their input.
func oneRank() *ir.Program {
	b := &builder{}
	for _, t := range []ir.DType{ir.F32, ir.BF16} {
		x, y, z := b.buffer(ir.Device, t, 7, 3), b.buffer(ir.Device, t, 7, 3), b.buffer(ir.Device, t, 7, 3)
		b.put(ir.AllGather, ir.Coll, []ir.View{y, x}, ir.Int(0))
		b.put(ir.ReduceScatter, ir.Coll, []ir.View{z, y}, ir.Int(0))
		b.put(ir.AllReduce, ir.Coll, []ir.View{z}, ir.Int(0))
	}
	return &ir.Program{Name: "one rank", Codes: []ir.Code{b.code}, Lines: []string{""}, Groups: []string{"all"},
		Ranks: []ir.Rank{{Groups: [][]int32{{0}}}}, Run: ir.Run{Sequence: 64, Batch: 8, Vocab: 1000, Steps: 1}}
}

// checkOneRank runs the collectives of one rank through NCCL, and shuts the communicator down, once cleanly and
// once by aborting it.
func checkOneRank(t *testing.T, m *Machine) {
	t.Helper()
	p := oneRank()
	within(t, func() {
		all, err := runSteps(p, 2, m.New, m)
		if err != nil {
			t.Error(err)
			return
		}
		for step := range all {
			parts, rest := [][]byte{}, all[step][0]
			for _, buffer := range p.Codes[0].Buffers {
				parts, rest = append(parts, rest[:buffer.Size]), rest[buffer.Size:]
			}
			for i, part := range parts {
				if !bytes.Equal(part, parts[i/3*3]) {
					t.Errorf("step %d: buffer %d is not what was given", step+1, i)
				}
			}
		}
	})
	again, err := m.Again()
	if err != nil {
		t.Fatal(err)
	}
	within(t, func() {
		d := again.New(0).(*Device)
		if err := d.Load(p, 0, &vm.Env{Transport: again}); err != nil {
			t.Error(err)
			return
		}
		lost := errors.New("a peer was lost")
		again.Abort(lost)
		if err := d.Begin(ir.SectionStep, 1); err != nil {
			t.Error(err)
		}
		for pc, in := range p.Codes[0].Sections[ir.SectionStep] { // the last of a group issues all
			if in.Info().Class == ir.ClassComm {
				d.Comm(pc)
			}
		}
		if err := d.Join(); !errors.Is(err, lost) {
			t.Errorf("after an abort: %v", err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestGPUNCCL tests the library as far as one GPU allows: its configuration, non-blocking initialisation,
// collectives, and both ways to shut a communicator down.
func TestGPUNCCL(t *testing.T) { checkOneRank(t, needGPU(t, Options{NCCL: true})) }

// TestNCCLOfOneRank runs the same checks with the stand-in libraries, to test the checks themselves.
func TestNCCLOfOneRank(t *testing.T) {
	fake := useFake(t)
	fake.reset(1, 1<<30, 100)
	checkOneRank(t, fake.open(t, Options{NCCL: true, OwnProducts: true}))
	if n, c := fake.live(), fake.comms(); n != 0 || c != 0 {
		t.Errorf("%d things and %d communicators were not given back", n, c)
	}
}
