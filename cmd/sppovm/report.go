package main

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/sppovm/internal/watch"
	"sppo.dev/internal/infile"
)

// maxLog is the size limit of a run's records in bytes.
const maxLog = 4 << 30

func report(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "write the page to this `FILE` (required)")
	cli.Files(flags, "output", "html")
	return func(env *cli.Env, args []string) error {
		if *out == "" {
			return cli.Usagef("report: give the output file with -o")
		}
		if err := cli.CheckOutput(*out, args...); err != nil {
			return err
		}
		file, size, err := infile.Open(args[0])
		if err != nil {
			return cli.Wrong(err)
		}
		defer file.Close()
		if size > maxLog {
			return cli.Usagef("%s has more than %d GiB", args[0], maxLog>>30)
		}
		log, err := watch.Read(io.LimitReader(file, maxLog))
		if err != nil {
			return cli.Wrong(fmt.Errorf("%s: %w", args[0], err))
		}
		name := filepath.Base(args[0])
		return cli.WriteFile(*out, func(w io.Writer) error { return watch.Report(w, strings.TrimSuffix(name, filepath.Ext(name)), log) })
	}
}
