package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"sppo.dev"
	"sppo.dev/lang"
)

// folder is the folder of the rows, relative to the root of the repository.
const folder = "bench/external"

// row is a measured step and its prediction.
type row struct {
	name   string // folder and file, without the extension
	fields map[string]string
	spec   *lang.Spec

	measured float64 // seconds of a step
	memory   string  // measured peak of a device; empty: unknown

	predicted float64 // seconds of a step
	peak      float64 // GiB of device memory
	fits      bool
}

// required lists the comments with which every row begins, as `# source: ...`. `# memory:` and `# note:` may follow: the measured
// peak of a device, and what differs from the measured program.
var required = []string{"source", "measured", "rates"}

// load reads all rows, in the order of their names.
func load(root string) ([]row, error) {
	files, err := filepath.Glob(filepath.Join(root, "*", "*.sppo"))
	if err != nil {
		return nil, err
	}
	var rows []row
	for _, f := range files {
		if of := filepath.Base(filepath.Dir(f)); of == "models" || of == "clusters" {
			continue
		}
		r, err := read(f)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		r.name = strings.TrimSuffix(filepath.ToSlash(strings.TrimPrefix(f, root+string(filepath.Separator))), ".sppo")
		rows = append(rows, r)
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Compare(a.name, b.name) })
	return rows, nil
}

// read reads a row's file.
func read(file string) (row, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return row{}, err
	}
	r := row{fields: fieldsOf(string(text))}
	for _, f := range required {
		if r.fields[f] == "" {
			return row{}, fmt.Errorf("no comment `# %s: ...`", f)
		}
	}
	if r.spec, err = sppo.Parse(file, text); err != nil {
		return row{}, err
	}
	r.memory = r.fields["memory"]
	r.measured, err = seconds(r.fields["measured"], r.spec)
	return r, err
}

// fieldsOf returns the comments at the beginning of a text, `# name: value`. A line that begins with `#   ` continues the value.
func fieldsOf(text string) map[string]string {
	fields, last := map[string]string{}, ""
	for line := range strings.Lines(text) {
		comment, ok := strings.CutPrefix(strings.TrimSpace(line), "# ")
		if !ok {
			break
		}
		if more, ok := strings.CutPrefix(comment, "  "); ok {
			fields[last] += " " + strings.TrimSpace(more)
			continue
		}
		name, value, _ := strings.Cut(comment, ": ")
		fields[name], last = value, name
	}
	return fields
}

// seconds returns the duration of a step that was measured as `725.5 ms`, `380 s`, or `4062 tokens/s per GPU`.
func seconds(text string, s *lang.Spec) (float64, error) {
	number, unit, _ := strings.Cut(text, " ")
	if unit == "tokens/s per GPU" {
		rate, err := strconv.ParseFloat(number, 64)
		ranks := max(1, s.Schedule.SP) * max(1, s.Schedule.PP) * max(1, s.Schedule.DP)
		return float64(s.Train.Sequence) * float64(s.Train.Batch) / rate / float64(ranks), err
	}
	d, err := time.ParseDuration(number + unit)
	return d.Seconds(), err
}
