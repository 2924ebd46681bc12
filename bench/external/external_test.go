package main

import (
	"os"
	"strings"
	"testing"

	"sppo.dev/internal/compile"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes"
)

func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil { // all paths are relative to the root of the repository
		panic(err)
	}
	irtest.Main(m)
}

// Every row parses, pins every key that could change its time, and is a plan; the page shows it.
func TestRows(t *testing.T) {
	rows, err := load(folder)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		_, name, _ := strings.Cut(r.name, "/")
		if !strings.Contains(string(text), "| "+name+" |") {
			t.Errorf("%s does not show %s: make external", page, r.name)
		}
		if r.measured <= 0 {
			t.Errorf("%s: measured %g s", r.name, r.measured)
		}
		p, err := compile.Plan(r.spec, passes.Options{})
		if err != nil {
			t.Errorf("%s: %v", r.name, err)
			continue
		}
		for _, d := range p.Decisions {
			if strings.Contains(d.Why, "the fastest found") {
				t.Errorf("%s: %s = %s is not pinned: %s", r.name, d.What, d.Value, d.Why)
			}
		}
	}
}

// The files have the rows that the page promises: sources, and dense models for each kind of GPU.
func TestEnough(t *testing.T) {
	rows, err := load(folder)
	if err != nil {
		t.Fatal(err)
	}
	sources, gpus := map[string]bool{}, map[string]int{}
	for _, r := range rows {
		source, _, _ := strings.Cut(r.fields["source"], " (")
		sources[source] = true
		for _, kind := range []string{"a100", "h100", "b200"} {
			if strings.Contains(r.name, "-"+kind) { // folders are named by source and GPU
				gpus[kind]++
			}
		}
	}
	if len(rows) < 30 || len(sources) < 5 || gpus["a100"] < 8 || gpus["h100"] < 8 || gpus["b200"] < 8 {
		t.Errorf("%d rows from %d sources; by GPU: %v", len(rows), len(sources), gpus)
	}
}

// With eight replicas, collectives on gradients take a part of the backward work that is left, and a step is within the limit.
func TestReplicas(t *testing.T) {
	j := replicatedJobs[0]
	one, err := j.step(1, "f32")
	if err != nil {
		t.Fatal(err)
	}
	for _, reduce := range []string{"f32", "bf16"} {
		s, err := j.step(8, reduce)
		if err != nil {
			t.Fatal(err)
		}
		if s.share < 0.1 || s.share >= hidden || s.step > (1+limit)*one.step || s.alone > s.step {
			t.Errorf("%s: %+v, with one replica %+v", reduce, s, one)
		}
	}
}

func TestFields(t *testing.T) {
	got := fieldsOf("# source: a: b\n#   more\n# measured: 3 s\nimport \"x\"\n# not: this\n")
	if len(got) != 2 || got["source"] != "a: b more" || got["measured"] != "3 s" {
		t.Errorf("%q", got)
	}
}
