package main

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"text/tabwriter"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// For each job in a fleet of common jobs, the report of `plan` must be true of the program. If the plan fits,
// building, verifying and simulating the program must succeed, and the program must use the planned memory. If it
// does not fit, following any one of the hints must make it fit.

// fleetModels lists published models.
var fleetModels = map[string]string{
	"llama-3.2-1b": "family = llama layers = 16 hidden = 2048 heads = 32 kv_heads = 8 ffn = 8192 vocab = 128256 tied = true",
	"llama-3.2-3b": "family = llama layers = 28 hidden = 3072 heads = 24 kv_heads = 8 ffn = 8192 vocab = 128256 tied = true",
	"llama-8b":     "family = llama layers = 32 hidden = 4096 heads = 32 kv_heads = 8 ffn = 14336 vocab = 128256",
	"llama-70b":    "family = llama layers = 80 hidden = 8192 heads = 64 kv_heads = 8 ffn = 28672 vocab = 128256",
	"llama-405b":   "family = llama layers = 126 hidden = 16384 heads = 128 kv_heads = 8 ffn = 53248 vocab = 128256",
	"qwen2.5-7b":   "family = qwen2 layers = 28 hidden = 3584 heads = 28 kv_heads = 4 ffn = 18944 vocab = 152064",
	"qwen2.5-14b":  "family = qwen2 layers = 48 hidden = 5120 heads = 40 kv_heads = 8 ffn = 13824 vocab = 152064",
	"qwen2.5-32b":  "family = qwen2 layers = 64 hidden = 5120 heads = 40 kv_heads = 8 ffn = 27648 vocab = 152064",
	"qwen2.5-72b":  "family = qwen2 layers = 80 hidden = 8192 heads = 64 kv_heads = 8 ffn = 29568 vocab = 152064",
	"qwen3-4b":     "family = qwen3 layers = 36 hidden = 2560 heads = 32 kv_heads = 8 head_dim = 128 ffn = 9728 vocab = 151936 tied = true",
	"qwen3-14b":    "family = qwen3 layers = 40 hidden = 5120 heads = 40 kv_heads = 8 ffn = 17408 vocab = 151936",
	"qwen3-8b":     "family = qwen3 layers = 36 hidden = 4096 heads = 32 kv_heads = 8 head_dim = 128 ffn = 12288 vocab = 151936",
	"gemma3-4b":    "family = gemma3 layers = 34 hidden = 2560 heads = 8 kv_heads = 4 head_dim = 256 ffn = 10240 vocab = 262208 tied = true",
	"gemma3-12b":   "family = gemma3 layers = 48 hidden = 3840 heads = 16 kv_heads = 8 head_dim = 256 ffn = 15360 vocab = 262208 tied = true",
	"mistral-7b":   "family = mistral layers = 32 hidden = 4096 heads = 32 kv_heads = 8 ffn = 14336 vocab = 32768",
	"nemo-12b":     "family = mistral layers = 40 hidden = 5120 heads = 32 kv_heads = 8 head_dim = 128 ffn = 14336 vocab = 131072",
	"gpt-1.3b":     "family = gpt layers = 24 hidden = 2048 heads = 16 vocab = 50304",
	"gpt-7b":       "family = gpt layers = 32 hidden = 4096 heads = 32 vocab = 50304",
	"gpt-13b":      "family = gpt layers = 40 hidden = 5120 heads = 40 vocab = 50304",
}

