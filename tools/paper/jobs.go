package main

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev"
	"sppo.dev/lang"
)

// row is a line of the paper's table of configurations. SP, PP and N for SPPO and Megatron are in the row's
// spec.
type row struct {
	name    string // name of the spec in examples/paper
	tuned   [2]int // SP and PP of the tuned Megatron
	ulysses int    // SP of DeepSpeed-Ulysses; the table has none for 13B and 65B
	paper   string // the result in the section "Model-Specific Performance"
}

var rows = []row{
	{"gpt-7b-512k", [2]int{32, 1}, 32, "1.13 to 1.29"},
	{"gpt-7b-640k", [2]int{32, 1}, 32, "1.13 to 1.29"},
	{"gpt-7b-768k", [2]int{32, 1}, 32, "1.13 to 1.29"},
	{"gpt-7b-896k", [2]int{32, 1}, 32, "1.13 to 1.29"},
	{"gpt-7b-1m", [2]int{32, 1}, 32, "Megatron out of memory"},
	{"gpt-13b-512k", [2]int{8, 8}, 64, "1.44 (breakdown)"},
	{"gpt-13b-640k", [2]int{8, 8}, 64, ""},
	{"gpt-13b-768k", [2]int{8, 8}, 64, ""},
	{"gpt-13b-1m", [2]int{8, 8}, 64, "Megatron out of memory"},
	{"gpt-13b-1280k", [2]int{8, 8}, 64, "Megatron out of memory"},
	{"gpt-65b-512k", [2]int{64, 2}, 64, ""},
	{"gpt-65b-600k", [2]int{64, 2}, 64, "3.38"},
	{"gpt-65b-640k", [2]int{64, 2}, 64, "3.12; 3.48 (breakdown)"},
	{"gpt-65b-768k", [2]int{64, 2}, 64, ""},
	{"gpt-65b-1m", [2]int{64, 2}, 64, "Megatron out of memory"},
}

// broken lists the rows of the paper's breakdown.
var broken = []string{"gpt-13b-512k", "gpt-65b-640k"}

// model returns the name of the model file that the row's spec imports.
func (r row) model() string {
	parts := strings.Split(r.name, "-")
	return strings.Join(parts[:2], "-")
}

// length returns the row's sequence length, as written in the row's name.
func (r row) length() string { return strings.ToUpper(strings.TrimPrefix(r.name, r.model()+"-")) }

// system is a column of the tables, with a schedule for each row to which it applies.
type system struct {
	name  string
	m     int // sequences in a batch
	only  []string
	text  func(r row, s *lang.Spec) string // the schedule; nil: that of the row's spec
	set   func(s *lang.Spec) []string      // overrides of the row's spec
	skips func(r row, s *lang.Spec) bool
}

func megatron(m int) system {
	return system{name: fmt.Sprintf("megatron, m = %d", m), m: m, text: func(_ row, s *lang.Spec) string {
		return fmt.Sprintf("megatron(sp = %d, pp = %d)", s.Schedule.SP, s.Schedule.PP)
	}}
}

func tuned(m int) system {
	return system{
		name: fmt.Sprintf("megatron tuned, m = %d", m), m: m,
		text: func(r row, _ *lang.Spec) string {
			return fmt.Sprintf("megatron(sp = %d, pp = %d)", r.tuned[0], r.tuned[1])
		},
		skips: func(r row, s *lang.Spec) bool { // the same as plain Megatron, or no pipeline to fill
			return r.tuned == [2]int{s.Schedule.SP, s.Schedule.PP} || r.tuned[1] == 1 && m > 1
		},
	}
}

// replicas returns the number of replicas for Ulysses: more than 1 if the number of heads is not divisible by
// the number of GPUs, because the row's SP is then smaller than the number of GPUs.
func (r row) replicas(s *lang.Spec) int { return max(1, s.Cluster.GPUs()/r.ulysses) }

func ours(name string, set ...string) system {
	return system{name: name, m: 1, set: func(*lang.Spec) []string { return set }}
}

// interleaved uses the largest number of virtual stages, at most eight, that divides the number of layers on a
// rank.
func interleaved(s *lang.Spec) []string {
	layers, v := s.Model.Layers/s.Schedule.PP, 8
	for layers%v != 0 {
		v--
	}
	return []string{"schedule.offload=adaptive", fmt.Sprintf("schedule.virtual_stages=%d", v)}
}

