package vm

import (
	"fmt"
	"os"
	"slices"

	"sppo.dev/corpus"
	"sppo.dev/ir"
)

// tokenData is a corpus of tokens. Sequence number s of step n, from 1 on, is sequence (n-1)*batch + s of the corpus.
type tokenData struct {
	run    ir.Run
	corpus *corpus.Corpus
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
			return nil, fmt.Errorf("data %q: %w", pattern, err)
		}
		files = append(files, found)
	}
	c, err := corpus.Open(files, o, corpus.Order{
		Sequence: run.Sequence, Seed: run.Seed, Holdout: run.Holdout, Held: validationWindows(run),
	}, run.Vocab)
	if err != nil {
		return nil, err
	}
	return &tokenData{*run, c}, nil
}

// globTokens is glob where a folder with a manifest stands for itself.
func globTokens(pattern string) ([]string, error) {
	if info, err := os.Stat(pattern); err == nil && info.IsDir() {
		return []string{pattern}, nil
	}
	files, err := glob(pattern)
	slices.Sort(files)
	return files, err
}

// Describe tells this corpus from others.
func (d *tokenData) Describe() string { return d.corpus.Describe() }

// Fingerprints tell the files from changed ones; a checkpoint keeps them.
func (d *tokenData) Fingerprints() []corpus.Fingerprint { return d.corpus.Fingerprints() }

// Unchanged reports a file that changed since its fingerprint was taken.
func (d *tokenData) Unchanged(before []corpus.Fingerprint) error { return d.corpus.Unchanged(before) }

// Tokens implements the interface of that name.
func (d *tokenData) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&d.run, position, out, stride); err != nil {
		return err
	}
	if section == ir.SectionEval {
		return d.corpus.Held(round*int64(d.run.EvalSequences)+sequence, position, out, stride)
	}
	return d.corpus.Train((round-1)*int64(d.run.Batch)+sequence, position, out, stride)
}