// fleetJobs lists jobs, each with its model, cluster, nodes, GPUs per node, sequence and further settings. The jobs
// that `make test` runs come first.
var fleetJobs = []string{
	"llama-8b h100 1 8 1M",
	"qwen2.5-7b h100 1 8 512K",
	"llama-3.2-1b h200 1 1 128K",
	"llama-8b h100 1 1 128K",
	"gpt-7b a100-80g 4 8 512K schedule.pp=4 schedule.sp=8",
	"mistral-7b a100-80g 1 8 256K schedule.sp=4",
	// The last stage has fewer layers because it also has the head, and ranks pass messages around the ring.
	"llama-405b h200 4 8 128K model.layers=31 schedule.pp=4 schedule.sp=8 schedule.virtual_stages=4 schedule.subsequences=32 schedule.strategy=terapipe schedule.recompute=none schedule.offload=none",

	"llama-3.2-1b h100 1 1 32K",
	"llama-3.2-1b h100 1 1 512K",
	"llama-3.2-1b h100 1 8 4M",
	"llama-3.2-1b b200 1 8 16M",
	"llama-3.2-1b a100-80g 2 8 2M schedule.order=layer",
	"llama-3.2-3b h200 1 1 64K",
	"llama-3.2-3b h100 1 8 1M schedule.pp=2",
	"llama-3.2-3b a100-80g 1 8 2M",
	"llama-8b h100 1 8 32K",
	"llama-8b h100 1 8 512K schedule.sp=4",
	"llama-8b h100 1 8 1M schedule.pp=8",
	"llama-8b h100 1 8 1M schedule.sp=4",
	"llama-8b h100 1 8 1M schedule.partition=auto",
	"llama-8b h100 1 8 1M schedule.keep=auto schedule.order=auto schedule.partition=auto",
	"llama-8b h100 1 8 2M",
	"llama-8b h100 1 8 4M",
	"llama-8b h100 2 8 4M",
	"llama-8b h100 1 8 16M",
	"llama-8b h100 4 8 4M",
	"llama-8b h100 8 8 16M",
	"llama-8b h100 8 8 16M schedule.order=sequence",
	"llama-8b h100 16 8 16M",
	"llama-8b h200 1 1 32K",
	"llama-8b h200 1 8 1M train.batch=2",
	"llama-8b h200 1 8 2M",
	"llama-8b b200 1 8 2M",
	"llama-8b b200 2 8 4M",
	"llama-8b a100-80g 1 8 512K",
	"llama-8b a100-80g 4 8 2M schedule.mux=on",
	"llama-70b h200 4 8 1M",
	"llama-70b h100 4 8 512K",
	"llama-70b h100 16 8 1M",
	"llama-70b b200 4 8 2M",
	"llama-70b h100 1 8 128K",
	"llama-70b a100-80g 16 8 512K schedule.pp=16",
	"llama-405b h200 16 8 128K",
	"llama-405b b200 16 8 256K",
	"llama-405b h100 4 8 128K",
	"qwen2.5-7b h100 1 8 2M",
	"qwen2.5-7b h200 1 8 1M schedule.recompute=full",
	"qwen2.5-7b h200 2 8 4M",
	"qwen2.5-14b h100 1 8 512K",
	"qwen2.5-14b h100 2 8 2M",
	"qwen2.5-32b h200 2 8 512K",
	"qwen2.5-32b a100-80g 1 8 128K",
	"qwen2.5-72b h200 4 8 512K",
	"qwen3-4b h100 1 8 1M",
	"qwen3-4b a100-80g 1 8 256K schedule.offload=full",
	"qwen3-14b h200 1 8 512K",
	"qwen3-14b h100 4 8 1M schedule.strategy=sppo",
	"mistral-7b h100 1 8 1M schedule.zero=3",
	"mistral-7b b200 1 8 4M",
	"mistral-7b h200 1 1 512K",
	"nemo-12b h100 1 8 512K",
	"nemo-12b h100 2 8 1M schedule.subsequences=64",
	"gpt-1.3b a100-80g 1 8 512K",
	"gpt-1.3b h100 1 1 64K",
	"gpt-7b a100-80g 4 8 1M schedule.offload=adaptive",
	"gpt-7b a100-80g 1 8 4M",
	"gpt-13b a100-80g 8 8 1M",
	"gpt-13b h100 1 8 256K",
	"llama-70b h100 1 1 32K",
	"llama-405b h100 1 8 32K",
	"llama-405b a100-80g 1 8 64K",
	"qwen2.5-72b h100 1 1 64K",
	"qwen2.5-32b a100-80g 1 1 64K",
	"llama-8b a100-80g 1 1 4M",
	"llama-70b a100-80g 1 1 64K",
	"llama-405b h100 1 8 64K",

	// Sizes that are not powers of two, and pins that leave little choice.
	"llama-8b a100-80g 1 1 1500K",
	"qwen2.5-14b h200 5 6 777216",
	"qwen3-4b a100-80g 3 8 1000000 train.batch=3",
	"mistral-7b b200 6 8 1M schedule.sp=2",

	// Llama 3.1 405B was trained with these stages: the first has only the embedding, and the last only the head.
	"llama-405b h100 16 8 8K train.batch=16 schedule.pp=16 schedule.sp=8 schedule.dp=1 schedule.virtual_stages=8 schedule.strategy=interleaved-1f1b",

	"llama-405b h100 16 8 128K train.batch=16 schedule.pp=16 schedule.sp=8 schedule.dp=1 schedule.virtual_stages=8 schedule.strategy=interleaved-1f1b",

	// The vocabulary is not divided, so the loss head's chunks matter most.
	"gemma3-4b h100 1 1 64K",
	"qwen3-8b h100 1 3 32K train.batch=64",
	"gemma3-12b h100 1 4 512K train.batch=3 schedule.pp=4",
	"qwen3-4b h200 1 1 32K",
	"llama-3.2-3b h100 1 2 64K train.batch=4",
	"qwen2.5-7b b200 1 3 128K train.batch=6",
}

