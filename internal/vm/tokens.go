package vm

import (
	"errors"

	"sppo.dev/ir"
)

// Tokens is a source of tokens, safe for concurrent use.
type Tokens interface {
	// Tokens writes the tokens at position, position+1, ... of a sequence to out[0], out[stride], ... For a
	// step, round is the step's number and sequence an index into its global batch; for a validation, round is
	// the number of the eval section and sequence an index into that section.
	Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error
}

// Documents is implemented by Tokens whose sequences contain several documents, or whose labels may be masked.
type Documents interface {
	Tokens
	// Marks is like Tokens, but for the other values that load_tokens can load: ir.AsLabels or ir.AsPositions.
	Marks(as int, section ir.Section, round, sequence, position int64, out []int32, stride int) error
	// Labels returns the total number of unmasked labels in the sequences of a step or an eval section.
	Labels(section ir.Section, round int64) (int64, error)
}

// Window is what a load_tokens instruction requests: adjacent tokens of adjacent sequences. Unless Chunks is 0,
// they are in the zigzag order of that many chunks.
type Window struct {
	Batch, Chunks, As  int // As is one of ir.AsTokens, ir.AsLabels, ir.AsPositions
	Sequence, Position int64
}

// Load writes the window's tokens to out.
func (w *Window) Load(from Tokens, section ir.Section, round int64, out []int32) error {
	load := from.Tokens
	if w.As != ir.AsTokens {
		marked, ok := from.(Documents)
		if !ok {
			return ErrNoDocuments
		}
		load = func(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
			return marked.Marks(w.As, section, round, sequence, position, out, stride)
		}
	}
	return w.Each(len(out), func(sequence, position int64, first, stride, end int) error {
		return load(section, round, sequence, position, out[first:end], stride)
	})
}

// Each calls visit for every run of tokens, in order: the elements first, first+stride, ... of the output,
// below end, are the tokens at position, position+1, ... of a sequence.
func (w *Window) Each(rows int, visit func(sequence, position int64, first, stride, end int) error) error {
	chunks := max(1, w.Chunks)
	each := rows / chunks // rows per chunk
	for j := range chunks {
		position := w.Position + ir.ZigzagChunk(int64(j), int64(chunks))*int64(each/w.Batch)
		for s := range min(w.Batch, each) {
			if err := visit(w.Sequence+int64(s), position, j*each+s, w.Batch, (j+1)*each); err != nil {
				return err
			}
		}
	}
	return nil
}

// ErrNoDocuments is the error of a program that asks for values that its tokens do not have: see Documents.
var ErrNoDocuments = errors.New("the program needs documents or masks, but the data has none")
