package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"

	"sppo.dev/internal/cuda"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
)

// stage is a part of the check that can be requested by name.
type stage struct {
	name, about string
	names       []string // possible arguments, one of which must follow the name
	tasks       func(name string) []task
}

// stages is the table of stages. The limit of a stage is the sum of its tasks' limits: at most mostStage, or
// mostFirst for the stage "first".
var stages = []stage{
	{"first", "libraries, correct attention, three measurements of attention speed, five opcodes", nil, firstTasks},
	{"devices", "driver, GPUs and libraries found", nil, deviceTasks},
	{"trial", "each attention kernel against the CPU and the portable ones, with bounded waits", nil, trialTasks},
	{"primitives", "each building block of the attention kernels against exact results", nil, primitiveTasks},
	{"bits", "each attention kernel for the card 200 times: equal bits", nil, bitsTasks},
	{"grow", "touches host memory, which some virtual machines only then get", nil, growTasks},
	{"attention", "attention, forward and backward, with each kind of kernel", nil, attentionTasks},
	{"conformance", "every opcode against naive formulas", nil, conformanceTasks},
	{"products", "products of layers, by cuBLASLt and by our own kernels", nil, figureTasks("products", 280*time.Second)},
	{"memory", "memory-bound kernels, copies, and the time to issue instructions", nil, memoryTasks},
	{"training", "a hundred steps against the CPU, several ranks on one GPU, graphs", nil, trainingTasks},
	{"schedules", "schedules against each other, and continuing from a checkpoint", nil, scheduleTasks},
	{"probe", "a cluster file for the machine, which layers uses", nil, probeTasks},
	{"torch", "the jobs of training and layers on PyTorch, by interop/torch", append([]string{"training"}, layerNames()...), torchTasks},
	{"layers", "layers of a model, measured and simulated", layerNames(), layerTasks},
	{"peers", "the same layers in PyTorch", peerNames(), peerTasks},
	{"nccl", "NCCL with one rank", nil, ncclTasks},
	{"tools", "compute-sanitizer on small attention, ncu on the attention kernels for the card", nil, toolTasks},
	{"report", "all results of the folder in one file; written after every stage", nil, nil},
}

// usual lists the stages that run if the command line names none. The most important come first, in case time
// runs out.
const usual = "grow first primitives bits conformance training attention products memory nccl probe torch training torch 7b-128k torch 8b-128k layers 7b-128k layers 8b-128k peers 7b-128k peers 8b-128k " +
	"tools layers 8b-128k-none layers 8b-128k-full layers 8b-128k-streamed schedules layers 7b-32k-none layers 7b-32k-full layers 7b-512k"

// testsKernels are the stages that test or time the kernels for the card. Once a test of those kernels has
// failed, the other stages use portable kernels, because otherwise they could not run attention.
var testsKernels = []string{"first", "trial", "primitives", "bits", "attention", "tools"}

const (
	mostStage = 5 * time.Minute
	mostFirst = 4 * time.Minute
)

// quietTest is how long a test may write nothing before it counts as hanging.
const quietTest = 70 * time.Second

func testTask(name, binary, pattern string, limit time.Duration, env ...string) task {
	return task{name: name, limit: limit, quiet: quietTest, argv: []string{binary}, tests: pattern, env: env}
}

func deviceTasks(string) []task {
	return []task{{name: "devices", limit: 60 * time.Second, argv: []string{"sppovm", "devices"}, must: "GPU 0: ", cause: "cuda ",
		found: func(_ *check, line string) (string, any) { return kindDevice, line }}}
}

// Settings of programs: checked limits how long kernels wait, and portable, with the head dimensions after it, disables
// kernels written for one architecture.
const (
	checked  = cuda.CheckVariable + "=1"
	portable = cuda.PortableVariable + "="
)

func trialTasks(string) []task {
	return []task{
		testTask("attention against the CPU", "cuda.test", "^TestGPUAttention$", 50*time.Second, checked),
		testTask("attention over many tokens", "cuda.test", "^TestGPUAttentionOfManyTokens$", 30*time.Second, checked),
	}
}

func primitiveTasks(string) []task {
	return []task{testTask("building blocks", "cuda.test", "^TestGPUPrimitives$", 60*time.Second, checked)}
}

func bitsTasks(string) []task {
	return []task{testTask("200 launches", "cuda.test", "^TestGPUBits$", 90*time.Second, checked)}
}

// growTasks touches as much host memory as layers may use.
func growTasks(string) []task {
	size := os.Getenv(memoryVariable)
	if size == "" {
		size = "0GiB"
	}
	return []task{{name: "host memory", limit: 120 * time.Second, argv: []string{"gpu", "touch", size},
		found: func(_ *check, line string) (string, any) { return kindHost, line }}}
}

