package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// table is a Markdown table.
type table struct {
	head  []string
	lines [][]string
	notes []string
}

func (t *table) add(cells ...string) { t.lines = append(t.lines, cells) }

// note adds a note, unless the table already has it.
func (t *table) note(text string) {
	if !slices.Contains(t.notes, text) {
		t.notes = append(t.notes, text)
	}
}

func (t *table) String() string {
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(t.head)
	line(slices.Repeat([]string{"---"}, len(t.head)))
	for _, cells := range t.lines {
		line(cells)
	}
	for i, n := range t.notes {
		if i == 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "- %s\n", n)
	}
	return b.String()
}

// tables lists the tables with their names on the page.
var tables = []struct {
	name string
	make func(r *results) (string, error)
}{
	{"throughput", throughput},
	{"speedup", speedup},
	{"auto", left},
	{"breakdown", breakdown},
	{"longest", longest},
	{"bubble", bubbles},
	{"activations", activations},
	{"byhand", byHand},
}

// rate returns a cell with tokens per second per GPU.
func (r *results) rate(t *table, row, system string) string {
	o, ok := r.Jobs[row+", "+system]
	switch {
	case !ok:
		return ""
	case o.Error != "":
		t.note(fmt.Sprintf("– for %s: %s", system, o.Error))
		return "–"
	case !o.Fits:
		t.note("In parentheses: the job needs more memory than the cluster has.")
		return fmt.Sprintf("(%s)", short(o.TGS))
	}
	return short(o.TGS)
}

