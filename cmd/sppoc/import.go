package main

import (
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/hf"
)

func importModel(flags *pflag.FlagSet) cli.Action {
	write := specOutput(flags, "the model")
	return func(env *cli.Env, args []string) error {
		return write(env, args[0], func() (string, int64, error) {
			model, err := hf.ReadModel(args[0])
			if err != nil {
				return "", 0, cli.Wrong(err)
			}
			return fmt.Sprintf("# Imported from %s. Use it in a spec with `import`.\n%s", configOf(args[0]), model.Text()), 0, nil
		})
	}
}

func initSpec(flags *pflag.FlagSet) cli.Action {
	write := specOutput(flags, "the spec")
	set := cli.ShortFlags(flags)
	return func(env *cli.Env, args []string) error {
		return write(env, args[0], func() (string, int64, error) {
			spec, err := cli.LoadSpec(args[0], set())
			if err != nil {
				return "", 0, err
			}
			text, _, err := cli.ModelSpec(args[0], set())
			return fmt.Sprintf("# A job for the model of %s. sppoc explain describes each key.\n%s", configOf(args[0]), text), spec.Train.Sequence, err
		})
	}
}

func configOf(dir string) string { return filepath.ToSlash(filepath.Join(dir, hf.ConfigFile)) }

// specOutput defines the flags of a command that derives a text from a model folder. It returns a function that writes the text,
// and notes on stderr how training differs from the model's config; derive also returns the length of sequences, or 0.
func specOutput(flags *pflag.FlagSet, what string) func(env *cli.Env, dir string, derive func() (string, int64, error)) error {
	out := flags.StringP("output", "o", "", "write "+what+" to this file instead of standard output")
	force := flags.Bool("force", false, "replace the file if it exists")
	cli.Files(flags, "output", "sppo")
	return func(env *cli.Env, dir string, derive func() (string, int64, error)) error {
		if *out != "" {
			if err := newFile(*out, filepath.Join(dir, hf.ConfigFile), *force); err != nil {
				return err
			}
		}
		text, sequence, err := derive()
		if err != nil {
			return err
		}
		if *out == "" {
			_, err = io.WriteString(env.Stdout, text)
		} else {
			err = cli.WriteFile(*out, func(w io.Writer) error {
				_, err := io.WriteString(w, text)
				return err
			})
		}
		cli.NoteModel(env, dir, sequence)
		return err
	}
}
