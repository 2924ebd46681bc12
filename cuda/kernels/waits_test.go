package kernels_test

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/cuda/emu"
	"sppo.dev/cuda/kernels"
	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Where the copy engine brings tiles, each wait that is left out shows in some order of lanes, warps and copies.
func TestMissingWaits(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: each fault is compiled")
	}
	library := needEmulator(t)
	for _, c := range []struct {
		op        ir.Op
		n, prefix int64
		source    string
		waits     []string
	}{
		{ir.Attention, 20, 700, "attention_hopper.cu", []string{
			"barrier_wait(barriers + KEYS_USED + tile % 2, (tile / 2 & 1) ^ 1);",
			"barrier_wait(barriers + KEYS_HERE + tile % 2, tile / 2 & 1);",
			"barrier_wait(barriers + VALUES_HERE + (tile - 1) % 2, (tile - 1) / 2 & 1);",
		}},
		{ir.AttentionGrad, 300, 200, "attention_hopper_grad.cu", []string{
			"barrier_wait(barriers + PAIR_USED + tile % 3, (tile / 3 & 1) ^ 1);",
			"barrier_wait(barriers + PAIR_HERE + tile % 3, tile / 3 & 1);",
		}},
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
		text := wider.ReplaceAllString(kernels.Text(c.source), "")
		for _, wait := range c.waits {
			broken, err := emu.BuildSources(t.TempDir(), map[string]string{c.source: strings.Replace(text, wait, ";", 1)})
			if err != nil {
				t.Fatal(err)
			}
			shown := false
			for seed := range uint64(4) {
				got, err := results(p, before, &device{library: broken, seed: 77 * seed, hopper: true, engine: true})
				shown = shown || err != nil || !bytes.Equal(got, right)
			}
			if !shown || !strings.Contains(text, wait) {
				t.Errorf("%s: without %s nothing shows", c.source, wait)
			}
		}
	}
}

// wider are the instances of kernels for wider heads than 64.
var wider = regexp.MustCompile(`(?m)^(FORWARD|GRADIENTS)\((96|128).*\n`)

// results are the bytes that an instruction leaves in what it writes.
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
