package schedule

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// Op is the kind of an action.
type Op uint8

// Kinds of actions; Ops describes them. From HandOut on, they belong to slots that the ranks of all stages
// share.
const (
	Begin Op = iota
	InputFromHost
	KVFromHost
	Embedding
	Head
	Enter
	Gather
	Complete
	Free
	LoadInput
	Recompute
	Visit
	Reduce
	Sum
	Release
	Reload
	End
	EndOnHost
	HandOut
	HandIn
	Lend
	Exchange
	Return
	FirstHalf
	SecondHalf
)

// Action is one entry of a schedule. Ops says what each field means for each kind of action.
type Action struct {
	Op    Op
	Task  int32 // index among the tasks of the rank
	Layer int32 // index among the layers of the task's stage, or number of a round
	Of    int32 // a second task, a subsequence, a stage or a slot
}

// as returns an action of another kind for the same task and layer.
func (a Action) as(op Op) Action {
	a.Op = op
	return a
}

// OpInfo is the row of a kind of action. A field without a meaning is 0, except that an Of that stands for a task is
// -1 if there is no such task on the rank.
type OpInfo struct {
	Name   string
	Doc    string
	Common bool   // whether it comes in the lists of all ranks, in the same order, so that readers may treat it as a single action
	Task   string // meaning of the field; "": the task under which the action is listed or, for the End of a piece, the piece
	Layer  string // meaning of the field; "": none
	Of     string // meaning of the field; "": none
	ofTask bool   // whether Of is the index of a task
}

// Ops lists the kinds of actions in the order of their numbers.
var Ops = [...]OpInfo{
	Begin:         {Name: "Begin", Doc: "Waits for the task's input."},
	InputFromHost: {Name: "InputFromHost", Doc: "Begins to copy the input of a task from the host.", Task: "the rank's next task"},
	KVFromHost:    {Name: "KVFromHost", Doc: "Begins to copy K and V of a layer from the host, if they are there.", Task: "the rank's next task", Layer: "layer of its stage"},
	Embedding:     {Name: "Embedding", Doc: "Runs the embedding in the direction of the task."},
	Head:          {Name: "Head", Doc: "Runs the head with the loss, forward and backward."},
	Enter: {Name: "Enter", Doc: "Begins a visit: one task's work in a layer or, in a shared slot, that of all the rank's tasks on its own stage. " +
		"It comes only if weights or gradients are divided (ZeRO). Buffers between the steps of earlier collectives are freed.", Task: "a task of the visit", Layer: "layer of its stage"},
	Gather: {Name: "Gather", Doc: "Begins to gather the divided weights of a layer that a visit reads, this one or the next.", Task: "a task of that visit", Layer: "layer of its stage"},
	Complete: {Name: "Complete", Doc: "Like Gather, but of a layer whose weights have been gathered already, except those that no visit has read since.",
		Task: "a task of the visit that reads them", Layer: "layer of its stage"},
	Free:      {Name: "Free", Doc: "Frees the gathered weights of a layer, each after its last use in the visit.", Task: "a task of the visit", Layer: "layer of its stage"},
	LoadInput: {Name: "LoadInput", Doc: "Begins to load the input of a layer for a subsequence, unless it is on the device.", Layer: "layer of the task's stage", Of: "the subsequence"},
	Recompute: {Name: "Recompute", Doc: "Recomputes the rows of K and V of a layer for a subsequence from the layer's input.", Layer: "layer of the task's stage", Of: "the subsequence"},
	Visit: {Name: "Visit", Doc: "Runs a layer in the direction of the task. A forward issues the layer's copies to the host; " +
		"the offloaded tensors keep their device bytes until the Release.", Layer: "layer of the task's stage"},
	Reduce: {Name: "Reduce", Doc: "Passes the divided gradients of a layer to collectives. The results of the previous Reduce are added to earlier sums.",
		Task: "a task of the visit that has added to them", Layer: "layer of its stage"},
	Sum: {Name: "Sum", Doc: "Begins to sum the whole gradients of a layer, or of the head, over ranks, if there are replicas. The last task that adds to them has run.",
		Task: "a task of that visit", Layer: "layer of its stage; the number of its layers: the head"},
	Release: {Name: "Release", Doc: "Ends the time allowed for a layer's copies to the host: the next user of the bytes waits for the copies.",
		Task: "the forward whose layer was copied", Layer: "layer of its stage"},
	Reload: {Name: "Reload", Doc: "Issues the copies that reload a layer.", Task: "the backward that needs the layer", Layer: "layer of its stage"},
	End: {Name: "End", Doc: "Passes the result on: on the device, or to the message that begins at the end of the task.",
		Of: "the task of this rank that reads the result, if there is one", ofTask: true},
	EndOnHost: {Name: "EndOnHost", Doc: "Like End, but the result goes to the host if its tensor is placed there.",
		Of: "the task of this rank that reads the result", ofTask: true},

	HandOut: {Name: "HandOut", Common: true, Doc: "Embeds a subsequence and distributes its pieces."},
	HandIn:  {Name: "HandIn", Common: true, Doc: "Sends gradients of pieces to the rank with the embedding."},
	Lend: {Name: "Lend", Common: true, Doc: "Sends weights of a layer of each stage to the ranks that begin to work for the stage.", Layer: "round",
		Of: "the slot for which they need the weights"},
	Exchange: {Name: "Exchange", Common: true, Doc: "Sends rows of K and V, or their gradients, to the ranks that read them.", Layer: "round", Of: "stage"},
	Return:   {Name: "Return", Common: true, Doc: "Each helper sends weight gradients to the previous rank.", Layer: "round"},
	FirstHalf: {Name: "FirstHalf", Doc: "Runs a layer of a piece up to the exchange, like the first half of a Visit.", Task: "the piece",
		Layer: "layer of the piece's stage"},
	SecondHalf: {Name: "SecondHalf", Doc: "Runs the rest of the layer.", Task: "the piece", Layer: "layer of the piece's stage"},
}

// Common reports whether an action is common to all ranks.
func (op Op) Common() bool { return Ops[op].Common }

// String returns the name of a kind of action.
func (op Op) String() string { return Ops[op].Name }

// text returns an action in words, given the rank's tasks and the one under which the action is listed: its name, its
// task if that may be another one, its layer, and what Of refers to.
func (a Action) text(tasks []Task, listed int) string {
	info := &Ops[a.Op]
	word := info.Name
	if info.Task != "" || int(a.Task) != listed {
		word += " " + tasks[a.Task].String()
	}
	if info.Layer != "" {
		word += fmt.Sprintf(" %d", a.Layer)
	}
	switch {
	case info.ofTask && a.Of >= 0:
		word += " for " + tasks[a.Of].String()
	case info.Of != "" && !info.ofTask:
		word += fmt.Sprintf(" of %d", a.Of)
	}
	return word
}

// lineWidth is the width at which Print wraps the actions of a task.
const lineWidth = 110

// Print writes the list as text: each task of the rank, followed by its actions, which two spaces separate.
func (l *List) Print(out io.Writer, tasks []Task) error {
	indent := 0
	for _, t := range tasks {
		indent = max(indent, len(t.String()))
	}
	w := bufio.NewWriter(out)
	for i, t := range tasks {
		line := fmt.Sprintf("%-*s", indent, t)
		for _, a := range l.Of(i) {
			word := "  " + a.text(tasks, i)
			if len(line)+len(word) > lineWidth && len(line) > indent {
				fmt.Fprintln(w, line)
				line = strings.Repeat(" ", indent)
			}
			line += word
		}
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
	return w.Flush()
}
