package main

import (
	"fmt"
	"image/color"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// chart has groups of bars, in panels with their own scales.
type chart struct {
	title   string
	series  []string
	marks   string // meaning of a mark on a bar; empty: no marks
	columns int    // columns of panels
	panels  []panel
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
	mark   float64 // the paper's value; 0: none
	open   bool    // outlined only: it does not fit
}

// look is the set of colours of a light or dark page.
type look struct {
	suffix          string // of the file names
	back, ink, rule color.Color
}

func grey(y uint8) color.Color { return color.RGBA{y, y, y, 255} }

var looks = []look{
	{"", color.White, grey(0x22), grey(0xcc)},
	{"-dark", color.RGBA{0x0d, 0x11, 0x17, 255}, grey(0xe6), grey(0x48)},
}

// shades holds the colours of the systems in all charts; nil is the text colour. Colour-blind readers can
// distinguish these colours (Okabe and Ito).
var shades = map[string]color.Color{
	"megatron, m = 1": grey(0xc4), "megatron, m = 32": grey(0x77), "megatron tuned, m = 1": orange, "megatron tuned": orange,
	"deepspeed-ulysses": sky, "fpdt": color.RGBA{0x00, 0x72, 0xb2, 255}, "sppo": color.RGBA{0x00, 0x9e, 0x73, 255},
	"sppo mux": color.RGBA{0xcc, 0x79, 0xa7, 255}, "sppo interleaved": color.RGBA{0xd5, 0x5e, 0x00, 255}, "auto": nil,
	"sppo without offload": grey(0xc4), "sppo, full offload": grey(0x77), "sppo, carry": sky,
}

var (
	orange = color.RGBA{0xe6, 0x9f, 0x00, 255}
	sky    = color.RGBA{0x56, 0xb4, 0xe9, 255}
)

// Dimensions of a chart, in points. Bars have the same width in all charts.
const (
	barWidth    = 9
	barGap      = 1
	groupGap    = 2 * barWidth
	panelHeight = 190
	axisWidth   = 36
	panelGap    = 14
	titleHeight = 26
	legendWidth = 140
	margin      = 8
	wider       = 1.15 // a replacement font may be wider by this factor
)

// typeface has characters of the same widths as those of Arial, which viewers use if typeface is not installed.
var typeface = font.Font{Typeface: "Liberation", Variant: "Sans"}

func init() { plot.DefaultFont, plotter.DefaultFont = typeface, typeface }

// svg draws the chart: panels in rows, the legend on the right.
func (c *chart) svg(l look) (string, error) {
	rows := (len(c.panels) + c.columns - 1) / c.columns
	plots := make([][]*plot.Plot, rows)
	slots := 0
	for _, p := range c.panels {
		slots = max(slots, len(p.groups))
	}
	for i, p := range c.panels {
		drawn, err := c.plot(p, slots, l)
		if err != nil {
			return "", err
		}
		if i%c.columns == 0 {
			plots[i/c.columns] = make([]*plot.Plot, c.columns)
		}
		plots[i/c.columns][i%c.columns] = drawn
	}
	title := plot.New().Title.TextStyle
	title.Color, title.XAlign, title.YAlign = l.ink, draw.XLeft, draw.YTop
	wide := vg.Length(float64(c.columns) * (axisWidth + float64(slots)*c.slotWidth() + panelGap))
	across := max(wide+legendWidth, wider*title.Width(c.title)) + 2*margin
	down := vg.Length(rows*(panelHeight+panelGap) + titleHeight + margin)
	canvas := vgsvg.New(across, down)
	page := draw.New(canvas)
	page.FillPolygon(l.back, []vg.Point{{}, {X: across}, {X: across, Y: down}, {Y: down}})
	page.FillText(title, vg.Point{X: margin, Y: down - margin}, c.title)

	body := draw.Crop(page, margin, -margin, margin, -titleHeight)
	legend, err := c.legend(l)
	if err != nil {
		return "", err
	}
	legend.Draw(draw.Crop(body, wide, 0, 0, 0))
	tiles := draw.Tiles{Rows: rows, Cols: c.columns, PadX: panelGap, PadY: panelGap}
	for i, row := range plot.Align(plots, tiles, draw.Crop(body, 0, wide-panelGap-body.Size().X, 0, 0)) {
		for k, place := range row {
			if plots[i][k] != nil {
				plots[i][k].Draw(place)
			}
		}
	}
	var b strings.Builder
	_, err = canvas.WriteTo(&b)
	return strings.ReplaceAll(b.String(), "font-family:Liberation Sans", "font-family:Liberation Sans,Arial,sans-serif"), err
}

// slotWidth returns the width of a group that has a bar for every series.
func (c *chart) slotWidth() float64 { return float64(len(c.series)*(barWidth+barGap) + groupGap) }

// plot draws the groups of a panel, and leaves space for as many groups as there are slots.
func (c *chart) plot(p panel, slots int, l look) (*plot.Plot, error) {
	out := plot.New()
	out.BackgroundColor = l.back
	out.X.Label.Text = p.caption
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal = nil, draw.LineStyle{Color: l.rule, Width: 0.5}
	out.Add(grid)
	labels := make([]string, slots)
	for i, g := range p.groups {
		labels[i] = g.label
		for k, b := range g.bars {
			beside := (float64(k) - float64(len(g.bars)-1)/2) * (barWidth + barGap)
			if err := c.add(out, float64(i)+beside/c.slotWidth(), b, l); err != nil {
				return nil, err
			}
		}
	}
	out.NominalX(labels...)
	out.X.Min, out.X.Max, out.X.Padding = -0.5, float64(slots)-0.5, 0
	out.X.Tick.Length, out.X.Tick.Color = 3, l.back // space for the labels
	out.Y.Min, out.Y.Max, out.Y.Padding, out.Y.Tick.Length, out.Y.LineStyle.Width = 0, 1.04*out.Y.Max, 0, 0, 0
	out.X.LineStyle.Color, out.Y.Tick.Marker = l.ink, plot.TickerFunc(roundTicks)
	for _, axis := range []*plot.Axis{&out.X, &out.Y} {
		axis.Label.TextStyle.Color, axis.Tick.Label.Color = l.ink, l.ink
	}
	return out, nil
}

// roundTicks returns a few ticks at multiples of 1, 2 or 5 times a power of ten.
func roundTicks(_, most float64) (ticks []plot.Tick) {
	order := math.Pow(10, math.Floor(math.Log10(most/4)))
	step := order
	for _, f := range []float64{2, 5} {
		if most/(f*order) >= 3 {
			step = f * order
		}
	}
	for i := 0.0; i*step <= most; i++ {
		ticks = append(ticks, plot.Tick{Value: i * step, Label: fmt.Sprintf("%.4g", i*step)})
	}
	return ticks
}

// add draws a bar centred at x, and its mark.
func (c *chart) add(to *plot.Plot, x float64, b bar, l look) error {
	drawn, err := plotter.NewBarChart(plotter.Values{b.value}, barWidth)
	if err != nil {
		return err
	}
	drawn.XMin, drawn.Color, drawn.LineStyle.Width = x, shadeOf(c.series[b.series], l), 0
	if b.open {
		drawn.LineStyle = draw.LineStyle{Color: drawn.Color, Width: 1, Dashes: []vg.Length{2, 2}}
		drawn.Color, drawn.Width = l.back, barWidth-1
	}
	if b.value > 0 {
		to.Add(drawn)
	}
	if b.mark > 0 {
		half := 0.6 * barWidth / c.slotWidth()
		to.Add(markFrom(x-half, x+half, b.mark, l))
	}
	return nil
}

// markFrom returns a mark: a horizontal line.
func markFrom(from, to, y float64, l look) *plotter.Line {
	return &plotter.Line{XYs: plotter.XYs{{X: from, Y: y}, {X: to, Y: y}}, LineStyle: draw.LineStyle{Color: l.ink, Width: 2}}
}

func shadeOf(series string, l look) color.Color {
	if shade := shades[series]; shade != nil {
		return shade
	}
	return l.ink
}

// legend names the series.
func (c *chart) legend(l look) (*plot.Legend, error) {
	legend := plot.NewLegend()
	legend.Top, legend.Left, legend.Padding, legend.ThumbnailWidth = true, true, 4, 10
	legend.TextStyle.Color, legend.TextStyle.Font.Size = l.ink, 10
	for _, series := range c.series {
		sample, err := plotter.NewBarChart(plotter.Values{1}, barWidth)
		if err != nil {
			return nil, err
		}
		sample.Color, sample.LineStyle.Width = shadeOf(series, l), 0
		legend.Add(series, sample)
	}
	if c.marks != "" {
		legend.Add(c.marks, markFrom(0, 0, 0, l))
	}
	return &legend, nil
}

// figures lists the charts with their file names.
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
	c := &chart{columns: 1, title: "Throughput, simulated: tokens per GPU and second; dashed bars need more memory than there is",
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

// breakdownChart marks the paper's factors on the bars of their techniques.
func breakdownChart(r *results) *chart {
	said := map[string]float64{"gpt-13b-512k, sppo": 1.23, "gpt-13b-512k, sppo mux": 1.44, "gpt-65b-640k, sppo": 3.38, "gpt-65b-640k, sppo mux": 3.48}
	c := &chart{columns: 2, title: "Breakdown, simulated: speed over Megatron", marks: "the paper"}
	for _, t := range techniques {
		if _, ok := shades[t.system]; ok { // other copy rates are in the table only
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
	c := &chart{columns: 1, title: "Longest sequence of GPT-7B, by the memory bound: millions of tokens", series: lengthSystems, marks: "the paper"}
	p := panel{}
	for _, n := range lengthGPUs {
		g := group{label: fmt.Sprintf("%d GPUs", n)}
		for i, s := range lengthSystems {
			var said float64
			fmt.Sscan(lengths[fmt.Sprintf("%s, %d", s, n)], &said) // nothing scanned: 0
			g.bars = append(g.bars, bar{series: i, value: r.millions(s, n), mark: said})
		}
		p.groups = append(p.groups, g)
	}
	c.panels = []panel{p}
	return c
}

func bubbleChart(r *results) *chart {
	c := &chart{columns: 3, title: "Bubble (idle divided by busy time), in percent, simulated", series: []string{"sppo", "sppo mux", "sppo interleaved"}, marks: "(pp - 1)/N"}
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
