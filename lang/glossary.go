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
	{"bound", "An upper limit of memory or a lower limit of time that holds for every plan of a kind. The search uses it to omit plans that cannot fit or cannot be faster."},
	{"bubble", "Time in which a rank has nothing to run while the pipeline fills, turns around or drains. The bubble of a step is the ratio of idle time to busy time, both summed over all ranks."},
	{"busy", "Busy time is the time in which a rank runs tasks, as opposed to idle time; in the table of stages, it is the mean of the stage's ranks for one step."},
	{"candidate", "A combination of the settings that the spec leaves open. The search estimates candidates and plans the best ones in full."},
	{"checkpoint", "A folder with the weights and the optimizer state after a step, from which a run can continue. While training goes on, it is written from a copy in host memory."},
	{"code", "The instructions of a program that all ranks of a stage share."},
	{"collectives", "Communication in which all ranks of a group take part, such as all_gather and reduce_scatter."},
	{"copies", "Transfers between device memory and host memory: d2h to the host, h2d to the device."},
	{"critical-path", "A chain of work that spans the whole step, in which each part waits for the previous one. Speeding up work outside this chain does not shorten the step."},
	{"estimate", "A time that the search computes from the cost model, without a simulation of the program."},
	{"exposed", "Exposed copies are copies between device and host that computation has to wait for."},
	{"fits", "A plan fits if the placed buffers of every rank are within the device memory and the host memory of the cluster."},
	{"footprint", "The number of bytes that a plan needs in each arena, predicted before buffers are placed."},
	{"gaps", "Bytes of an arena that no buffer uses when its use is highest. They remain because buffers with different lifetimes cannot always be packed without space between them."},
	{"gradients", "The derivatives of the loss with respect to the weights. They are summed over all subsequences and microbatches of a step."},
	{"grid", "The number of tokens of which the length of every subsequence is a multiple: schedule.align."},
	{"idle", "Idle time is the time in which a rank has no task to run; the bubble is idle time divided by busy time."},
	{"k-and-v", "The keys and values of attention, type 0. Later subsequences read them, so they are kept, or streamed from the host; gradients of K and V are summed over the subsequences that read them."},
	{"lag", "The number of tasks that may run after a forward task before its offloaded activations must have reached the host, so that their device memory can be reused. The offload pass chooses this number."},
	{"logits", "The scores of all words of the vocabulary for the tokens of which the loss is computed at the same time."},
	{"loss-head", "The output matrix and the loss, computed for schedule.loss_chunk tokens at a time."},
	{"m", "The number of sequences of a step, train.batch. N is the number of subsequences of a sequence."},
	{"memory-bound-kernels", "Kernels whose time is that of reading and writing memory, such as norms and activation functions."},
	{"messages", "Buffers for activations and gradients on their way between stages."},
	{"mfu", "Model FLOPs utilization: the FLOPs of the model, with causal attention and without recomputation, divided by the FLOPs that the GPUs could execute at their peak rate in the same time."},
	{"n", "N, the number of subsequences of a sequence: schedule.subsequences."},
	{"pauses", "Parts of the critical path in which nothing runs: the latency of a message, or the time before an instruction is issued."},
	{"rank", "One GPU of a job, or its counterpart on the CPU. Rank (d*pp + i)*sp + k is member k of stage i of replica d."},
	{"replica", "One of schedule.dp copies of the pipeline. Each processes different sequences from the batch."},
	{"saved-activation", "An activation that the backward pass reads. It is kept, offloaded to host memory or recomputed."},
	{"simulated", "Simulated times are those of the program in virtual time, in which every instruction takes as long as the cost model says."},
	{"stage", "A contiguous group of layers, and the sp ranks that share them. A virtual stage is one of several stages on the same rank."},
	{"staging", "Buffers in host memory for values on their way between two places, such as messages or optimizer state."},
	{"step", "One update of the weights: forward and backward passes of train.batch sequences, then the optimizer."},
	{"subsequence", "A contiguous chunk of a sequence. Chunks pass through the pipeline one after another, like microbatches in other systems; see schedule.subsequences."},
	{"task", "The forward or the backward pass of one subsequence through one stage, or the deferred part of a split backward pass."},
	{"tgs", "Tokens per GPU per second."},
	{"throughput", "Tokens per second, usually per GPU (tgs), and the share of the peak rate that this is (mfu)."},
	{"training", "The line of a report that names the trained and the frozen parameters, if not all parameters are trained: train.adapter, train.freeze."},
	{"turn", "The point at which a stage switches from the forward pass of the last subsequence to its backward pass."},
	{"type-0", "Activations that later subsequences read: K and V."},
	{"type-1", "Activations that only the backward pass reads. They can be offloaded or recomputed."},
	{"unit", "The smallest group of saved activations that is offloaded or recomputed as one."},
	{"weights", "The parameters of the model. With zero = 3, each rank holds a part of those of its stage; tensors that are trained have an f32 master in addition if dtype = bf16."},
	{"working-memory", "Device memory for values that are needed only within a task, as opposed to weights, saved activations and messages."},
}

// findTerm returns the glossary entry for a name, or nil.
func findTerm(name string) *Term {
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
