package main

import (
	"bufio"
	"fmt"
	"html"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// Dimensions of a figure, in pixels. It is as wide as a page of text, so that it is not scaled down there.
const (
	figureLabels = 92
	figurePlot   = 800
	figureRow    = 13
	figureTitle  = 22
	figureLetter = 5.2 // the average width of a letter of 9 pixels
)

// showNames gives the colour name and the meaning of each kind of span, in the order of the kinds' numbers.
var showNames = [...][2]string{
	{"forward", "forward"}, {"backward", "backward"}, {"other", "optimizer and other"}, {"d2h", "copy to host"},
	{"h2d", "copy to device"}, {"collective", "collective"}, {"message", "message"}, {"bubble", "bubble"},
	{"exposed", "exposed transfer"}, {"collwait", "waiting for collective"}, {"weights", "deferred weight gradients"},
}

// useColour returns the name of the colour of a use of memory.
func useColour(part ir.Part) string { return "use-" + part.Key() }

// palettes holds the colours of the page, by theme and by name.
var palettes = func() map[string]map[string]string {
	all := map[string]map[string]string{}
	light, dark, _ := strings.Cut(pageStyle, `:root[data-theme="dark"]`)
	for theme, text := range map[string]string{"light": light, "dark": dark} {
		all[theme] = map[string]string{}
		for _, m := range regexp.MustCompile(`--([a-z0-9_-]+): (#[0-9a-f]{6});`).FindAllStringSubmatch(text, -1) {
			all[theme][m[1]] = m[2]
		}
	}
	return all
}()

// figure is an SVG that grows downwards.
type figure struct {
	theme   string
	body    strings.Builder
	y       int
	seen    [len(showNames)]bool // the kinds of spans that occur
	used    [ir.NumParts]bool    // the uses of memory that occur
	limited bool                 // a row shows its capacity
}

// colour returns a colour of the page.
func (f *figure) colour(name string) string {
	c := palettes[f.theme][name]
	if c == "" {
		panic("internal: the page has no colour " + name)
	}
	return c
}

// shade returns a colour mixed with the background, as the page does.
func (f *figure) shade(name string) string {
	c, back := channels(f.colour(name)), channels(f.colour("back"))
	for i := range c {
		c[i] = 0.7*c[i] + 0.3*back[i]
	}
	return fmt.Sprintf("#%02x%02x%02x", int(c[0]+0.5), int(c[1]+0.5), int(c[2]+0.5))
}

// ink returns black or white, whichever contrasts more with a colour.
func ink(colour string) string {
	if luminance(colour) > 0.18 {
		return "#111111"
	}
	return "#ffffff"
}

// luminance returns the relative luminance of a colour, from 0 to 1.
func luminance(colour string) float64 {
	c := channels(colour)
	for i := range c {
		c[i] = math.Pow(c[i]/255, 2.2)
	}
	return 0.2126*c[0] + 0.7152*c[1] + 0.0722*c[2]
}

// channels returns the red, green and blue of a colour.
func channels(colour string) (c [3]float64) {
	for i := range c {
		n, err := strconv.ParseUint(colour[1+2*i:3+2*i], 16, 8)
		if err != nil {
			panic("internal: " + err.Error())
		}
		c[i] = float64(n)
	}
	return c
}

func (f *figure) text(x, y int, anchor, style, text string) {
	if style != "" {
		style = ` style="` + style + `"`
	}
	fmt.Fprintf(&f.body, `<text x="%d" y="%d" text-anchor="%s"%s>%s</text>`+"\n", x, y, anchor, style, html.EscapeString(text))
}

// small is the style of secondary text.
func (f *figure) small() string { return "font-size:9px;fill:" + f.colour("soft") }

func (f *figure) write(w io.Writer) error {
	b := bufio.NewWriter(w)
	width := figureLabels + figurePlot + 20
	fmt.Fprintf(b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11" fill="%s">`+"\n",
		width, f.y+8, width, f.y+8, f.colour("text"))
	fmt.Fprintf(b, `<defs><pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2" height="4" fill="%s"/></pattern></defs>`+"\n", f.colour("bubble"))
	fmt.Fprintf(b, `<rect width="100%%" height="100%%" fill="%s"/>`+"\n", f.colour("back"))
	if _, err := b.WriteString(f.body.String()); err != nil {
		return err
	}
	b.WriteString("</svg>\n") // errors are kept until Flush
	return b.Flush()
}

// legend lists the kinds of spans and the uses of memory that occur.
func (f *figure) legend() {
	f.y += 18
	x := figureLabels
	add := func(fill, text string) {
		wide := 24 + 11*len(text)/2
		if x+wide > figureLabels+figurePlot {
			x, f.y = figureLabels, f.y+16
		}
		fmt.Fprintf(&f.body, `<rect x="%d" y="%d" width="9" height="9" fill="%s"/>`+"\n", x, f.y-9, fill)
		f.text(x+13, f.y-1, "start", "", text)
		x += wide
	}
	for k, n := range showNames {
		if f.seen[k] {
			add(f.fill(k), n[1])
		}
	}
	if slices.Contains(f.used[:], true) {
		x, f.y = figureLabels, f.y+18
		f.text(figureLabels-6, f.y-1, "end", "", "memory")
	}
	for part := range ir.PartGaps {
		if f.used[part] {
			add(f.colour(useColour(part)), part.String())
		}
	}
	if f.limited {
		add("none", "capacity")
		fmt.Fprintf(&f.body, `<path d="M%d %d.5h9" stroke="%s"/>`+"\n", x-24-11*len("capacity")/2, f.y-4, f.colour("limit"))
	}
	f.y += 4
}

func (f *figure) fill(kind int) string {
	if kind == showBubble {
		return "url(#hatch)"
	}
	return f.colour(showNames[kind][0])
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
		fmt.Fprintf(&f.body, `<path d="M%d %dv4" stroke="%s"/>`+"\n", x, f.y-10, f.colour("soft"))
		f.text(x, f.y+4, "middle", "", fmt.Sprintf("%.4g %s", at/unit, name))
	}
	f.y += 6
}

