package vm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"sppo.dev/ir"
)

// Split is a part of a data set that an evaluation reads once, from start to end, in disjoint windows of one
// sequence each. The label of a window's last token is the first token of the next window.
type Split struct {
	run    ir.Run
	tokens int64                                            // tokens of the split
	read   func(first int64, out []int32, stride int) error // reads tokens of the split, starting at index first
}

// Names of splits.
const (
	SplitAll        = "all"
	SplitTrain      = "train"
	SplitValidation = "validation"
)

// SplitNames lists the names of splits.
var SplitNames = []string{SplitAll, SplitTrain, SplitValidation}

// OpenSplit opens a part of a run's data set. Relative file names are resolved in dir. holdout is the share of
// the data that is held out for validation. Tokens are read in the order of the files, regardless of the run's
// order.
func OpenSplit(run *ir.Run, dir, split string, holdout float64) (*Split, error) {
	s := &Split{run: *run}
	if o := run.DataOptions; o != nil && o.Marked() {
		return nil, errors.New("data with documents or masks is not a single stream of tokens: evaluate it with documents = off and masks = ignore")
	}
	var err error
	switch run.DataKind {
	case "text":
		err = s.openText(dir)
	case "tokens":
		err = s.openCorpus(dir)
	default:
		err = fmt.Errorf("data of kind %q has no end; use text or tokens", run.DataKind)
	}
	if err != nil {
		return nil, err
	}
	held, all := int64(float64(s.tokens)*holdout), s.read
	switch split {
	case SplitTrain:
		s.tokens -= held
	case SplitValidation:
		start := s.tokens - held
		s.tokens = held
		s.read = func(first int64, out []int32, stride int) error { return all(start+first, out, stride) }
	}
	if windows, _ := s.Windows(); windows == 0 {
		return nil, fmt.Errorf("the split %s has %d tokens, fewer than the %d of one sequence and its last label", split, s.tokens, run.Sequence+1)
	}
	return s, nil
}

func (s *Split) openText(dir string) error {
	files, err := expand(s.run.DataFiles, dir)
	if err != nil {
		return err
	}
	text, err := concatenate(files)
	if err != nil {
		return err
	}
	if len(text) == 0 {
		return errors.New("the data is empty")
	}
	if highest := slices.Max(text); int(highest) >= s.run.Vocab {
		return fmt.Errorf("the data contains byte %d, which is outside the vocabulary of %d; a vocabulary of 256 covers all text",
			highest, s.run.Vocab)
	}
	s.tokens = int64(len(text))
	s.read = func(first int64, out []int32, stride int) error {
		for i := 0; i < len(out); i += stride {
			out[i] = int32(text[first])
			first++
		}
		return nil
	}
	return nil
}

// openCorpus opens a corpus as one stream.
func (s *Split) openCorpus(dir string) error {
	run := s.run
	if run.DataOptions == nil {
		return errors.New("data of tokens without options")
	}
	if len(run.DataOptions.Weights) > 0 {
		return errors.New("a mixture with weights is not a single stream of tokens; evaluate its parts separately")
	}
	options := *run.DataOptions
	options.Shuffle = false
	run.DataOptions, run.Sequence, run.Holdout, run.EvalBatch = &options, 1, 0, 0
	data, err := newTokenData(&run, dir)
	if err != nil {
		return err
	}
	s.tokens = data.corpus.Tokens()
	s.read = func(first int64, out []int32, stride int) error { return data.corpus.Stream(first, out, stride) }
	return nil
}

// Windows returns the number of whole windows, and the number of tokens after the last one.
func (s *Split) Windows() (windows, rest int64) {
	labelled := max(0, s.tokens-1)
	return labelled / s.run.Sequence, labelled % s.run.Sequence
}

// Tokens implements the interface Tokens. Windows are numbered across rounds. If the windows run out during a
// round, the last one is repeated, and Evaluate ignores the repetitions.
func (s *Split) Tokens(_ ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&s.run, position, out, stride); err != nil {
		return err
	}
	windows, _ := s.Windows()
	window := min(round*int64(s.run.EvalSequences)+sequence, windows-1)
	return s.read(window*s.run.Sequence+position, out, stride)
}

// Evaluate passes the token losses of every window of the split, in order, to the function each. The job must
// have been opened with this split. The loss of a masked token is NaN.
func (s *Split) Evaluate(ctx context.Context, j *Job, each func(losses []float32) error) error {
	windows, _ := s.Windows()
	together := int64(s.run.EvalSequences)
	for round := int64(0); round*together < windows; round++ {
		if _, err := j.evalSection(ctx, round); err != nil {
			return err
		}
		losses, err := j.TokenLosses()
		if err != nil {
			return err
		}
		for i := range min(together, windows-round*together) {
			if err := each(losses[i*s.run.Sequence : (i+1)*s.run.Sequence]); err != nil {
				return err
			}
		}
	}
	return nil
}
