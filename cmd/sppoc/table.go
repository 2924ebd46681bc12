package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// This file writes the table of compare as text.

// Widths of the table. A table that is wider than tableWidth continues in further blocks, which repeat the columns that name
// the lines.
const (
	tableWidth = 120
	cellWidth  = 32 // longer cells continue in the next line
	columnGap  = "  "
)

// tableColumn is a column of the table.
type tableColumn struct {
	head string
	key  string // of the value, if it is that of a key; a column of its own for this key replaces this one
	cell func(*result) string
}

// settingColumns are the columns that are only shown if the lines differ in them.
var settingColumns = []tableColumn{
	{"sequence", "train.sequence", func(r *result) string { return tokens(r.Sequence) }},
	{"dp/pp/sp", "", func(r *result) string { return strings.ReplaceAll(r.Layout, " x ", "/") }},
	{"N", "schedule.subsequences", func(r *result) string { return fmt.Sprint(r.Subsequences) }},
	{"m", "train.batch", func(r *result) string { return fmt.Sprint(r.Batch) }},
}

// figures returns the columns of simulated figures: those that every first block shows, and the others.
func figures(rows []result) (first, others []tableColumn) {
	peak := func(a ir.Arena, of func(*result) ir.Bytes) func(*result) string {
		return func(r *result) string {
			text := of(r).String()
			if of(r) > r.capacity[a] {
				text += tooMuch
			}
			return text
		}
	}
	one := map[string]float64{} // rate of the first line of each group
	for i := range rows {
		if r := &rows[i]; r.Error == "" && one[r.group] == 0 {
			one[r.group] = r.rate()
		}
	}
	first = []tableColumn{
		{"step", "", func(r *result) string { return ir.Seconds(r.StepS).String() }},
		{"speed", "", func(r *result) string { return fmt.Sprintf("%.2f", r.rate()/one[r.group]) }},
		{"MFU", "", func(r *result) string { return fmt.Sprintf("%.1f%%", 100*r.MFU) }},
		{"device", "", peak(ir.Device, func(r *result) ir.Bytes { return r.DevicePeak })},
		{"host", "", peak(ir.Host, func(r *result) ir.Bytes { return r.HostPeak })},
	}
	return first, []tableColumn{
		{"tokens/s", "", func(r *result) string { return cli.Short(r.TGS) }},
		{"bubble", "", func(r *result) string { return fmt.Sprintf("%.1f%%", 100*r.BubbleRatio) }},
		{"exposed", "", func(r *result) string { return ir.Seconds(r.ExposedS).String() }},
	}
}

// inUse returns a column with the GPUs in use if a line leaves some idle.
func inUse(rows []result) []tableColumn {
	if !slices.ContainsFunc(rows, func(r result) bool { return r.GPUs > r.Ranks }) {
		return nil
	}
	return []tableColumn{{"in use", "", func(r *result) string { return fmt.Sprintf("%d of %d", r.Ranks, r.GPUs) }}}
}

// tooMuch marks a peak that exceeds the memory of a rank.
const tooMuch = "*"

// names returns the columns that name the lines.
func names(rows []result) (out []tableColumn) {
	if !oneJob(rows) || len(rows[0].Set) == 0 {
		out = append(out, tableColumn{"job", "", (*result).job})
	}
	for i, s := range rows[0].Set {
		key, _, _ := strings.Cut(s, "=")
		out = append(out, tableColumn{keyName(key), key, func(r *result) string {
			_, value, _ := strings.Cut(r.Set[i], "=")
			if chosen := r.decided(key); value == "auto" && chosen != "" {
				value += ": " + chosen
			}
			return value
		}})
	}
	return out
}

// columnsOf returns the columns after the names: what the plans do with saved activations, figures, sizes, and other decisions.
// The values that all lines share are in same.
func columnsOf(rows []result, names []tableColumn) (out []tableColumn, same []string) {
	var done []*result
	for i := range rows {
		if rows[i].Error == "" {
			done = append(done, &rows[i])
		}
	}
	var settings []tableColumn
	for _, c := range append(inUse(rows), settingColumns...) {
		value := c.cell(done[0])
		switch {
		case c.key != "" && slices.ContainsFunc(names, func(n tableColumn) bool { return n.key == c.key }):
		case len(rows) == 1, slices.ContainsFunc(done, func(r *result) bool { return c.cell(r) != value }):
			settings = append(settings, c)
		default:
			same = append(same, c.head+" = "+value)
		}
	}
	differ, agree := decisions(rows, names)
	var placements, others []tableColumn
	for _, key := range differ {
		c := tableColumn{keyName(key), key, func(r *result) string { return r.decided(key) }}
		if slices.Contains([]string{"schedule.recompute", "schedule.offload"}, key) {
			placements = append(placements, c)
		} else {
			others = append(others, c)
		}
	}
	main, rest := figures(rows)
	return slices.Concat(placements, main, settings, rest, others), append(same, agree...)
}