// timelineFigure draws the timelines of the given ranks, with their memory, for print.
func timelineFigure(w io.Writer, theme, title string, p *ir.Program, t *sim.Timeline, ranks []int) error {
	f := &figure{theme: theme, y: figureTitle}
	f.text(figureLabels, 14, "start", "font-size:12px;font-weight:600",
		fmt.Sprintf("%s, simulated on %s: %s a step, MFU %.1f%%, bubble %.1f%%", title, p.Machine.Name, t.Makespan, 100*t.MFU(), 100*t.BubbleRatio()))
	height := max(2*figureRow, 8*figureRow/len(ranks))
	top := topOfMemory(p, ranks)
	for _, r := range ranks {
		code := &p.Codes[p.Ranks[r].Code]
		spans := t.Rank(r).Spans
		kinds := spanKinds(code, spans)
		f.y += 8
		f.text(4, f.y+10, "start", "font-weight:600", fmt.Sprintf("rank %d", r))
		f.tasks(code, spans, t.Makespan)
		for s := range ir.NumStreams {
			if f.stream(code, spans, kinds, s, t.Makespan) {
				f.text(figureLabels-6, f.y+10, "end", "", s.String())
				f.y += figureRow
			}
		}
		for a := range ir.NumArenas {
			if code.Arenas[a] > 0 {
				f.y += 3
				f.memory(t.Memory(r, a), t.Makespan, height, top[a])
				f.text(figureLabels-6, f.y+height/2, "end", "", a.String()+" memory")
				f.text(figureLabels-6, f.y+height/2+11, "end", f.small(), fmt.Sprintf("%s of %s", code.Arenas[a], capacityOf(p)[a]))
				f.y += height
			}
		}
	}
	f.axis(t.Makespan)
	f.legend()
	return f.write(w)
}

