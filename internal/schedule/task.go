package schedule

import (
	"fmt"
	"strings"
)

// Kind is the kind of computation of a task.
type Kind uint8

// Kinds of tasks. If weight gradients are computed in a separate task, the backward computes only
// the gradient of its input.
const (
	Forward Kind = 1 + iota
	Backward
	WeightGrad
)

// Kinds lists the kinds of tasks.
var Kinds = []Kind{Forward, Backward, WeightGrad}

// String returns the letter of a kind, or "" for the zero Kind.
func (k Kind) String() string { return [...]string{"", "F", "B", "W"}[k] }

// Task is the forward or backward of a microbatch's subsequence through the layers of one virtual stage, or the
// weight gradients that a backward has deferred. In JSON it is written as kind, microbatch, subsequence and
// virtual stage, such as "F0.3@1", or "F0.3/2@1" for the second piece of a subsequence.
type Task struct {
	Kind        Kind
	Microbatch  int
	Subsequence int
	Stage       int // virtual stage
	Piece       int // number of the piece of a divided subsequence, from 1; 0: the whole subsequence
}

// As returns the task of another kind for the same subsequence on the same virtual stage.
func (t Task) As(kind Kind) Task {
	t.Kind = kind
	return t
}

// Undoes reports whether the task is the backward of a given forward.
func (t Task) Undoes(f Task) bool { return f.Kind == Forward && t == f.As(Backward) }

// Slot returns the number of a task's slot. For a backward this is the slot of its forward. In a
// pipeline of equal tasks, the tasks of one slot run at the same time.
func (t Task) Slot() int { return t.Stage + t.Subsequence }

// SameSlot reports whether two tasks have the same kind, microbatch and slot.
func SameSlot(a, b Task) bool {
	return a.Kind == b.Kind && a.Microbatch == b.Microbatch && a.Slot() == b.Slot()
}

// MarshalText writes a task in the format "F0.3@1".
func (t Task) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

func (t Task) String() string {
	piece := ""
	if t.Piece > 0 {
		piece = fmt.Sprintf("/%d", t.Piece)
	}
	return fmt.Sprintf("%s%d.%d%s@%d", t.Kind, t.Microbatch, t.Subsequence, piece, t.Stage)
}

// UnmarshalText reads the format that MarshalText writes.
func (t *Task) UnmarshalText(text []byte) error {
	word := string(text)
	for _, kind := range Kinds {
		rest, ok := strings.CutPrefix(word, kind.String())
		if !ok {
			continue
		}
		read := Task{Kind: kind}
		if rest, stage, found := strings.Cut(rest, "@"); found {
			rest, piece, _ := strings.Cut(rest, "/")
			words := stage + " " + rest + " " + piece
			_, _ = fmt.Sscanf(words, "%d %d.%d %d", &read.Stage, &read.Microbatch, &read.Subsequence, &read.Piece)
		}
		if read.String() == word { // accept only the standard spelling
			*t = read
			return nil
		}
	}
	const form = "write F, B or W, microbatch, dot, subsequence, @, virtual stage, as in F0.3@1"
	return fmt.Errorf("%q is not a task: %s", word, form)
}
