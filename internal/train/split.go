package train

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Split is a part of a data set that an evaluation reads once, from start to end, in disjoint windows of one
// sequence each. Unless documents or masks exclude it, the label of a window's last token is the first token of the next
// window.
type Split struct {
	run  ir.Run
	text []byte          // of data of kind text
	data *corpus.Ordered // of data of kind tokens
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
	var total int64
	var part func(base, size int64) error
	var err error
	switch run.DataKind {
	case "text":
		total, part, err = s.openText(dir)
	case "tokens":
		total, part, err = s.openCorpus(dir)
	default:
		err = fmt.Errorf("data of kind %q has no end; use text or tokens", run.DataKind)
	}
	if err != nil {
		return nil, err
	}
	base, size, held := int64(0), total, int64(float64(total)*holdout)
	switch split {
	case SplitTrain:
		size -= held
	case SplitValidation:
		base, size = total-held, held
	}
	if err := part(base, size); err != nil {
		return nil, err
	}
	if windows, _ := s.Windows(); windows == 0 {
		return nil, fmt.Errorf("the split %s has %d tokens, fewer than the %d of one sequence and its last label", split, size, run.Sequence+1)
	}
	return s, nil
}

// openText opens data of kind text. It returns the number of tokens, and a function that selects a range of them.
func (s *Split) openText(dir string) (int64, func(base, size int64) error, error) {
	files, err := expand(s.run.DataFiles, dir)
	if err != nil {
		return 0, nil, err
	}
	text, err := concatenate(files)
	if err != nil {
		return 0, nil, err
	}
	if len(text) == 0 {
		return 0, nil, errors.New("the data is empty")
	}
	if highest := slices.Max(text); int(highest) >= s.run.Vocab {
		return 0, nil, fmt.Errorf("the data contains byte %d, which is outside the vocabulary of %d; a vocabulary of 256 covers all text",
			highest, s.run.Vocab)
	}
	return int64(len(text)), func(base, size int64) error { s.text = text[base:][:size]; return nil }, nil
}

// openCorpus is like openText, for data of kind tokens.
func (s *Split) openCorpus(dir string) (int64, func(base, size int64) error, error) {
	run := s.run
	if run.DataOptions == nil {
		return 0, nil, errors.New("data of tokens without options")
	}
	if len(run.DataOptions.Weights) > 0 {
		return 0, nil, errors.New("a mixture with weights has no order; evaluate its parts separately")
	}
	options := *run.DataOptions
	whole := options.Pack == "whole"
	options.Shuffle, options.Pack = false, "" // the order is that of the split, however short it is
	run.DataOptions, run.Sequence, run.Holdout, run.EvalBatch = &options, 1, 0, 0
	data, err := newTokenData(&run, dir)
	if err != nil {
		return 0, nil, err
	}
	return data.corpus.Tokens(), func(base, size int64) (err error) {
		s.data, err = data.corpus.Ordered(base, size, s.run.Sequence, whole)
		return err
	}, nil
}

// Windows returns the number of whole windows, and the number of tokens after the last one.
func (s *Split) Windows() (windows, rest int64) {
	if s.data != nil {
		return s.data.Count()
	}
	labelled := max(0, int64(len(s.text))-1)
	return labelled / s.run.Sequence, labelled % s.run.Sequence
}

// window returns the window that an eval section reads as one of its sequences. Windows are numbered across rounds. If
// they run out during a round, the last one is repeated, and Evaluate ignores the repetitions.
func (s *Split) window(round, sequence int64) int64 {
	windows, _ := s.Windows()
	return min(round*int64(s.run.EvalSequences)+sequence, windows-1)
}

// Tokens implements the interface Tokens.
func (s *Split) Tokens(_ ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&s.run, position, out, stride); err != nil {
		return err
	}
	window := s.window(round, sequence)
	if s.data != nil {
		return s.data.Sequence(window).Tokens(position, out, stride)
	}
	text := s.text[window*s.run.Sequence+position:]
	for i, at := 0, 0; i < len(out); i, at = i+stride, at+1 {
		out[i] = int32(text[at])
	}
	return nil
}

// Marks implements Documents.
func (s *Split) Marks(as int, _ ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if s.data == nil {
		return vm.ErrNoDocuments
	}
	if err := checkWindow(&s.run, position, out, stride); err != nil {
		return err
	}
	of := s.data.Sequence(s.window(round, sequence))
	if as == ir.AsLabels {
		return of.Labels(position, out, stride, ir.NoLabel)
	}
	return of.Positions(position, out, stride)
}

// Labels implements Documents.
func (s *Split) Labels(_ ir.Section, round int64) (n int64, err error) {
	for i := range int64(s.run.EvalSequences) {
		counted, err := s.Counted(s.window(round, i))
		if err != nil {
			return 0, err
		}
		n += counted
	}
	return n, nil
}

// Counted returns the number of labels of a window that count.
func (s *Split) Counted(window int64) (int64, error) {
	if s.data == nil {
		return s.run.Sequence, nil
	}
	return s.data.Sequence(window).Counted()
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
