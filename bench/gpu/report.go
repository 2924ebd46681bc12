package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"sppo.dev/ir"
)

// Report is the output file.
type Report struct {
	Date     string            `json:"date"`
	Card     string            `json:"card"`
	Devices  []string          `json:"devices"`
	Tasks    []Task            `json:"tasks"`
	Broken   int               `json:"broken_lines,omitempty"` // number of incomplete lines in the journal
	Goals    []Goal            `json:"goals"`
	Tests    map[string]string `json:"tests"` // pass, skip, fail, crash or hang, by test/subtest/subtest
	Training []Training        `json:"training"`
	Figures  []Figure          `json:"figures"`
	Layers   []Layers          `json:"layers"`
	Torch    *Torch            `json:"torch,omitempty"`
	Machine  json.RawMessage   `json:"machine,omitempty"`
	Peers    []Peer            `json:"peers"`
	Tools    []Tool            `json:"tools,omitempty"`
}

// Torch is what the machine in interop/torch does with the same programs.
type Torch struct {
	Training []Training `json:"training"`
	Layers   []Layers   `json:"layers"`
}

// Tool holds the lines that sum up what one of NVIDIA's tools reports.
type Tool struct {
	Name  string   `json:"name"`
	Lines []string `json:"lines"`
}

// Task is the result of a part of a stage.
type Task struct {
	Stage  string  `json:"stage"`
	Name   string  `json:"name"`
	End            // if the check was killed during the task, the status is "cut off"
	Clocks *Clocks `json:"clocks,omitempty"`
}

// Training compares a run on the CPU with the same run on the GPU.
type Training struct {
	Job     string  `json:"job"`
	Steps   int     `json:"steps"`
	CPULoss float64 `json:"cpu_loss"` // loss of the last step
	GPULoss float64 `json:"gpu_loss"`
	Worst   float64 `json:"worst_of_tolerance"` // largest difference of a loss or gradient norm, divided by its tolerance
	Tokens  float64 `json:"gpu_tokens_per_s"`
	Error   string  `json:"error,omitempty"` // the first step that exceeds its tolerance, or that the loss did not fall
}

// Figure is a measurement in the format that cuda.test writes.
type Figure struct {
	Kind    string  `json:"kind"`
	Name    string  `json:"name"`
	By      string  `json:"by,omitempty"`
	Seconds float64 `json:"seconds"`
	Spread  float64 `json:"spread"`
	TFLOPS  float64 `json:"tflops,omitempty"`
	GBps    float64 `json:"gb_per_s,omitempty"`
	Share   float64 `json:"share,omitempty"`
}

// Layers is the result of a model with few layers on one GPU.
type Layers struct {
	Name      string   `json:"name"`
	Tokens    int64    `json:"tokens"`
	Step      float64  `json:"step_s"` // median of all steps after the first
	Simulated float64  `json:"simulated_step_s"`
	TGS       float64  `json:"tokens_per_s"`
	MFU       float64  `json:"mfu"`
	Loss      float64  `json:"first_loss"`
	Uniform   float64  `json:"log_vocabulary"` // the loss of a model that has learned nothing
	Device    ir.Bytes `json:"device_peak_bytes"`
	Host      ir.Bytes `json:"host_peak_bytes"`
	Beside    ir.Bytes `json:"beside_bytes,omitempty"` // what PyTorch allocates beside the arenas
}

// Peer is another program's result for the same layers.
type Peer struct {
	Name   string  `json:"name"` // of our layers
	By     string  `json:"by"`
	Way    string  `json:"way"`
	Kernel string  `json:"attention"` // flash or cudnn
	Step   float64 `json:"step_s,omitempty"`
	Error  string  `json:"error,omitempty"`
	Faster float64 `json:"ours_is_faster,omitempty"` // its step time divided by ours
}

// Clocks summarizes the samples of clock and power taken during a task.
type Clocks struct {
	Samples  int     `json:"samples"`
	MaxMHz   float64 `json:"max_sm_mhz"`
	MeanMHz  float64 `json:"mean_sm_mhz"`
	MaxWatt  float64 `json:"max_w"`
	MeanWatt float64 `json:"mean_w"`
}

// write reads the journal in a folder and writes the report, DATE-CARD.json, to the same folder.
func write(folder string, now time.Time) (string, error) {
	results, broken, err := readJournal(folder)
	if err != nil {
		return "", err
	}
	r := &reader{of: latest(results)}
	report := r.report()
	report.Date, report.Broken = now.Format(time.DateOnly), broken
	if r.err != nil {
		return "", r.err
	}
	report.Goals = goals(report)
	text, err := json.MarshalIndent(report, "", "  ")
	if err != nil {
		return "", err
	}
	card := strings.Trim(regexp.MustCompile(`[^a-z0-9]+`).ReplaceAllString(strings.ToLower(report.Card), "-"), "-")
	name := filepath.Join(folder, report.Date+"-"+card+".json")
	return name, os.WriteFile(name, append(text, '\n'), 0o644)
}