const (
	shortFleet   = 7
	timeAccuracy = 0.02 // largest relative error of estimated times, compared with simulated ones
)

func TestFleet(t *testing.T) {
	jobs := fleetJobs
	if os.Getenv("SPPO_LONG") == "" {
		jobs = jobs[:shortFleet]
	}
	fly(t, jobs, func(t *testing.T, name string) string {
		text, set := fleetJob(strings.Fields(name))
		return flight(t, text, set)
	})
}

// fleetJob returns the spec and the overrides of a fleet job.
func fleetJob(f []string) (text string, set []string) {
	text = fmt.Sprintf("import \"clusters/%s.sppo\"\nmodel m { %s dtype = bf16 }\ncluster c = %s(nodes = %s, gpus_per_node = %s)\ntrain { data = random() }\n",
		f[1], fleetModels[f[0]], f[1], f[2], f[3])
	return text, append([]string{"train.sequence=" + f[4]}, f[5:]...)
}

// fleetFile writes the spec of a fleet job to a file. It also returns the overrides.
func fleetFile(t *testing.T, f []string) (file string, set []string) {
	t.Helper()
	text, set := fleetJob(f)
	file = filepath.Join(t.TempDir(), "job.sppo")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file, set
}

// fleetQuestions lists jobs for which to find the longest sequence or the fewest GPUs. `make test` runs the
// first; TestPages asks the second, which leaves all to the search, of an example.
var fleetQuestions = []string{
	"--max-sequence qwen2.5-7b h100 1 8 512K schedule.order=sequence",
	"--max-sequence llama-8b h100 1 8 1M",
	"--max-sequence llama-3.2-1b h200 1 1 128K",
	"--max-sequence llama-8b h100 4 8 1M",
	"--max-sequence llama-70b h200 4 8 512K schedule.pp=4",
	"--max-sequence gpt-7b a100-80g 4 8 512K schedule.sp=8",
	"--min-gpus llama-8b h100 1 8 1M",
	"--min-gpus llama-8b h100 1 8 2M",
	"--min-gpus llama-8b h200 1 8 128K schedule.optimizer_offload=none",
	"--min-gpus llama-70b h100 4 8 256K",
	"--min-gpus gpt-13b a100-80g 2 8 512K schedule.sp=8",
}

const answerLimit = 60 * time.Second // limit on the processor time of an answer

// TestFleetQuestions checks that the jobs that --max-sequence and --min-gpus find can be built and fit.
func TestFleetQuestions(t *testing.T) {
	questions := fleetQuestions
	if os.Getenv("SPPO_LONG") == "" {
		questions = questions[:1]
	}
	fly(t, questions, func(t *testing.T, name string) string {
		f := strings.Fields(name)
		text, _ := fleetJob(f[1:])
		file, set := fleetFile(t, f[1:])
		ask, changes := longestSequence, longestIn
		if f[0] == "--min-gpus" {
			ask, changes = fewestGPUs, fewestIn
		}
		before := processorTime()
		answer, _, err := ask(nil, file, set)
		if err != nil {
			t.Fatal(err)
		}
		if spent := processorTime() - before; spent > answerLimit {
			t.Errorf("the answer took %s of processor time, over %s", spent, answerLimit)
		} else {
			t.Logf("%s of processor time: %s", spent, answer)
		}
		found := changes(answer)
		if found == nil {
			t.Fatalf("no answer in %q", answer)
		}
		row := flight(t, text, append(set, found...))
		if !strings.HasPrefix(row, "fits") {
			t.Errorf("with %v: %s", found, row)
		}
		return row
	})
}

