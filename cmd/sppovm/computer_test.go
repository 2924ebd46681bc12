package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cuda"
)

// Without a GPU, the commands devices and run report what is missing; run then fails, but devices succeeds.
func TestWithoutGPU(t *testing.T) {
	if _, err := cuda.Open(cuda.Options{}); err == nil {
		t.Skip("SKIPPED: this machine has a GPU")
	}
	inBase(t)
	stdout, _ := sppovm(t, context.Background(), "devices")
	if !strings.Contains(stdout, " is missing") && !strings.Contains(stdout, "no GPU") {
		t.Errorf("devices says:\n%s", stdout)
	}
	var out, errs bytes.Buffer
	code := app.Main(&cli.Env{Context: context.Background(), Stdout: &out, Stderr: &errs}, []string{"run", "tiny.sppo", "--device", "cuda"})
	if code != 1 || !strings.Contains(errs.String(), "the cuda device cannot run here: ") || out.Len() > 0 {
		t.Errorf("exit %d\n%s%s", code, errs.String(), out.String())
	}
}
