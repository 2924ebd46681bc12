package lang

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// fit checks a value against a type and returns it in its final form: a bare name that stands for a call
// becomes a call. An error in an item of a list is reported at that item.
func (t valueType) fit(what string, v value, report func(*Diagnostic)) (value, bool) {
	fail := func(code Code, hint, format string, args ...any) (value, bool) {
		report(newDiagnostic(code, v.at, hint, format, args...))
		return v, false
	}
	switch v.kind {
	case isName:
		if slices.Contains(t.names, v.name) {
			return v, true
		}
		if t.call(v.name) != nil {
			v.kind = isCall
			return t.fitCall(what, v, report)
		}
		hint := ""
		if all := t.allNames(); len(all) > 0 {
			hint = "it may be " + orList(all)
			if near := nearest(v.name, all); near != "" {
				hint = "did you mean `" + near + "`?"
			}
		} else {
			hint = "it takes " + t.String()
		}
		return fail(UnknownName, hint, "%s cannot be `%s`", what, v.name)
	case isNumber:
		if t.number != nil {
			return t.number.fit(what, v, report)
		}
	case isList:
		if t.list != nil {
			return t.list.fit(what, v, report)
		}
	case isCall:
		if len(t.calls) > 0 {
			return t.fitCall(what, v, report)
		}
	case isText:
		if t.text {
			return v, true
		}
		if slices.Contains(t.allNames(), v.text) {
			return fail(WrongType, fmt.Sprintf("write %s without quotes", v.text), "%s needs %s, found a string", what, t)
		}
		if t.number != nil {
			return fail(WrongType, "write the number in digits and without quotes", "%s needs %s, found %s", what, t, v)
		}
		if len(t.calls) > 0 && t.calls[0].texts {
			return fail(WrongType, fmt.Sprintf("write %s(%q)", t.calls[0].name, v.text), "%s needs %s, found a string", what, t)
		}
	}
	return fail(WrongType, "", "%s needs %s, found %s", what, t, v)
}

func (n *number) fit(what string, v value, report func(*Diagnostic)) (value, bool) {
	fail := func(code Code, hint, format string, args ...any) (value, bool) {
		report(newDiagnostic(code, v.at, hint, format, args...))
		return v, false
	}
	if v.dim != n.dim && v.num != 0 {
		return fail(WrongDimension, n.unitHint(v), "%s needs %s, found %s", what, n.dim, v.dim)
	}
	v.dim = n.dim
	if n.whole && n.dim == dimBytes { // 0.9 * 80GiB need not be a whole number of bytes
		v.num = math.Floor(v.num)
	}
	if n.whole && v.num != math.Trunc(v.num) {
		return fail(OutOfRange, fmt.Sprintf("%s or %s", showNumber(math.Floor(v.num), n.dim), showNumber(math.Ceil(v.num), n.dim)),
			"%s needs a whole number, found %s", what, v)
	}
	if v.num < n.min || n.above && v.num == n.min || v.num > n.max || n.below && v.num == n.max {
		words := n.rangeWords()
		if n.above && n.max >= maxRanks && v.num > n.max { // not documented
			words = "at most " + showNumber(n.max, n.dim)
		}
		return fail(OutOfRange, "it must be "+words, "%s is out of range: %s", what, v)
	}
	return v, true
}

// unitHint returns a hint that lists the right units. If the number has no unit, which is the most common
// mistake, the hint says so.
func (n *number) unitHint(v value) string {
	if n.dim == dimCount {
		return "write a number without a unit, or use K for 1024 or M for 1024K"
	}
	hint := "its units are " + strings.Join(unitsOf(n.dim), " ")
	if v.dim == dimCount {
		hint = "a unit is missing: " + hint
	}
	return hint
}

func (n *number) rangeWords() string {
	least, most := showNumber(n.min, n.dim), showNumber(n.max, n.dim)
	switch {
	case n.max >= maxRanks && n.above:
		return "above " + least
	case n.max >= maxRanks && n.min >= 0:
		return fmt.Sprintf("from %s to %s", least, most)
	case n.above && n.below:
		return fmt.Sprintf("above %s and below %s", least, most)
	case n.above:
		return fmt.Sprintf("above %s and at most %s", least, most)
	case n.below:
		return fmt.Sprintf("at least %s and below %s", least, most)
	}
	return fmt.Sprintf("from %s to %s", least, most)
}

