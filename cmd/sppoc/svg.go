package main

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"math"
	"regexp"
	"strings"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
	"sppo.dev/vm/sim"
)

// Dimensions of a figure, in pixels.
const (
	figureLabels = 110
	figurePlot   = 1000
	figureRow    = 12
	figureTitle  = 22
)

// showNames gives the colour name and the meaning of each kind of span, in the order of the kinds' numbers.
var showNames = [...][2]string{
	{"forward", "forward"}, {"backward", "backward"}, {"other", "optimizer and other"}, {"d2h", "copy to host"},
	{"h2d", "copy to device"}, {"collective", "collective"}, {"message", "message"}, {"bubble", "bubble"},
	{"exposed", "exposed transfer"}, {"collwait", "waiting for collective"}, {"weights", "deferred weight gradients"},
}

// colour returns a colour of the page's light theme.
func colour(name string) string {
	m := regexp.MustCompile(`--` + name + `: (#[0-9a-f]+);`).FindStringSubmatch(pageStyle)
	if m == nil {
		panic("internal: the page has no colour " + name)
	}
	return m[1]
}

// figure is an SVG that grows downwards.
type figure struct {
	body strings.Builder
	y    int
}

func (f *figure) text(x, y int, anchor, style, text string) {
	fmt.Fprintf(&f.body, `<text x="%d" y="%d" text-anchor="%s" style="%s">%s</text>`+"\n", x, y, anchor, style, html.EscapeString(text))
}