func breakdownOnly(s system) system {
	s.only = broken
	return s
}

// free is the name of the system whose schedule is left to the solver.
const free = "auto"

// chunk is the number of tokens in a chunk of FPDT, as chosen by its authors.
const chunk = 64 << 10

// systems lists the columns.
var systems = []system{
	megatron(1), megatron(8), megatron(32), tuned(1), tuned(32),
	{name: "deepspeed-ulysses", m: 1, text: func(r row, s *lang.Spec) string {
		return fmt.Sprintf("deepspeed-ulysses(sp = %d, dp = %d)", r.ulysses, r.replicas(s))
	}},
	{name: "fpdt", m: 1, text: func(r row, s *lang.Spec) string {
		return fmt.Sprintf("fpdt(sp = %d, dp = %d, chunks = %d)", r.ulysses, r.replicas(s), (s.Train.Sequence+chunk-1)/chunk)
	}},
	breakdownOnly(ours("sppo without offload", "schedule.offload=none")),
	breakdownOnly(ours("sppo, full offload", "schedule.offload=full")),
	ours("sppo", "schedule.offload=adaptive"),
	breakdownOnly(ours("sppo, carry", "schedule.offload=carry")),
	breakdownOnly(ours("sppo mux left", "schedule.offload=adaptive", "schedule.mux=left")),
	breakdownOnly(ours("sppo mux right", "schedule.offload=adaptive", "schedule.mux=right")),
	ours("sppo mux", "schedule.offload=adaptive", "schedule.mux=on"),
	{name: "sppo interleaved", m: 1, set: interleaved},
	{name: free, m: 1, text: func(row, *lang.Spec) string { return "" }},
	slowly("sppo, full offload", "full", "13.6"), slowly("sppo, full offload", "full", "3"), slowly("sppo", "adaptive", "3"),
}

// slowly returns a system that offloads at a rate other than the testbed's 32 GB/s: at 13.6, which the transfer
// times in the paper's text imply, or at 3.
func slowly(name, policy, rate string) system {
	return breakdownOnly(ours(name+" at "+rate+" GB/s",
		"cluster.d2h_bandwidth="+rate+"GB/s", "cluster.h2d_bandwidth="+rate+"GB/s", "schedule.offload="+policy))
}

// job is one simulation.
type job struct {
	row    row
	system system
}

// key names a job in the results.
func (j job) key() string { return j.row.name + ", " + j.system.name }

// jobs returns all applicable pairs of rows and systems.
func jobs() ([]job, error) {
	var list []job
	for _, r := range rows {
		spec, err := load(r.name, nil)
		if err != nil {
			return nil, err
		}
		for _, s := range systems {
			if len(s.only) > 0 && !slices.Contains(s.only, r.name) || s.skips != nil && s.skips(r, spec) {
				continue
			}
			list = append(list, job{r, s})
		}
	}
	return list, nil
}

// folder is the path of the rows' specs, relative to the root of the repository.
const folder = "examples/paper/"

func load(name string, set []string) (*lang.Spec, error) {
	return sppo.Load(folder+name+".sppo", set...)
}

// spec returns the job's spec.
func (j job) spec() (*lang.Spec, error) {
	own, err := load(j.row.name, nil)
	if err != nil || j.system.text == nil {
		if err == nil {
			own, err = load(j.row.name, j.system.set(own))
		}
		return own, err
	}
	schedule := j.system.text(j.row, own)
	batch := j.system.m
	if strings.Contains(schedule, "dp = ") { // each replica has its own sequence
		batch *= j.row.replicas(own)
	}
	return parse(j.row.model(), schedule, own.Train.Sequence, batch, nil)
}

// parse returns a spec that trains a model with a shipped schedule or, if schedule is "", without a schedule.
func parse(model, schedule string, sequence int64, batch int, set []string) (*lang.Spec, error) {
	name, _, _ := strings.Cut(schedule, "(")
	text := fmt.Sprintf("import %q\ntrain {\n  sequence = %d\n  batch = %d\n  data = random()\n}\n", model+".sppo", sequence, batch)
	if schedule != "" {
		text += fmt.Sprintf("import %q\nschedule s = %s\n", "baselines/"+name+".sppo", schedule)
	}
	return sppo.Parse(folder+name+" for "+model, []byte(text), set...)
}
