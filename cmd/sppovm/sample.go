package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/data/tokenizer"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/infile"
	"sppo.dev/internal/passes/words"
	"sppo.dev/internal/sample"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// sampleFlags are the flags of sample.
type sampleFlags struct {
	weights, adapter, resume string
	tokenizer                string
	prompt, promptFile       string
	tokens, sequence         int64
	choice                   sample.Choice
	threads                  int
	quiet                    bool
	free                     freeMemory
}

func sampling(flags *pflag.FlagSet) cli.Action {
	var f sampleFlags
	flags.StringVar(&f.weights, "weights", "", "use the weights in this Hugging Face model `FOLDER`")
	flags.StringVar(&f.adapter, "adapter", "", "with --weights, use the adapters in this `FOLDER`, in PEFT format")
	flags.StringVar(&f.resume, "resume", "", "use the weights of this checkpoint")
	flags.StringVar(&f.prompt, "prompt", "", "the text to continue")
	flags.StringVar(&f.promptFile, "prompt-file", "", "continue the text in this file")
	flags.StringVar(&f.tokenizer, "tokenizer", "", "use the tokenizer in this file or folder")
	flags.Int64Var(&f.tokens, "max-tokens", 256, "the maximum number of tokens to generate")
	flags.Float64Var(&f.choice.Temperature, "temperature", 1, "divide logits by this number before sampling a token; "+
		"0: always take the most probable token")
	flags.IntVar(&f.choice.TopK, "top-k", 0, "sample only from this many of the most probable tokens; 0: all")
	flags.Float64Var(&f.choice.TopP, "top-p", 1, "sample only from the most probable tokens whose probabilities add up to this share")
	flags.Int64Var(&f.choice.Seed, "seed", 1, "seed for sampling")
	flags.Int64Var(&f.sequence, "sequence", 0, "length of the training sequences, in tokens; selects the longrope frequencies; 0: the length of this text")
	flags.IntVar(&f.threads, "threads", 0, "number of threads for kernels; 0: one per processor core")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "show warnings and errors only, no progress")
	for _, name := range []string{"weights", "adapter", "resume", "prompt-file", "tokenizer"} {
		cli.Files(flags, name)
	}
	return func(env *cli.Env, _ []string) error {
		if err := f.check(flags.Changed("prompt"), flags.Changed("prompt-file")); err != nil {
			return err
		}
		source, err := f.open()
		if err != nil {
			return cli.Wrong(err)
		}
		defer source.close()
		return f.write(env, source)
	}
}

func (f *sampleFlags) check(prompt, file bool) error {
	switch {
	case (f.weights == "") == (f.resume == ""):
		return cli.Usagef("sample: give the weights with --weights or --resume")
	case f.adapter != "" && f.weights == "":
		return cli.Usagef("--adapter needs --weights: the folder of the model that the adapter belongs to")
	case prompt == file:
		return cli.Usagef("sample: give the text to continue with --prompt or --prompt-file")
	case f.tokens < 1:
		return cli.Usagef("--max-tokens must be 1 or more")
	case f.threads < 0 || f.sequence < 0:
		return cli.Usagef("--threads and --sequence must be 0 or more")
	}
	if err := f.choice.Check(); err != nil {
		return cli.Usagef("--%v", err)
	}
	return nil
}

// sampleSource provides the model, the weights and the tokenizer.
type sampleSource struct {
	name    string
	model   lang.Model
	most    int64  // maximum number of tokens in a sequence; 0: any number
	folder  string // folder that may contain a tokenizer
	end     []uint32
	weights func(sequence int64) (sample.Weights, error) // opens the weights; the field close closes them
	close   func() error
}

func (f *sampleFlags) open() (*sampleSource, error) {
	if f.resume != "" {
		return f.openCheckpoint()
	}
	return openFolder(f.weights, f.adapter)
}