// about identifies a task.
type about struct{ stage, task string }

// part holds the results of the last run of a task.
type part struct {
	about
	results []Result
}

// latest keeps the results of each task's last run. Tasks are in the order of their first runs. A run that was
// cut off does not replace the earlier one; the results of both are kept.
func latest(results []Result) (parts []*part) {
	by, before := map[about]*part{}, map[about]int{} // before: number of results from runs that have ended
	for _, r := range results {
		key := about{r.Stage, r.Task}
		p := by[key]
		if p == nil {
			p = &part{about: key}
			by[key], parts = p, append(parts, p)
		}
		p.results = append(p.results, r)
		if r.Kind == kindEnd {
			p.results = p.results[before[key]:]
			before[key] = len(p.results)
		}
	}
	return parts
}

// reader reads parts. Unreadable data is an error.
type reader struct {
	of  []*part
	err error
}

// objects returns all results of the given kind.
func objects[T any](r *reader, kind string) (out []T) {
	for _, p := range r.of {
		out = append(out, objectsOf[T](r, p, kind)...)
	}
	return out
}

func objectsOf[T any](r *reader, p *part, kind string) (out []T) {
	for _, result := range p.results {
		if result.Kind != kind {
			continue
		}
		var x T
		if err := json.Unmarshal(result.Data, &x); err != nil {
			r.err = errors.Join(r.err, fmt.Errorf("%s, %s: %w: %s", p.stage, p.task, err, result.Data))
			continue
		}
		out = append(out, x)
	}
	return out
}

func (r *reader) report() *Report {
	x := &Report{Card: "unknown", Tests: map[string]string{}, Training: []Training{}, Layers: []Layers{}, Peers: []Peer{}}
	x.Devices = objects[string](r, kindDevice)
	for _, line := range x.Devices {
		if m := regexp.MustCompile(`GPU 0: ([^,]+),`).FindStringSubmatch(line); m != nil {
			x.Card = m[1]
		}
	}
	for _, p := range r.of {
		x.Tasks = append(x.Tasks, r.task(p))
		switch p.stage {
		case "training":
			if t := r.training(p); t.Steps > 0 {
				x.Training = append(x.Training, t)
			}
		case "tools":
			if lines := objectsOf[string](r, p, kindTool); len(lines) > 0 {
				x.Tools = append(x.Tools, Tool{p.task, lines})
			}
		case "torch":
			r.torch(x, p)
		case "layers":
			if slices.Contains(layerNames(), p.task) {
				x.Layers = append(x.Layers, r.layers(p))
			}
		}
	}
	for _, t := range objects[Test](r, kindTest) {
		worst(x.Tests, t)
	}
	x.Figures = distinct(objects[Figure](r, kindFigure))
	if probed := objects[struct{ Machine json.RawMessage }](r, kindProbe); len(probed) > 0 {
		x.Machine = probed[len(probed)-1].Machine
	}
	x.Peers = append(x.Peers, objects[Peer](r, kindPeer)...)
	for i := range x.Peers {
		for _, ours := range x.Layers {
			if p := &x.Peers[i]; p.Name == ours.Name && ours.Step > 0 {
				p.Faster = p.Step / ours.Step
			}
		}
	}
	return x
}

// torch adds what the machine in interop/torch has measured in a task.
func (r *reader) torch(x *Report, p *part) {
	if x.Torch == nil {
		x.Torch = &Torch{Training: []Training{}, Layers: []Layers{}}
	}
	if t := r.training(p); t.Steps > 0 {
		x.Torch.Training = append(x.Torch.Training, t)
	} else if slices.Contains(layerNames(), p.task) {
		x.Torch.Layers = append(x.Torch.Layers, r.layers(p))
	}
}

// distinct keeps the last of the figures that have the same kind, name and By.
func distinct(all []Figure) (out []Figure) {
	for i, f := range all {
		same := func(later Figure) bool { return later.Kind == f.Kind && later.Name == f.Name && later.By == f.By }
		if !slices.ContainsFunc(all[i+1:], same) {
			out = append(out, f)
		}
	}
	return out
}

func (r *reader) task(p *part) Task {
	t := Task{Stage: p.stage, Name: p.task, End: End{Status: "cut off"}}
	if p.results[len(p.results)-1].Kind == kindEnd {
		t.End = objectsOf[End](r, p, kindEnd)[0]
	}
	if clocks := objectsOf[Clocks](r, p, kindClocks); len(clocks) > 0 {
		t.Clocks = &clocks[0]
	}
	return t
}