// figures returns a task that runs the subtests of TestGPUFigures that match a pattern.
func figures(name, pattern string, limit time.Duration) task {
	t := testTask(name, "cuda.test", "^TestGPUFigures$/"+pattern, limit, figuresVariable+"="+figureSize())
	t.kind = kindFigure
	return t
}

// figuresVariable is the size of what cuda.test measures.
const figuresVariable = "SPPO_GPU_FIGURES"

// figureSize returns "gpu", or the size for a rehearsal without a GPU.
func figureSize() string {
	if size := os.Getenv(figuresVariable); size != "" {
		return size
	}
	return "gpu"
}

func figureTasks(kind string, limit time.Duration) func(string) []task {
	return func(string) []task { return []task{figures(kind, "^"+kind+"$", limit)} }
}

func attentionTasks(string) []task {
	return []task{
		figures("for the card", "^attention$/^for_the_card$", 80*time.Second),
		figures("for the card, copied by threads", "^attention$/^for_the_card,_copied", 80*time.Second),
		figures("portable", "^attention$/^portable$", 60*time.Second),
	}
}

func memoryTasks(string) []task {
	return []task{figures("memory", "^memory$", 200*time.Second), figures("issue", "^issue$", 80*time.Second)}
}

// someOpcodes matches the opcodes that reveal most errors: they use tensor cores, sums over rows, exponentials,
// and state in f32.
const someOpcodes = "^(matmul|attention|attention_grad|rmsnorm_grad|adamw)$"

func conformanceTasks(string) []task {
	return []task{
		testTask("by cuBLASLt", "cuda.test", "^TestGPUConformance$/^cuBLASLt$", 150*time.Second),
		testTask("by our own products", "cuda.test", "^TestGPUConformance$/^own_products$/^(matmul|bias_grad)$", 60*time.Second),
	}
}

func firstTasks(string) []task {
	tasks := append(deviceTasks(""), trialTasks("")...)
	card := figures("three figures", "^attention$/^for_the_card$/(^attention_bf16|^attention_grad_bf16,_32768)", 50*time.Second)
	return append(tasks, card, testTask("five opcodes", "cuda.test", "^TestGPUConformance$/^own_products$/"+someOpcodes, 50*time.Second, checked))
}

func trainingTasks(string) []task {
	tasks := []task{
		testTask("ranks on one GPU", "cuda.test", "^TestGPUTrainingIsThatOfTheCPU$", 130*time.Second),
		testTask("graphs and peaks", "cuda.test", "^TestGPU(Graphs|Peaks|sOfSeveralProcesses)$", 60*time.Second),
	}
	for _, r := range references {
		tasks = append(tasks, task{name: r.name, limit: 50 * time.Second, kind: kindRun, first: r.onCPU, last: r.judge,
			argv: []string{"sppovm", "run", "{files}/" + r.name + ".sppb", "--dir", "{files}", "--device", "cuda", "--json", "-q"}})
	}
	return tasks
}

// onCPU returns the steps of a reference on the CPU, computed by make gpu-bundle.
func (r reference) onCPU(c *check) (map[string][]any, error) {
	text, err := os.ReadFile(filepath.Join(c.files, r.name+".cpu.jsonl"))
	var all []any
	for line := range bytes.Lines(text) {
		all = append(all, json.RawMessage(bytes.TrimSpace(line)))
	}
	return map[string][]any{kindCPU: all}, err
}

// judge compares the steps on the GPU with those on the CPU.
func (r reference) judge(results *part) error {
	x := &reader{of: []*part{results}}
	_, err := r.same(objectsOf[stepLine](x, results, kindRun), objectsOf[stepLine](x, results, kindCPU))
	return errors.Join(x.err, err)
}

func scheduleTasks(string) []task {
	return []task{
		testTask("schedules", "e2e.test", "^TestGPUSchedulesAreEqual$", 220*time.Second),
		testTask("resume", "e2e.test", "^TestGPUResume$", 80*time.Second),
	}
}

func probeTasks(string) []task {
	return []task{{name: "probe", limit: 240 * time.Second, kind: kindProbe, last: judgeProbe,
		argv: []string{"sppovm", "probe", "--device", "cuda", "--json", "-q", "-o", "{out}/" + clusterFile, "--name", "measured"}}}
}

