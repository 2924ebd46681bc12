package lang

import (
	"math"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"testing"
)

// TestText checks that the text of a spec means the same as the spec's file with its imports and overrides.
func TestText(t *testing.T) {
	sets := [][]string{
		nil,
		{"train.optimizer.lr=1e-4", "train.sequence=8128K", "schedule.keep=[k]", "cluster.host_memory=200GB"},
		{"cluster=h200(gpus_per_node = 1, host_memory = 211GiB)", "schedule=alst()", "train.guard.spikes=7", "train.batch=3"},
		{"train.data=tokens(\"corpus/*.bin\", \"more\", type = uint16)", "train.freeze=[embeddings, \"layer.0-1\"]"},
	}
	checked := 0
	for _, pattern := range []string{"../examples/*.sppo", "../examples/long/*.sppo", "../examples/paper/*-512k.sppo", "../examples/today/*.sppo"} {
		files, _ := filepath.Glob(pattern)
		for _, file := range files {
			for _, set := range sets {
				want, err := Load(file, Options{Shipped: shipped, Set: set})
				if err != nil {
					continue // a file that others import, or an override that does not suit it
				}
				text := want.Text("../examples/new")
				got, err := Parse("../examples/new/job.sppo", []byte(text), Options{Shipped: shipped})
				if err != nil {
					t.Fatalf("%s %v: %v\n%s", file, set, err, text)
				}
				checked++
				a, b := *want, *got
				a.File, a.source, b.File, b.source = "", nil, "", nil
				for _, s := range []*Spec{&a, &b} { // paths are relative to the working directory
					for i := range s.Train.Data.Files {
						s.Train.Data.Files[i], _ = filepath.Abs(s.Train.Data.Files[i])
					}
				}
				if !reflect.DeepEqual(a, b) {
					t.Errorf("%s %v: the text means\n%+v\nwant\n%+v\n%s", file, set, b, a, text)
				}
			}
		}
	}
	if checked < 60 {
		t.Errorf("only %d specs were checked", checked)
	}
}

// TestExactNumber checks that numbers are read as they were written.
func TestExactNumber(t *testing.T) {
	for text, want := range map[string]string{"8323072": "8128K", "1024": "1024", "32K": "32K", "450GB/s": "450GB/s", "1M": "1M", "0.1": "0.1", "80GiB": "80GiB", "312TFLOPS": "312TFLOPS", "5us": "5us", "3e-4": "0.0003", "1_000_000_000": "1e+09"} {
		x, name, _ := splitNumber(text)
		u := unit{1, dimCount}
		if name != "" {
			u = units[name]
		}
		if got := exactNumber(u.of(x), u.dim); got != want {
			t.Errorf("%s is written as %s, want %s", text, got, want)
		}
	}
	r := rand.New(rand.NewPCG(29, 5))
	for range 10000 {
		for _, d := range []dim{dimCount, dimBytes, dimDuration, dimRate, dimCompute} {
			x := float64(r.Int64N(1<<50)) * []float64{1, 1e-12, 1e3}[r.IntN(3)]
			if d == dimBytes {
				x = float64(int64(x))
			}
			value, name, ok := splitNumber(exactNumber(x, d))
			u := unit{1, dimCount}
			if name != "" {
				u = units[name]
			}
			if got := u.of(value); x != 0 && (!ok || u.dim != d || got != x && (d != dimCompute || math.Abs(got-x) > 1e-15*x)) {
				t.Fatalf("%g is written as %s, which is %g", x, exactNumber(x, d), got)
			}
		}
	}
}