// memoryScale is the top of a row of memory, and whether that is the capacity.
type memoryScale struct {
	top      ir.Bytes
	capacity bool
}

// topOfMemory returns the scale of each arena's rows: up to the capacity, unless the ranks would fill less than a
// third of it, and otherwise up to the highest byte in use. The page has the same rule.
func topOfMemory(p *ir.Program, ranks []int) (top [ir.NumArenas]memoryScale) {
	for a, capacity := range capacityOf(p) {
		most := ir.Bytes(1)
		for _, r := range ranks {
			most = max(most, p.Codes[p.Ranks[r].Code].Arenas[a])
		}
		top[a] = memoryScale{max(most, capacity), true}
		if most < capacity/3 {
			top[a] = memoryScale{most, false}
		}
	}
	return top
}

// memory stacks the uses of an arena over time. A pixel column shows the moment with the most bytes in use.
func (f *figure) memory(levels []sim.Level, makespan ir.Seconds, height int, scale memoryScale) {
	columns := make([]*sim.Level, figurePlot)
	for i := range levels {
		end := makespan
		if i+1 < len(levels) {
			end = levels[i+1].At
		}
		last := min(int(math.Ceil(pixels(end, makespan))), figurePlot)
		for c := int(pixels(levels[i].At, makespan)); c < last; c++ {
			if columns[c] == nil || levels[i].Bytes() > columns[c].Bytes() {
				columns[c] = &levels[i]
			}
		}
	}
	base := float64(f.y + height)
	for part := int(ir.PartGaps) - 1; part >= 0; part-- { // each covers the ones before it
		path, at, was := "", 0, 0.0
		for c, l := range columns {
			var n ir.Bytes
			for i := range part + 1 {
				n += l.Parts[i]
			}
			f.used[part] = f.used[part] || 2*float64(l.Parts[part])*float64(height) >= float64(scale.top) // half a pixel
			if up := math.Round(2*float64(n)/float64(scale.top)*float64(height)) / 2; up != was {
				path += fmt.Sprintf("h%dv%g", c-at, was-up)
				at, was = c, up
			}
		}
		if path != "" {
			fmt.Fprintf(&f.body, `<path d="M%d %g%sH%dV%gz" fill="%s"/>`+"\n", figureLabels, base, path, figureLabels+figurePlot, base, f.colour(useColour(ir.Part(part))))
		}
	}
	if scale.capacity {
		f.limited = true
		fmt.Fprintf(&f.body, `<path d="M%d %d.5h%d" stroke="%s"/>`+"\n", figureLabels, f.y, figurePlot, f.colour("limit"))
	}
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
		look := f.fill(kind)
		if light {
			look = f.shade(showNames[kind][0])
		}
		x, width := figureLabels+pixels(from, makespan), pixels(to-from, makespan)
		fmt.Fprintf(&f.body, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n",
			x, f.y+1, max(width-0.5, 0.2), figureRow-2, look)
		if width > figureLetter*float64(len(name)+strings.Count(name, "@"))+1 { // @ is twice as wide
			f.text(int(x+width/2), f.y+figureRow-3, "middle", "font-size:9px;fill:"+ink(look), name)
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
	f.text(figureLabels-6, f.y+10, "end", "", "tasks")
	f.y += figureRow
}

// stream draws the row of a stream, and reports whether anything was drawn. Each pixel column stands for a short
// interval. Its colour is that of the kind of span that takes most of the interval, and its height shows how busy
// the stream is.
func (f *figure) stream(code *ir.Code, spans []sim.Span, kinds []uint8, s ir.Stream, makespan ir.Seconds) bool {
	cells := make([][len(showNames)]float64, figurePlot)
	any := false
	for pc := range spans {
		k := kinds[pc]
		if code.Sections[ir.SectionStep][pc].Stream != s || k == showNothing || spans[pc].End <= spans[pc].Begin {
			continue
		}
		any, f.seen[k] = true, true
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
	var bars [len(showNames)]strings.Builder
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
			fmt.Fprintf(&bars[kind], "M%d %dh%dv-%gh-%dz", figureLabels+from, f.y+figureRow-1, i-from, h, i-from)
		}
		from, kind, level = i, k, l
	}
	for k := range bars {
		if bars[k].Len() > 0 {
			fmt.Fprintf(&f.body, `<path d="%s" fill="%s"/>`+"\n", &bars[k], f.fill(k))
		}
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

// comparisonFigure draws two bars for each line that compare prints: one as long as the tokens per second and rank,
// and beside it the peaks of memory, in a frame as wide as the capacity.
func comparisonFigure(w io.Writer, rows []result) error {
	const gap, frame = 130, 120 // for the note of a bar, and the width of a frame
	f := &figure{theme: "light"}
	most, names, same := 0.0, 0, oneJob(rows)
	for i := range rows {
		most, names = max(most, rows[i].TGS), max(names, len(rows[i].label(same)))
	}
	left := 16 + 6*names
	right := figureLabels + figurePlot - 2*frame - 10
	title := "tokens per second and rank, simulated"
	if same && len(rows[0].Set) > 0 {
		title = rows[0].job() + ": " + title
	}
	f.text(10, 14, "start", "font-size:12px;font-weight:600", title)
	for a := range ir.NumArenas {
		f.text(right+int(a)*(frame+20), 30, "start", f.small(), a.String()+" memory")
	}
	f.y = 34
	for i := range rows {
		r := &rows[i]
		f.y += 18
		f.text(left-6, f.y, "end", "", r.label(same))
		if r.Error != "" || most == 0 {
			f.text(left, f.y, "start", "", r.Error)
			continue
		}
		width := int(r.TGS / most * float64(right-left-gap))
		look := f.colour("forward")
		note := fmt.Sprintf("%s, MFU %.1f%%, m = %d", cli.Short(r.TGS), 100*r.MFU, r.Batch)
		if !r.Fits {
			look, note = f.colour("bubble"), note+", does not fit"
		}
		fmt.Fprintf(&f.body, `<rect x="%d" y="%d" width="%d" height="12" fill="%s"/>`+"\n", left, f.y-10, width, look)
		f.text(left+width+6, f.y, "start", f.small(), note)
		for a, n := range [ir.NumArenas]ir.Bytes{ir.Device: r.DevicePeak, ir.Host: r.HostPeak} {
			f.peak(right+a*(frame+20), frame, n, r.capacity[a])
		}
	}
	f.y += 6
	return f.write(w)
}

// peak draws the peak of an arena in a frame that ends at the capacity.
func (f *figure) peak(x, frame int, n, capacity ir.Bytes) {
	look, share := f.colour("memory"), float64(n)/float64(max(capacity, 1))
	if share > 1 {
		look, share = f.colour("exposed"), 1
	}
	fmt.Fprintf(&f.body, `<rect x="%d" y="%d" width="%.1f" height="12" fill="%s"/>`+"\n", x, f.y-10, share*float64(frame), look)
	fmt.Fprintf(&f.body, `<rect x="%d.5" y="%d.5" width="%d" height="11" fill="none" stroke="%s"/>`+"\n", x, f.y-10, frame-1, f.colour("line"))
	fmt.Fprintf(&f.body, `<path d="M%d.5 %dv14" stroke="%s"/>`+"\n", x+frame-1, f.y-11, f.colour("limit"))
	style := "font-size:9px"
	if share == 1 {
		style += ";fill:" + ink(look)
	}
	f.text(x+frame/2, f.y-1, "middle", style, fmt.Sprintf("%s of %s", n, capacity))
}
