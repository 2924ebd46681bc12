package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// having returns a stand-in for the free memory of this computer.
func having(bytes ir.Bytes) freeMemory {
	return func() vm.FreeMemory { return vm.FreeMemory{Host: bytes, Groups: vm.Unlimited} }
}

// A job that needs more memory than this computer has is refused before anything is allocated: all its ranks count, with the
// copies from which they write checkpoints. A job that needs all free memory is not.
func TestJobNeedsMemory(t *testing.T) {
	inBase(t)
	job, err := cli.OpenProgram(nil, "tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	var need, copies ir.Bytes
	for _, r := range job.Program.Ranks {
		need += job.Program.Codes[r.Code].Arenas[ir.Device] + job.Program.Codes[r.Code].Arenas[ir.Host]
	}
	each, err := train.CopyBytes(job.Program)
	if err != nil {
		t.Fatal(err)
	}
	for _, bytes := range each {
		copies += bytes
	}
	saving := saveFlags{dir: "ckpt", every: "1", steps: 1, keep: 1}
	waiting := saving
	waiting.wait = true
	for name, c := range map[string]struct {
		f    runFlags
		free ir.Bytes
		ok   bool
	}{
		"enough":               {runFlags{device: "cpu"}, need, true},
		"too little":           {runFlags{device: "cpu"}, need - 1, false},
		"forced":               {runFlags{device: "cpu", force: true}, 0, true},
		"enough for copies":    {runFlags{device: "cpu", saves: saving}, need + copies, true},
		"too little for them":  {runFlags{device: "cpu", saves: saving}, need + copies - 1, false},
		"no copies":            {runFlags{device: "cpu", saves: waiting}, need, true},
		"enough for residues":  {runFlags{device: "field"}, 4*need + 8*ir.Bytes(len(each))*ir.Bytes(ir.NumArenas), true},
		"too little for these": {runFlags{device: "field"}, 4*need - 1, false},
	} {
		c.f.free = having(c.free)
		computer, err := c.f.open(job.Program, nil)
		if err == nil {
			computer.close()
		}
		if (err == nil) != c.ok || !c.ok && cli.ExitCode(err) != cli.NoFit {
			t.Errorf("%s: %v, exit code %d", name, err, cli.ExitCode(err))
		}
	}
	f := runFlags{device: "cpu", free: having(need - 1)}
	_, err = f.open(job.Program, nil)
	pattern := "^tiny needs " + need.String() + ` of memory on this computer: \S+ \S+ of device memory and \S+ \S+ of host memory for ` +
		"4 ranks, but " + (need - 1).String() + " are free; sppovm run --device sim simulates the job; .*--cluster local.*fewer ranks.*smaller model.*--force"
	if !regexp.MustCompile(pattern).MatchString(err.Error()) {
		t.Errorf("%v\nwant %s", err, pattern)
	}
}

// Text is not sampled from a model that needs more memory than is free.
func TestSampleNeedsMemory(t *testing.T) {
	inBase(t)
	sppovm(t, t.Context(), "run", "tiny.sppo", "-q", "--steps", "0", "--save", "tiny.ckpt")
	f := sampleFlags{resume: "tiny.ckpt", prompt: "to", tokens: 8, free: having(1)}
	f.choice.TopP = 1
	source, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	defer source.close()
	var stdout, stderr bytes.Buffer
	env := &cli.Env{Context: t.Context(), Stdout: &stdout, Stderr: &stderr}
	if err := f.write(env, source); cli.ExitCode(err) != cli.NoFit || !strings.Contains(err.Error(), "of memory for its weights and 10 tokens, but 1 B are free") {
		t.Errorf("%v", err)
	}
	f.free = nil
	if err := f.write(env, source); err != nil {
		t.Error(err)
	}
}