func (l *list) fit(what string, v value, report func(*Diagnostic)) (value, bool) {
	if len(v.list) < l.min || len(v.list) > l.max {
		wants := fmt.Sprintf("%d to %d", l.min, l.max)
		if l.min == l.max {
			wants = fmt.Sprint(l.min)
		}
		report(newDiagnostic(WrongType, v.at, "", "%s needs a list of %s values, found %d", what, wants, len(v.list)))
		return v, false
	}
	out, all := v, true
	out.list = make([]value, len(v.list))
	for i, item := range v.list {
		fitted, ok := l.item.fit(fmt.Sprintf("%s[%d]", what, i), item, report)
		out.list[i], all = fitted, all && ok
	}
	return out, all
}

func (t valueType) call(name string) *callType {
	for i := range t.calls {
		if t.calls[i].name == name {
			return &t.calls[i]
		}
	}
	return nil
}

// fitCall checks the name of a call and its positional arguments. Named arguments are keys, which load.go
// checks.
func (t valueType) fitCall(what string, v value, report func(*Diagnostic)) (value, bool) {
	c := t.call(v.name)
	if c == nil {
		hint := "it takes " + t.String()
		if near := nearest(v.name, t.allNames()); near != "" {
			hint = "did you mean `" + near + "`?"
		}
		report(newDiagnostic(UnknownName, v.at, hint, "%s cannot be `%s(...)`", what, v.name))
		return v, false
	}
	if !c.texts && len(v.list) > 0 {
		hint := "it takes none"
		if c.block != "" {
			hint = fmt.Sprintf("write %s(%s = ...)", c.name, KeysOf(c.block)[0].Name)
		}
		report(newDiagnostic(BadArgument, v.list[0].at, hint, "`%s` takes no positional arguments", c.name))
		return v, false
	}
	if c.texts && len(v.list) == 0 {
		report(newDiagnostic(BadArgument, v.at, fmt.Sprintf("write %s(\"FILE\")", c.name), "`%s` needs at least one string", c.name))
		return v, false
	}
	all := true
	for _, item := range v.list {
		if item.kind != isText || item.text == "" {
			report(newDiagnostic(BadArgument, item.at, "", "`%s` needs strings that are not empty, found %s", c.name, item))
			all = false
		}
	}
	if c.block == "" && len(v.named) > 0 {
		report(newDiagnostic(BadArgument, v.named[0].nameAt, "", "`%s` has no argument `%s`", c.name, v.named[0].name))
		all = false
	}
	return v, all
}

// String describes the type for messages and for the reference page.
func (t valueType) String() string {
	var forms []string
	for _, n := range t.names {
		forms = append(forms, "`"+n+"`")
	}
	if t.number != nil {
		forms = append(forms, t.number.String())
	}
	if t.list != nil {
		forms = append(forms, t.list.String())
	}
	for _, c := range t.calls {
		forms = append(forms, "`"+c.name+"(...)`")
	}
	if t.text {
		forms = append(forms, "a string")
	}
	return joinOr(forms)
}

func (n *number) String() string {
	switch {
	case n.dim == dimCount && n.whole:
		return "a whole number"
	case n.dim == dimCount && n.max == 1 && n.below && !n.above:
		return "a fraction, " + n.rangeWords()
	case n.dim == dimCount && n.max == 1:
		return "a fraction " + n.rangeWords()
	case n.dim == dimCount:
		return "a number"
	}
	return n.dim.String()
}

func (l *list) String() string {
	item := l.item
	switch {
	case item.list != nil:
		return "a list of (rows, share) pairs"
	case len(item.names) > 0 && item.text:
		return "a list of " + joinAnd(append(quoted(item.names), "strings"))
	case len(item.names) > 0:
		return "a list of " + joinAnd(quoted(item.names))
	}
	count := ""
	if l.min == l.max {
		count = fmt.Sprintf("%d ", l.min)
	}
	if item.number.whole {
		return "a list of " + count + "whole numbers"
	}
	return "a list of " + count + "numbers " + item.number.rangeWords()
}

func quoted(ns []string) []string {
	out := make([]string, len(ns))
	for i, n := range ns {
		out[i] = "`" + n + "`"
	}
	return out
}

func orList(ns []string) string { return joinOr(quoted(ns)) }

func joinOr(forms []string) string { return join(forms, "or") }

func joinAnd(forms []string) string { return join(forms, "and") }

// join joins words with commas, and the last two with a conjunction.
func join(words []string, conjunction string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " " + conjunction + " " + words[len(words)-1]
}
