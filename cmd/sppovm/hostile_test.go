package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/clitest"
)

// A device, a pipe or an endless file in place of a program, data, a checkpoint or weights causes a single
// error.
func TestHostileFiles(t *testing.T) {
	inBase(t)
	jobOf(t)
	const tokens = `--set train.data=tokens("x.bin") --set train.holdout=0`
	clitest.Hostile(t, &app, "x.sppb", nil, "sppovm run x.sppb", "sppovm run x.sppb --device sim", "sppovm eval x.sppb --resume none")
	clitest.Hostile(t, &app, "x.txt", nil, `sppovm run tiny.sppo --set train.data=text("x.txt")`)
	clitest.Hostile(t, &app, "x.bin", []string{"sparse"}, "sppovm run tiny.sppo "+tokens) // a TiB of zeros is valid data
	clitest.Hostile(t, &app, "x.ckpt", nil, "sppovm run tiny.sppo --resume x.ckpt", "sppovm export x.ckpt -o out")
	if err := os.RemoveAll("hub/model.safetensors"); err != nil {
		t.Fatal(err)
	}
	clitest.Hostile(t, &app, "hub/model.safetensors", nil, "sppovm run job.sppo --weights hub")
}

// An unusual file in place of a prompt file or of a file in a checkpoint also causes a single error.
func TestHostileCheckpoints(t *testing.T) {
	inBase(t)
	sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "1", "--save", "good", "-q")
	for _, name := range []string{"manifest.json", "rank-00000.safetensors"} {
		path := filepath.Join("good", "step-1", name)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		clitest.Hostile(t, &app, path, nil, "sppovm run tiny.sppo --resume good/step-1", "sppovm export good/step-1 -o out")
		if err := os.WriteFile(path, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	clitest.Hostile(t, &app, "prompt", []string{"binary"}, "sppovm sample --resume good/step-1 --prompt-file prompt --max-tokens 1")
}

// Resuming a run that is set to end before the step of the checkpoint is an error. If the run is set to end at that
// step, it has nothing to do and succeeds.
func TestResumeBeyondTheEnd(t *testing.T) {
	inBase(t)
	sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "3", "--save", "three.ckpt", "-q")
	var out, errs bytes.Buffer
	code := app.Main(&cli.Env{Context: t.Context(), Stdout: &out, Stderr: &errs}, []string{"run", "tiny.sppo", "--steps", "2", "--resume", "three.ckpt", "-q"})
	if code != cli.BadInput || errs.String() != "sppovm: three.ckpt is a checkpoint of step 3, but the run ends after step 2; continue further with --steps\n" {
		t.Errorf("exit %d: %s", code, errs.String())
	}
	sppovm(t, t.Context(), "run", "tiny.sppo", "--steps", "3", "--resume", "three.ckpt", "-q")
}
