package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/data/corpus/prepare"
	"sppo.dev/internal/data/tokenizer"
	"sppo.dev/internal/passes/words"
)

func tokenize(flags *pflag.FlagSet) cli.Action {
	var job prepare.Job
	flags.StringVarP(&job.Dir, "output", "o", "", "write the tokens to this folder")
	from := flags.String("tokenizer", "", "a tokenizer.json, a SentencePiece model, or a folder that contains either")
	flags.StringVar(&job.Field, "field", "text", "jsonl field or parquet column that contains the text")
	flags.StringVar(&job.Prompt, "prompt", "", "jsonl field with the prompt, which precedes the text of --field and is not trained on")
	flags.StringVar(&job.Segments, "segments", "", "jsonl field that contains the text of a document as segments, each marked as trained on or not, such as\n[{\"text\": \"Hi!\", \"train\": false}, {\"text\": \"Hello.\", \"train\": true}]")
	eos := flags.Bool("append-eos", false, "append the end-of-sequence token to each document")
	token := flags.String("eos", "", "the end-of-sequence token, if the tokenizer's folder does not specify it")
	flags.IntVar(&job.Workers, "workers", 0, "number of threads; 0: one per processor")
	return func(env *cli.Env, args []string) (err error) {
		if job.Dir == "" || *from == "" {
			return cli.Usagef("tokenize: give the output folder with -o and the tokenizer with --tokenizer")
		}
		if job.Prompt != "" && job.Segments != "" {
			return cli.Usagef("tokenize: give --prompt or --segments, not both")
		}
		if job.Tokenizer, err = tokenizer.Open(*from); err != nil {
			return cli.Wrong(err)
		}
		if job.EOS, err = endToken(job.Tokenizer, *from, *eos, *token); err != nil {
			return err
		}
		if job.Inputs, err = prepare.Inputs(args); err != nil {
			return cli.Wrong(err)
		}
		bar := newBar(env)
		job.Progress = func(p prepare.Progress) {
			bar.show(p.Read, p.Size, cli.Short(float64(p.Tokens))+" tokens")
		}
		m, err := job.Run(env.Context)
		bar.end()
		if err != nil {
			return stoppedOr(err, "the same command continues after the last complete shard")
		}
		mustWarn(env, job.Inputs)
		fmt.Fprintf(env.Stdout, "files: %s\n", summary(job.Inputs))
		fmt.Fprintf(env.Stdout, "%s: %s of type %s in %s\n", job.Dir, words.Plural(m.Tokens, "token"), m.Type, words.Plural(m.Documents, "document"))
		options := ""
		if m.Masks {
			options = ", masks = on"
		}
		fmt.Fprintf(env.Stdout, "to use them in a spec: data = tokens(%q%s), with model.vocab = %d or more\n", job.Dir, options, m.Vocab)
		return nil
	}
}

// endToken returns the token to append to each document, or -1 if none is requested.
func endToken(tok *tokenizer.Tokenizer, from string, wanted bool, name string) (int64, error) {
	if name != "" {
		id, ok := tok.ID(name)
		if !ok {
			return -1, cli.Usagef("--eos %s: %s has no such token", name, from)
		}
		return int64(id), nil
	}
	if !wanted {
		return -1, nil
	}
	id, ok := tok.EOS()
	if !ok {
		return -1, cli.Usagef("--append-eos: %s does not name the end-of-sequence token: give it with --eos", from)
	}
	return int64(id), nil
}

