package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// chart is groups of bars, in panels that have a scale each: side by side, as many as a page is wide.
type chart struct {
	title  string
	series []string
	marks  string // what a mark on a bar means; empty: there are none
	panels []panel
}

type panel struct {
	caption string
	groups  []group
}

type group struct {
	label string
	bars  []bar
}

// bar is a value of a series.
type bar struct {
	series int
	value  float64
	mark   float64 // what the paper says; 0: nothing
	open   bool    // outlined only: it does not fit
}

// shades of systems differ for the colour-blind, too (Okabe and Ito), and are the same in all figures.
var shades = map[string]string{
	"megatron, m = 1": "#c4c4c4", "megatron, m = 32": "#777777", "megatron tuned, m = 1": "#e69f00", "megatron tuned": "#e69f00",
	"deepspeed-ulysses": "#56b4e9", "fpdt": "#0072b2", "sppo": "#009e73", "sppo mux": "#cc79a7", "sppo interleaved": "#d55e00", "auto": "#000000",
	"sppo without offload": "#c4c4c4", "sppo, full offload": "#777777", "sppo, carry": "#56b4e9",
}

// Measures in pixels.
const (
	plotWidth   = 1040 // of a row of panels, where more than one has room
	plotMargin  = 10
	plotHeight  = 220
	panelBelow  = 54 // its labels, and what parts them from the next
	barWidth    = 11
	groupGap    = 18
	panelGap    = 24
	axisWidth   = 40
	letter      = 7 // of a label
	titleLetter = 8
	legendRow   = 18
	legendWide  = 190 // of an entry
)

// String is the chart as SVG.
func (c *chart) String() string {
	width, wide := max(3*legendWide, 2*plotMargin+titleLetter*len(c.title)), plotMargin
	var first []bool // of a row
	for i, p := range c.panels {
		w := axisWidth + panelWidth(p) + panelGap
		first = append(first, i > 0 && wide+w > plotWidth)
		if first[i] {
			wide = plotMargin
		}
		wide += w
		width = max(width, wide)
	}
	var b strings.Builder
	x, top := plotMargin, 36+c.legend(&b, width)
	for i, p := range c.panels {
		if first[i] {
			x, top = plotMargin, top+plotHeight+panelBelow
		}
		c.draw(&b, p, x+axisWidth, top)
		x += axisWidth + panelWidth(p) + panelGap
	}
	height := top + plotHeight + panelBelow
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" font-family="sans-serif" font-size="11" fill="#222222">
<rect width="100%%" height="100%%" fill="#ffffff"/>
<text x="10" y="18" font-size="13" font-weight="600">%s</text>
%s</svg>
`, width, height, width, height, html.EscapeString(c.title), b.String())
}

// width is that of the bars or of the label, whichever is wider.
func (g *group) width() int { return max(barWidth*len(g.bars), letter*len(g.label)) }

func panelWidth(p panel) int {
	width := groupGap
	for _, g := range p.groups {
		width += groupGap + g.width()
	}
	return width
}

// legend names the series, and gives its height.
func (c *chart) legend(b *strings.Builder, width int) int {
	across := max(1, (width-20)/legendWide)
	at := func(i int) (x, y int) { return 10 + i%across*legendWide, 38 + i/across*legendRow }
	for i, name := range c.series {
		x, y := at(i)
		fmt.Fprintf(b, `<rect x="%d" y="%d" width="10" height="10" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n", x, y-9, shades[name], x+15, y, html.EscapeString(name))
	}
	n := len(c.series)
	if c.marks != "" {
		x, y := at(n)
		fmt.Fprintf(b, `<path d="M%d %dh12" stroke="#000000" stroke-width="2"/><text x="%d" y="%d">%s</text>`+"\n", x-1, y-4, x+15, y, html.EscapeString(c.marks))
		n++
	}
	return (n + across - 1) / across * legendRow
}

func (c *chart) draw(b *strings.Builder, p panel, left, top int) {
	most := 0.0
	for _, g := range p.groups {
		for _, v := range g.bars {
			most = max(most, v.value, v.mark)
		}
	}
	step := roundStep(most / 4)
	ceiling := step * math.Ceil(most/step)
	y := func(v float64) float64 { return float64(top+plotHeight) - v/ceiling*plotHeight }
	right := left + panelWidth(p)
	for v := 0.0; v <= ceiling*1.0001; v += step {
		fmt.Fprintf(b, `<path d="M%d %.1fH%d" stroke="#dddddd"/><text x="%d" y="%.1f" text-anchor="end">%.4g</text>`+"\n", left, y(v), right, left-5, y(v)+4, v)
	}
	x := left + groupGap
	for _, g := range p.groups {
		middle := x + g.width()/2
		for i, v := range g.bars {
			drawBar(b, v, shades[c.series[v.series]], middle+barWidth*i-barWidth*len(g.bars)/2, y)
		}
		fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle">%s</text>`+"\n", middle, top+plotHeight+16, html.EscapeString(g.label))
		x += g.width() + groupGap
	}
	fmt.Fprintf(b, `<text x="%d" y="%d" text-anchor="middle" font-weight="600">%s</text>`+"\n", (left+right)/2, top+plotHeight+34, html.EscapeString(p.caption))
}

