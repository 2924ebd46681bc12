package kernels_test

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"sppo.dev/cuda/kernels"
	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Where the copy engine brings tiles, each wait that is left out shows in some order of lanes, warps and copies.
func TestMissingWaits(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	library := needEmulator(t)
	for _, c := range []struct {
		op        ir.Op
		n, prefix int64
		source    string
		waits     int
	}{
		{ir.Attention, 20, 700, "attention_hopper.cu", 5},
		{ir.AttentionGrad, 300, 200, "attention_hopper_grad.cu", 3},
	} {
		rng := rand.New(rand.NewPCG(1, 2))
		p := drawn(t, rng, c.op, map[string]int64{"": 3, "n": c.n, "prefix": c.prefix, "keys": c.prefix + c.n, "heads": 2, "kv_heads": 2, "head_dim": 64, "batch": 1, "T": 1})
		in := &p.Codes[0].Sections[ir.SectionStep][0]
		var before [][]byte
		for i, v := range in.Args {
			before = append(before, nil)
			if v.Present() {
				before[i] = values(rng, in, i)
			}
		}
		right, err := results(p, before, &device{library: library, hopper: true, engine: true})
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for i, line := range strings.Split(kernels.Text(c.source), "\n") {
			if !strings.Contains(line, "barrier_wait(") {
				continue
			}
			found++
			library.Skip(c.source, i+1)
			shown := false
			for seed := uint64(0); seed < 6 && !shown; seed++ {
				got, err := results(p, before, &device{library: library, seed: 77 * seed, hopper: true, engine: true})
				shown = err != nil || !bytes.Equal(got, right)
			}
			library.Skip("", 0)
			if !shown {
				t.Errorf("%s:%d: without %s nothing shows", c.source, i+1, strings.TrimSpace(line))
			}
		}
		if found != c.waits {
			t.Errorf("%s has %d waits, not %d", c.source, found, c.waits)
		}
	}
}

// results returns the bytes that an instruction leaves in what it writes.
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