// decisions returns the keys in which the plans differ and those in which they agree. Neither list contains keys with a column of
// their own, or keys that have the default value in all plans.
func decisions(rows []result, names []tableColumn) (differ, same []string) {
	skip := []string{"schedule.dp", "schedule.pp", "schedule.sp", "schedule.subsequences"}
	for _, c := range names {
		skip = append(skip, c.key)
	}
	var planned []*result
	var keys []string
	for i := range rows {
		r := &rows[i]
		if len(r.Schedule) == 0 {
			continue
		}
		planned = append(planned, r)
		for _, s := range r.Schedule {
			if key, _, _ := strings.Cut(s, "="); !slices.Contains(skip, key) && !slices.Contains(keys, key) {
				keys = append(keys, key)
			}
		}
	}
	for _, key := range keys {
		value := planned[0].decided(key)
		if slices.ContainsFunc(planned, func(r *result) bool { return r.decided(key) != value }) {
			differ = append(differ, key)
		} else if value != lang.FindKey(key).Default {
			same = append(same, keyName(key)+" = "+value)
		}
	}
	return differ, same
}

func compareText(w io.Writer, rows []result) error {
	names := names(rows)
	columns, same := columnsOf(rows, names)
	var out strings.Builder
	for len(columns) > 0 {
		block, n := names, 0
		for n < len(columns) && (n == 0 || blockWidth(rows, append(block, columns[n])) <= tableWidth) {
			block = append(block[:len(block):len(block)], columns[n])
			n++
		}
		writeBlock(&out, rows, block)
		out.WriteByte('\n')
		columns = columns[n:]
	}
	for _, remark := range remarks(rows, same) {
		out.WriteString(cli.Wrap(remark, ""))
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// cells returns the cells of a column for all lines that could be compiled, after its head. Each consists of one or more lines.
func (c *tableColumn) cells(rows []result) [][]string {
	out := [][]string{{c.head}}
	for i := range rows {
		if rows[i].Error == "" {
			out = append(out, folded(c.cell(&rows[i])))
		}
	}
	return out
}

// width returns the width of the widest line of a column.
func (c *tableColumn) width(rows []result) (width int) {
	for _, cell := range c.cells(rows) {
		for _, line := range cell {
			width = max(width, utf8.RuneCountInString(line))
		}
	}
	return width
}

func blockWidth(rows []result, columns []tableColumn) int {
	width := -len(columnGap)
	for i := range columns {
		width += len(columnGap) + columns[i].width(rows)
	}
	return width
}

// writeBlock writes a block of columns.
func writeBlock(out *strings.Builder, rows []result, columns []tableColumn) {
	var cells [][][]string // by column, line, and line of the cell
	for i := range columns {
		cells = append(cells, columns[i].cells(rows))
	}
	for i := range cells[0] {
		height := 0
		for c := range cells {
			height = max(height, len(cells[c][i]))
		}
		for h := range height {
			var line strings.Builder
			for c := range cells {
				text := ""
				if h < len(cells[c][i]) {
					text = cells[c][i][h]
				}
				fmt.Fprintf(&line, "%-*s%s", columns[c].width(rows), text, columnGap)
			}
			out.WriteString(strings.TrimRight(line.String(), " ") + "\n")
		}
	}
}

// folded breaks a cell into lines of at most cellWidth, after a comma, a space, a hyphen or an underscore if there is one.
func folded(text string) (lines []string) {
	for len(text) > cellWidth {
		cut := strings.LastIndexAny(text[:cellWidth], ", -_") + 1
		if cut == 0 {
			cut = cellWidth
		}
		lines = append(lines, text[:cut])
		text = text[cut:]
	}
	return append(lines, text)
}

// remarks returns the texts after the table: the meaning of its columns, what all lines have in common, the fastest lines, and the
// lines that could not be compiled.
func remarks(rows []result, same []string) (out []string) {
	text := "Simulated. N: subsequences per sequence; m: sequences per step; device, host: peak memory of a rank; tokens/s: of a rank"
	grouped := slices.ContainsFunc(rows, func(r result) bool { return r.baseline != "" })
	switch {
	case grouped:
		text += "; speed: relative to the job with its own schedule"
	case len(rows) > 1:
		text += "; speed: tokens per second of all ranks, relative to the first line"
	}
	if len(inUse(rows)) > 0 {
		text += "; in use: ranks, of those that the cluster has; MFU: of the ranks in use"
	}
	out = append(out, text+".")
	if text := overCapacity(rows); text != "" {
		out = append(out, text)
	}
	if len(same) > 0 {
		out = append(out, fmt.Sprintf("The same in all lines: %s.", strings.Join(same, ", ")))
	}
	if text := unlikeLengths(rows); text != "" {
		out = append(out, text)
	}
	switch {
	case grouped:
		out = append(out, advantages(rows)...)
	case len(rows) > 1:
		out = append(out, fastest(rows))
	}
	return append(out, failures(rows)...)
}

// overCapacity explains the mark of peaks that exceed the memory of a rank, if there are any.
func overCapacity(rows []result) string {
	over := func(r result) bool { return r.Error == "" && !r.Fits }
	i := slices.IndexFunc(rows, over)
	if i < 0 {
		return ""
	}
	has := rows[i].capacity
	if slices.ContainsFunc(rows, func(r result) bool { return over(r) && r.capacity != has }) {
		return tooMuch + ": more than a rank has; the job does not fit."
	}
	return fmt.Sprintf("%s: more than a rank has, which is %s of device memory and %s of host memory; the job does not fit.", tooMuch, has[ir.Device], has[ir.Host])
}

// unlikeLengths returns a sentence if jobs differ in the length of their sequences although no line of the table names it.
func unlikeLengths(rows []result) string {
	var lengths []string
	var first *result
	differ := false
	for i := range rows {
		r := &rows[i]
		if r.Error != "" || slices.ContainsFunc(r.Set, func(s string) bool { return strings.HasPrefix(s, "train.sequence=") }) {
			continue
		}
		if first == nil {
			first = r
		}
		differ = differ || r.Sequence != first.Sequence
		if text := r.job() + " " + tokens(r.Sequence); !slices.Contains(lengths, text) {
			lengths = append(lengths, text)
		}
	}
	if !differ {
		return ""
	}
	return fmt.Sprintf("The jobs have sequences of different lengths: %s; --sequence gives all of them the same.", strings.Join(lengths, ", "))
}

// advantages compares, in each group, the speed of the job's own schedule with that of the fastest baseline that fits.
func advantages(rows []result) (out []string) {
	for i := range rows {
		own := &rows[i]
		if own.baseline != "" {
			continue
		}
		var best *result
		for j := range rows {
			if r := &rows[j]; r.group == own.group && r.baseline != "" && r.Error == "" && r.Fits && (best == nil || r.rate() > best.rate()) {
				best = r
			}
		}
		text := "With its own schedule, the job is "
		if words := strings.TrimSpace(strings.TrimSuffix(own.label(oneJob(rows)), "schedule="+ownSchedule)); words != "" {
			text = words + ": "
		}
		switch {
		case own.Error != "" || !own.Fits:
			text += "without a plan that fits"
		case best == nil:
			text += "the only one that fits"
		default:
			text += fmt.Sprintf("%.2f times as fast as with %s, the fastest baseline that fits", own.rate()/best.rate(), best.baseline)
		}
		if best != nil && (own.Error != "" || !own.Fits) {
			text += "; " + best.baseline + " is the fastest baseline that fits"
		}
		out = append(out, text+".")
	}
	return out
}

// tie is the relative difference below which two speeds are considered equal.
const tie = 1e-3

// fastest names the lines that fit and whose speed ties with the best.
func fastest(rows []result) string {
	best := 0.0
	for i := range rows {
		if r := &rows[i]; r.Error == "" && r.Fits {
			best = max(best, r.rate())
		}
	}
	if best == 0 {
		return "None of them fits."
	}
	var names []string
	for i := range rows {
		if r := &rows[i]; r.Error == "" && r.Fits && r.rate() >= (1-tie)*best {
			names = append(names, r.label(oneJob(rows)))
		}
	}
	if len(names) == 1 {
		return fmt.Sprintf("The fastest that fits: %s.", names[0])
	}
	return fmt.Sprintf("The fastest that fit, within %g%% of each other: %s.", 100*tie, strings.Join(names, "; "))
}

// failures names the lines that could not be compiled, with the reason.
func failures(rows []result) (out []string) {
	heard := map[string]bool{}
	for i := range rows {
		why := rows[i].Error
		if why == "" || heard[why] {
			continue
		}
		heard[why] = true
		var names []string
		for j := range rows[i:] {
			if r := &rows[i+j]; r.Error == why {
				names = append(names, r.label(oneJob(rows)))
			}
		}
		out = append(out, fmt.Sprintf("Not compiled: %s: %s", strings.Join(names, "; "), why))
	}
	return out
}
