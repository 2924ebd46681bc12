package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"sppo.dev"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/ir"
)

// reference is a job that trains on the GPU as on the CPU. Its text is in the bundle.
type reference struct {
	name      string
	bf16      bool
	overrides []string
}

// referenceText is the text, in the folder of the bundle.
const referenceText = "text.txt"

// references are jobs of examples. Their initial weights are so large that every gradient of attention shows in the
// gradient norm.
var references = []reference{
	{"gpt-docs", false, []string{"train.steps=100", "train.warmup=10", "model.init_std=0.1", "train.data=text(\"" + referenceText + "\")"}},
	{"llama-docs", true, []string{"train.steps=100", "train.warmup=10", "model.init_std=0.1", "train.data=text(\"" + referenceText + "\")"}},
}

// referenceOf returns the reference with a name, or one with bf16 weights.
func referenceOf(name string) reference {
	for _, r := range references {
		if r.name == name {
			return r
		}
	}
	return reference{name: name, bf16: true}
}

// program compiles a reference from the folder of the examples.
func (r *reference) program(examples string) (*ir.Program, error) {
	spec, err := sppo.Load(filepath.Join(examples, r.name+".sppo"), r.overrides...)
	if err != nil {
		return nil, err
	}
	return sppo.Compile(context.Background(), spec, sppo.Options{})
}

// cpuSteps trains a program on the cpu device, with the text in a folder, for a number of steps.
func cpuSteps(p *ir.Program, folder string, steps int) (out []stepLine, err error) {
	job, err := train.Open(p, func(int) (vm.Device, error) { return cpu.New(nil), nil }, train.Options{Dir: folder})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, job.Close()) }()
	ctx := context.Background()
	if err := job.Init(ctx); err != nil {
		return nil, err
	}
	for range steps {
		r, err := job.Step(ctx)
		if err != nil {
			return nil, err
		}
		out = append(out, stepLine{Step: r.Step, Loss: &r.Loss, Norm: r.GradNorm})
	}
	return out, nil
}

// writeReferences writes the program of each reference and its steps on the CPU to the folder of the bundle, which
// contains the text.
func writeReferences(folder, examples string) error {
	for _, r := range references {
		p, err := r.program(examples)
		if err != nil {
			return err
		}
		if err := ir.WriteFile(filepath.Join(folder, r.name+".sppb"), p); err != nil {
			return err
		}
		if err := writeSteps(folder, r.name, p); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}

// writeSteps writes the steps of a program on the CPU to a file in the folder of its text.
func writeSteps(folder, name string, p *ir.Program) error {
	steps, err := cpuSteps(p, folder, p.Run.Steps)
	if err != nil {
		return err
	}
	var lines []byte
	for _, s := range steps {
		line, err := json.Marshal(s)
		if err != nil {
			return err
		}
		lines = append(append(lines, line...), '\n')
	}
	return os.WriteFile(filepath.Join(folder, name+".cpu.jsonl"), lines, 0o644)
}

// same compares the steps of a reference on the GPU with those on the CPU.
func (r *reference) same(gpu, cpu []stepLine) (worst float64, err error) {
	convert := func(all []stepLine) (out []probe.TrainingStep) {
		for _, s := range steps(all) {
			out = append(out, probe.TrainingStep{Loss: *s.Loss, Norm: s.Norm})
		}
		return out
	}
	return probe.SameTraining(convert(gpu), convert(cpu), r.bf16)
}
