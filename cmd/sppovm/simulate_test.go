package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"sppo.dev"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// A simulated run prints the figures of a simulation in which every rank runs the interpreter loop.
func TestSimulationOfClasses(t *testing.T) {
	inBase(t)
	for _, c := range []struct {
		set  string
		args []string
		o    sim.Options
	}{
		{"schedule.dp=1", nil, sim.Options{}},
		{"cluster=h100(gpus_per_node = 4)", nil, sim.Options{}},
		{"cluster=h100(gpus_per_node = 4)", []string{"--slow", "3=1.5"}, sim.Options{Slow: map[int]float64{3: 1.5}}},
		{"cluster=h100(gpus_per_node = 4)", []string{"--contention"}, sim.Options{Contention: true}},
		{"cluster=h100(gpus_per_node = 4)", []string{"--jitter", "0.1", "--seed", "7"}, sim.Options{Jitter: 0.1, Seed: 7}},
		{"schedule.pp=1", []string{"--slow", "1=1.5"}, sim.Options{Slow: map[int]float64{1: 1.5}}},
	} {
		program := buildProgram(t, "tiny.sppo", c.set)
		out, _ := sppovm(t, t.Context(), append([]string{"run", program, "--device", "sim", "--json", "--steps", "2"}, c.args...)...)
		p, err := ir.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		world, err := sim.New(p, c.o)
		if err != nil {
			t.Fatal(err)
		}
		job, err := train.Open(p, func(rank int) (vm.Device, error) { return world.Device(rank), nil }, train.Options{Tokens: sim.NoTokens{}})
		if err != nil {
			t.Fatal(err)
		}
		lines := objects(t, out)
		for i := range 2 {
			step, err := job.Step(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got := lines[i]["step_s"]; got != step.Seconds {
				t.Errorf("%s %v: step %d takes %v s, not %v", c.set, c.args, i+1, got, step.Seconds)
			}
		}
		last, all := lines[2], world.Timeline()
		for key, want := range map[string]float64{
			"bubble_ratio": all.BubbleRatio(), "mfu": all.MFU(), "exposed_transfer_s": float64(all.Exposed()),
			"device_peak_bytes": float64(most(p, job, ir.Device)), "host_peak_bytes": float64(most(p, job, ir.Host)),
		} {
			if got := last[key].(float64); math.Abs(got-want) > 1e-12*want {
				t.Errorf("%s %v: %s is %v, not %v", c.set, c.args, key, got, want)
			}
		}
		if err := job.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// most returns the highest peak of any rank.
func most(p *ir.Program, job *train.Job, a ir.Arena) (peak ir.Bytes) {
	for r := range p.Ranks {
		peak = max(peak, job.Peaks(r)[a])
	}
	return peak
}

// The memory of a simulated run hardly depends on the number of replicas, because equal ranks are simulated once.
func TestSimulationOfManyRanks(t *testing.T) {
	dir := t.TempDir()
	spent := func(replicas int) uint64 {
		file := fmt.Sprintf("%s/%d.sppo", dir, replicas)
		text := fmt.Sprintf(`import "clusters/h100.sppo"
model m { family = llama layers = 4 hidden = 256 heads = 8 kv_heads = 4 ffn = 512 vocab = 256 dtype = bf16 }
cluster c = h100(nodes = %[1]d, gpus_per_node = 8)
train { data = random() sequence = 4K batch = %[2]d }
schedule s { dp = %[2]d pp = 2 sp = 2 zero = 3 subsequences = 16 }`, replicas/2, replicas)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		program := buildProgram(t, file)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		sppovm(t, t.Context(), "run", program, "--device", "sim", "-q")
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	few, many := spent(2), spent(256)
	t.Logf("8 ranks: %d bytes, 1024 ranks: %d", few, many)
	if more := (many - few) / (1024 - 8); more > 16<<10 {
		t.Errorf("verifying and simulating takes %d bytes for each rank more: as if each were simulated", more)
	}
}

// buildProgram compiles a spec to a file.
func buildProgram(t *testing.T, spec string, set ...string) (file string) {
	t.Helper()
	s, err := sppo.Load(spec, set...)
	if err != nil {
		t.Fatal(err)
	}
	p, err := sppo.Compile(t.Context(), s, sppo.Options{})
	if err != nil {
		t.Fatal(err)
	}
	file = filepath.Join(t.TempDir(), "job.sppb")
	if err := ir.WriteFile(file, p); err != nil {
		t.Fatal(err)
	}
	return file
}
