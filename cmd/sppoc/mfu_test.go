package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/report"
	"sppo.dev/ir"
)

// Models, lengths and numbers of H100 GPUs of the table of model FLOPs utilization. A step has one sequence for each
// GPU.
var (
	mfuModels  = []string{"llama-3.2-1b", "llama-3.2-3b", "llama-8b", "qwen2.5-7b", "qwen3-4b", "mistral-7b", "gemma3-4b", "gpt-7b"}
	mfuLengths = []string{"32K", "64K", "128K", "256K", "512K"}
	mfuGPUs    = []int{1, 3, 5, 7}
)

// low is the utilization below which the table gives a reason.
const low = 0.35

// TestMFU prints the simulated model FLOPs utilization of each job, over all GPUs of the cluster, including those that
// the plan leaves idle. SPPO_MFU selects jobs, as in SPPO_MFU="llama-8b 3,5,7 32K,128K"; an empty field or - selects all.
func TestMFU(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("takes an hour; set SPPO_LONG=1")
	}
	chosen := append(strings.Fields(os.Getenv("SPPO_MFU")), "-", "-", "-")
	selects := func(field int, value string) bool {
		return chosen[field] == "-" || slices.Contains(strings.Split(chosen[field], ","), value)
	}
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "model\tGPUs\tsequence\tMFU\tstep\tdevice\tranks\treason")
	for _, model := range mfuModels {
		for _, gpus := range mfuGPUs {
			for _, length := range mfuLengths {
				if !selects(0, model) || !selects(1, fmt.Sprint(gpus)) || !selects(2, length) {
					continue
				}
				t.Run(fmt.Sprint(model, " ", gpus, " ", length), func(t *testing.T) {
					row := fmt.Sprintf("%s\t%d\t%s\t%s", model, gpus, length, utilization(t, model, gpus, length))
					t.Log(row)
					fmt.Fprintln(w, row)
				})
			}
		}
	}
	w.Flush()
	t.Log("Simulated; MFU over all GPUs of the cluster\n" + table.String())
}

// utilization plans a job and returns the rest of its row.
func utilization(t *testing.T, model string, gpus int, length string) string {
	file, set := fleetFile(t, []string{model, "h100", "1", fmt.Sprint(gpus), length, fmt.Sprintf("train.batch=%d", gpus)})
	job, _, _, err := weighed(file, set)
	if err != nil {
		t.Fatal(err)
	}
	if err := job.Simulate(); err != nil {
		t.Fatal(err)
	}
	p := job.Plan
	if short := p.Memory.Shortfall(); short != nil {
		return "-\t-\t-\t-\tdoes not fit: " + short.String()
	}
	if !p.Time.Simulated {
		t.Errorf("%v: the step has not been simulated", set)
	}
	mfu := p.Throughput.MFU * float64(p.Parallel.Ranks()) / float64(gpus)
	par := p.Parallel
	row := fmt.Sprintf("%.1f%%\t%s\t%s\tdp %d pp %d sp %d zero %d %s", 100*mfu, p.Time.StepS, slices.Max(p.Memory.DevicePeakBytes),
		par.DP, par.PP, par.SP, par.Zero, cmp.Or(par.OptimizerOffload, "none"))
	if mfu < low {
		row += "\t" + strings.Join(append(report.Warnings(p), longestWork(p)), "; ")
	}
	return row
}

// longestWork names the three kinds of work that take most of the critical path, with their shares of the step.
func longestWork(p *plan.Plan) string {
	sums := map[string]ir.Seconds{}
	var works []string
	for _, c := range p.Time.CriticalPath {
		if sums[c.Work] == 0 {
			works = append(works, c.Work)
		}
		sums[c.Work] += c.Seconds
	}
	slices.SortStableFunc(works, func(a, b string) int { return cmp.Compare(sums[b], sums[a]) })
	var parts []string
	for _, work := range works[:min(3, len(works))] {
		parts = append(parts, fmt.Sprintf("%s %.0f%%", work, 100*float64(sums[work]/p.Time.StepS)))
	}
	return "critical path: " + strings.Join(parts, ", ")
}
