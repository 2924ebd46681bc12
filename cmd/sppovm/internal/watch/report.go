package watch

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
)

//go:embed report.html
var reportPage string

var reportTemplate = template.Must(template.New("report").Parse(reportPage))

// page is the input of the report's template.
type page struct {
	Title, Status, Class string // Class is the CSS class of the status
	About                []string
	Tiles                []tile
	Charts               []*chart
	Splits               []bar
	Table                [][]string    // one row per part of the split
	Shares               template.HTML // drawing of the split over time
	Layers               template.HTML
	Memory               []memoryBar
	Events               []event
}

// tile is a figure with its name and a remark.
type tile struct{ Name, Value, Note string }

// bar is a split into parts that add up to 100 percent.
type bar struct {
	Name  string
	Parts []Part
}

// memoryBar is the peak memory of the fullest rank, compared with the machine's capacity.
type memoryBar struct {
	Name, Text string
	Share      float64 // percent of the capacity; -1: unknown
}

type event struct{ Time, Step, Text, Class string }

// Report writes a page about the run. It is self-contained: it needs no network and no other file.
func Report(w io.Writer, title string, l *Log) error {
	run := l.Run()
	if run.Name != "" {
		title = run.Name
	}
	p := &page{Title: title, About: about(run), Tiles: tiles(l), Charts: charts(l), Splits: splits(l), Shares: shares(l), Layers: heatmap(l), Memory: memory(l)}
	p.Status, p.Class = status(l)
	p.Events = events(l)
	for i, name := range (&Split{}).Parts() {
		row := []string{name.Name}
		for _, b := range p.Splits {
			row = append(row, fmt.Sprintf("%.1f%%", b.Parts[i].Share))
		}
		p.Table = append(p.Table, row)
	}
	return reportTemplate.Execute(w, p)
}

func about(r *Run) []string {
	if r.Name == "" {
		return nil
	}
	return []string{
		fmt.Sprintf("%s parameters, %s of %s a step", short(float64(r.Parameters)), words.Plural(r.Batch, "sequence"), words.Plural(r.Sequence, "token")),
		fmt.Sprintf("%s = %s × %s × %s per stage", words.Plural(r.Ranks, "rank"), words.Plural(r.DP, "replica"), words.Plural(r.PP, "stage"), words.Plural(r.SP, "rank")),
		"device " + r.Device, r.Version,
	}
}

func status(l *Log) (text, class string) {
	last := 0
	if n := len(l.Steps); n > 0 {
		last = l.Steps[n-1].Step
	}
	failed := ""
	for _, n := range l.Notes {
		if len(l.Runs) > 0 && n.Time.Before(l.Run().Time) {
			continue
		}
		if strings.HasPrefix(n.Note, "failed: ") {
			failed = n.Note
		}
	}
	switch {
	case failed != "":
		return "failed after step " + fmt.Sprint(last), "bad"
	case l.Done != nil && (l.Run().Steps == 0 || l.Done.Steps >= l.Run().Steps):
		return fmt.Sprintf("done after step %d", l.Done.Steps), "good"
	case l.Done != nil:
		return fmt.Sprintf("stopped after step %d", l.Done.Steps), "open"
	}
	return fmt.Sprintf("step %d; running, or killed", last), "open"
}

func tiles(l *Log) []tile {
	var out []tile
	n := len(l.Steps)
	if n == 0 {
		return nil
	}
	last := l.Steps[n-1]
	out = append(out, tile{"steps", fmt.Sprint(last.Step), ofLast(l.Run().Steps)}, tile{"training loss", figure(float64(last.Loss), 4), "of the last step"})
	best := (*Validation)(nil)
	for _, v := range l.Validations {
		if v.Loss.Finite() && (best == nil || v.Loss < best.Loss) {
			best = v
		}
	}
	if best != nil {
		out = append(out, tile{"best validation loss", figure(float64(best.Loss), 4), fmt.Sprintf("after step %d", best.Step)})
	}
	seconds := median(l.Steps, func(s *Step) float64 { return float64(s.Seconds) })
	note := "median"
	if p := l.Run().Predicted; p != nil {
		note = fmt.Sprintf("median; %s simulated on %s", ir.Seconds(p.Seconds), l.Run().Machine)
	}
	out = append(out, tile{"time of a step", ir.Seconds(seconds).String(), note})
	if n := skipped(l); n > 0 {
		out = append(out, tile{"skipped steps", fmt.Sprint(n), "left the weights unchanged"})
	}
	out = append(out, tile{"tokens per second", short(math.Round(median(l.Steps, func(s *Step) float64 { return float64(s.TokensPerSecond) }))), "median"})
	if r := l.Run(); r.Sequence > 0 {
		out = append(out, tile{"tokens", short(float64(r.Sequence) * float64(r.Batch) * float64(last.Step)), "in all steps"})
	}
	return out
}

