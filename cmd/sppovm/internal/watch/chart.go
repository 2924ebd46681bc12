package watch

import (
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"strconv"
	"strings"
)

// Size of a chart and of its margins, in units of its view box.
const (
	chartWidth, chartHeight                    = 640.0, 240.0
	leftMargin, rightMargin, topMargin, bottom = 58.0, 12.0, 10.0, 30.0
	columns                                    = 400 // maximum number of points drawn
)

// point is a value of a curve. Low and High are the extremes of the values that it represents.
type point struct{ X, Y, Low, High float64 }

// line is a curve with a name and the CSS class of its colour.
type line struct {
	name, class string
	points      []point
	dots        bool
}

// chart is a drawing of curves over steps or over positions.
type chart struct {
	Title string
	Axis  string // label of x; empty: step
	Note  string // below the title

	Drawing template.HTML // output of render
	lines   []line
	log     bool // logarithmic y axis
	logX    bool
	zero    bool // the y axis starts at 0
	cut     bool // cut off large y values of the first steps if this enlarges the rest of the curve considerably
}

// thin averages adjacent values if there are more than a chart can show. It omits values that are not finite.
func thin(points []point) []point {
	var good []point
	for _, p := range points {
		if !math.IsNaN(p.Y) && !math.IsInf(p.Y, 0) {
			good = append(good, point{p.X, p.Y, p.Y, p.Y})
		}
	}
	each := (len(good) + columns - 1) / columns
	if each <= 1 {
		return good
	}
	var out []point
	for i := 0; i < len(good); i += each {
		part := good[i:min(i+each, len(good))]
		p := point{part[len(part)-1].X, 0, math.Inf(1), math.Inf(-1)}
		for _, q := range part {
			p.Y += q.Y / float64(len(part))
			p.Low, p.High = min(p.Low, q.Y), max(p.High, q.Y)
		}
		out = append(out, p)
	}
	return out
}

// scale maps values to coordinates. Values above its upper end are drawn at that end.
type scale struct {
	low, high  float64
	begin, end float64
	log        bool
}

func (s scale) at(v float64) float64 {
	low, high := s.low, s.high
	v = min(v, high)
	if s.log {
		v, low, high = math.Log10(v), math.Log10(low), math.Log10(high)
	}
	if high == low {
		return (s.begin + s.end) / 2
	}
	return s.begin + (v-low)/(high-low)*(s.end-s.begin)
}

// ticks returns about five round values within the scale. On a logarithmic scale that contains fewer than three powers
// of ten and their multiples by 2 and 5, they are evenly spaced.
func (s scale) ticks() []float64 {
	if s.log {
		var out []float64
		for e := math.Floor(math.Log10(s.low)); e <= math.Ceil(math.Log10(s.high)); e++ {
			for _, m := range []float64{1, 2, 5} {
				if v := m * math.Pow(10, e); v >= s.low*0.999 && v <= s.high*1.001 && (m == 1 || s.high/s.low < 50) {
					out = append(out, v)
				}
			}
		}
		if len(out) > 2 {
			return out
		}
	}
	if s.high <= s.low {
		return []float64{s.low}
	}
	raw := (s.high - s.low) / 5
	unit := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, m := range []float64{1, 2, 5, 10} {
		if unit*m >= raw {
			unit *= m
			break
		}
	}
	var out []float64
	for i := math.Ceil(s.low/unit - 1e-9); i*unit <= s.high+unit*1e-9; i++ {
		out = append(out, i*unit)
	}
	return out
}

// scales fits both axes to the curves.
func (c *chart) scales() (x, y scale, ok bool) {
	x = scale{math.Inf(1), math.Inf(-1), leftMargin, chartWidth - rightMargin, c.logX}
	y = scale{math.Inf(1), math.Inf(-1), chartHeight - bottom, topMargin, c.log}
	for _, l := range c.lines {
		for _, p := range l.points {
			x.low, x.high = min(x.low, p.X), max(x.high, p.X)
			y.low, y.high = min(y.low, p.Low), max(y.high, p.High)
		}
	}
	if x.low > x.high {
		return x, y, false
	}
	if c.zero {
		y.low = 0
	}
	if high := c.afterStart(x.low + (x.high-x.low)/20); c.cut && high-y.low < (y.high-y.low)/2 {
		y.high = high
		c.Note = strings.TrimPrefix(c.Note+"; the first values are higher than shown", "; ")
	}
	if y.log = y.log && y.low > 0; !y.log {
		if room := (y.high - y.low) * 0.05; room > 0 {
			y.high += room
			if !c.zero {
				y.low -= room
			}
		} else {
			y.low, y.high = y.low-math.Abs(y.low)*0.1, y.high+math.Abs(y.high)*0.1
		}
	}
	return x, y, true
}

