package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/data/tokenizer"
)

// Training trains a tokenizer on files.
type Training struct {
	Inputs  []Input
	Dir     string
	Vocab   int
	Field   string
	Limit   int64 // bytes of text to read; 0: all
	Workers int   // 0: one for each processor

	Counted func(read, size int64) // called like Job.Progress
	Merged  func(tokens int)
}

// TrainingResult is the result of a training run.
type TrainingResult struct {
	Text  int64 // bytes read
	Words int   // number of distinct words
	Vocab int
	Whole bool // all text was read
}

// Run counts words, merges pairs, and writes tokenizer.json and tokenizer_config.json to Dir, each completely
// or not at all.
func (t *Training) Run(ctx context.Context) (*TrainingResult, error) {
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		if _, err := os.Lstat(filepath.Join(t.Dir, name)); err == nil {
			return nil, fmt.Errorf("%s: the folder already contains a %s: remove it first, or write to another folder", t.Dir, name)
		}
	}
	out := &TrainingResult{}
	all, err := t.count(ctx, out)
	if err != nil {
		return nil, err
	}
	out.Words = all.Words()
	file, err := all.Train(t.Vocab, t.Merged)
	if err != nil {
		return nil, err
	}
	made, err := tokenizer.Read(file)
	if err != nil {
		return nil, fmt.Errorf("reading the new tokenizer: %w", err)
	}
	out.Vocab = made.Size()
	if err := os.MkdirAll(t.Dir, 0o777); err != nil {
		return nil, err
	}
	config := fmt.Sprintf("{\"eos_token\": %q, \"tokenizer_class\": \"PreTrainedTokenizerFast\"}\n", tokenizer.EndOfText)
	if err := corpus.Replace(filepath.Join(t.Dir, "tokenizer_config.json"), []byte(config)); err != nil {
		return nil, err
	}
	return out, corpus.Replace(filepath.Join(t.Dir, "tokenizer.json"), file)
}

// count reads the documents and counts their words with several workers.
func (t *Training) count(ctx context.Context, out *TrainingResult) (*tokenizer.Trainer, error) {
	workers := t.Workers
	if workers <= 0 {
		workers = runtime.GOMAXPROCS(0)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	texts, errs := make(chan string, workers), make([]error, workers)
	trainers := make([]*tokenizer.Trainer, workers)
	var wait sync.WaitGroup
	for i := range workers {
		trainers[i] = tokenizer.NewTrainer()
		wait.Go(func() {
			for text := range texts {
				if err := trainers[i].Add(text); err != nil && errs[i] == nil {
					errs[i] = err
					cancel()
				}
			}
		})
	}
	err := t.read(ctx, trainers[0].Cut, texts, out)
	close(texts)
	wait.Wait()
	for i := range workers {
		if errs[i] != nil {
			return nil, errs[i]
		}
		if i > 0 {
			trainers[0].Join(trainers[i])
		}
	}
	return trainers[0], err
}

var errEnough = errors.New("enough text")

func (t *Training) read(ctx context.Context, cut func([]byte) int, texts chan<- string, out *TrainingResult) error {
	var size, before int64
	for _, in := range t.Inputs {
		size += in.size
	}
	for i := range t.Inputs {
		in := &t.Inputs[i]
		err := in.each(corpus.Fields{Text: t.Field}, cut, func(d corpus.Document, read int64) error {
			if t.Limit > 0 && out.Text+int64(len(d.Text)) > t.Limit {
				return errEnough
			}
			out.Text += int64(len(d.Text))
			if t.Counted != nil {
				t.Counted(before+read, size)
			}
			select {
			case texts <- d.Text:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		if errors.Is(err, errEnough) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", in.Name, err)
		}
		before += in.size
	}
	out.Whole = true
	return nil
}