func drawBar(b *strings.Builder, v bar, shade string, x int, y func(float64) float64) {
	if v.value > 0 {
		look := fmt.Sprintf(`fill="%s"`, shade)
		if v.open {
			look = fmt.Sprintf(`fill="none" stroke="%s" stroke-dasharray="2 2"`, shade)
		}
		fmt.Fprintf(b, `<rect x="%.1f" y="%.1f" width="%d" height="%.1f" %s/>`+"\n", float64(x)+0.5, y(v.value), barWidth-2, y(0)-y(v.value), look)
	}
	if v.mark > 0 {
		fmt.Fprintf(b, `<path d="M%d %.1fh%d" stroke="#000000" stroke-width="2"/>`+"\n", x-2, y(v.mark), barWidth+2)
	}
}

// roundStep is the next of 1, 2, 5, 10, ... of the step's order.
func roundStep(step float64) float64 {
	order := math.Pow(10, math.Floor(math.Log10(step)))
	for _, f := range []float64{1, 2, 5} {
		if step <= f*order {
			return f * order
		}
	}
	return 10 * order
}

// figures by the name of their file.
var figures = []struct {
	name string
	make func(r *results) *chart
}{
	{"throughput", throughputChart},
	{"breakdown", breakdownChart},
	{"longest", longestChart},
	{"bubble", bubbleChart},
}

func throughputChart(r *results) *chart {
	c := &chart{title: "Throughput, simulated: tokens a GPU and second; dashed where it would take more memory than there is",
		series: []string{"megatron, m = 1", "megatron, m = 32", "megatron tuned, m = 1", "deepspeed-ulysses", "fpdt", "sppo", "sppo mux", "sppo interleaved", "auto"}}
	for _, row := range rows {
		if len(c.panels) == 0 || c.panels[len(c.panels)-1].caption != row.model() {
			c.panels = append(c.panels, panel{caption: row.model()})
		}
		g := group{label: row.length()}
		for i, s := range c.series {
			if o, ok := r.Jobs[row.name+", "+s]; ok && o.Error == "" {
				g.bars = append(g.bars, bar{series: i, value: o.TGS, open: !o.Fits})
			}
		}
		last := &c.panels[len(c.panels)-1]
		last.groups = append(last.groups, g)
	}
	return c
}

// breakdownChart has the paper's factors at the bars of the techniques that they are for.
func breakdownChart(r *results) *chart {
	said := map[string]float64{"gpt-13b-512k, sppo": 1.23, "gpt-13b-512k, sppo mux": 1.44, "gpt-65b-640k, sppo": 3.38, "gpt-65b-640k, sppo mux": 3.48}
	c := &chart{title: "Breakdown, simulated: speed over Megatron", marks: "the paper"}
	for _, t := range techniques {
		if shades[t.system] != "" { // those at other rates of copies are in the table alone
			c.series = append(c.series, t.system)
		}
	}
	for _, row := range broken {
		p := panel{caption: row + " over megatron"}
		for _, base := range []string{"megatron, m = 1", "megatron, m = 32", "megatron tuned, m = 1"} {
			g := group{label: strings.TrimLeft(strings.TrimPrefix(base, "megatron"), ", ")}
			for i, s := range c.series {
				g.bars = append(g.bars, bar{series: i, value: r.over(row, s, base), mark: said[row+", "+s], open: !r.Jobs[row+", "+s].Fits})
			}
			if r.Jobs[row+", "+base].TGS > 0 {
				p.groups = append(p.groups, g)
			}
		}
		c.panels = append(c.panels, p)
	}
	return c
}

func longestChart(r *results) *chart {
	c := &chart{title: "Longest sequence of GPT-7B, by the bound on memory: millions of tokens", series: lengthSystems, marks: "the paper"}
	p := panel{}
	for _, n := range lengthGPUs {
		g := group{label: fmt.Sprintf("%d GPUs", n)}
		for i, s := range lengthSystems {
			var said float64
			fmt.Sscan(lengths[fmt.Sprintf("%s, %d", s, n)], &said) // nothing is 0
			g.bars = append(g.bars, bar{series: i, value: r.millions(s, n), mark: said})
		}
		p.groups = append(p.groups, g)
	}
	c.panels = []panel{p}
	return c
}

func bubbleChart(r *results) *chart {
	c := &chart{title: "Bubble over busy time, in percent, simulated", series: []string{"sppo", "sppo mux", "sppo interleaved"}, marks: "(pp - 1)/N"}
	for _, row := range rows {
		if len(c.panels) == 0 || c.panels[len(c.panels)-1].caption != row.model() {
			c.panels = append(c.panels, panel{caption: row.model()})
		}
		g := group{label: row.length()}
		for i, s := range c.series {
			o, ok := r.Jobs[row.name+", "+s]
			if !ok || o.Error != "" {
				continue
			}
			b := bar{series: i, value: 100 * o.Bubble}
			if pp, n := o.shape(); i == 0 && n > 0 {
				b.mark = 100 * float64(pp-1) / float64(n)
			}
			g.bars = append(g.bars, b)
		}
		last := &c.panels[len(c.panels)-1]
		last.groups = append(last.groups, g)
	}
	return c
}
