package lang

import (
	"cmp"
	"math"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Text writes the spec as a text of its own, for a file in the folder dir: every key that the spec's file, its imports or an
// override has given, with its value. Text without an import, a parameter or an override then means the same. Comments and the
// names of values are lost.
func (s *Spec) Text(dir string) string {
	var b strings.Builder
	for i := range Blocks {
		block := &Blocks[i]
		if !block.inText() {
			continue
		}
		entries := ""
		for _, k := range KeysOf(block.Name) {
			if text := s.textOf(k, dir); text != "" {
				entries += k.Name + " = " + text + "\n"
			}
		}
		name := s.source.names[block.Name]
		if entries == "" && name == "" && !block.Required {
			continue
		}
		b.WriteString(strings.TrimSpace(block.Name+" "+name) + " {\n" + entries + "}\n\n")
	}
	text, err := Format(s.File, []byte(b.String()))
	if err != nil {
		panic("internal: the text of a spec does not parse: " + err.Error())
	}
	return string(text)
}

// textOf writes the value of a key as in a spec, or returns "" if neither the key nor an argument of its value was given.
func (s *Spec) textOf(k *Key, dir string) string {
	v, written := s.source.given[k.Path()]
	if !written && k.Default != "" {
		v = k.valueOf(k.Default)
	}
	var arguments []string
	if call := k.takes.call(v.name); call != nil && v.kind == isCall {
		for _, arg := range KeysOf(call.block) {
			if text := s.textOf(arg, dir); text != "" && call.has(arg.Name) {
				arguments = append(arguments, arg.Name+" = "+text)
			}
		}
	}
	if !written && len(arguments) == 0 {
		return ""
	}
	file := func(v value) string { return v.text }
	if k.paths && !v.shipped {
		file = func(v value) string { return v.pathFrom(dir) }
	}
	return v.source(arguments, file)
}

// source writes a value as in a spec. A call has the given named arguments, and strings are those that the function text returns.
func (v value) source(arguments []string, text func(value) string) string {
	var items []string
	for _, item := range v.list {
		items = append(items, item.source(nil, text))
	}
	switch v.kind {
	case isNumber:
		return exactNumber(v.num, v.dim)
	case isText:
		return strconv.Quote(text(v))
	case isList:
		return "[" + strings.Join(items, ", ") + "]"
	case isCall:
		return v.name + "(" + strings.Join(append(items, arguments...), ", ") + ")"
	}
	return v.name
}

// pathFrom returns the file name in a string, relative to the folder dir unless it is absolute.
func (v value) pathFrom(dir string) string {
	file := v.path()
	if file == "" || path.IsAbs(file) {
		return file
	}
	from, err := filepath.Abs(dir)
	to, errTo := filepath.Abs(file)
	relative, errRelative := filepath.Rel(from, to)
	if cmp.Or(err, errTo, errRelative) != nil {
		return file
	}
	return filepath.ToSlash(relative)
}

// exactNumber writes a number in base units so that reading it gives the same number, with the unit that makes it shortest. A
// computed number of operations per second may change by a rounding error, because none of its units is a power of 2.
func exactNumber(x float64, d dim) string {
	if x == 0 {
		return "0"
	}
	if x < 0 {
		return "-" + exactNumber(-x, d)
	}
	best, off := "", 0.0
	consider := func(scaled float64, u unit, name string) {
		const plain = len("10000000")
		text := strconv.FormatFloat(scaled, 'f', -1, 64)
		if len(text) > plain {
			text = strconv.FormatFloat(scaled, 'g', -1, 64)
		}
		if e := math.Abs(u.of(scaled) - x); best == "" || e < off || e == off && len(text)+len(name) < len(best) {
			best, off = text+name, e
		}
	}
	if d == dimCount {
		consider(x, unit{1, dimCount}, "")
	}
	for _, name := range slices.Backward(unitsOf(d)) {
		u := units[name]
		if d == dimCount && (x < leastK || x/u.scale != math.Trunc(x/u.scale)) || strings.HasSuffix(name, "b/s") {
			continue
		}
		for _, towards := range []float64{x / u.scale, 0, math.Inf(1)} { // the quotient is rounded
			consider(math.Nextafter(x/u.scale, towards), u, name)
		}
		if short, err := strconv.ParseFloat(decimal(x/u.scale), 64); err == nil { // without the errors of the division
			consider(short, u, name)
		}
	}
	return best
}
