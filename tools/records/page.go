package main

import (
	"fmt"
	"regexp"
	"strings"
)

// page is the output file, relative to the root of the repository.
const page = "docs/records.md"

const intro = `# Published records and predictions

This page is written by ` + "`make records`" + `. It compares published results of training on very long sequences with the plans that ` + "`sppoc`" + `
makes for the same model and hardware when every choice is left to it, with one sequence per step unless the job says otherwise. **All
our figures are simulated**: no such job has run. The clusters are those of ` + "`internal/shipped/clusters`" + `, with 2 TB of host memory per node, all of which the
job can use. Their kernel rates are measurements by others or assumptions; the cluster files say which.

- *fits*: whether the published number of tokens fits here. If it does not, the other figures are those of the longest sequence that
  fits, in steps of 64K tokens.
- *MFU*: model FLOPs divided by the peak. Model FLOPs are three times those of the forward pass, with causal attention. Publications may
  count FLOPs differently.
- *ceiling*: the speed of the published job's arithmetic alone, with each operation performed once at the assumed rates of the
  kernels. No schedule exceeds this speed. A published figure above it means that the assumed rates are too low, or that FLOPs are
  counted differently.

`

const head = "| record | job | published | fits here | tokens | step, simulated | tokens/s per GPU, simulated | MFU, simulated | ceiling: tokens/s per GPU | ceiling: MFU |\n" +
	"| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"

const formula = `
In seconds per token and GPU, the ceiling is the following expression. M and A are the forward FLOPs per token of matmuls and of
causal attention, and each e is the best efficiency of the cluster for that kind of kernel:

    (3 M / e_matmul + A / e_attention + 2.5 A / e_attention_grad) / peak

The backward kernel of attention recomputes the scores, so it takes 2.5 times the FLOPs of the forward kernel. MFU counts only 2 times.

## Sources, and why the figures differ

`

// render returns the page. Rows that are not selected are copied from the old page.
func render(old string, wanted *regexp.Regexp) (string, error) {
	var b strings.Builder
	b.WriteString(intro + head)
	for i := range records {
		r := &records[i]
		row, known := rowOf(old, r)
		if !known || wanted.MatchString(r.name) {
			p, err := r.predict()
			if err != nil {
				return "", fmt.Errorf("%s: %w", r.name, err)
			}
			row = r.row(&p)
		}
		b.WriteString(row)
	}
	section, err := fair(old, wanted)
	if err != nil {
		return "", err
	}
	b.WriteString(formula)
	for _, r := range records {
		fmt.Fprintf(&b, "- **%s** (%s). %s\n", r.name, r.source, r.why)
	}
	b.WriteString(section)
	return b.String(), nil
}

// begin returns the start of a row: everything that is not predicted.
func (r *record) begin() string { return fmt.Sprintf("| %s | %s | %s |", r.name, r.job, r.claim) }

// rowOf returns the row of a record in a page, and whether there is one.
func rowOf(text string, r *record) (string, bool) {
	for _, line := range strings.SplitAfter(text, "\n") {
		if strings.HasPrefix(line, r.begin()) {
			return line, true
		}
	}
	return "", false
}

func (r *record) row(p *prediction) string {
	fits := "no"
	if p.fits {
		fits = "yes"
	}
	cells := " none | | | |"
	if p.sequence > 0 {
		cells = fmt.Sprintf(" %s | %s s | %.4g | %.1f%% |", count(p.sequence), seconds(p.stepS), p.tgs, 100*p.mfu)
	}
	return fmt.Sprintf("%s %s |%s %.4g | %.1f%% |\n", r.begin(), fits, cells, p.ceiling.tgs, 100*p.ceiling.mfu)
}

// count writes a number of tokens with K or M (powers of 1024) if that is exact.
func count(tokens int64) string {
	switch {
	case tokens%(1<<20) == 0:
		return fmt.Sprintf("%dM", tokens>>20)
	case tokens%(1<<10) == 0:
		return fmt.Sprintf("%dK", tokens>>10)
	}
	return fmt.Sprint(tokens)
}

// seconds writes a time with four digits, or with all digits before the decimal point if there are more.
func seconds(s float64) string {
	if s >= 1e4 {
		return fmt.Sprintf("%.0f", s)
	}
	return fmt.Sprintf("%.4g", s)
}
