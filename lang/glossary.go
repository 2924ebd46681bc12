package lang

import (
	"fmt"
	"slices"
	"strings"
)

// Term is a word, other than a key, that reports and messages use.
type Term struct {
	Name string
	Doc  string
}

// Terms is the glossary.
var Terms = []Term{
	{"activation", "A tensor that the forward pass computes. If the backward pass needs it, it is kept on the device, offloaded to the host, or recomputed."},
	{"ahead", "The number of layers by which a copy back to the device is issued before the backward pass needs it. The offload pass chooses this number."},
	{"alpha", "The fraction of a subsequence's saved activation bytes that is offloaded, from 0 to 1."},
	{"arena", "A rank's single allocation of device memory, or of pinned host memory. The compiler gives each buffer a fixed address in it."},
	{"bubble", "Time in which a rank has nothing to run while the pipeline fills, turns around or drains. The bubble of a step is the ratio of idle time to busy time, both summed over all ranks."},
	{"critical-path", "A chain of work that spans the whole step, in which each part waits for the previous one. Speeding up work outside this chain does not shorten the step."},
	{"exposed", "Exposed copies are copies between device and host that computation has to wait for."},
	{"footprint", "The number of bytes that a plan needs in each arena, predicted before buffers are placed."},
	{"gaps", "Bytes of an arena that no buffer uses when its use is highest. They remain because buffers with different lifetimes cannot always be packed without space between them."},
	{"lag", "The number of tasks that may run after a forward task before its offloaded activations must have reached the host, so that their device memory can be reused. The offload pass chooses this number."},
	{"mfu", "Model FLOPs utilisation: the FLOPs of the model, with causal attention and without recomputation, divided by the FLOPs that the GPUs could execute at their peak rate in the same time."},
	{"rank", "One GPU of a job, or its counterpart on the CPU. Rank (d*pp + i)*sp + k is member k of stage i of replica d."},
	{"replica", "One of schedule.dp copies of the pipeline. Each processes different sequences from the batch."},
	{"stage", "A contiguous group of layers, and the sp ranks that share them. A virtual stage is one of several stages on the same rank."},
	{"subsequence", "A contiguous chunk of a sequence. Chunks pass through the pipeline one after another, like microbatches in other systems; see schedule.subsequences."},
	{"task", "The forward or the backward pass of one subsequence through one stage, or the deferred part of a split backward pass."},
	{"tgs", "Tokens per GPU per second."},
	{"turn", "The point at which a stage switches from the forward pass of the last subsequence to its backward pass."},
	{"type-0", "Activations that later subsequences read: K and V."},
	{"type-1", "Activations that only the backward pass reads. They can be offloaded or recomputed."},
	{"unit", "The smallest group of saved activations that is offloaded or recomputed as one."},
	{"working-memory", "Device memory for values that are needed only within a task, as opposed to weights, saved activations and messages."},
}

// FindTerm returns the glossary entry for a name, or nil.
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

// values returns the words that a key accepts: plain names, and the names of calls.
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

// explainValue describes the keys that accept a word: in full if there is only one, otherwise by name.
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
	return wrap(fmt.Sprintf("%s is a value of %s.", word, joinAnd(paths)), "")
}
