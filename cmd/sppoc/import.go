package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/hf"
)

func importModel(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "write the model to this file instead of standard output")
	force := flags.Bool("force", false, "replace the file if it exists")
	cli.Files(flags, "output", "sppo")
	return func(env *cli.Env, args []string) error {
		if *out != "" {
			if err := cli.CheckOutput(*out, filepath.Join(args[0], hf.ConfigFile)); err != nil {
				return err
			}
			if _, err := os.Lstat(*out); err == nil && !*force {
				return cli.Usagef("%s already exists: --force replaces it", *out)
			}
		}
		model, err := hf.ReadModel(args[0])
		if err != nil {
			return cli.Wrong(err)
		}
		text := fmt.Sprintf("# Imported from %s. Use it in a spec with `import`.\n%s", filepath.ToSlash(filepath.Join(args[0], hf.ConfigFile)), model.Text())
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
