package main

import (
	"cmp"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
)

// page is the page with the tables, each of which a command writes between two comments.
const page = "docs/predictions.md"

// line returns the row as text for a terminal.
func (r *row) line() string {
	return fmt.Sprintf("%-44s %10s %10s %+6.1f%%  memory %s / %s", r.name, stepText(r.measured), stepText(r.predicted), 100*r.error(), cmp.Or(r.memory, "-"), r.peakText())
}

// peakText returns the predicted peak of device memory.
func (r *row) peakText() string {
	text := fmt.Sprintf("%.1f GiB", r.peak)
	if !r.fits {
		text += ", does not fit"
	}
	return text
}

func stepText(s float64) string {
	if s < 10 {
		return fmt.Sprintf("%.0f ms", 1000*s)
	}
	return fmt.Sprintf("%.1f s", s)
}

// table returns the section of the page: a table for each source, and a summary.
func table(rows []row) string {
	var b strings.Builder
	b.WriteString(summary(rows))
	for i := range rows {
		r := &rows[i]
		source, name, _ := strings.Cut(r.name, "/")
		if i == 0 || !strings.HasPrefix(rows[i-1].name, source+"/") {
			fmt.Fprintf(&b, "\n**%s**: %s. Rates: %s.\n\n", source, r.fields["source"], r.fields["rates"])
			b.WriteString("| job | GPUs | measured | simulated | error | memory, measured | memory, simulated | note |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
		}
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %+.1f%% | %s | %s | %s |\n", name, r.gpus(), stepText(r.measured), stepText(r.predicted),
			100*r.error(), cmp.Or(r.memory, "-"), r.peakText(), r.fields["note"])
	}
	return b.String()
}

// gpus returns the number of GPUs of the job.
func (r *row) gpus() int {
	s := &r.spec.Schedule
	return max(1, s.SP) * max(1, s.PP) * max(1, s.DP)
}

// summary returns how many rows there are, and how large their errors are.
func summary(rows []row) string {
	var b strings.Builder
	for _, kind := range []struct {
		name string
		of   func(r *row) bool
	}{
		{"All rows", func(*row) bool { return true }},
		{"One node", func(r *row) bool { return r.gpus() <= r.spec.Cluster.GPUsPerNode }},
		{"Several nodes", func(r *row) bool { return r.gpus() > r.spec.Cluster.GPUsPerNode }},
	} {
		var off []float64
		for i := range rows {
			if kind.of(&rows[i]) {
				off = append(off, math.Abs(rows[i].error()))
			}
		}
		if len(off) == 0 {
			continue
		}
		slices.Sort(off)
		within := 0
		for _, x := range off {
			if x <= 0.12 {
				within++
			}
		}
		fmt.Fprintf(&b, "- %s: %d; the median of the absolute errors is %.1f%%, the largest %.1f%%; %d are within 12%%.\n", kind.name, len(off), 100*off[len(off)/2], 100*off[len(off)-1], within)
	}
	return b.String()
}

// rewrite replaces what a command writes into the page.
func rewrite(command, section string) error {
	old, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	begin, end := "<!-- written by "+command+": begin -->\n", "<!-- end -->\n"
	before, rest, found := strings.Cut(string(old), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		return fmt.Errorf("%s has no section %q ... %q", page, strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return os.WriteFile(page, []byte(before+begin+"\n"+section+"\n"+end+after), 0o644)
}
