package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/cuda"
)

// A run on the CPU of a job that was planned for GPUs says so at its start, and only there.
func TestPlannedForGPUs(t *testing.T) {
	inBase(t)
	const want = "device cpu, 1 thread, "
	for cluster, note := range map[string]string{
		"four": "", "h100(gpus_per_node = 4)": "; the job is planned for the GPUs of h100: --device cuda runs it on GPUs, --device sim simulates it on h100",
	} {
		_, stderr := sppovm(t, t.Context(), "run", "tiny.sppo", "--threads", "1", "--steps", "1", "--set", "cluster="+cluster)
		first, rest, _ := strings.Cut(stderr, "\n")
		if !strings.HasPrefix(first, want) || note != "" && !strings.HasSuffix(first, note) || strings.Contains(first, "planned") != (note != "") || strings.Contains(rest, "planned") {
			t.Errorf("on %s:\n%s", cluster, stderr)
		}
	}
}

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
