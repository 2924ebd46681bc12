// Command gpu makes one JSON file of what check.sh left in a folder: what a GPU was shown to do, and which of the goals
// of this project it meets. It runs where there is no Go.
//
//	check.sh    what runs on a machine with a GPU, and the names of the files that it leaves
//	main.go     the files to one report
//	goals.go    what is wanted of a card, and what the report says of it
//	*.sppo      models whose layers are timed
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"sppo.dev/ir"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: gpu FOLDER")
		os.Exit(2)
	}
	name, err := write(os.Args[1], time.Now())
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpu:", err)
		os.Exit(1)
	}
	fmt.Println(name)
}

// Report is the file that is written.
type Report struct {
	Date     string            `json:"date"`
	Card     string            `json:"card"`
	Devices  []string          `json:"devices"`
	Missing  []string          `json:"missing"` // files that check.sh did not come to
	Goals    []Goal            `json:"goals"`
	Tests    map[string]string `json:"tests"` // pass, fail or skip, by test and first subtest
	Training []Training        `json:"training"`
	Figures  []Figure          `json:"figures"`
	Layers   []Layers          `json:"layers"`
	Longest  map[string]string `json:"longest"` // sequence that fits, by model
	Machine  json.RawMessage   `json:"machine,omitempty"`
	Clocks   *Clocks           `json:"clocks,omitempty"`
	Peers    []Peer            `json:"peers"`
}

// Training is a run on the cpu and the same on the GPU.
type Training struct {
	Job       string  `json:"job"`
	Steps     int     `json:"steps"`
	CPULoss   float64 `json:"cpu_loss"` // of the last step
	GPULoss   float64 `json:"gpu_loss"`
	Worst     float64 `json:"worst_relative_difference"` // of all steps
	Tokens    float64 `json:"gpu_tokens_per_s"`
	Tolerance float64 `json:"tolerance"`
}

// Figure is a line of cuda.test's figures, as it stands there.
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

// Layers is a model with few layers on one GPU.
type Layers struct {
	Name      string   `json:"name"`
	Tokens    int64    `json:"tokens"`
	Step      float64  `json:"step_s"` // the median behind the first
	Simulated float64  `json:"simulated_step_s"`
	TGS       float64  `json:"tokens_per_s"`
	MFU       float64  `json:"mfu"`
	Device    ir.Bytes `json:"device_peak_bytes"`
	Host      ir.Bytes `json:"host_peak_bytes"`
}

// Peer is what another program does with the same layers.
type Peer struct {
	Name   string  `json:"name"` // of our layers
	By     string  `json:"by"`
	Way    string  `json:"way"`
	Step   float64 `json:"step_s,omitempty"`
	Error  string  `json:"error,omitempty"`
	Faster float64 `json:"ours_is_faster,omitempty"` // its step over ours
}

// Clocks are samples of the whole run.
type Clocks struct {
	Samples  int     `json:"samples"`
	MaxMHz   float64 `json:"max_sm_mhz"`
	MeanMHz  float64 `json:"mean_sm_mhz"`
	MaxWatt  float64 `json:"max_w"`
	MeanWatt float64 `json:"mean_w"`
}