// afterStart returns the highest value of the curves at or after a given x.
func (c *chart) afterStart(from float64) float64 {
	high := math.Inf(-1)
	for _, l := range c.lines {
		for _, p := range l.points {
			if p.X >= from {
				high = max(high, p.High)
			}
		}
	}
	return high
}

// short formats a number for an axis.
func short(v float64) string {
	switch a := math.Abs(v); {
	case a < 1e-12:
		return "0"
	case a >= 1e9:
		return strconv.FormatFloat(v/1e9, 'g', 4, 64) + "B"
	case a >= 1e6:
		return strconv.FormatFloat(v/1e6, 'g', 4, 64) + "M"
	case a >= 1e4:
		return strconv.FormatFloat(v/1e3, 'g', 4, 64) + "K"
	}
	return strconv.FormatFloat(v, 'g', 4, 64)
}

// render draws the chart, and reports whether there is anything to draw. The page's script takes the values that it
// shows from the attribute data-lines.
func (c *chart) render() bool {
	for i := range c.lines {
		c.lines[i].points = thin(c.lines[i].points)
	}
	x, y, ok := c.scales()
	if !ok {
		return false
	}
	var b strings.Builder
	axis := c.Axis
	if axis == "" {
		axis = "step"
	}
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="img" aria-label="%s" data-axis="%s" data-lines="%s">`,
		chartWidth, chartHeight, template.HTMLEscapeString(c.Title), template.HTMLEscapeString(axis), template.HTMLEscapeString(c.values(x, y)))
	for _, v := range y.ticks() {
		fmt.Fprintf(&b, `<line class="grid" x1="%g" x2="%g" y1="%.1f" y2="%.1f"/><text class="y" x="%g" y="%.1f">%s</text>`,
			leftMargin, chartWidth-rightMargin, y.at(v), y.at(v), leftMargin-6, y.at(v)+3.5, short(v))
	}
	for _, v := range x.ticks() {
		fmt.Fprintf(&b, `<text class="x" x="%.1f" y="%g">%s</text>`, x.at(v), chartHeight-bottom+15, short(v))
	}
	fmt.Fprintf(&b, `<text class="axis" x="%g" y="%g">%s</text>`, chartWidth-rightMargin, chartHeight-3, template.HTMLEscapeString(axis))
	for _, l := range c.lines {
		l.draw(&b, x, y)
	}
	b.WriteString(`<line class="cursor" y1="10" y2="210"/></svg>`)
	c.Drawing = template.HTML(b.String())
	return true
}

func (l *line) draw(b *strings.Builder, x, y scale) {
	var path, upper, lower strings.Builder
	banded := false
	for i, p := range l.points {
		fmt.Fprintf(&path, "%c%.1f %.1f", "ML"[min(i, 1)], x.at(p.X), y.at(p.Y))
		fmt.Fprintf(&upper, "%c%.1f %.1f", "ML"[min(i, 1)], x.at(p.X), y.at(p.High))
		banded = banded || p.High > p.Low
	}
	if banded {
		for i := len(l.points) - 1; i >= 0; i-- {
			fmt.Fprintf(&lower, "L%.1f %.1f", x.at(l.points[i].X), y.at(l.points[i].Low))
		}
		fmt.Fprintf(b, `<path class="band %s" d="%s%sZ"/>`, l.class, upper.String(), lower.String())
	}
	if len(l.points) > 1 {
		fmt.Fprintf(b, `<path class="line %s" d="%s"/>`, l.class, path.String())
	}
	if l.dots || len(l.points) == 1 {
		for _, p := range l.points {
			fmt.Fprintf(b, `<circle class="%s" cx="%.1f" cy="%.1f" r="3"/>`, l.class, x.at(p.X), y.at(p.Y))
		}
	}
}

// values returns the data that the page's script shows at the pointer: the name of each curve, and three numbers
// for each point, namely its horizontal coordinate in the chart, x and y.
func (c *chart) values(x, y scale) string {
	type curve struct {
		Name   string       `json:"name"`
		Points [][3]float64 `json:"points"` // coordinate, x, y
	}
	out := []curve{}
	for _, l := range c.lines {
		one := curve{Name: l.name}
		for _, p := range l.points {
			one.Points = append(one.Points, [3]float64{round(x.at(p.X)), p.X, p.Y})
		}
		out = append(out, one)
	}
	text, err := json.Marshal(out)
	if err != nil {
		panic("internal: " + err.Error())
	}
	return string(text)
}

func round(v float64) float64 { return math.Round(10*v) / 10 }

// Legend lists the curves, if there are several.
func (c *chart) Legend() []Part {
	var out []Part
	if len(c.lines) > 1 {
		for _, l := range c.lines {
			out = append(out, Part{Key: l.class, Name: l.name})
		}
	}
	return out
}