func skipped(l *Log) (n int) {
	for _, s := range l.Steps {
		if s.Skipped {
			n++
		}
	}
	return n
}

func ofLast(steps int) string {
	if steps == 0 {
		return ""
	}
	return fmt.Sprintf("of %d", steps)
}

// figure formats a number. NaN becomes "not finite", because in a log it may also stand for an infinity.
func figure(v float64, digits int) string {
	if math.IsNaN(v) {
		return "not finite"
	}
	return fmt.Sprintf("%.*f", digits, v)
}

func median(steps []*Step, of func(*Step) float64) float64 {
	var all []float64
	for _, s := range steps {
		if v := of(s); !math.IsNaN(v) {
			all = append(all, v)
		}
	}
	if len(all) == 0 {
		return math.NaN()
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// curveOf returns the curve of one figure over all steps.
func curveOf(l *Log, of func(*Step) Number) (points []point) {
	for _, s := range l.Steps {
		points = append(points, point{X: float64(s.Step), Y: float64(of(s))})
	}
	return points
}

func charts(l *Log) []*chart {
	loss := curveOf(l, func(s *Step) Number { return s.Loss })
	var held []point
	for _, v := range l.Validations {
		held = append(held, point{X: float64(v.Step), Y: float64(v.Loss)})
	}
	norm := curveOf(l, func(s *Step) Number { return s.GradNorm })
	all := []*chart{
		{Title: "Loss", Note: bad(loss), lines: []line{{"training", "c1", loss, false}}, cut: true},
		{Title: "Gradient norm before clipping", Note: bad(norm), lines: []line{{"norm", "c1", norm, false}}, log: true},
		{Title: "Learning rate", lines: []line{{"learning rate", "c1", curveOf(l, func(s *Step) Number { return s.LR }), false}}, zero: true},
		{Title: "Tokens per second", lines: []line{{"tokens/s", "c1", curveOf(l, func(s *Step) Number { return s.TokensPerSecond }), false}}, zero: true},
	}
	if len(held) > 0 {
		all[0].lines = append(all[0].lines, line{"validation", "c2", held, true})
	}
	if c := positions(l); c != nil {
		all = append(all, c)
	}
	if slices.ContainsFunc(l.Steps, func(s *Step) bool { return len(s.ExpertLoad) > 0 }) {
		all = append(all, &chart{Title: "Load of the busiest expert, divided by the mean", lines: []line{
			{"in the layer where it is largest", "c1", curveOf(l, func(s *Step) Number { return busiest(s.ExpertLoad) }), false},
			{"mean of all layers", "c2", curveOf(l, func(s *Step) Number { return meanOf(s.ExpertLoad) }), false},
		}})
	}
	return slices.DeleteFunc(all, func(c *chart) bool { return !c.render() })
}

func busiest(load map[string]Number) (most Number) {
	for _, x := range load {
		most = max(most, x)
	}
	return most
}

func meanOf(load map[string]Number) (mean Number) {
	for _, layer := range layers(load) { // in an order, as sums of floats depend on it
		mean += load[layer] / Number(len(load))
	}
	return mean
}

// bad describes how many values of a curve are not finite and cannot be drawn, or returns "" if all can.
func bad(points []point) string {
	n := 0
	for _, p := range points {
		if math.IsNaN(p.Y) || math.IsInf(p.Y, 0) {
			n++
		}
	}
	switch n {
	case 0:
		return ""
	case 1:
		return "1 step without a finite value"
	}
	return fmt.Sprintf("%d steps without a finite value", n)
}

// positions draws the loss by position for the first and the last validation.
func positions(l *Log) *chart {
	var with []*Validation
	for _, v := range l.Validations {
		if len(v.ByPosition) > 0 {
			with = append(with, v)
		}
	}
	if len(with) == 0 {
		return nil
	}
	if len(with) > 2 {
		with = []*Validation{with[0], with[len(with)-1]}
	}
	c := &chart{Title: "Validation loss by position", Axis: "position in the sequence", logX: true}
	for i, v := range with {
		one := line{fmt.Sprintf("after step %d", v.Step), fmt.Sprintf("c%d", i+1), nil, true}
		for _, b := range v.ByPosition {
			one.points = append(one.points, point{X: float64(b.Last + 1), Y: float64(b.Loss)})
		}
		c.lines = append(c.lines, one)
	}
	return c
}

// splits returns the mean split of the measured steps and the predicted split. The mean leaves out the first step
// after each start, unless the log has only one step.
func splits(l *Log) []bar {
	var out []bar
	first := map[int]bool{}
	for _, r := range l.Runs {
		first[r.First+1] = true
	}
	mean, n := Split{}, 0.0
	for _, s := range l.Steps {
		if s.Split == nil || first[s.Step] && len(l.Steps) > 1 {
			continue
		}
		n++
		mean.Compute += s.Split.Compute
		mean.Copies += s.Split.Copies
		mean.Communication += s.Split.Communication
		mean.Bubble += s.Split.Bubble
	}
	if n > 0 {
		mean = Split{mean.Compute / n, mean.Copies / n, mean.Communication / n, mean.Bubble / n}
		out = append(out, bar{"measured", percent(mean.Parts())})
	}
	if p := l.Run().Predicted; p != nil && p.Split != nil {
		out = append(out, bar{"simulated on " + l.Run().Machine, percent(p.Split.Parts())})
	}
	return out
}

func percent(parts []Part) []Part {
	for i := range parts {
		parts[i].Share *= 100
	}
	return parts
}

// shares draws the splits of the measured steps as stacked areas. If a chart cannot show them all, it skips steps
// at regular intervals.
func shares(l *Log) template.HTML {
	var steps []*Step
	for _, s := range l.Steps {
		if s.Split != nil {
			steps = append(steps, s)
		}
	}
	if len(steps) < 2 {
		return ""
	}
	each := (len(steps) + columns - 1) / columns
	x := scale{float64(steps[0].Step), float64(steps[len(steps)-1].Step), leftMargin, chartWidth - rightMargin, false}
	y := scale{0, 1, chartHeight - bottom, topMargin, false}
	below := make([]float64, len(steps))
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img" aria-label="Split of the time by step">`, chartWidth, chartHeight)
	for i, part := range steps[0].Split.Parts() {
		var up, down strings.Builder
		for k := 0; k < len(steps); k += each {
			top := below[k] + steps[k].Split.Parts()[i].Share
			fmt.Fprintf(&up, "%c%.1f %.1f", "ML"[min(k, 1)], x.at(float64(steps[k].Step)), y.at(top))
			below[k] = top
		}
		for k := (len(steps) - 1) / each * each; k >= 0; k -= each {
			fmt.Fprintf(&down, "L%.1f %.1f", x.at(float64(steps[k].Step)), y.at(below[k]-steps[k].Split.Parts()[i].Share))
		}
		fmt.Fprintf(&b, `<path class="area %s" d="%s%sZ"><title>%s</title></path>`, part.Key, up.String(), down.String(), part.Name)
	}
	for _, v := range []float64{0, 0.25, 0.5, 0.75, 1} {
		fmt.Fprintf(&b, `<text class="y" x="%g" y="%.1f">%g%%</text>`, leftMargin-6, y.at(v)+3.5, 100*v)
	}
	for _, v := range x.ticks() {
		fmt.Fprintf(&b, `<text class="x" x="%.1f" y="%g">%s</text>`, x.at(v), chartHeight-bottom+15, short(v))
	}
	fmt.Fprintf(&b, `<text class="axis" x="%g" y="%g">step</text></svg>`, chartWidth-rightMargin, chartHeight-3)
	return template.HTML(b.String())
}

// heatColumns is the maximum number of columns of a heat map.
const heatColumns = 60

// heatmap draws the gradient norms of layers, with one row per layer and at most one column per reading. Larger
// norms are darker.
func heatmap(l *Log) template.HTML {
	var with []*Step
	names := map[string]Number{}
	low, high := math.Inf(1), math.Inf(-1)
	for _, s := range l.Steps {
		if len(s.GradNorms) == 0 {
			continue
		}
		with = append(with, s)
		for name, v := range s.GradNorms {
			names[name] = v
			if v.Finite() && v > 0 {
				low, high = min(low, float64(v)), max(high, float64(v))
			}
		}
	}
	if len(with) == 0 || low > high {
		return ""
	}
	each := (len(with) + heatColumns - 1) / heatColumns
	rows, count := layers(names), (len(with)+each-1)/each
	const left, height = 80.0, 14.0
	width := (chartWidth - left - rightMargin) / float64(count)
	tall := height*float64(len(rows)) + 24
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img" aria-label="Gradient norm by layer">`, chartWidth, tall)
	for i, name := range rows {
		fmt.Fprintf(&b, `<text class="y" x="%g" y="%g">%s</text>`, left-6, height*float64(i)+11, template.HTMLEscapeString(name))
		for k := range count {
			s := with[k*each]
			v, ok := s.GradNorms[name]
			if !ok || !v.Finite() || v <= 0 {
				continue
			}
			strength := 1.0
			if high > low {
				strength = math.Log(float64(v)/low) / math.Log(high/low)
			}
			fmt.Fprintf(&b, `<rect class="heat" x="%.2f" y="%g" width="%.2f" height="%g" style="--s:%.2f"><title>%s, step %d: %.4g</title></rect>`,
				left+width*float64(k), height*float64(i)+1, width+0.3, height-1, strength, template.HTMLEscapeString(name), s.Step, float64(v))
		}
	}
	fmt.Fprintf(&b, `<text class="x first" x="%g" y="%g">step %d</text><text class="axis" x="%g" y="%g">step %d</text></svg>`,
		left, tall-6, with[0].Step, chartWidth-rightMargin, tall-6, with[(count-1)*each].Step)
	return template.HTML(b.String())
}

func memory(l *Log) []memoryBar {
	run := l.Run()
	if run.Name == "" {
		return nil
	}
	var out []memoryBar
	add := func(name string, m Memory, touched ir.Bytes) {
		b := memoryBar{name, fmt.Sprintf("%s planned", m.Peak), -1}
		if touched > 0 {
			b.Text += fmt.Sprintf(", %s used", touched)
		}
		if m.Capacity > 0 {
			b.Text += fmt.Sprintf(", of %s", m.Capacity)
			b.Share = 100 * min(1, float64(m.Peak)/float64(m.Capacity))
		}
		out = append(out, b)
	}
	var device, host ir.Bytes
	if l.Done != nil && l.Done.Steps > run.First { // a start without a step uses only the memory of weights
		device, host = l.Done.DevicePeak, l.Done.HostPeak
	}
	add("device", run.DeviceMemory, device)
	add("host", run.HostMemory, host)
	return out
}

func events(l *Log) []event {
	type at struct {
		time time.Time
		event
	}
	var all []at
	for _, r := range l.Runs {
		text := "started"
		if r.First > 0 {
			text = fmt.Sprintf("continued after step %d", r.First)
		}
		all = append(all, at{r.Time, event{Step: fmt.Sprint(r.First), Text: text, Class: "open"}})
	}
	for _, n := range l.Notes {
		class := ""
		if strings.HasPrefix(n.Note, "failed: ") || strings.HasPrefix(n.Note, "warning: ") {
			class = "bad"
		}
		all = append(all, at{n.Time, event{Step: fmt.Sprint(n.Step), Text: n.Note, Class: class}})
	}
	slices.SortStableFunc(all, func(a, b at) int { return a.time.Compare(b.time) })
	var out []event
	for _, a := range all {
		a.Time = a.time.UTC().Format("2006-01-02 15:04:05")
		out = append(out, a.event)
	}
	return out
}
