package kernels_test

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"sppo/cuda/emu"
	"sppo/cuda/kernels"
	"sppo/ir"
	"sppo/vm"
)

// Where the copy engine brings tiles, each wait that is left out shows in some order of lanes, warps and copies.
func TestMissingWaits(t *testing.T) {
	if testing.Short() {
		t.Skip("each fault is compiled")
	}
	library := needEmulator(t)
	rng := rand.New(rand.NewPCG(1, 2))
	p := drawn(t, rng, ir.Attention, map[string]int64{"": 3, "n": 20, "prefix": 700, "keys": 720, "heads": 1, "kv_heads": 1, "head_dim": 64, "batch": 1, "T": 1})
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	var before [][]byte
	for i := range in.Args {
		before = append(before, values(rng, in, i))
	}
	right, err := logSums(p, before, &device{library: library, hopper: true, engine: true})
	if err != nil {
		t.Fatal(err)
	}
	text := kernels.Text("attention_hopper.cu")
	for _, wait := range []string{
		"barrier_wait(barriers + KEYS_USED + tile % 2, (tile / 2 & 1) ^ 1);",
		"if (tile > 0) barrier_wait(barriers + VALUES_HERE + (tile - 1) % 2, (tile - 1) / 2 & 1);",
	} {
		broken, err := emu.BuildSources(t.TempDir(), map[string]string{"attention_hopper.cu": strings.Replace(text, wait, "", 1)})
		if err != nil {
			t.Fatal(err)
		}
		shown := false
		for seed := range uint64(4) {
			got, err := logSums(p, before, &device{library: broken, seed: 77 * seed, hopper: true, engine: true})
			shown = shown || err != nil || !bytes.Equal(got, right)
		}
		if !shown || !strings.Contains(text, wait) {
			t.Errorf("without %s nothing shows", wait)
		}
	}
}

// logSums is attention's second result.
func logSums(p *ir.Program, before [][]byte, d *device) ([]byte, error) {
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	if err := d.Load(p, 0, &vm.Env{Transport: vm.NewLocal()}); err != nil {
		return nil, err
	}
	for i, b := range before {
		copy(d.view(in.Args[i]), b)
	}
	if err := d.Begin(ir.SectionStep, 1); err != nil {
		return nil, err
	}
	d.Launch(0)
	out := bytes.Clone(d.view(in.Args[1]))
	if err := d.Join(); err != nil {
		return nil, err
	}
	return out, d.Close()
}
