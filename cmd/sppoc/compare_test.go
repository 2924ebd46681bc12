package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestCompareFitsScreen checks that the table of a job with all baselines is at most 120 columns wide, and that its first block
// shows memory, recompute and offload. The jobs are specs and a model
// folder.
func TestCompareFitsScreen(t *testing.T) {
	config, err := os.ReadFile("../../internal/hf/testdata/configs/Qwen3-4B.json")
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(t.TempDir(), "Qwen3-4B")
	if err := errors.Join(os.Mkdir(folder, 0o755), os.WriteFile(filepath.Join(folder, "config.json"), config, 0o644)); err != nil {
		t.Fatal(err)
	}
	jobs := [][]string{
		{"../../examples/tiny.sppo"},
		{"../../examples/tiny.sppo", "../../examples/gpt-docs.sppo"},
		{"../../examples/tiny.sppo", "--sweep", "train.sequence=64,128", "--sweep", "model.hidden=32,64"},
		{folder, "--cluster", "h100", "--sequence", "64K"},
	}
	for _, job := range jobs {
		text := string(answer(t, append(append([]string{"compare"}, job...), "--baselines")...))
		for line := range strings.Lines(text) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 120 {
				t.Errorf("%v: a line has %d columns: %s", job, n, line)
			}
		}
		head, _, _ := strings.Cut(text, "\n")
		for _, name := range []string{"schedule", "recompute", "offload", "step", "speed", "MFU", "device", "host"} {
			if !strings.Contains(" "+head+" ", " "+name+" ") {
				t.Errorf("%v: the first block has no column %s: %s", job, name, head)
			}
		}
		for _, name := range baselines() {
			if !strings.Contains(text, "\n"+name+" ") && !strings.Contains(text, " "+name+" ") {
				t.Errorf("%v: there is no line for %s", job, name)
			}
		}
		if !strings.Contains(text, "times as fast as with ") {
			t.Errorf("%v: the job is not compared with the baselines:\n%s", job, text)
		}
	}
}

// TestBaselines checks that exactly the shipped schedules whose sizes are open are baselines.
func TestBaselines(t *testing.T) {
	if got, want := strings.Join(baselines(), " "), "alst fsdp2-cp megatron-cp megatron-tuned ulysses-selective"; got != want {
		t.Errorf("the baselines are %s, want %s", got, want)
	}
}

// TestOverCapacity checks the mark of peaks that do not fit, and that such a line is not called the fastest.
func TestOverCapacity(t *testing.T) {
	text := string(answer(t, "compare", "../../examples/tiny.sppo", "--sweep", "cluster.device_memory=1GiB,100KiB"))
	for _, part := range []string{"157 KiB* ", "*: more than a rank has, which is 100 KiB of device memory", "The fastest that fits: device_memory=1GiB."} {
		if !strings.Contains(strings.ReplaceAll(text, "\n", " "), part) {
			t.Errorf("%q is not in\n%s", part, text)
		}
	}
}
