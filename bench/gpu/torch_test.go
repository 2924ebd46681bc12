package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"sppo.dev/interop/torch/torchtest"
	"sppo.dev/ir"
)

// The stage torch runs the jobs of training and a model's layers on the CPU, with the files of the bundle.
func TestTorchStage(t *testing.T) {
	torchtest.Install(t)
	files, out := t.TempDir(), t.TempDir()
	in := func(name string) string { return filepath.Join(files, name) }
	for _, argv := range [][]string{{"go", "build", "-o", files + "/", "./bench/gpu"}, {"cp", "-rL", "interop/torch/sppo_torch", files}} {
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Dir = torchtest.Root()
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", argv, err, text)
		}
	}
	cluster, err := os.ReadFile("../../internal/shipped/clusters/h200.sppo")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"7b.sppo": tinyModel, "8b.sppo": tinyModel, referenceText: tinyModel, "cluster.sppo": string(clusterName.ReplaceAll(cluster, []byte("cluster measured")))} {
		if err := os.WriteFile(in(name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range references {
		if err := compile(in("7b.sppo"), in(r.name+".sppb"), nil); err != nil {
			t.Fatal(err)
		}
		p, err := ir.ReadFile(in(r.name + ".sppb"))
		if err != nil {
			t.Fatal(err)
		}
		if err := writeSteps(files, r.name, p); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(in("gpu"), "torch", "training", "torch", "8b-128k")
	cmd.Env = append(os.Environ(), outVariable+"="+out, pythonVariable+"="+os.Getenv("SPPO_PYTHON"), figuresVariable+"=small", factorVariable+"=10")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	results, broken, err := readJournal(out)
	if err != nil || broken > 0 {
		t.Fatal(broken, err)
	}
	r := &reader{of: latest(results)}
	x := r.report().Torch
	if r.err != nil || x == nil || len(x.Training) != len(references) || len(x.Layers) != 1 {
		t.Fatalf("%+v, %v", x, r.err)
	}
	for _, run := range x.Training {
		if run.Error != "" || run.Worst > 1 {
			t.Errorf("%+v", run)
		}
	}
	if l := x.Layers[0]; l.Step <= 0 || l.Device <= 0 || l.apart() > mostApart {
		t.Errorf("%+v", l)
	}
}
