package main

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/data/corpus/prepare"
)

func checkData(flags *pflag.FlagSet) cli.Action {
	var o corpus.Options
	vocab := flags.Int("vocab", 0, "size of the vocabulary, which all tokens must be in; 0: any")
	flags.StringVar(&o.Type, "type", "auto", "type of the tokens in flat files: auto, uint16 or uint32")
	flags.StringVar(&o.Header, "header", "auto", "header of flat files: auto, none or llmc")
	flags.StringVar(&o.Field, "field", "text", "jsonl field or parquet column that contains the text")
	return func(env *cli.Env, args []string) error {
		if o.Type != "auto" && o.Type != "uint16" && o.Type != "uint32" {
			return cli.Usagef("check-data: --type %s: must be auto, uint16 or uint32", o.Type)
		}
		if o.Header != "auto" && o.Header != "none" && o.Header != "llmc" {
			return cli.Usagef("check-data: --header %s: must be auto, none or llmc", o.Header)
		}
		if *vocab < 0 {
			return cli.Usagef("check-data: --vocab %d: must be at least 0", *vocab)
		}
		damaged := 0
		for _, name := range args {
			out, err := prepare.Check(env.Context, name, o, *vocab)
			if env.Context.Err() != nil {
				return errors.New("stopped before everything was checked")
			}
			var path *fs.PathError
			switch {
			case errors.As(err, &path) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission):
				return err // the disk, for example
			case err != nil:
				return cli.Wrong(err)
			}
			for _, d := range out.Damage {
				fmt.Fprintln(env.Stdout, d)
			}
			damaged += len(out.Damage)
			if len(out.Damage) > 0 {
				continue
			}
			what := fmt.Sprintf("%d tokens", out.Tokens)
			if out.Tokens == 0 {
				what = fmt.Sprintf("%d documents", out.Documents)
			} else if out.Documents > 0 {
				what += fmt.Sprintf(" in %d documents", out.Documents)
			}
			how := "no damage found; the format has no checksums"
			if out.Sums {
				how = "all checksums are right"
			}
			fmt.Fprintf(env.Stdout, "%s: %s: %s\n", name, what, how)
		}
		if damaged > 0 {
			return fmt.Errorf("number of damaged files: %d", damaged)
		}
		return nil
	}
}
