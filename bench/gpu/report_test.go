package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// left holds the results from a card that meets all goals, by stage, task and kind.
var left = map[[3]string]string{
	{"devices", "devices", kindDevice}: `"cuda  NVIDIA's driver for CUDA 12.4"` + "\n" + `"      GPU 0: NVIDIA H200, sm_90, 132 multiprocessors, 139 GiB, at 0000:3b:00.0"`,
	{"conformance", "by cuBLASLt", kindTest}: `{"name":"TestGPUConformance/cuBLASLt/matmul/f32","result":"pass"}
{"name":"TestGPUConformance/cuBLASLt/matmul","result":"pass"}
{"name":"TestGPUConformance","result":"pass"}`,
	{"schedules", "resume", kindTest}: `{"name":"TestGPUResume","result":"pass"}`,
	{"attention", "for the card", kindFigure}: `{"kind":"attention","name":"attention bf16, 32768 tokens","by":"for the card","seconds":1,"spread":0,"tflops":520}
{"kind":"attention","name":"attention_grad bf16, 32768 tokens","by":"for the card","seconds":1,"spread":0,"tflops":410}`,
	{"products", "products", kindFigure}: `{"kind":"matmul","name":"7B y: matmul","by":"cuBLASLt, the fastest","seconds":1,"spread":0,"tflops":700,"share":1}
{"kind":"matmul","name":"7B y: matmul","by":"cuBLASLt","seconds":1,"spread":0,"tflops":650,"share":0.93}
{"kind":"matmul","name":"7B y: matmul","by":"own","seconds":4,"spread":0,"tflops":150,"share":0.2}`,
	{"memory", "memory", kindFigure}: `{"kind":"memory","name":"gelu bf16","seconds":1,"spread":0,"gb_per_s":4000,"share":0.95}`,
	{"memory", "issue", kindFigure}:  `{"kind":"issue","name":"layers","by":"calls","seconds":0.1,"spread":0,"share":0.01}`,
	{"training", "gpt", kindCPU}: `{"step":1,"loss":5.0,"grad_norm":2}
{"step":2,"loss":4.0,"grad_norm":2}
{"step":2,"eval_loss":4.5}
{"done":true,"steps":2,"final_loss":4}`,
	{"training", "gpt", kindRun}:                        `{"step":1,"loss":5.001,"grad_norm":2.01,"tokens_per_s":70}` + "\n" + `{"step":2,"loss":4.004,"grad_norm":2,"tokens_per_s":80}`,
	{"layers", "7b-32k-none", kindProgram}:              `{"tokens":32768,"flops":2.4e15,"vocab":8103,"peak":1e15}`,
	{"layers", "7b-32k-none", kindRun}:                  steps9("2", "2") + `{"done":true,"steps":3,"device_peak_bytes":1000,"host_peak_bytes":0}`,
	{"layers", "7b-32k-none, simulated", kindSim}:       `{"simulated":true,"step":1,"step_s":1.9}` + "\n" + `{"simulated":true,"done":true,"step_s_median":1.9}`,
	{"layers", "7b-32k-full", kindProgram}:              `{"tokens":32768,"flops":2.4e15,"vocab":8103,"peak":1e15}`,
	{"layers", "7b-32k-full", kindRun}:                  steps9("2.02") + `{"done":true,"steps":2,"device_peak_bytes":500,"host_peak_bytes":500}`,
	{"layers", "7b-32k-full, simulated", kindSim}:       `{"simulated":true,"done":true,"step_s_median":2.0}`,
	{"layers", "7b-128k", kindProgram}:                  `{"tokens":131072,"flops":2.4e15,"vocab":8103,"peak":1e15}`,
	{"layers", "7b-128k", kindRun}:                      steps9("4"),
	{"layers", "7b-128k, simulated", kindSim}:           `{"simulated":true,"done":true,"step_s_median":4.1}`,
	{"layers", "7b-128k", kindClocks}:                   `{"samples":2,"max_sm_mhz":1980,"mean_sm_mhz":1940,"max_w":650,"mean_w":625}`,
	{"probe", "probe", kindProbe}:                       `{"item":"a","seconds":1}` + "\n" + `{"done":true,"machine":{"name":"measured"},"notes":{}}`,
	{"peers", "7b-128k checkpointing, flash", kindPeer}: `{"name":"7b-128k","by":"PyTorch 2.9","way":"checkpointing","step_s":6}`,
	{"peers", "7b-128k plain, flash", kindPeer}:         `{"name":"7b-128k","by":"PyTorch 2.9","way":"plain","error":"out of memory"}`,
}