// judgeProbe requires rates that a machine can have: if measured times are too short, as when a clock does not wait for the
// work, they exceed the peak.
func judgeProbe(results *part) error {
	x := &reader{of: []*part{results}}
	for _, done := range objectsOf[struct{ Machine *ir.Machine }](x, results, kindProbe) {
		m := done.Machine
		if m == nil {
			continue
		}
		for _, curve := range []struct {
			name   string
			points []ir.CurvePoint
		}{{"matmul", m.MatmulEfficiency}, {"attention", m.AttentionEfficiency}, {"attention_grad", m.AttentionGradEff}} {
			for _, p := range curve.points {
				if !(p[1] > 0 && p[1] <= 1) {
					return fmt.Errorf("%s of %g rows reaches %.2f of the card's peak, which is impossible: its time was not measured correctly", curve.name, p[0], p[1])
				}
			}
		}
	}
	return x.err
}

func ncclTasks(string) []task {
	return []task{testTask("one rank", "cuda.test", "^TestGPUNCCL$", 80*time.Second)}
}

// layers lists the models whose layers are timed, both here and by peers/torch_layers.py.
var layers = []struct {
	name, spec string
	peer       bool
	set        []string
}{
	{"7b-32k-none", "7b.sppo", true, []string{"train.sequence=32K", "schedule.offload=none"}},
	{"7b-32k-full", "7b.sppo", true, []string{"train.sequence=32K", "schedule.offload=full"}},
	{"7b-128k", "7b.sppo", true, nil},
	{"7b-512k", "7b.sppo", true, []string{"train.sequence=512K", "model.layers=1", "train.steps=3"}},
	{"8b-128k", "8b.sppo", true, nil},
	{"8b-128k-none", "8b.sppo", false, []string{"model.layers=2", "train.steps=4", "schedule.offload=none"}},
	{"8b-128k-full", "8b.sppo", false, []string{"model.layers=2", "train.steps=4", "schedule.offload=full", "schedule.subsequences=8"}},
	{"8b-128k-streamed", "8b.sppo", false, []string{"model.layers=2", "train.steps=4", "schedule.offload=full", "schedule.subsequences=8", "schedule.keep=[]"}},
}

// peerNames returns the layers that peers/torch_layers.py knows.
func peerNames() (names []string) {
	for _, l := range layers {
		if l.peer {
			names = append(names, l.name)
		}
	}
	return names
}

func layerNames() (names []string) {
	for _, l := range layers {
		names = append(names, l.name)
	}
	return names
}

// layersProgram returns the path of the program of layers, and a task that compiles it.
func layersProgram(name string) (program string, build []task) {
	program = "{work}/" + name + ".sppb"
	for _, l := range layers {
		if l.name != name {
			continue
		}
		t := task{name: name + ", compiled", limit: 40 * time.Second, argv: []string{"gpu", "compile", "{work}/" + l.spec, program}, first: specs}
		t.argv = append(t.argv, l.set...)
		if size := os.Getenv(memoryVariable); size != "" {
			t.argv = append(t.argv, "cluster.host_memory="+size)
		}
		build = append(build, t)
	}
	return program, build
}

func layerTasks(name string) []task {
	program, tasks := layersProgram(name)
	return append(tasks,
		task{name: name, limit: 200 * time.Second, kind: kindRun, first: factsOf(name), last: judgeLayers, argv: []string{"sppovm", "run", program, "--device", "cuda", "--json", "-q"}},
		task{name: name + ", simulated", limit: 40 * time.Second, kind: kindSim, argv: []string{"sppovm", "run", program, "--device", "sim", "--json", "-q"}})
}

// noTorch matches what Python says without PyTorch.
var noTorch = regexp.MustCompile(`No module named '(torch|numpy)'`)

// torchTasks returns the tasks of the machine in interop/torch. In a rehearsal without a GPU, it computes on the CPU.
func torchTasks(name string) (tasks []task) {
	device := "cuda"
	if figureSize() != "gpu" {
		device = "cpu"
	}
	run := func(name, program string, limit time.Duration) task {
		return task{name: name, limit: limit, kind: kindRun, refused: noTorch, optional: true, env: []string{"PYTHONPATH={files}", "PYTHONDONTWRITEBYTECODE=1"},
			argv: []string{python(), "-m", "sppo_torch", "run", program, "--dir", "{files}", "--device", device, "--json", "-q"}}
	}
	if name == "training" {
		for _, r := range references {
			t := run(r.name, "{files}/"+r.name+".sppb", 140*time.Second)
			t.first, t.last = r.onCPU, r.judge
			tasks = append(tasks, t)
		}
		return tasks
	}
	program, tasks := layersProgram(name)
	t := run(name, program, 240*time.Second)
	t.first, t.last = factsOf(name), judgeLayers
	return append(tasks, t)
}

