package train

import (
	"fmt"
	"os"
	"slices"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/ir"
)

// tokenData is a corpus of tokens. The sequences of step n are sequences (n-1)*batch to n*batch of the corpus, in their order or,
// if they have several documents, in the one that method place gives; steps are counted from 1.
type tokenData struct {
	run    ir.Run
	corpus *corpus.Corpus
	orders orders
}

func newTokenData(run *ir.Run, dir string) (*tokenData, error) {
	if run.DataOptions == nil {
		return nil, fmt.Errorf("data of tokens without options")
	}
	o := corpus.Options(*run.DataOptions)
	if o.Tokenizer != "" {
		o.Tokenizer = resolve(o.Tokenizer, dir)
	}
	var files [][]string
	for _, pattern := range run.DataFiles {
		found, err := globTokens(resolve(pattern, dir))
		if err != nil {
			return nil, fmt.Errorf("data: %w", err)
		}
		files = append(files, found)
	}
	c, err := corpus.Open(files, o, corpus.Order{
		Sequence: run.Sequence, Seed: run.Seed, Holdout: run.Holdout, Held: validationWindows(run),
	}, run.Vocab)
	if err != nil {
		return nil, err
	}
	return &tokenData{run: *run, corpus: c}, nil
}

// globTokens is like glob, but also accepts a folder, which it returns as a single item, and sorts the files.
func globTokens(pattern string) ([]string, error) {
	if info, err := os.Stat(pattern); err == nil && info.IsDir() {
		return []string{pattern}, nil
	}
	files, err := glob(pattern)
	slices.Sort(files)
	return files, err
}

// Describe identifies the corpus.
func (d *tokenData) Describe() string { return d.corpus.Describe() }

// Fingerprints returns the files' fingerprints, which a checkpoint stores so that a resumed run detects changed
// files.
func (d *tokenData) Fingerprints() []corpus.Fingerprint { return d.corpus.Fingerprints() }

// Unchanged returns an error if a file has changed since its fingerprint was taken; the error names the file.
func (d *tokenData) Unchanged(before []corpus.Fingerprint) error { return d.corpus.Unchanged(before) }

// sequence returns a sequence of a step or an eval section.
func (d *tokenData) sequence(section ir.Section, round, sequence int64) (corpus.Sequence, error) {
	if section == ir.SectionEval {
		return d.corpus.Validation(round*int64(d.run.EvalSequences) + sequence)
	}
	at, err := d.place(round, sequence)
	return d.corpus.Training(d.first(round) + at), err
}

// Marks implements Documents.
func (d *tokenData) Marks(as int, section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&d.run, position, out, stride); err != nil {
		return err
	}
	s, err := d.sequence(section, round, sequence)
	if err != nil {
		return err
	}
	if as == ir.AsLabels {
		return s.Labels(position, out, stride, ir.NoLabel)
	}
	return s.Positions(position, out, stride)
}

// Labels implements Documents.
func (d *tokenData) Labels(section ir.Section, round int64) (n int64, err error) {
	sequences := d.run.Batch
	if section == ir.SectionEval {
		sequences = d.run.EvalSequences
	}
	for i := range int64(sequences) {
		s, err := d.sequence(section, round, i)
		if err != nil {
			return 0, err
		}
		counted, err := s.Counted()
		if err != nil {
			return 0, err
		}
		n += counted
	}
	return n, nil
}

// Tokens implements the interface Tokens.
func (d *tokenData) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&d.run, position, out, stride); err != nil {
		return err
	}
	s, err := d.sequence(section, round, sequence)
	if err != nil {
		return err
	}
	return s.Tokens(position, out, stride)
}