// steps9 returns the steps of a run, the first of which takes 9 seconds.
func steps9(seconds ...string) (text string) {
	for i, s := range append([]string{"9"}, seconds...) {
		text += fmt.Sprintf(`{"step":%d,"loss":9,"step_s":%s}`+"\n", i+1, s)
	}
	return text
}

// folder writes the results in left, with some changes, to a journal in a new folder.
func folder(t *testing.T, change map[[3]string]string) string {
	t.Helper()
	dir := t.TempDir()
	j, err := openJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	keys := slices.SortedFunc(maps.Keys(left), func(a, b [3]string) int { return slices.Compare(a[:], b[:]) })
	for i, key := range keys {
		text := left[key]
		if other, ok := change[key]; ok {
			text = other
		}
		for line := range strings.Lines(text) {
			j.add(key[0], key[1], key[2], json.RawMessage(line))
		}
		if i+1 == len(keys) || keys[i+1][0] != key[0] || keys[i+1][1] != key[1] {
			j.add(key[0], key[1], kindEnd, End{Status: "ok", Seconds: 1})
		}
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

func report(t *testing.T, change map[[3]string]string) *Report {
	t.Helper()
	dir := folder(t, change)
	name, err := write(dir, time.Date(2026, 11, 21, 0, 0, 0, 0, time.UTC))
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(dir, "2026-11-21-nvidia-h200.json"); change == nil && name != want {
		t.Errorf("%s, want %s", name, want)
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

func unmet(r *Report) (names []string) {
	for _, g := range r.Goals {
		if !g.Met {
			names = append(names, g.Name)
		}
	}
	return names
}

func TestReport(t *testing.T) {
	r := report(t, nil)
	if names := unmet(r); len(names) > 0 || len(r.Goals) != 11 || r.Broken > 0 || slices.ContainsFunc(r.Tasks, func(t Task) bool { return t.Status != "ok" }) {
		t.Errorf("not met: %v; tasks: %+v", names, r.Tasks)
	}
	if r.Tests["TestGPUConformance/cuBLASLt/matmul"] != "pass" {
		t.Errorf("%v", r.Tests)
	}
	if at := slices.IndexFunc(r.Tasks, func(t Task) bool { return t.Name == "7b-128k" }); r.Tasks[at].Clocks.MaxMHz != 1980 {
		t.Errorf("%+v", r.Tasks[at])
	}
	if x := r.Training[0]; x.Steps != 2 || x.Worst < 0.49 || x.Worst > 0.51 || x.Tokens != 80 {
		t.Errorf("%+v", x)
	}
	i := slices.IndexFunc(r.Layers, func(l Layers) bool { return l.Name == "7b-128k" })
	if x := r.Layers[i]; x.Step != 4 || x.MFU != 0.6 || x.Simulated != 4.1 || x.TGS != 32768 {
		t.Errorf("%+v", x)
	}
	if p := r.Peers; len(p) != 2 || p[0].Faster != 1.5 || p[1].Error == "" || p[1].Faster != 0 {
		t.Errorf("%+v", p)
	}
}

// A goal counts as missed if its figures do not meet it, and also if it has no figures.
func TestGoalsAreMissed(t *testing.T) {
	for name, change := range map[string]map[[3]string]string{
		"tests":             {{"schedules", "resume", kindTest}: `{"name":"TestGPUResume","result":"hang"}`},
		"training":          {{"training", "gpt", kindRun}: `{"step":1,"loss":5,"grad_norm":2.1}` + "\n" + `{"step":2,"loss":4,"grad_norm":2}`},
		"layers":            {{"layers", "7b-128k", kindRun}: steps9("5"), {"layers", "7b-128k, simulated", kindSim}: `{"simulated":true,"done":true,"step_s_median":5}`},
		"losses of layers":  {{"layers", "7b-32k-full", kindRun}: strings.ReplaceAll(steps9("2.02"), `"loss":9`, `"loss":9.01`)},
		"offload":           {{"layers", "7b-32k-full", kindRun}: steps9("2.2")},
		"losses  of layers": {{"layers", "7b-128k", kindRun}: strings.ReplaceAll(steps9("4"), `"loss":9`, `"loss":7`)},
		"simulation":        {{"layers", "7b-128k, simulated", kindSim}: `{"simulated":true,"done":true,"step_s_median":3}`},
	} {
		if got := unmet(report(t, change)); len(got) != 1 || got[0] != strings.ReplaceAll(name, "  ", " ") {
			t.Errorf("%s: not met: %v", name, got)
		}
	}
	r := report(t, map[[3]string]string{
		{"devices", "devices", kindDevice}: `"no GPU"`, {"attention", "for the card", kindFigure}: "", {"products", "products", kindFigure}: "",
		{"memory", "memory", kindFigure}: "", {"memory", "issue", kindFigure}: "",
	})
	if got := unmet(r); !slices.Equal(got, []string{"products", "attention", "attention_grad", "memory-bound kernels", "issue"}) || r.Card != "unknown" {
		t.Errorf("not met: %v", got)
	}
}

// Layers whose losses show a wrong copy or a model that computes something else miss a goal.
func TestPlantedLosses(t *testing.T) {
	for name, change := range map[string]map[[3]string]string{
		"a loss that offload changes by 0.11%":     {{"layers", "7b-32k-full", kindRun}: strings.ReplaceAll(steps9("2.02"), `"loss":9`, `"loss":9.01`)},
		"a loss below the logarithm of vocabulary": {{"layers", "7b-128k", kindRun}: strings.ReplaceAll(steps9("4"), `"loss":9`, `"loss":7`)},
	} {
		r := report(t, change)
		at := slices.IndexFunc(r.Goals, func(g Goal) bool { return g.Name == "losses of layers" })
		if g := r.Goals[at]; g.Met {
			t.Errorf("%s: the goal is met", name)
		} else {
			told(t, "layers", name, fmt.Sprintf("goal not met: %s: %.3g times what is allowed", g.Name, g.Got))
		}
	}
}

// The probe stage reports rates above the card's peak, and a cluster file with which simulated steps are off misses the goal.
func TestPlantedProbe(t *testing.T) {
	for fault, want := range map[string]string{"": "", "fast clock": "matmul of 4096 rows reaches 1.42 of the card's peak"} {
		_, out, status := measured(t, bundle(t), fault, "probe")
		report := regexp.MustCompile(`(?m)^failed .* probe  (.*)$`).FindStringSubmatch(out)
		if (status != 0) != (want != "") || want != "" && (report == nil || !strings.HasPrefix(report[1], want)) {
			t.Errorf("%q: status %d\n%s", fault, status, out)
		} else if want != "" {
			told(t, "probe", "a clock that counts half of the time", report[1])
		}
	}
	r := report(t, map[[3]string]string{{"layers", "7b-128k, simulated", kindSim}: `{"simulated":true,"done":true,"step_s_median":4.6}`})
	at := slices.IndexFunc(r.Goals, func(g Goal) bool { return g.Name == "simulation" })
	if g := r.Goals[at]; g.Met {
		t.Error("a simulated step that takes 1.15 times as long meets the goal")
	} else {
		told(t, "probe, layers", "a bandwidth in cluster.sppo with which a step takes 1.15 times as long", fmt.Sprintf("goal not met: %s: %.3g", g.Name, g.Got))
	}
}

// A journal that broke off in the middle of a line and of a task is read as far as possible, and lines added
// later are unaffected. If a figure was measured twice, the last one is used.
func TestJournalIsReadAfterAKill(t *testing.T) {
	dir := folder(t, nil)
	path := filepath.Join(dir, journalFile)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(text, `{"time":"2026-11-22T10:00:00Z","stage":"pro`...), 0o644); err != nil {
		t.Fatal(err)
	}
	j, err := openJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	j.add("products", "products", kindFigure, json.RawMessage(`{"kind":"matmul","name":"7B y: matmul","by":"cuBLASLt","seconds":1,"spread":0,"tflops":650,"share":0.99}`))
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	parts, broken, err := readJournal(dir)
	if err != nil || broken != 1 {
		t.Errorf("%d broken lines, %v", broken, err)
	}
	r := &reader{of: latest(parts)}
	got := r.report()
	at := slices.IndexFunc(got.Tasks, func(t Task) bool { return t.Stage == "products" })
	shares := []float64{}
	for _, f := range got.Figures {
		if f.Kind == "matmul" {
			shares = append(shares, f.Share)
		}
	}
	if r.err != nil || got.Tasks[at].Status != "cut off" || !slices.Equal(shares, []float64{1, 0.2, 0.99}) {
		t.Errorf("%v, %+v, %v", r.err, got.Tasks[at], shares)
	}
}
