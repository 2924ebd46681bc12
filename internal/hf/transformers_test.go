package hf_test

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// transformers loads models that we have trained and exported, and computes the same loss as our next step.
func TestTransformersLoadsExports(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with transformers")
	}
	command := exec.Command(python, filepath.Join("..", "..", "bench", "peers", "hub_models.py"), "--measure")
	var names []string
	var before, after []float64
	for _, dir := range fixtures(t) {
		e := readExpected(t, dir)
		program := compile(t, dir, 2, e, "model.dtype=f32", "schedule.sp=1", "schedule.pp=2", "train.optimizer=adamw(lr = 1e-2)", "train.steps=30")
		job := open(t, dir, program, e)
		for range 20 {
			if _, err := job.Step(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		command.Args = append(command.Args, exported(t, job, "f32"))
		next, err := job.Step(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		names, before, after = append(names, filepath.Base(dir)), append(before, e.Loss), append(after, next.Loss)
	}
	var errs bytes.Buffer
	command.Stderr = &errs
	text, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	lines := json.NewDecoder(bytes.NewReader(text))
	for i, name := range names {
		var e expected
		if err := lines.Decode(&e); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		if d := math.Abs(e.Loss - after[i]); !(d <= 1e-4) || after[i] > before[i]-0.5 {
			t.Errorf("%s: loss %.6f, transformers has %.6f; before training it was %.6f", name, after[i], e.Loss, before[i])
		}
	}
}
