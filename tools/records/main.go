// Command records writes docs/records.md: published results of training on very long sequences, compared with the
// compiler's predictions for the same jobs on the same hardware.
//
//	main.go     the command
//	table.go    the records: publication, job as a spec, why the figures differ
//	predict.go  plans, compiles and simulates a record's job, and computes its ceiling
//	page.go     the page, with its text
//	fair.go     compares a job with the schedules of other systems
package main

import (
	"fmt"
	"os"
	"regexp"

	"github.com/spf13/pflag"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "records:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := pflag.NewFlagSet("records", pflag.ContinueOnError)
	only := flags.String("only", "", "predict only the records that match this expression, and keep the other rows of the page; baselines selects the comparison with other schedules")
	if err := flags.Parse(args); err != nil {
		return err
	}
	wanted, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	old, err := os.ReadFile(page)
	if err != nil && *only != "" {
		return err
	}
	text, err := render(string(old), wanted)
	if err != nil {
		return err
	}
	return os.WriteFile(page, []byte(text), 0o644)
}