func (f *sampleFlags) openCheckpoint() (*sampleSource, error) {
	c, err := train.OpenCheckpoint(f.resume)
	if err != nil {
		return nil, noCheckpoint("--resume", f.resume, err)
	}
	s := &sampleSource{
		name: f.resume, model: lang.Model(c.Model), folder: c.Origin, close: c.Close,
		weights: func(int64) (sample.Weights, error) { return c, nil },
	}
	if c.Model.IsZero() {
		return nil, errors.Join(fmt.Errorf("%s does not name its model", f.resume), c.Close())
	}
	for _, t := range c.Weights() {
		if t.Name == "pos" {
			s.most = t.Shape[0]
		}
	}
	if model, err := hf.ReadModel(c.Origin); c.Origin != "" && err == nil {
		s.end, _ = model.EndTokens()
	}
	return s, nil
}

func openFolder(dir, adapter string) (*sampleSource, error) {
	model, err := readModel(dir)
	if err != nil {
		return nil, err
	}
	s := &sampleSource{name: dir, most: model.Context(), folder: dir, close: func() error { return nil }}
	if s.model, err = model.Lang(1<<10, ""); err != nil {
		return nil, err
	}
	if adapter != "" {
		if s.model, err = model.Adapted(adapter, s.model); err != nil {
			return nil, err
		}
	}
	if s.end, err = model.EndTokens(); err != nil {
		return nil, err
	}
	s.weights = func(sequence int64) (sample.Weights, error) {
		tensors := sample.Tensors(s.model, sequence)
		w, err := &startWeights{}, error(nil)
		if w.Weights, err = model.OpenWeights(hf.OfAdapter(tensors, false)); err != nil {
			return nil, err
		}
		s.close = w.Close
		if adapter != "" {
			if w.adapter, err = model.OpenAdapter(adapter, tensors, &s.model); err != nil {
				return nil, err
			}
		}
		for _, t := range hf.OfAdapter(tensors, false) {
			if w.Wider(t.Name, ir.BF16) {
				s.model.DType = "f32"
			}
		}
		return w, nil
	}
	return s, nil
}

// text opens the tokenizer. Without one, a model with a vocabulary of 256 tokens reads and writes bytes.
func (f *sampleFlags) text(env *cli.Env, s *sampleSource) (sample.Text, error) {
	path := f.tokenizer
	if path == "" && s.folder != "" && tokenizer.IsIn(s.folder) {
		path = s.folder
	}
	switch {
	case path != "":
		t, err := tokenizer.Open(path)
		if err != nil {
			return nil, err
		}
		note, err := ofModel(s.model.Vocab, t, path)
		if err != nil {
			return nil, err
		}
		if note != "" && f.tokenizer != "" { // a model's folder has the right tokenizer
			fmt.Fprintf(env.Stderr, "note: %s\n", note)
		}
		if eos, ok := t.EOS(); ok {
			s.end = append(s.end, eos)
		}
		return &sample.Tokens{Tokenizer: t}, nil
	case s.model.Vocab == 256:
		return &sample.Bytes{}, nil
	}
	return nil, fmt.Errorf("%s has no tokenizer, and the model's %d tokens are not bytes: give one with --tokenizer", s.name, s.model.Vocab)
}

// ofModel returns an error if a tokenizer cannot be that of a model with the given vocabulary, and a note if it is
// probably another one. Models often have up to paddedTo-1 tokens more, because their vocabulary is padded to a multiple.
func ofModel(vocab int, t *tokenizer.Tokenizer, path string) (note string, err error) {
	gap := vocab - t.Size()
	switch have := fmt.Sprintf("the model has %d tokens, but the tokenizer in %s has %d", vocab, path, t.Size()); {
	case max(gap, -gap) > max(512, vocab/10): // tokenizers may have tokens for other parts of a larger model
		return "", fmt.Errorf("%s: give the tokenizer that it was trained with", have)
	case gap < 0 || gap >= paddedTo:
		return have + ": is it the one that the model was trained with?", nil
	}
	return "", nil
}

