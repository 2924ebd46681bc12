package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
)

// jobOf writes a spec that trains the model in the folder hub on four ranks.
func jobOf(t *testing.T) {
	t.Helper()
	text := `import "clusters/local.sppo"
cluster here = local(ranks = 4)
model small {
  family = llama   layers = 2   hidden = 8   heads = 2   kv_heads = 1   head_dim = 6   ffn = 12   vocab = 37   dtype = bf16   norm_eps = 1e-6
}
train { sequence = 32   steps = 4   data = random()   eval_batch = 0 }
schedule four { sp = 2   pp = 2   subsequences = 2   align = 2 }
`
	if err := os.WriteFile("job.sppo", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// Each process loads the weights of its own ranks only, and the job gives the same results as it does in a single
// process. A checkpoint records the source of the weights, even after the run is resumed.
func TestProcessesLoadWeights(t *testing.T) {
	inBase(t)
	jobOf(t)
	args := []string{"job.sppo", "--weights", "hub", "--steps", "2", "-q"}
	alone(t, append(args, "--save", "one.ckpt")...)
	all := launchAll(t, 2, inWorld(t, 2, append(args, "--save", "many.ckpt")...))
	end(t, all)
	for i, p := range all {
		if p.code != cli.Done {
			t.Fatalf("process %d: exit %d\n%s", i, p.code, p.errs.String())
		}
	}
	same(t, "one.ckpt", "many.ckpt")
	alone(t, "job.sppo", "--resume", "many.ckpt", "--steps", "3", "-q", "--save", "later.ckpt")
	c, err := train.OpenCheckpoint("later.ckpt")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if dir, err := filepath.Abs("hub"); err != nil || c.Origin != dir || c.Step != 3 {
		t.Errorf("step %d of weights from %q, want 3 and %q: %v", c.Step, c.Origin, dir, err)
	}
	alone(t, "job.sppo", "--steps", "1", "-q", "--save", "fresh.ckpt")
	fresh, err := train.OpenCheckpoint("fresh.ckpt")
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Close()
	if fresh.Origin != "" {
		t.Errorf("weights that were drawn come from %q", fresh.Origin)
	}
}

// If processes are given different weights, the job stops and reports the difference.
func TestProcessesWithOtherWeights(t *testing.T) {
	inBase(t)
	jobOf(t)
	sppovm(t, t.Context(), "run", "job.sppo", "--weights", "hub", "--steps", "0", "-q", "--save", "start.ckpt")
	sppovm(t, t.Context(), "export", "start.ckpt", "-o", "other", "--dtype", "f32")
	world := inWorld(t, 2)
	all := launchAll(t, 2, func(i int) []string {
		return append(world(i), "job.sppo", "--steps", "1", "-q", "--weights", []string{"hub", "other"}[i])
	})
	end(t, all)
	if text := all[0].errs.String(); all[0].code != cli.Failed || !strings.Contains(text, "process 1 reads different weights from process 0") {
		t.Errorf("exit %d\n%s", all[0].code, text)
	}
}

// A bf16 program without master weights cannot represent the values in a folder of f32 weights exactly, so it
// requires --cast.
func TestRoundingWeightsWantsCast(t *testing.T) {
	inBase(t)
	jobOf(t)
	sppovm(t, t.Context(), "run", "job.sppo", "--weights", "hub", "--steps", "0", "-q", "--save", "start.ckpt")
	sppovm(t, t.Context(), "export", "start.ckpt", "-o", "wide", "--dtype", "f32")
	job, err := cli.OpenProgram(nil, "job.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		folder  string
		masters bool
		cast    bool
		want    string
	}{
		{"wide", true, false, ""}, {"hub", false, false, ""}, {"wide", false, true, ""},
		{"wide", false, false, "the program stores embed only as bf16, which rounds the folder's values; --cast allows this"},
	} {
		p := *job.Program
		p.Codes = slices.Clone(p.Codes)
		for i := range p.Codes {
			states := slices.Clone(p.Codes[i].States)
			p.Codes[i].States = slices.DeleteFunc(states, func(s ir.State) bool { return !c.masters && s.Role == ir.RoleMaster })
		}
		f := runFlags{weights: c.folder, cast: c.cast}
		w, err := f.openWeights(&p)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%+v: %v", c, err)
		case c.want == "":
			w.Close()
		case err == nil || !strings.Contains(err.Error(), c.want) || cli.ExitCode(err) != cli.BadInput:
			t.Errorf("%+v: %v", c, err)
		}
	}
}