// longestIn returns the overrides that turn a job into the one that --max-sequence found, or nil if it found none.
func longestIn(answer string) (set []string) {
	var tokens int64
	_, count, _ := strings.Cut(answer, "(")
	lines := strings.Split(answer, "\n")
	if _, err := fmt.Sscanf(count, "%d", &tokens); err != nil || len(lines) < 2 {
		return nil
	}
	set = append(set, fmt.Sprintf("train.sequence=%d", tokens))
	for _, change := range strings.Split(strings.TrimSpace(lines[1]), "--set ")[1:] {
		set = append(set, strings.Trim(strings.TrimSpace(change), "'"))
	}
	return set
}

// fewestIn returns the overrides that turn a job into the one that --min-gpus found, or nil if it found none.
func fewestIn(answer string) []string {
	var gpus, nodes, each int
	if n, _ := fmt.Sscanf(answer, "%d GPUs (%d nodes of %d)", &gpus, &nodes, &each); n == 3 {
		return []string{fmt.Sprintf("cluster.nodes=%d", nodes), fmt.Sprintf("cluster.gpus_per_node=%d", each)}
	}
	if n, _ := fmt.Sscanf(answer, "%d of the GPUs of a node are enough", &gpus); n == 1 {
		return []string{"cluster.nodes=1", fmt.Sprintf("cluster.gpus_per_node=%d", gpus)}
	}
	return nil
}

// publishedJobs lists models from the hub, described by their config.json, with sequence lengths for one node
// of H200s. `make test` runs the first.
var publishedJobs = []string{
	"Gemma-3-27B 256K", "Gemma-3-27B 1M", "Llama-3.1-8B 256K", "Llama-3.1-8B 1M", "Llama-3.1-70B 256K", "Llama-3.1-70B 1M",
	"Llama-3.1-405B 256K", "Llama-3.1-405B 1M", "Qwen2.5-7B 256K", "Qwen2.5-7B 1M", "Qwen2.5-32B 256K", "Qwen2.5-32B 1M",
	"Qwen3-4B 256K", "Qwen3-4B 1M", "Qwen3-14B 256K", "Qwen3-14B 1M", "Mistral-7B-v0.3 256K", "Mistral-7B-v0.3 1M",
}

// TestPublishedJobs plans the models described by config files, as `sppoc plan FOLDER --cluster h200` does.
func TestPublishedJobs(t *testing.T) {
	jobs := publishedJobs
	if os.Getenv("SPPO_LONG") == "" {
		jobs = jobs[:1]
	}
	fly(t, jobs, func(t *testing.T, name string) string {
		published, sequence, _ := strings.Cut(name, " ")
		config, err := os.ReadFile(filepath.Join("..", "..", "internal", "hf", "testdata", "configs", published+".json"))
		if err != nil {
			t.Fatal(err)
		}
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, hf.ConfigFile), config, 0o644); err != nil {
			t.Fatal(err)
		}
		model, err := hf.ReadModel(dir)
		if err != nil {
			t.Fatal(err)
		}
		return flight(t, model.Spec("h200", "nodes = 1", sequence), nil)
	})
}

// fly calls check for each job and logs the returned rows as a table.
func fly(t *testing.T, jobs []string, check func(t *testing.T, name string) string) {
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "job\tverdict\tsearch\tplacing\testimate\tstep\tdevice peak\thost peak\tbuilt and simulated")
	for _, name := range jobs {
		t.Run(name, func(t *testing.T) {
			row := check(t, name)
			t.Log(row) // in case a later job does not end
			fmt.Fprintln(w, name+"\t"+row)
		})
	}
	w.Flush()
	t.Log("CPU seconds; placing is what the search has placed; a step is simulated, the estimate is the search's\n" + table.String())
}