// factsOf reads the facts about the program of layers.
func factsOf(name string) func(c *check) (map[string][]any, error) {
	return func(c *check) (map[string][]any, error) { return programFacts(filepath.Join(c.work, name+".sppb")) }
}

// judgeLayers requires the loss of layers that have learned nothing.
func judgeLayers(results *part) error {
	x := &reader{of: []*part{results}}
	l := x.layers(results)
	if x.err == nil && !(l.apart() <= mostApart) {
		return fmt.Errorf("the first loss is %g, not about the logarithm of the vocabulary, %g", l.Loss, l.Uniform)
	}
	return x.err
}

// Facts are what the report needs to know about a program.
type Facts struct {
	Tokens int64   `json:"tokens"` // per step
	Flops  float64 `json:"flops"`  // model FLOPs per step
	Vocab  int     `json:"vocab"`
	Peak   float64 `json:"peak"` // bf16 FLOPs per second of all ranks' GPUs together
}

func programFacts(path string) (map[string][]any, error) {
	p, err := ir.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return map[string][]any{kindProgram: {Facts{
		Tokens: p.Run.Sequence * int64(p.Run.Batch), Flops: p.FlopsModel, Vocab: p.Run.Vocab, Peak: p.Machine.PeakBF16 * float64(len(p.Ranks)),
	}}}, nil
}

var clusterName = regexp.MustCompile(`(?m)^cluster (\w+)`)

// specs writes the models and their cluster to the folder for temporary files. The cluster is the probed
// machine or, without a probe, the shipped cluster of the card.
func specs(c *check) (map[string][]any, error) {
	cluster, err := os.ReadFile(filepath.Join(c.folder, clusterFile))
	if err != nil {
		name := c.shippedCluster()
		if cluster, err = shipped.Files.ReadFile("clusters/" + name + ".sppo"); err != nil {
			return nil, err
		}
		fmt.Fprintf(c.out, "there is no %s from a probe; using the shipped cluster %s\n", clusterFile, name)
		cluster = clusterName.ReplaceAll(cluster, []byte("cluster measured"))
	}
	errs := []error{os.WriteFile(filepath.Join(c.work, clusterFile), cluster, 0o644)}
	for _, name := range []string{"7b.sppo", "8b.sppo"} {
		text, err := os.ReadFile(filepath.Join(c.files, name))
		errs = append(errs, err, os.WriteFile(filepath.Join(c.work, name), text, 0o644))
	}
	return nil, errors.Join(errs...)
}

// shippedCluster returns the name of the shipped cluster for the card in the journal, or for an H200 if the
// card is unknown.
func (c *check) shippedCluster() string {
	results, _, _ := readJournal(c.folder) // without a journal, the card is unknown
	for _, r := range results {
		for kind, cluster := range map[string]string{"H100": "h100", "A100": "a100-80g", "B200": "b200"} {
			if r.Kind == kindDevice && bytes.Contains(r.Data, []byte("GPU 0: ")) && bytes.Contains(r.Data, []byte(kind)) {
				return cluster
			}
		}
	}
	return "h200"
}

// peerTasks returns one task for each configuration: each of two attention kernels in PyTorch, with and without
// recomputation.
func peerTasks(name string) (tasks []task) {
	interpreter := python()
	for _, kernel := range []string{"cudnn", "flash"} {
		for _, way := range []string{"plain", "checkpointing"} {
			tasks = append(tasks, task{name: fmt.Sprintf("%s %s, %s", name, way, kernel), limit: 70 * time.Second, kind: kindPeer, env: []string{"PYTHONUNBUFFERED=1"},
				argv: []string{interpreter, "{files}/torch_layers.py", "--only", name, "--way", way, "--attention", kernel, "--steps", "2"}})
		}
	}
	return tasks
}

// pythonVariable names the Python interpreter that has PyTorch; empty: it is searched.
const pythonVariable = "SPPO_GPU_PYTHON"

// python returns a Python interpreter that has PyTorch, or else python3.
func python() string {
	candidates := []string{"python3"}
	if name := os.Getenv(pythonVariable); name != "" {
		candidates = []string{name}
	}
	for _, pattern := range []string{"/opt/*/bin/python3", "/opt/*/.venv/bin/python3", "/opt/*/*/bin/python3"} {
		found, _ := filepath.Glob(pattern) // only a bad pattern is an error
		candidates = append(candidates, found...)
	}
	for _, path := range candidates {
		if exec.Command(path, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)").Run() == nil {
			return path
		}
	}
	return "python3"
}