// worst keeps the worst result for each test and subtest, down to two levels of subtests.
func worst(results map[string]string, t Test) {
	order := []string{"pass", "skip", "fail", "crash", "hang"}
	parts := strings.Split(t.Name, "/")
	name := strings.Join(parts[:min(len(parts), 3)], "/")
	if slices.Index(order, t.Result) > slices.Index(order, results[name]) {
		results[name] = t.Result
	}
}

// stepLine holds those fields of a line from sppovm run --json that the report needs.
type stepLine struct {
	Step    int      `json:"step"`
	Loss    *float64 `json:"loss"`
	Norm    float64  `json:"grad_norm"`
	Tokens  float64  `json:"tokens_per_s"`
	Seconds float64  `json:"step_s"`
	Median  float64  `json:"step_s_median"`
	Device  ir.Bytes `json:"device_peak_bytes"`
	Host    ir.Bytes `json:"host_peak_bytes"`
	Beside  ir.Bytes `json:"beside_bytes"`
	Done    bool     `json:"done"`
}

func steps(all []stepLine) []stepLine {
	return slices.DeleteFunc(slices.Clone(all), func(s stepLine) bool { return s.Done || s.Loss == nil || s.Step == 0 })
}

func (r *reader) training(p *part) Training {
	t := Training{Job: p.task}
	all, here := objectsOf[stepLine](r, p, kindCPU), objectsOf[stepLine](r, p, kindRun)
	cpu, gpu := steps(all), steps(here)
	if t.Steps = min(len(cpu), len(gpu)); t.Steps == 0 {
		return t
	}
	last := t.Steps - 1
	t.CPULoss, t.GPULoss, t.Tokens = *cpu[last].Loss, *gpu[last].Loss, gpu[last].Tokens
	of := referenceOf(p.task)
	var err error
	if t.Worst, err = of.same(here, all); err != nil {
		t.Error = err.Error()
	}
	return t
}

func (r *reader) layers(p *part) Layers {
	x := Layers{Name: p.task}
	run := objectsOf[stepLine](r, p, kindRun)
	seconds := []float64{}
	for _, s := range steps(run) {
		seconds = append(seconds, s.Seconds)
	}
	for _, s := range run {
		x.Device, x.Host, x.Beside = max(x.Device, s.Device), max(x.Host, s.Host), max(x.Beside, s.Beside)
	}
	for _, other := range r.of {
		if other.about == (about{p.stage, p.task + ", simulated"}) {
			for _, s := range objectsOf[stepLine](r, other, kindSim) {
				x.Simulated = max(x.Simulated, s.Median)
			}
		}
	}
	facts := objectsOf[Facts](r, p, kindProgram)
	if all := steps(run); len(facts) > 0 && len(all) > 0 {
		x.Loss, x.Uniform = *all[0].Loss, math.Log(float64(max(2, facts[0].Vocab)))
	}
	if len(facts) == 0 || len(seconds) < 2 {
		return x
	}
	seconds = seconds[1:]
	slices.Sort(seconds)
	x.Step = seconds[len(seconds)/2]
	x.Tokens = facts[0].Tokens
	x.TGS = float64(x.Tokens) / x.Step
	if facts[0].Peak > 0 {
		x.MFU = facts[0].Flops / (x.Step * facts[0].Peak)
	}
	return x
}

// mostApart is the largest relative difference of the first loss of layers from the logarithm of the vocabulary, and
// mostBetween that between the same layers with different ways to offload.
const mostApart, mostBetween = 2e-2, 1e-3

func (l *Layers) apart() float64 { return math.Abs(l.Loss/l.Uniform - 1) }

// lossDifferences returns the first losses' relative differences divided by what is allowed: from the logarithm of the
// vocabulary, and between layers whose names differ only after the last dash.
func lossDifferences(all []Layers) (out []float64) {
	group := func(l *Layers) string { return l.Name[:strings.LastIndex(l.Name, "-")] }
	for i := range all {
		if l := &all[i]; l.Loss > 0 {
			out = append(out, l.apart()/mostApart)
			for j := range all[:i] {
				if m := &all[j]; m.Loss > 0 && strings.Count(l.Name, "-") > 1 && group(l) == group(m) {
					out = append(out, math.Abs(l.Loss/m.Loss-1)/mostBetween)
				}
			}
		}
	}
	return out
}

// add adds a sample, a line of the form "MHz, W".
func (c *Clocks) add(line string) {
	var mhz, watt float64
	if n, _ := fmt.Sscanf(strings.ReplaceAll(line, ",", " "), "%f %f", &mhz, &watt); n != 2 {
		return
	}
	n := float64(c.Samples)
	c.Samples++
	c.MaxMHz, c.MaxWatt = max(c.MaxMHz, mhz), max(c.MaxWatt, watt)
	c.MeanMHz, c.MeanWatt = (c.MeanMHz*n+mhz)/(n+1), (c.MeanWatt*n+watt)/(n+1)
}
