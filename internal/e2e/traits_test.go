package e2e

import (
	"fmt"
	"maps"
	"slices"
	"sppo.dev/internal/passes/plan"
	"strings"
	"sync"
	"testing"
)

// trait is a property that a random spec requests or that its plan has. A choice without effect, such as a ring
// of one rank, is not a trait.
type trait struct {
	name           string
	asked, planned func(*drawn) bool
}

// traits lists all values of all choices, and some consequences of combined choices.
var traits = listTraits()

func listTraits() []trait {
	list := []trait{
		{name: "several subsequences", asked: func(d *drawn) bool { return d.over("subsequences") }},
		{name: "several stages", asked: func(d *drawn) bool { return d.over("pp") }},
		{name: "several ranks a stage", asked: func(d *drawn) bool { return d.over("sp") }},
		{name: "replicas", asked: func(d *drawn) bool { return d.over("dp") }},
		{name: "microbatches of several sequences", asked: func(d *drawn) bool { return d.over("microbatch") }},
		{name: "several microbatches", asked: func(d *drawn) bool { return d.batch > 1 }},
		{name: "virtual stages", asked: func(d *drawn) bool { return d.over("pp") }, planned: func(d *drawn) bool { return d.plan.Parallel.VirtualStages > 1 }},
		{name: "a recompute that auto chose", asked: func(d *drawn) bool { return d.ask("recompute") == "auto" }, planned: placed(plan.PlacementRecompute)},
		{name: "an offload that auto chose", asked: func(d *drawn) bool { return d.ask("offload") == "auto" }, planned: placed(plan.PlacementOffload)},
		{name: "layers with windows", asked: func(d *drawn) bool { return d.model.Window != "" }, planned: func(d *drawn) bool { return len(d.windows()) == 1 && d.windows()[0] > 0 }},
		{name: "layers of several windows", asked: func(d *drawn) bool { return d.model.Window != "" }, planned: func(d *drawn) bool { return len(d.windows()) > 1 }},
		{name: "windows with K or V that stream", asked: func(d *drawn) bool {
			return d.model.Window != "" && d.ask("keep") != "[k, v]" && d.over("subsequences")
		},
			planned: func(d *drawn) bool { return slices.Max(d.windows()) > 0 }},
		{name: "MLPs of several widths", asked: func(d *drawn) bool { return strings.Contains(d.text, "ffn = [") }, planned: func(d *drawn) bool { return len(d.plan.Model.FFNs) > 1 }},
		{name: "layers without attention", asked: func(d *drawn) bool {
			return strings.Contains(d.model.Traits, "none]") || strings.Contains(d.model.Traits, "[none")
		}, planned: func(d *drawn) bool { return len(d.plan.Model.Mixers) > 1 }},
		{name: "layers without attention and K or V that stream", asked: func(d *drawn) bool {
			return d.ask("keep") != "[k, v]" && d.over("subsequences") && strings.Contains(d.model.Traits, "none")
		}, planned: func(d *drawn) bool { return len(d.plan.Model.Mixers) > 1 }},
		{name: "layers without attention whose tasks are shared", asked: func(d *drawn) bool { return d.ask("mux") != "off" && d.over("pp") }, planned: func(d *drawn) bool {
			return len(d.plan.Model.Mixers) > 1 && (d.plan.Mux.Left || d.plan.Mux.Right)
		}},
		{name: "experts", asked: func(d *drawn) bool { return strings.Contains(d.text, "num_experts") }},
		{name: "experts in some layers", asked: func(d *drawn) bool { return strings.Contains(d.text, "num_experts") }, planned: func(d *drawn) bool { return len(d.plan.Model.MLPs) > 1 }},
		{name: "experts on several ranks", asked: func(d *drawn) bool { return strings.Contains(d.text, "num_experts") && d.over("sp") }},
		{name: "experts in rings of groups", asked: func(d *drawn) bool {
			return strings.Contains(d.text, "num_experts") && strings.HasPrefix(d.ask("sp"), "[")
		}},
		{name: "different experts on ranks", asked: func(d *drawn) bool { return d.ask("expert_parallel") == "on" && d.over("sp") }},
		{name: "groups of experts by their best ones", asked: func(d *drawn) bool { return strings.Contains(d.text, "group_limited_greedy") }},
		{name: "linear attention", asked: func(d *drawn) bool { return d.linear() }},
		{name: "linear attention in several subsequences", asked: func(d *drawn) bool { return d.linear() && d.over("subsequences") }},
		{name: "linear attention on several ranks", asked: func(d *drawn) bool { return d.linear() && d.over("sp") }},
		{name: "linear attention on several stages", asked: func(d *drawn) bool { return d.linear() && d.over("pp") }},
		{name: "linear attention of two kinds", asked: func(d *drawn) bool { return strings.Contains(d.text, "mamba2, gated_delta") }},
		{name: "decays by channel on several ranks", asked: func(d *drawn) bool { return strings.Contains(d.text, "kimi_delta") && d.over("sp") }},
		{name: "latent experts on several ranks", asked: func(d *drawn) bool { return strings.Contains(d.text, "moe_latent_size") && d.over("sp") }},
		{name: "latent attention", asked: func(d *drawn) bool { return strings.Contains(d.text, "kv_lora_rank") }},
		{name: "latent attention in several subsequences", asked: func(d *drawn) bool { return strings.Contains(d.text, "kv_lora_rank") && d.over("subsequences") }},
		{name: "latent attention on several ranks", asked: func(d *drawn) bool { return strings.Contains(d.text, "kv_lora_rank") && d.over("sp") }},
		{name: "cached latents", asked: func(d *drawn) bool { return d.ask("latent_cache") == "on" && d.over("subsequences") }},
		{name: "cached latents on several ranks", asked: func(d *drawn) bool {
			return d.ask("latent_cache") == "on" && d.over("subsequences") && d.over("sp")
		}},
		{name: "dropout", asked: func(d *drawn) bool { return strings.Contains(d.model.Tuning, "dropout = 0.") }},
		{name: "adapters", asked: func(d *drawn) bool { return strings.HasPrefix(d.model.Tuning, "adapter") }},
		{name: "frozen tensors", asked: func(d *drawn) bool { return strings.HasPrefix(d.model.Tuning, "freeze") }},
		{name: "layers without a backward", asked: func(d *drawn) bool { return strings.HasPrefix(d.model.Tuning, "freeze") }, planned: func(d *drawn) bool { return d.plan.Untrained > 0 }},
		{name: "rounded gradients", asked: func(d *drawn) bool { return strings.Contains(d.text, "grad_reduce") && d.over("dp") }},
		{name: "a bf16 model", asked: func(d *drawn) bool { return d.model.DType == "bf16" }},
	}
	for _, key := range slices.Sorted(maps.Keys(choices)) {
		values := slices.Compact(slices.Sorted(slices.Values(choices[key])))
		for _, value := range values {
			list = append(list, trait{name: key + " = " + value, asked: func(d *drawn) bool { return d.ask(key) == value && d.matters(key, value) }})
		}
	}
	return list
}

