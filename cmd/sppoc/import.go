package main

import (
	"fmt"
	"io"
	"path/filepath"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/hf"
)

func importModel(flags *pflag.FlagSet) cli.Action {
	write := specOutput(flags, "the model")
	return func(env *cli.Env, args []string) error {
		return write(env, args[0], func() (string, *hf.Model, error) {
			model, err := hf.ReadModel(args[0])
			if err != nil {
				return "", nil, cli.Wrong(err)
			}
			return fmt.Sprintf("# Imported from %s. Use it in a spec with `import`.\n%s", configOf(args[0]), model.Text()), model, nil
		})
	}
}

func initSpec(flags *pflag.FlagSet) cli.Action {
	write := specOutput(flags, "the spec")
	set := cli.ShortFlags(flags)
	return func(env *cli.Env, args []string) error {
		return write(env, args[0], func() (string, *hf.Model, error) {
			spec, err := cli.LoadSpec(args[0], set())
			if err != nil {
				return "", nil, err
			}
			text, model, err := cli.ModelSpec(args[0], set())
			cli.NoteLength(env, args[0], spec.Train.Sequence)
			return fmt.Sprintf("# A job for the model of %s. sppoc explain describes each key.\n%s", configOf(args[0]), text), model, err
		})
	}
}

func configOf(dir string) string { return filepath.ToSlash(filepath.Join(dir, hf.ConfigFile)) }

// specOutput defines the flags of a command that derives a text from a model folder. It returns a function that writes the text.
func specOutput(flags *pflag.FlagSet, what string) func(env *cli.Env, dir string, text func() (string, *hf.Model, error)) error {
	out := flags.StringP("output", "o", "", "write "+what+" to this file instead of standard output")
	force := flags.Bool("force", false, "replace the file if it exists")
	cli.Files(flags, "output", "sppo")
	return func(env *cli.Env, dir string, derive func() (string, *hf.Model, error)) error {
		if *out != "" {
			if err := newFile(*out, filepath.Join(dir, hf.ConfigFile), *force); err != nil {
				return err
			}
		}
		text, model, err := derive()
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
		for _, notice := range model.Notices {
			fmt.Fprintf(env.Stderr, "note: %s\n", notice)
		}
		return err
	}
}