// paddedTo is the largest multiple to which vocabularies are commonly padded, the default of Megatron-LM.
const paddedTo = 128

// maxPrompt is the size limit of a prompt's file in bytes.
const maxPrompt = 64 << 20

func (f *sampleFlags) readPrompt() (string, error) {
	if f.promptFile == "" {
		return f.prompt, nil
	}
	text, err := infile.Read(f.promptFile, maxPrompt)
	return string(text), err
}

// prepare reads the prompt and the weights.
func (f *sampleFlags) prepare(env *cli.Env, s *sampleSource, pool *simd.Pool) (*sample.Model, sample.Text, []int32, error) {
	text, err := f.text(env, s)
	if err != nil {
		return nil, nil, nil, err
	}
	start, err := f.readPrompt()
	if err != nil {
		return nil, nil, nil, err
	}
	prompt, err := text.Encode(start)
	if err != nil {
		return nil, nil, nil, err
	}
	n := int64(len(prompt))
	size := sample.Size{Tokens: n + f.tokens}
	switch {
	case n == 0:
		return nil, nil, nil, sample.ErrEmpty
	case int(slices.Max(prompt)) >= s.model.Vocab:
		return nil, nil, nil, fmt.Errorf("the prompt has token %d, but the model has only %d tokens: give the tokenizer that it was trained with", slices.Max(prompt), s.model.Vocab)
	case s.most > 0 && n >= s.most:
		return nil, nil, nil, fmt.Errorf("the prompt has %d tokens, but the model takes sequences of at most %d", n, s.most)
	case s.most > 0 && f.sequence > s.most:
		return nil, nil, nil, fmt.Errorf("--sequence %d: the model takes sequences of at most %d tokens", f.sequence, s.most)
	case s.most > 0:
		size.Tokens = min(size.Tokens, s.most)
	}
	size.Sequence = max(size.Tokens, f.sequence)
	size.Fits = func(need ir.Bytes) error {
		what := fmt.Sprintf("%s needs %s of memory for its weights and %s", s.name, need, words.Plural(size.Tokens, "token"))
		return f.free.check(need, what, "fewer --max-tokens or a smaller model")
	}
	weights, err := s.weights(size.Sequence)
	if err != nil {
		return nil, nil, nil, err
	}
	model, err := sample.Open(s.model, size, weights, pool)
	return model, text, prompt, err
}

func (f *sampleFlags) write(env *cli.Env, s *sampleSource) error {
	pool := simd.NewPool(f.threads)
	defer pool.Close()
	model, text, prompt, err := f.prepare(env, s, pool)
	if err != nil {
		return cli.Wrong(err)
	}
	defer model.Close()
	say := func(format string, args ...any) {
		if !f.quiet {
			fmt.Fprintf(env.Stderr, format+"\n", args...)
		}
	}
	say("%s on cpu, %s, %s: %s", s.name, words.Plural(pool.Threads(), "thread"), simd.ISA(), model.Bytes())
	began, open := time.Now(), false
	n, ended, err := model.Write(prompt, &sample.Request{Tokens: f.tokens, Choice: f.choice, End: s.end}, text, env.Context.Err, func(piece string) error {
		if piece == "" {
			return nil
		}
		open = !strings.HasSuffix(piece, "\n")
		_, err := io.WriteString(env.Stdout, piece)
		return err
	})
	if open {
		fmt.Fprintln(env.Stdout)
	}
	how := ""
	switch {
	case errors.Is(err, context.Canceled):
		how, err = ", then stopped", nil
	case ended:
		how = ", the last of which ends the text"
	case n < f.tokens:
		how = fmt.Sprintf("; the model takes sequences of at most %d", s.most)
	}
	seconds := time.Since(began).Seconds()
	say("%s in %.1f s after a prompt of %d%s", words.Plural(n, "token"), seconds, len(prompt), how)
	return err
}