// ask returns the schedule's request for a key.
func (d *drawn) ask(key string) string {
	i := slices.IndexFunc(d.schedule, func(r request) bool { return r.key == key })
	value := d.schedule[i].value
	if key == "offload" && strings.HasPrefix(value, "[") {
		return "list"
	}
	return value
}

// windows lists the different windows of the plan's layers; 0 stands for layers that see the whole sequence.
func (d *drawn) windows() (list []int64) {
	m := &d.plan.Model
	for layer := range m.Layers {
		w := m.WindowOf(layer)
		if w >= d.plan.Train.Sequence {
			w = 0
		}
		if !slices.Contains(list, w) {
			list = append(list, w)
		}
	}
	return list
}

// over reports whether the schedule requests a value other than 1 for a key.
func (d *drawn) over(key string) bool { return d.ask(key) != "1" }

// matters reports whether a key's value makes a difference, given the other choices.
func (d *drawn) matters(key, value string) bool {
	switch key {
	case "sp_mode":
		return d.over("sp")
	case "zero":
		return value == "0" || d.over("dp")
	case "mux":
		return d.ask("mux") == "off" && value == "off" || d.ask("mux") != "off" && d.over("pp")
	case "partition", "keep", "order":
		return d.over("subsequences")
	case "recompute":
		return value != "full_kv" || d.over("subsequences")
	}
	return true
}

// placed returns a function that reports whether a draw's plan gives any unit the placement.
func placed(placement byte) func(*drawn) bool {
	return func(d *drawn) bool {
		return strings.ContainsRune(fmt.Sprint(d.plan.Offload.Placement), rune(placement))
	}
}

// tally counts the traits of checked specs.
type tally struct {
	sync.Mutex
	specs int
	of    map[string]int
}

func (c *tally) add(d *drawn) {
	if d == nil {
		return
	}
	c.Lock()
	defer c.Unlock()
	if c.of == nil {
		c.of = map[string]int{}
	}
	c.specs++
	for _, x := range traits {
		if (x.asked == nil || x.asked(d)) && (x.planned == nil || x.planned(d)) {
			c.of[x.name]++
		}
	}
}

// report prints the traits of the specs. If all is set, a missing trait is an error.
func (c *tally) report(t *testing.T, all bool) {
	var counts []string
	for _, x := range traits {
		counts = append(counts, fmt.Sprintf("%s: %d", x.name, c.of[x.name]))
		if all && c.of[x.name] == 0 {
			t.Errorf("no spec had %s", x.name)
		}
	}
	t.Logf("of %d specs had %s", c.specs, strings.Join(counts, "; "))
}

// linear reports whether some layers have linear attention.
func (d *drawn) linear() bool { return strings.Contains(d.text, "linear_num_key_heads") }