// flight plans one job, checks that the plan is true, and returns its row.
func flight(t *testing.T, text string, set []string) string {
	file := filepath.Join(t.TempDir(), "job.sppo")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	job, searching, placing, err := weighed(file, set)
	if err != nil {
		t.Fatal(err)
	}
	if limit := searchLimit(job.Plan.Cluster.GPUs()); searching > limit {
		t.Errorf("the search took %s of processor time, over %s", searching, limit)
	}
	spent := fmt.Sprintf("%.1f s\t%.1f s", searching.Seconds(), placing.Seconds())
	m := job.Plan.Memory
	device, host := cli.Peaks(&m)
	if !m.Fits {
		return fmt.Sprintf("does not fit\t%s\t\t\t%s\t%s\t%s", spent, device, host, fmt.Sprintf("%d hints followed", followed(t, job, set)))
	}
	estimate := job.Plan.Time.StepS
	before := processorTime()
	if err := job.Compile(); err != nil { // also verifies the program
		t.Fatal(err)
	}
	timeline, err := sim.Run(job.Program, ir.SectionStep, sim.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for s, code := range job.Program.Codes {
		if code.Arenas[ir.Device] != m.DevicePeakBytes[s] || code.Arenas[ir.Host] != m.HostPeakBytes[s] {
			t.Errorf("stage %d of the program takes %v, and the plan says %s and %s", s, code.Arenas, m.DevicePeakBytes[s], m.HostPeakBytes[s])
		}
	}
	if off := float64(estimate/timeline.Makespan) - 1; math.Abs(off) > timeAccuracy {
		t.Errorf("the search estimated %s, %.1f%% off the simulated %s", estimate, 100*off, timeline.Makespan)
	}
	return fmt.Sprintf("fits\t%s\t%s\t%s\t%s\t%s\t%.1f s", spent, estimate, timeline.Makespan, device, host, (processorTime() - before).Seconds())
}

// weighed plans and places a job. It returns the processor time of the search, excluding the time for placing, and
// the total processor time for placing.
func weighed(file string, set []string) (job *cli.Job, searching, placing time.Duration, err error) {
	place := func(p *plan.Plan) (*plan.Shortfall, error) {
		before := processorTime()
		defer func() { placing += processorTime() - before }()
		return codegen.MeasureFit(p)
	}
	debug.FreeOSMemory() // releases the memory of earlier jobs
	before := processorTime()
	if job, err = cli.OpenPlan(file, set, passes.Options{Measure: place}); err != nil {
		return nil, 0, 0, err
	}
	searching = processorTime() - before - placing
	before = processorTime()
	err = job.Measure()
	return job, searching, placing + processorTime() - before, err
}

// searchLimit is the maximum processor time of a search, which depends on the number of GPUs. On a busy machine
// the same search uses more processor time, so only the long tests apply the limit strictly.
func searchLimit(gpus int) time.Duration {
	limit := 7 * time.Second
	if gpus > 128 {
		limit = 20 * time.Second
	}
	if os.Getenv("SPPO_LONG") == "" {
		limit *= 4
	}
	return limit
}

// followed checks that every hint makes the job fit, and returns the number of hints.
func followed(t *testing.T, job *cli.Job, set []string) (hints int) {
	t.Helper()
	for _, line := range strings.Split(adviseFit(nil, job, set).Error(), "\n") {
		changes, ok := strings.CutPrefix(line, "  --set ")
		if !ok {
			continue
		}
		changes = changes[:strings.LastIndex(changes, ": ")]
		hints++
		with := set[:len(set):len(set)]
		for _, change := range strings.Split(changes, " --set ") {
			with = append(with, strings.Trim(change, "'"))
		}
		hinted, err := cli.OpenPlan(job.Spec.File, with, passes.Options{})
		if err == nil {
			err = hinted.Measure()
		}
		if err != nil || !hinted.Plan.Memory.Fits {
			t.Errorf("the hint %q does not fit: %v", changes, err)
		}
	}
	return hints
}

// processorTime returns the CPU time used by this process.
func processorTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
