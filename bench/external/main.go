// Command external compares training steps that others have measured and published with simulated steps of the same jobs,
// whose every setting is pinned. It prints a table and writes it into docs/predictions.md. With regular expressions as arguments, it
// predicts and prints only rows whose names match one of them, and the page stays as it is. With -replicas, it writes another table
// instead, of steps that nobody has measured.
//
//	main.go     the command
//	row.go      reads a row: a spec that begins with comments on its source
//	predict.go  plans and simulates it
//	table.go    the table and its summary
//	replicas.go steps with many replicas
//
// A folder of this one has the rows of one source; models and clusters have what they import, and missing.md lists published
// results that cannot be expressed. Nothing is fitted to a step that is then predicted: rates of kernels come from
// measurements of kernels, or from other sources' steps, and the cluster files say which.
package main

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "external:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if slices.Equal(args, []string{"-replicas"}) {
		text, err := replicasTable()
		if err != nil {
			return err
		}
		return rewrite("make replicas", text)
	}
	only := strings.Join(args, "|")
	wanted, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	rows, err := load(folder)
	if err != nil {
		return err
	}
	var done []row
	for _, r := range rows {
		if !wanted.MatchString(r.name) {
			continue
		}
		if err := r.predict(); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
		fmt.Println(r.line())
		done = append(done, r)
	}
	fmt.Print("\n", summary(done))
	if only != "" {
		return nil
	}
	missing, err := os.ReadFile(folder + "/missing.md")
	if err != nil {
		return err
	}
	return rewrite("make external", table(done)+"\n"+string(missing))
}
