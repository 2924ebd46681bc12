// Command paper repeats the evaluation of the SPPO paper in virtual time, and writes the figures of
// docs/paper.md.
//
//	main.go    the command: simulate the selected jobs, then write
//	jobs.go    the table of rows and systems, and the spec of a job
//	run.go     from a job to its outcome; the longest sequence that fits
//	tables.go  outcomes as tables, next to the paper's figures
//	plot.go    charts
//	write.go   results, tables and charts to files
//
// This code does not depend on how plans are made.
package main

import (
	"fmt"
	"os"
	"regexp"
	"time"

	"github.com/spf13/pflag"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "paper:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := pflag.NewFlagSet("paper", pflag.ContinueOnError)
	only := flags.String("only", "", "simulate only the jobs that match this expression, and keep the results of the others; ^$ only writes")
	if err := flags.Parse(args); err != nil {
		return err
	}
	wanted, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	known := &results{}
	if *only != "" {
		if known, err = readResults(); err != nil {
			return err
		}
	}
	begin := time.Now()
	if err := known.fill(wanted); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "%d jobs and %d searches are on the page; those simulated now took %s\n",
		len(known.Jobs), len(known.Longest), time.Since(begin).Round(time.Second))
	return known.write()
}