func trainTokenizer(flags *pflag.FlagSet) cli.Action {
	var job prepare.Training
	flags.StringVarP(&job.Dir, "output", "o", "", "write the tokenizer to this folder")
	flags.IntVar(&job.Vocab, "vocab", 32768, "number of tokens in the vocabulary")
	flags.StringVar(&job.Field, "field", "text", "jsonl field or parquet column that contains the text")
	limit := flags.Int64("limit", 1024, "read at most this many MiB of text; 0: all")
	flags.IntVar(&job.Workers, "workers", 0, "number of threads; 0: one per processor")
	return func(env *cli.Env, args []string) (err error) {
		if job.Dir == "" {
			return cli.Usagef("train-tokenizer: give the output folder with -o")
		}
		if job.Inputs, err = prepare.Inputs(args); err != nil {
			return cli.Wrong(err)
		}
		job.Limit = *limit << 20
		bar := newBar(env)
		job.Counted = func(read, size int64) { bar.show(read, size, "counted") }
		job.Merged = func(tokens int) { bar.show(int64(tokens), int64(job.Vocab), "tokens made") }
		result, err := job.Run(env.Context)
		bar.end()
		if err != nil {
			return stoppedOr(err, "nothing was written")
		}
		mustWarn(env, job.Inputs)
		fmt.Fprintf(env.Stdout, "files: %s\n", summary(job.Inputs))
		if !result.Whole {
			fmt.Fprintf(env.Stderr, "%s: %d MiB of text were read, and the rest was ignored: --limit 0 reads all of it\n",
				env.Name, result.Text>>20)
		}
		if result.Vocab < job.Vocab {
			fmt.Fprintf(env.Stderr, "%s: no pair of tokens occurs more than once in the text, so the vocabulary has only %d tokens\n",
				env.Name, result.Vocab)
		}
		fmt.Fprintf(env.Stdout, "%s: %d tokens from %d bytes of text, %d distinct words\n", job.Dir, result.Vocab, result.Text, result.Words)
		return nil
	}
}

// summary says what files there are, by the ends of their names, and how large they are.
func summary(inputs []prepare.Input) string {
	counts, bytes := map[string]int{}, int64(0)
	for i := range inputs {
		name := filepath.Base(inputs[i].Name)
		_, ending, dotted := strings.Cut(strings.TrimLeft(name, "."), ".")
		if parts := strings.Split(ending, "."); dotted {
			ending = "." + parts[len(parts)-1]
			if packed := ending == ".gz" || ending == ".zst"; packed && len(parts) > 1 {
				ending = "." + parts[len(parts)-2] + ending
			}
		} else {
			ending = "without an ending"
		}
		counts[ending]++
		bytes += inputs[i].Size()
	}
	var list []string
	for _, ending := range slices.Sorted(maps.Keys(counts)) {
		list = append(list, fmt.Sprintf("%d %s", counts[ending], ending))
	}
	if extra := len(list) - 10; extra > 0 {
		list = append(list[:10], fmt.Sprintf("and %d other endings", extra))
	}
	return fmt.Sprintf("%s in %s: %s", words.Plural(bytes, "byte"), words.Plural(int64(len(inputs)), "file"), strings.Join(list, ", "))
}

// mustWarn warns of files with bytes that are not UTF-8.
func mustWarn(env *cli.Env, inputs []prepare.Input) {
	const most = 5
	warned := 0
	for i := range inputs {
		if n := inputs[i].Invalid(); n > 0 {
			if warned++; warned <= most {
				fmt.Fprintf(env.Stderr, "%s: %s: %s not in UTF-8, read as U+FFFD\n", env.Name, inputs[i].Name, words.Plural(n, "byte"))
			}
		}
	}
	if warned > most {
		fmt.Fprintf(env.Stderr, "%s: %s with bytes that are not UTF-8\n", env.Name, words.Plural(int64(warned-most), "other file"))
	}
}

// stoppedOr turns the error of a job into that of the command: stopped by the user, an I/O failure, or invalid
// input.
func stoppedOr(err error, how string) error {
	var path *fs.PathError
	switch {
	case errors.Is(err, context.Canceled):
		return cli.Stopped("stopped: %s", how)
	case errors.As(err, &path):
		return err
	}
	return cli.Wrong(err)
}

// bar is a progress line on a terminal, overwritten in place.
type bar struct {
	to    io.Writer // nil: no terminal
	began time.Time
	shown time.Time
}

func newBar(env *cli.Env) *bar {
	b := &bar{began: time.Now()}
	if cli.IsTerminal(env.Stderr) {
		b.to = env.Stderr
	}
	return b
}

func (b *bar) show(done, all int64, what string) {
	if b.to == nil || time.Since(b.shown) < 100*time.Millisecond {
		return
	}
	b.shown = time.Now()
	share := float64(done) / float64(max(1, all))
	left := ""
	if took := time.Since(b.began); share > 0.01 {
		left = fmt.Sprintf(", %s left", time.Duration(float64(took)*(1-share)/share).Round(time.Second))
	}
	cli.Overwrite(b.to, fmt.Sprintf("%5.1f%%  %s%s", 100*share, what, left))
}

func (b *bar) end() {
	if b.to != nil && !b.shown.IsZero() {
		cli.Overwrite(b.to, "")
	}
}