// short writes a rate with at most four digits.
func short(v float64) string {
	if v < 100 {
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

func throughput(r *results) (string, error) {
	t := &table{head: []string{"row", "dp x pp x sp, N"}}
	var columns []string
	for _, s := range systems {
		if len(s.only) == 0 {
			columns = append(columns, s.name)
		}
	}
	t.head = append(t.head, columns...)
	for _, row := range rows {
		cells := []string{row.name, r.Jobs[row.name+", sppo"].Schedule}
		for _, c := range columns {
			cells = append(cells, r.rate(t, row.name, c))
		}
		t.add(cells...)
	}
	return t.String(), nil
}

// over returns the speed of one job of a row relative to another, or 0 if either is missing.
func (r *results) over(row, system, base string) float64 {
	a, b := r.Jobs[row+", "+system], r.Jobs[row+", "+base]
	if b.TGS == 0 {
		return 0
	}
	return a.TGS / b.TGS
}

func times(v float64) string {
	if v == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f", v)
}

// filled returns the speed of a system relative to Megatron with a pipeline that is always full. With m
// sequences, Megatron takes (m + pp - 1) / m times as long as with a full pipeline.
func (r *results) filled(row, system string) float64 {
	const m = 32
	base := r.Jobs[fmt.Sprintf("%s, megatron, m = %d", row, m)]
	var dp, pp, sp int
	if _, err := fmt.Sscanf(base.Schedule, "%d x %d x %d", &dp, &pp, &sp); err != nil || base.TGS == 0 {
		return 0
	}
	return r.Jobs[row+", "+system].TGS / (base.TGS * float64(m+pp-1) / m)
}

func speedup(r *results) (string, error) {
	t := &table{head: []string{"row", "m = 1", "m = 8", "m = 32", "unlimited m", "tuned, m = 1", "best of sppo, m = 32", "auto, m = 32", "the paper"}}
	for _, row := range rows {
		best := r.best(row.name)
		t.add(row.name, times(r.over(row.name, "sppo", "megatron, m = 1")), times(r.over(row.name, "sppo", "megatron, m = 8")),
			times(r.over(row.name, "sppo", "megatron, m = 32")), times(r.filled(row.name, "sppo")),
			times(r.over(row.name, "sppo", "megatron tuned, m = 1")), fmt.Sprintf("%s, %s", times(r.over(row.name, best, "megatron, m = 32")), best), times(r.over(row.name, "auto", "megatron, m = 32")), row.paper)
	}
	return t.String(), nil
}

// best returns our fastest system that fits.
func (r *results) best(row string) string {
	best := "sppo"
	for _, s := range systems {
		if o := r.Jobs[row+", "+s.name]; s.set != nil && o.Fits && o.TGS > r.Jobs[row+", "+best].TGS {
			best = s.name
		}
	}
	return best
}

// left shows the schedule that the solver finds for each row, and how much faster it is than the best SPPO
// schedule with the row's sizes.
func left(r *results) (string, error) {
	keys := []string{"strategy", "virtual_stages", "sp_mode", "mux", "recompute", "offload"}
	t := &table{head: append(append([]string{"row", "in the row", "found"}, keys...), "device memory", "host memory", "speed relative to the best of sppo")}
	for _, row := range rows {
		o := r.Jobs[row.name+", "+free]
		cells := []string{row.name, r.Jobs[row.name+", sppo"].Schedule, o.Schedule}
		for _, key := range keys {
			cells = append(cells, cmp.Or(o.Found[key], "unit by unit"))
		}
		t.add(append(cells, o.Device.String(), o.Host.String(), times(r.over(row.name, free, r.best(row.name))))...)
	}
	return t.String(), nil
}

// techniques lists the techniques of the breakdown, with the paper's factors over Megatron for 13B at 512K and 65B at
// 640K. The factor for full offload is relative to SPPO without offload.
var techniques = []struct {
	system string
	paper  [2]string
}{
	{"sppo without offload", [2]string{"", ""}},
	{"sppo, full offload", [2]string{"0.91 of without", "2.1"}},
	{"sppo", [2]string{"1.23", "3.38"}},
	{"sppo, carry", [2]string{"ours", "ours"}},
	{"sppo mux left", [2]string{"", ""}},
	{"sppo mux right", [2]string{"", ""}},
	{"sppo mux", [2]string{"1.44", "3.48"}},
	{"sppo interleaved", [2]string{"ours", "ours"}},
	{"sppo, full offload at 13.6 GB/s", [2]string{"", ""}},
	{"sppo, full offload at 3 GB/s", [2]string{"", ""}},
	{"sppo at 3 GB/s", [2]string{"", ""}},
	{"auto", [2]string{"ours", "ours"}},
}

func breakdown(r *results) (string, error) {
	t := &table{head: []string{"row", "technique", "tokens/s per GPU", "device memory", "over megatron, m = 1", "m = 32", "over tuned, m = 1", "the paper"}}
	for i, row := range broken {
		for _, x := range techniques {
			o := r.Jobs[row+", "+x.system]
			memory := ""
			if o.Error == "" {
				memory = o.Device.String()
			}
			t.add(row, x.system, r.rate(t, row, x.system), memory, times(r.over(row, x.system, "megatron, m = 1")),
				times(r.over(row, x.system, "megatron, m = 32")), times(r.over(row, x.system, "megatron tuned, m = 1")), x.paper[i])
		}
	}
	return t.String(), nil
}

// lengths holds the paper's longest sequences, by system and number of GPUs, as multiples of about a million
// tokens.
var lengths = map[string]string{
	"sppo, 32": "1.3", "sppo, 64": "2", "sppo, 128": "4",
	"megatron tuned, 32": "1", "megatron tuned, 64": "1.375", "megatron tuned, 128": "2.13",
	"deepspeed-ulysses, 32": "1", "deepspeed-ulysses, 64": "0", "deepspeed-ulysses, 128": "0",
}

// lengthSystems and lengthGPUs are the rows and columns of the table of longest sequences. In the chart of that
// table, each number of GPUs has a group of bars, one for each system.
var (
	lengthSystems = []string{"megatron tuned", "deepspeed-ulysses", "fpdt", "sppo"}
	lengthGPUs    = []int{32, 64, 128}
)

func longest(r *results) (string, error) {
	t := &table{head: []string{"system"}}
	for _, n := range lengthGPUs {
		t.head = append(t.head, fmt.Sprintf("%d GPUs", n), "the paper")
	}
	for _, s := range lengthSystems {
		cells := []string{s}
		for _, n := range lengthGPUs {
			said := lengths[fmt.Sprintf("%s, %d", s, n)]
			if said != "" {
				said += "x"
			}
			cells = append(cells, fmt.Sprintf("%.2fM", r.millions(s, n)), said)
		}
		t.add(cells...)
	}
	return t.String(), nil
}

func (r *results) millions(system string, gpus int) float64 {
	return float64(r.Longest[fmt.Sprintf("longest, %s, %d GPUs", system, gpus)]) / (1 << 20)
}

// shape returns the numbers of stages and subsequences of an outcome.
func (o *outcome) shape() (pp, n int) {
	var dp, sp int
	fmt.Sscanf(o.Schedule, "%d x %d x %d, N = %d", &dp, &pp, &sp, &n) // as written by simulate
	return pp, n
}

func bubbles(r *results) (string, error) {
	t := &table{head: []string{"row", "pp", "N", "(pp - 1)/N", "simulated", "interleaved", "imbalance of FLOPs", "exposed transfer"}}
	for _, row := range rows {
		o := r.Jobs[row.name+", sppo"]
		pp, n := o.shape()
		t.add(row.name, fmt.Sprint(pp), fmt.Sprint(n), percent(float64(pp-1)/float64(max(1, n))), percent(o.Bubble),
			percent(r.Jobs[row.name+", sppo interleaved"].Bubble), percent(o.Imbalance), fmt.Sprintf("%.2f s", o.ExposedS))
	}
	return t.String(), nil
}

func percent(v float64) string { return fmt.Sprintf("%.1f%%", 100*v) }

// activations shows how activation memory differs between the first and the last of N subsequences with equal
// causal FLOPs, for one layer of 65B at 128K on one GPU. It gives the memory by the paper's count of 36 bytes per
// token and hidden element, the memory of the tensors that our plan saves, and the memory that the paper states.
func activations(*results) (string, error) {
	t := &table{head: []string{"N", "first, last length", "36 bytes per token and hidden element", "saved here", "the paper"}}
	for _, c := range []struct {
		n    int
		said string
	}{{8, "10.59 to 2.87 GB"}, {16, "6.04 to 1.3 GB"}} {
		spec, err := load("gpt-65b-1m", []string{"schedule.sp=1", "schedule.pp=1", "train.sequence=128K",
			"schedule.align=1", fmt.Sprintf("schedule.subsequences=%d", c.n)})
		if err != nil {
			return "", err
		}
		p := plan.New(spec)
		if err := passes.Run(spec, p, passes.Options{}); err != nil {
			return "", err
		}
		saved := 0.0
		for _, u := range p.Units {
			if u.Block == "layer" && u.Type == plan.Type1 {
				saved += u.BytesPerToken
			}
		}
		at := p.Subsequences.Lengths
		first, last := float64(at[0]), float64(at[len(at)-1])
		each := 36 * float64(p.Model.Hidden)
		t.add(fmt.Sprint(c.n), fmt.Sprintf("%d, %d", at[0], at[len(at)-1]), fmt.Sprintf("%.2f to %.2f GB", first*each/1e9, last*each/1e9),
			fmt.Sprintf("%s to %s", ir.Bytes(first*saved), ir.Bytes(last*saved)), c.said)
	}
	return t.String(), nil
}

// worked holds the figures computed by hand for 7B at 512K with N = 32, in seconds per sequence.
var worked = []struct {
	system string
	byHand float64
}{{"sppo", 59.8}, {"sppo interleaved", 55.2}, {"sppo mux", 55.0}}

func byHand(r *results) (string, error) {
	t := &table{head: []string{"schedule", "by hand", "simulated", "difference"}}
	for _, w := range worked {
		o := r.Jobs["gpt-7b-512k, "+w.system]
		if o.Error != "" {
			t.add(w.system, fmt.Sprintf("%.1f s", w.byHand), "–", o.Error)
			continue
		}
		t.add(w.system, fmt.Sprintf("%.1f s", w.byHand), fmt.Sprintf("%.1f s", o.StepS), fmt.Sprintf("%+.1f%%", 100*(o.StepS/w.byHand-1)))
	}
	return t.String(), nil
}
