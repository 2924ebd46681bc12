package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"sppo.dev/ir"
)

// left is what check.sh leaves on a card that does well.
var left = map[string]string{
	"devices.txt": "cpu   amd64, 16 cores\ncuda  NVIDIA's driver for CUDA 12.4\n      GPU 0: NVIDIA H200, sm_90, 132 multiprocessors, 139 GiB, at 0000:3b:00.0\n",
	"cuda.log": "=== RUN   TestGPUConformance\n--- PASS: TestGPUConformance (9.00s)\n    --- PASS: TestGPUConformance/cuBLASLt (4.00s)\n" +
		"        --- PASS: TestGPUConformance/cuBLASLt/matmul (1.00s)\n            --- PASS: TestGPUConformance/cuBLASLt/matmul/f32 (0.50s)\nPASS\n",
	"e2e.log": "--- PASS: TestGPUResume (1.00s)\n",
	"figures.jsonl": `{"kind":"matmul","name":"7B y: matmul","by":"cuBLASLt, the fastest","seconds":1,"spread":0,"tflops":700,"share":1}
{"kind":"matmul","name":"7B y: matmul","by":"cuBLASLt","seconds":1,"spread":0,"tflops":650,"share":0.93}
{"kind":"matmul","name":"7B y: matmul","by":"own","seconds":4,"spread":0,"tflops":150,"share":0.2}
{"kind":"attention","name":"attention bf16, 32768 tokens","by":"portable","seconds":2,"spread":0,"tflops":260}
{"kind":"attention","name":"attention bf16, 32768 tokens","by":"for the card","seconds":1,"spread":0,"tflops":520}
{"kind":"attention","name":"attention_grad bf16, 32768 tokens","by":"for the card","seconds":1,"spread":0,"tflops":410}
{"kind":"memory","name":"gelu bf16","seconds":1,"spread":0,"gb_per_s":4000,"share":0.95}
{"kind":"issue","name":"layers","by":"calls","seconds":0.1,"spread":0,"share":0.01}
`,
	"gpt.cpu.jsonl":         `{"step":1,"loss":5.0,"step_s":1}` + "\n" + `{"step":2,"loss":4.0,"step_s":1}` + "\n" + `{"step":2,"eval_loss":4.5}` + "\n" + `{"done":true,"steps":2,"final_loss":4}` + "\n",
	"gpt.cuda.jsonl":        `{"step":1,"loss":5.01,"tokens_per_s":70,"step_s":1}` + "\n" + `{"step":2,"loss":4.04,"tokens_per_s":80,"step_s":1}` + "\n",
	"7b-32k-none.run.jsonl": `{"step":1,"loss":9,"step_s":9}` + "\n" + `{"step":2,"loss":9,"step_s":2}` + "\n" + `{"step":3,"loss":9,"step_s":2}` + "\n" + `{"done":true,"steps":3,"device_peak_bytes":1000,"host_peak_bytes":0}`,
	"7b-32k-full.run.jsonl": `{"step":1,"loss":9,"step_s":9}` + "\n" + `{"step":2,"loss":9,"step_s":2.02}` + "\n" + `{"done":true,"steps":2,"device_peak_bytes":500,"host_peak_bytes":500}`,
	"7b-32k-none.sim.jsonl": `{"simulated":true,"step":1,"step_s":1.9}` + "\n" + `{"simulated":true,"done":true,"step_s_median":1.9}`,
	"7b-32k-full.sim.jsonl": `{"simulated":true,"done":true,"step_s_median":2.0}`,
	"7b-128k.run.jsonl":     `{"step":1,"loss":9,"step_s":9}` + "\n" + `{"step":2,"loss":9,"step_s":4}`,
	"7b-128k.sim.jsonl":     `{"simulated":true,"done":true,"step_s_median":4.1}`,
	"7b.longest.txt":        "8K tokens fit (8192)\n",
	"probe.jsonl":           `{"item":"a","seconds":1}` + "\n" + `{"done":true,"machine":{"name":"measured"},"notes":{}}`,
	"clocks.csv":            "1980, 650.5\n1900, 600.5\n[N/A], 3\n",
	"peers.jsonl":           `{"name":"7b-128k","by":"PyTorch 2.9","way":"checkpointing","step_s":6}` + "\n" + `{"name":"7b-128k","by":"PyTorch 2.9","way":"save_on_cpu","error":"out of memory"}`,
}

// folder is left, changed, with a program for each model.
func folder(t *testing.T, change map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range left {
		if other, ok := change[name]; ok {
			text = other
		}
		if text == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	p := &ir.Program{Name: "p", Codes: []ir.Code{{Name: "c"}}, Ranks: []ir.Rank{{}}, Lines: []string{""}, FlopsModel: 2.4e15,
		Machine: ir.Machine{PeakBF16: 1e15}, Run: ir.Run{Sequence: 128 << 10, Batch: 1}}
	for _, name := range []string{"7b-32k-none", "7b-32k-full", "7b-128k"} {
		p.Run.Sequence = 32 << 10
		if name == "7b-128k" {
			p.Run.Sequence = 128 << 10
		}
		if err := ir.WriteFile(filepath.Join(dir, name+".sppb"), p); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func report(t *testing.T, change map[string]string) *Report {
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
	if names := unmet(r); len(names) > 0 || len(r.Goals) != 10 || len(r.Missing) > 0 {
		t.Errorf("not met: %v; missing: %v", names, r.Missing)
	}
	if r.Tests["TestGPUConformance/cuBLASLt/matmul"] != "pass" || r.Longest["7b"] != "8K tokens fit (8192)" || r.Clocks.MaxMHz != 1980 || r.Clocks.Samples != 2 {
		t.Errorf("%v, %v, %v", r.Tests, r.Longest, r.Clocks)
	}
	if x := r.Training[0]; x.Steps != 2 || x.Worst < 0.009 || x.Worst > 0.011 || x.Tokens != 80 {
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

// Each goal is missed by what it is about, and what was not looked at is no goal met.
func TestGoalsAreMissed(t *testing.T) {
	for name, change := range map[string]map[string]string{
		"tests":      {"e2e.log": "--- FAIL: TestGPUResume (1.00s)\n"},
		"training":   {"gpt.cuda.jsonl": `{"step":1,"loss":5.5,"step_s":1}`},
		"layers":     {"7b-128k.run.jsonl": `{"step":1,"loss":9,"step_s":9}` + "\n" + `{"step":2,"loss":9,"step_s":5}`, "7b-128k.sim.jsonl": `{"simulated":true,"done":true,"step_s_median":5}`},
		"offload":    {"7b-32k-full.run.jsonl": `{"step":1,"loss":9,"step_s":9}` + "\n" + `{"step":2,"loss":9,"step_s":2.2}`},
		"simulation": {"7b-128k.sim.jsonl": `{"simulated":true,"done":true,"step_s_median":3}`},
	} {
		if got := unmet(report(t, change)); len(got) != 1 || got[0] != name {
			t.Errorf("%s: not met: %v", name, got)
		}
	}
	r := report(t, map[string]string{"figures.jsonl": "", "cuda.log": "", "devices.txt": "no GPU\n"})
	if got := unmet(r); !slices.Equal(got, []string{"products", "attention", "attention_grad", "memory-bound kernels", "issue"}) || !slices.Contains(r.Missing, "cuda.log") || r.Card != "unknown" {
		t.Errorf("not met: %v; missing: %v", got, r.Missing)
	}
}
