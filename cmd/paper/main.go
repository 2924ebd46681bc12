// Command paper works the evaluation of the SPPO paper out again, in virtual time, and writes docs/paper.md around it.
//
//	main.go    the command: simulate what is asked for, then write
//	jobs.go    the table of rows and systems, and the text of a job
//	run.go     from a job to its outcome; the longest sequence that fits
//	tables.go  outcomes as tables, beside what the paper says
//	plot.go    figures
//	write.go   results, tables and figures to files
//
// It knows nothing of how anything works: it compares, and quotes.
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
	only := flags.String("only", "", "simulate the jobs that match this expression alone, and keep what is known of the others; ^$ just writes")
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
	fmt.Fprintf(os.Stderr, "%d jobs and %d searches are on the page, those of today done in %s\n",
		len(known.Jobs), len(known.Longest), time.Since(begin).Round(time.Second))
	return known.write()
}
