package lang

import (
	"fmt"
	"slices"
	"strings"
)

// Term is a word that reports and messages use and no key is called.
type Term struct {
	Name string
	Doc  string
}

// Terms is the glossary.
var Terms = []Term{
	{"activation", "A tensor that a forward pass computes. Those that the backward pass reads are saved: kept on the device, offloaded to the host, or recomputed."},
	{"alpha", "The share of the bytes that a layer saves of a subsequence which is offloaded, from 0 to 1."},
	{"arena", "One allocation of a rank: device memory, or pinned host memory. Buffers get fixed places in it when a program is built."},
	{"bubble", "Time in which a rank waits while the pipeline fills, turns round or drains. The bubble of a step is idle time divided by busy time, over all ranks."},
	{"exposed", "Exposed transfers are the time in which computation waits for copies between device and host."},
	{"footprint", "The bytes that a plan needs of each arena, as predicted before buffers are placed."},
	{"mfu", "Model FLOPs utilisation: the FLOPs of the model, causal attention counted and recomputation not, divided by what the GPUs could do at their peak in the same time."},
	{"rank", "One GPU of a job, or what stands for one on the CPU. Rank (d*pp + i)*sp + k is member k of stage i of replica d."},
	{"replica", "One of schedule.dp copies of the pipeline. Each takes its own sequences of the batch."},
	{"stage", "A part of the layers that follow one another, on the sp ranks that share it. A virtual stage is one of several that a rank holds."},
	{"subsequence", "A slice of a sequence. Slices pass through the pipeline one after another, as microbatches do elsewhere; see schedule.subsequences."},
	{"task", "The forward or the backward pass of one subsequence through one stage, or the part of a backward pass that was put off."},
	{"tgs", "Tokens that one GPU trains on in a second."},
	{"turn", "Where a stage goes over from the forward pass of the last subsequence to its backward pass."},
	{"type-0", "Activations that later subsequences read: K and V."},
	{"type-1", "Activations that the backward pass alone reads. They may be offloaded or recomputed."},
	{"unit", "The smallest group of saved activations that is offloaded or recomputed as one."},
}

// FindTerm finds a word of the glossary.
func FindTerm(name string) *Term {
	i := slices.IndexFunc(Terms, func(t Term) bool { return strings.EqualFold(t.Name, name) })
	if i < 0 {
		return nil
	}
	return &Terms[i]
}

func (t *Term) explain() string { return t.Name + "\n" + wrap(t.Doc, "    ") }

func termNames() []string {
	var names []string
	for _, t := range Terms {
		names = append(names, t.Name)
	}
	return names
}

// values are the words that a key takes, names and calls.
func (k *Key) values() []string {
	names := slices.Clone(k.takes.names)
	if k.takes.list != nil {
		names = append(names, k.takes.list.item.names...)
	}
	for _, c := range k.takes.calls {
		names = append(names, c.name)
	}
	return names
}

// explainValue describes the keys that take a word: in full where there is one, else their names.
func explainValue(word string) string {
	var takers []*Key
	var paths []string
	for _, k := range Keys {
		if slices.Contains(k.values(), word) {
			takers, paths = append(takers, k), append(paths, k.Path())
		}
	}
	switch len(takers) {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("%s is a value of %s.\n\n%s", word, paths[0], explainKey(takers[0]))
	}
	return wrap(fmt.Sprintf("%s is a value of %s.", word, strings.Join(paths, ", ")), "")
}