func (f *figure) write(w io.Writer) error {
	b := bufio.NewWriter(w)
	width := figureLabels + figurePlot + 20
	fmt.Fprintf(b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="10" fill="%s">`+"\n",
		width, f.y+8, width, f.y+8, colour("text"))
	fmt.Fprintf(b, `<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2" height="4" fill="%s"/></pattern></defs>`+"\n", colour("bubble"))
	fmt.Fprintf(b, `<rect width="100%%" height="100%%" fill="%s"/>`+"\n", colour("back"))
	if _, err := b.WriteString(f.body.String()); err != nil {
		return err
	}
	b.WriteString("</svg>\n") // errors are kept until Flush
	return b.Flush()
}

// legend lists the kinds of spans that occur.
func (f *figure) legend(seen [len(showNames)]bool) {
	x := figureLabels
	f.y += 18
	for k, n := range showNames {
		if !seen[k] {
			continue
		}
		wide := 30 + 6*len(n[1])
		if x+wide > figureLabels+figurePlot {
			x, f.y = figureLabels, f.y+14
		}
		fmt.Fprintf(&f.body, `<rect x="%d" y="%d" width="9" height="9" fill="%s"/>`+"\n", x, f.y-9, fill(k))
		f.text(x+13, f.y-1, "start", "", n[1])
		x += wide
	}
	f.y += 4
}

func fill(kind int) string {
	if kind == showBubble {
		return "url(#hatch)"
	}
	return colour(showNames[kind][0])
}

// axis marks round times below all rows.
func (f *figure) axis(makespan ir.Seconds) {
	f.y += 12
	order := math.Pow(10, math.Floor(math.Log10(float64(makespan)/4)))
	step := order
	for _, factor := range []float64{2, 5, 10} {
		if step*9 < float64(makespan) {
			step = factor * order
		}
	}
	unit, name := 1.0, "s"
	for _, u := range []string{"ms", "us", "ns"} {
		if float64(makespan) < unit {
			unit, name = unit/1000, u
		}
	}
	for at := 0.0; at <= float64(makespan)*(1+1e-9); at += step {
		x := figureLabels + int(pixels(ir.Seconds(at), makespan))
		fmt.Fprintf(&f.body, `<path d="M%d %dv4" stroke="%s"/>`+"\n", x, f.y-10, colour("soft"))
		f.text(x, f.y+4, "middle", "", fmt.Sprintf("%.4g %s", at/unit, name))
	}
	f.y += 6
}

// timelineFigure draws the timelines of the given ranks for print.
func timelineFigure(w io.Writer, title string, p *ir.Program, t *sim.Timeline, ranks []int) error {
	f := &figure{y: figureTitle}
	f.text(figureLabels, 14, "start", "font-size:12px;font-weight:600",
		fmt.Sprintf("%s, simulated on %s: %s a step, MFU %.1f%%, bubble %.1f%%", title, p.Machine.Name, t.Makespan, 100*t.MFU(), 100*t.BubbleRatio()))
	var seen [len(showNames)]bool
	for _, r := range ranks {
		code := &p.Codes[p.Ranks[r].Code]
		spans := t.Rank(r).Spans
		kinds := spanKinds(code, spans)
		f.y += 6
		f.text(4, f.y+9, "start", "font-weight:600", fmt.Sprintf("rank %d", r))
		f.tasks(code, spans, t.Makespan)
		for s := range ir.NumStreams {
			if f.stream(code, spans, kinds, s, t.Makespan, &seen) {
				f.text(figureLabels-6, f.y+9, "end", "", s.String())
				f.y += figureRow
			}
		}
	}
	f.axis(t.Makespan)
	f.legend(seen)
	return f.write(w)
}

// taskNames selects the properties that the names of tasks contain: those that differ among the tasks of the ranks
// that run the same code. The page names tasks by the same rule.
type taskNames struct{ microbatch, subsequence, stage bool }

// For each phase that a task can have, taskKinds gives the kind of span, which determines the colour, and
// taskLetters gives the first letter of the task's name.
var (
	taskKinds   = map[ir.Phase]int{ir.PhaseForward: showForward, ir.PhaseBackward: showBackward, ir.PhaseWeights: showWeights}
	taskLetters = map[ir.Phase]string{ir.PhaseForward: "F", ir.PhaseBackward: "B", ir.PhaseWeights: "W"}
)

func taskNamesOf(code *ir.Code) (n taskNames) {
	var first *ir.Provenance
	for pc := range code.Sections[ir.SectionStep] {
		v := &code.Sections[ir.SectionStep][pc].Prov
		if taskLetters[v.Phase] == "" || v.Subsequence < 0 {
			continue
		}
		if first == nil {
			first = v
		}
		n.microbatch = n.microbatch || v.Microbatch != first.Microbatch
		n.subsequence = n.subsequence || v.Subsequence != first.Subsequence
		n.stage = n.stage || v.Stage != first.Stage
	}
	return n
}

// of returns the name of a task, and whether it has a lighter shade.
func (n taskNames) of(v ir.Provenance) (name string, light bool) {
	at := v.Subsequence
	name = taskLetters[v.Phase]
	switch {
	case n.microbatch && n.subsequence:
		name += fmt.Sprintf("%d.", v.Microbatch)
	case n.microbatch:
		at = v.Microbatch
	}
	name += fmt.Sprint(at)
	if n.stage {
		name += fmt.Sprintf("@%d", v.Stage)
	}
	return name, at%2 == 1
}

// tasks draws a bar for each series of kernels of the same task, in alternating shades, with the task's name if
// there is space.
func (f *figure) tasks(code *ir.Code, spans []sim.Span, makespan ir.Seconds) {
	names := taskNamesOf(code)
	var of ir.Provenance
	var from, to ir.Seconds
	draw := func() {
		kind, ok := taskKinds[of.Phase]
		if !ok || to <= from {
			return
		}
		name, light := names.of(of)
		opacity := 1.0
		if light {
			opacity = 0.6
		}
		x, width := figureLabels+pixels(from, makespan), pixels(to-from, makespan)
		fmt.Fprintf(&f.body, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s" fill-opacity="%g"/>`+"\n",
			x, f.y+1, max(width-0.5, 0.2), figureRow-2, fill(kind), opacity)
		if width > float64(6*len(name)+2) {
			ink := "font-size:9px"
			if kind == showForward && !light { // the only bar that is too dark for black text
				ink += ";fill:" + colour("back")
			}
			f.text(int(x+width/2), f.y+figureRow-3, "middle", ink, name)
		}
	}
	for pc := range code.Sections[ir.SectionStep] {
		in := &code.Sections[ir.SectionStep][pc]
		if in.Stream != ir.Compute || in.Info().Class == ir.ClassSync || in.Prov.Subsequence < 0 {
			continue
		}
		v := in.Prov
		if v.Phase != of.Phase || v.Subsequence != of.Subsequence || v.Microbatch != of.Microbatch || v.Stage != of.Stage {
			draw()
			of, from = v, spans[pc].Begin
		}
		to = spans[pc].End
	}
	draw()
	f.text(figureLabels-6, f.y+9, "end", "", "tasks")
	f.y += figureRow
}

// stream draws the row of a stream, and reports whether anything was drawn. Each pixel column stands for a short
// interval. Its colour is that of the kind of span that takes most of the interval, and its height shows how busy
// the stream is.
func (f *figure) stream(code *ir.Code, spans []sim.Span, kinds []uint8, s ir.Stream, makespan ir.Seconds, seen *[len(showNames)]bool) bool {
	cells := make([][len(showNames)]float64, figurePlot)
	any := false
	for pc := range spans {
		k := kinds[pc]
		if code.Sections[ir.SectionStep][pc].Stream != s || k == showNothing || spans[pc].End <= spans[pc].Begin {
			continue
		}
		any, seen[k] = true, true
		at, end := pixels(spans[pc].Begin, makespan), pixels(spans[pc].End, makespan)
		for at < end {
			i := min(int(at), len(cells)-1)
			next := min(end, float64(i+1))
			if i == len(cells)-1 {
				next = end
			}
			cells[i][k] += next - at
			at = next
		}
	}
	if !any {
		return false
	}
	from, kind, level := 0, -1, 0
	for i := 0; i <= len(cells); i++ {
		k, l := -1, 0
		if i < len(cells) {
			k, l = prevailing(&cells[i])
		}
		if k == kind && l == level && i < len(cells) {
			continue
		}
		if kind >= 0 {
			h := float64(figureRow-2) * float64(level) / 4
			fmt.Fprintf(&f.body, `<rect x="%d" y="%g" width="%d" height="%g" fill="%s"/>`+"\n",
				figureLabels+from, float64(f.y+figureRow-1)-h, i-from, h, fill(kind))
		}
		from, kind, level = i, k, l
	}
	return true
}

func pixels(t, makespan ir.Seconds) float64 { return float64(t/makespan) * figurePlot }

// prevailing returns the kind of span that takes most of a pixel column's time, and how busy the stream is in this
// time, in quarters.
func prevailing(shares *[len(showNames)]float64) (kind, level int) {
	kind = -1
	busy, most := 0.0, 0.0
	for k, share := range shares {
		busy += share
		if share > most {
			kind, most = k, share
		}
	}
	if kind < 0 {
		return -1, 0
	}
	return kind, max(1, int(4*min(busy, 1)+0.5))
}

// comparisonFigure draws a bar for each line that compare prints. The length of a bar shows the tokens per second
// and rank.
func comparisonFigure(w io.Writer, rows []result) error {
	f := &figure{y: figureTitle}
	f.text(10, 14, "start", "font-size:12px;font-weight:600", "tokens per second and rank, simulated")
	most, names, same := 0.0, 0, oneJob(rows)
	if same && len(rows[0].Set) > 0 {
		f = &figure{y: figureTitle}
		f.text(10, 14, "start", "font-size:12px;font-weight:600", rows[0].job()+": tokens per second and rank, simulated")
	}
	for i := range rows {
		most, names = max(most, rows[i].TGS), max(names, len(rows[i].label(same)))
	}
	left := 16 + 6*names
	for i := range rows {
		r := &rows[i]
		f.y += 18
		f.text(left-6, f.y, "end", "", r.label(same))
		if r.Error != "" || most == 0 {
			f.text(left, f.y, "start", "", r.Error)
			continue
		}
		width := int(r.TGS / most * float64(figureLabels+figurePlot-left-180))
		look := colour("forward")
		note := fmt.Sprintf("%s, MFU %.1f%%, m = %d", cli.Short(r.TGS), 100*r.MFU, r.Batch)
		if !r.Fits {
			look, note = colour("bubble"), note+", does not fit"
		}
		fmt.Fprintf(&f.body, `<rect x="%d" y="%d" width="%d" height="12" fill="%s"/>`+"\n", left, f.y-10, width, look)
		f.text(left+width+6, f.y, "start", "", note)
	}
	f.y += 6
	return f.write(w)
}