// write reads a folder and writes DATE-CARD.json into it.
func write(folder string, now time.Time) (string, error) {
	r := &reader{folder: folder}
	report := r.report()
	report.Date = now.Format(time.DateOnly)
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

// reader reads what is in the folder. What is not there is noted; what makes no sense is an error.
type reader struct {
	folder  string
	missing []string
	err     error
}

func (r *reader) report() *Report {
	x := &Report{Card: "unknown", Tests: map[string]string{}, Longest: map[string]string{}, Training: []Training{}, Layers: []Layers{}, Peers: []Peer{}}
	x.Devices = r.lines("devices.txt")
	for _, line := range x.Devices {
		if m := regexp.MustCompile(`GPU 0: ([^,]+),`).FindStringSubmatch(line); m != nil {
			x.Card = m[1]
		}
	}
	for _, log := range []string{"cuda.log", "e2e.log"} {
		r.tests(x.Tests, log)
	}
	x.Figures = objects[Figure](r, "figures.jsonl")
	for _, cpu := range r.files("*.cpu.jsonl") {
		x.Training = append(x.Training, r.training(strings.TrimSuffix(cpu, ".cpu.jsonl")))
	}
	for _, run := range r.files("*.run.jsonl") {
		x.Layers = append(x.Layers, r.layers(strings.TrimSuffix(run, ".run.jsonl")))
	}
	for _, file := range r.files("*.longest.txt") {
		x.Longest[strings.TrimSuffix(file, ".longest.txt")] = strings.Join(r.lines(file), "; ")
	}
	if probed := objects[struct{ Machine json.RawMessage }](r, "probe.jsonl"); len(probed) > 0 {
		x.Machine = probed[len(probed)-1].Machine
	}
	x.Clocks = r.clocks("clocks.csv")
	x.Peers = append(x.Peers, objects[Peer](r, "peers.jsonl")...)
	for i := range x.Peers {
		for _, ours := range x.Layers {
			if p := &x.Peers[i]; p.Name == ours.Name && ours.Step > 0 {
				p.Faster = p.Step / ours.Step
			}
		}
	}
	x.Missing = append([]string{}, r.missing...)
	return x
}

func (r *reader) files(pattern string) (names []string) {
	paths, err := filepath.Glob(filepath.Join(r.folder, pattern))
	r.err = errors.Join(r.err, err)
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	return names
}

// lines are those of a file that are not empty.
func (r *reader) lines(name string) (lines []string) {
	f, err := os.Open(filepath.Join(r.folder, name))
	if errors.Is(err, fs.ErrNotExist) {
		r.missing = append(r.missing, name)
		return nil
	}
	if err != nil {
		r.err = errors.Join(r.err, err)
		return nil
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 1<<24)
	for scan.Scan() {
		if line := strings.TrimSpace(scan.Text()); line != "" {
			lines = append(lines, line)
		}
	}
	r.err = errors.Join(r.err, scan.Err())
	return lines
}

// objects are the lines of a file of JSON.
func objects[T any](r *reader, name string) (out []T) {
	for _, line := range r.lines(name) {
		var x T
		if err := json.Unmarshal([]byte(line), &x); err != nil {
			r.err = errors.Join(r.err, fmt.Errorf("%s: %w: %s", name, err, line))
			return nil
		}
		out = append(out, x)
	}
	return out
}

// tests takes results from a log of -test.v, for each opcode and schedule one: that of its worst subtest.
func (r *reader) tests(results map[string]string, log string) {
	worse := []string{"pass", "skip", "fail"}
	line := regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\S+)`)
	for _, text := range r.lines(log) {
		m := line.FindStringSubmatch(text)
		if m == nil {
			continue
		}
		parts := strings.Split(m[2], "/")
		name := strings.Join(parts[:min(len(parts), 3)], "/")
		result := strings.ToLower(m[1])
		if slices.Index(worse, result) > slices.Index(worse, results[name]) {
			results[name] = result
		}
	}
}

// stepLine is what sppovm run --json writes, as far as it matters here.
type stepLine struct {
	Step    int
	Loss    *float64
	Tokens  float64  `json:"tokens_per_s"`
	Seconds float64  `json:"step_s"`
	Median  float64  `json:"step_s_median"`
	Device  ir.Bytes `json:"device_peak_bytes"`
	Host    ir.Bytes `json:"host_peak_bytes"`
	Done    bool
}

func steps(all []stepLine) []stepLine {
	return slices.DeleteFunc(slices.Clone(all), func(s stepLine) bool { return s.Done || s.Loss == nil || s.Step == 0 })
}

// bf16Tolerance is how far a loss may be off, relatively, where both computers round to bf16.
const bf16Tolerance = 3e-2

func (r *reader) training(job string) Training {
	t := Training{Job: job, Tolerance: bf16Tolerance}
	cpu, gpu := steps(objects[stepLine](r, job+".cpu.jsonl")), steps(objects[stepLine](r, job+".cuda.jsonl"))
	t.Steps = min(len(cpu), len(gpu))
	for i := range t.Steps {
		c, g := *cpu[i].Loss, *gpu[i].Loss
		t.CPULoss, t.GPULoss, t.Tokens = c, g, gpu[i].Tokens
		t.Worst = max(t.Worst, abs(g-c)/abs(c))
	}
	return t
}

func abs(x float64) float64 { return max(x, -x) }

func (r *reader) layers(name string) Layers {
	x := Layers{Name: name}
	run := objects[stepLine](r, name+".run.jsonl")
	seconds := []float64{}
	for _, s := range steps(run) {
		seconds = append(seconds, s.Seconds)
	}
	for _, s := range run {
		x.Device, x.Host = max(x.Device, s.Device), max(x.Host, s.Host)
	}
	for _, s := range objects[stepLine](r, name+".sim.jsonl") {
		x.Simulated = max(x.Simulated, s.Median)
	}
	p, err := ir.ReadFile(filepath.Join(r.folder, name+".sppb"))
	if err != nil || len(seconds) < 2 {
		r.missing = append(r.missing, name+".sppb, or steps of it")
		return x
	}
	seconds = seconds[1:]
	slices.Sort(seconds)
	x.Step = seconds[len(seconds)/2]
	x.Tokens = p.Run.Sequence * int64(p.Run.Batch)
	x.TGS = float64(x.Tokens) / x.Step
	if p.Machine.PeakBF16 > 0 {
		x.MFU = p.FlopsModel / (x.Step * float64(len(p.Ranks)) * p.Machine.PeakBF16)
	}
	return x
}

// clocks reads lines of "MHz, W".
func (r *reader) clocks(name string) *Clocks {
	c := &Clocks{}
	for _, line := range r.lines(name) {
		var mhz, watt float64
		if n, _ := fmt.Sscanf(strings.ReplaceAll(line, ",", " "), "%f %f", &mhz, &watt); n != 2 {
			continue
		}
		c.Samples++
		c.MaxMHz, c.MaxWatt = max(c.MaxMHz, mhz), max(c.MaxWatt, watt)
		c.MeanMHz, c.MeanWatt = c.MeanMHz+mhz, c.MeanWatt+watt
	}
	if c.Samples == 0 {
		return nil
	}
	c.MeanMHz, c.MeanWatt = c.MeanMHz/float64(c.Samples), c.MeanWatt/float64(c.Samples)
	return c
}
