package lang

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

type valueKind int

const (
	isNumber valueKind = iota
	isName             // a bare name that stands for itself: auto, bf16
	isText
	isList
	isCall
	isBad // already reported
)

// value is the result of an expression. Its span, which diagnostics point at, is the text of the
// expression or, for a parameter, that of its argument.
type value struct {
	kind  valueKind
	num   float64
	dim   dim
	name  string // of a name or call
	text  string
	list  []value // items of a list, positional arguments of a call
	named []namedValue
	at    span

	shipped bool // the file that a call names is a shipped one
}

type namedValue struct {
	name   string
	nameAt span
	value  value
}

// String describes the value for messages.
func (v value) String() string {
	switch v.kind {
	case isNumber:
		return showNumber(v.num, v.dim)
	case isName:
		return "`" + v.name + "`"
	case isText:
		return strconv.Quote(v.text)
	case isList:
		return fmt.Sprintf("a list of %d", len(v.list))
	}
	return v.name + "(...)"
}

// Int returns the value as an integer. The key has checked that it is a whole number or a name such
// as auto, which gives 0.
func (v value) Int() int { return int(v.num) }

// Auto reports whether the value is left to the compiler's passes.
func (v value) Auto() bool { return v.kind == isName && v.name == "auto" }

// numbers returns the numbers of a list.
func (v value) numbers() (list []float64) {
	for _, item := range v.list {
		list = append(list, item.num)
	}
	return list
}

// binding is the value of a name.
type binding struct {
	value value
	given bool // set by an argument, which diagnostics then point at
	at    span
	bad   bool // the error has been reported, so uses report nothing
}

// scope is a chain of name tables: that of a block, then the one that all files share.
type scope struct {
	names map[string]*binding
	outer *scope
}

func (s *scope) find(name string) *binding {
	for ; s != nil; s = s.outer {
		if b := s.names[name]; b != nil {
			return b
		}
	}
	return nil
}

func (s *scope) all() []string {
	var out []string
	for ; s != nil; s = s.outer {
		out = append(out, sortedKeys(s.names)...)
	}
	return out
}

// evaluator evaluates the expressions of one text in one scope.
type evaluator struct {
	src    *sourceText
	scope  *scope
	calls  []callType
	takes  *number  // numbers that the key accepts; nil: any
	enum   []string // names that stand for themselves in the expression, even if they are also bound
	report func(*Diagnostic)
}

// expr evaluates an expression. It returns false after reporting a diagnostic.
func (e *evaluator) expr(n *exprNode) (value, bool) {
	left, ok := e.term(n.First)
	for _, next := range n.Rest {
		right, rightOK := e.term(next.Value)
		if !ok || !rightOK {
			ok = false
			continue
		}
		if ok = e.numbers(next.Op, left, right); !ok {
			continue
		}
		if left.dim != right.dim {
			e.fail(WrongDimension, right.at, "", "cannot `%s` %s and %s", next.Op, left.dim, right.dim)
			ok = false
			continue
		}
		if next.Op == "+" {
			left.num += right.num
		} else {
			left.num -= right.num
		}
		left.at = nodeSpan(e.src, n.Tokens)
	}
	return left, ok && e.finite(left)
}

func (e *evaluator) term(n *termNode) (value, bool) {
	left, ok := e.factor(n.First)
	for _, next := range n.Rest {
		right, rightOK := e.factor(next.Value)
		if !ok || !rightOK {
			ok = false
			continue
		}
		if ok = e.numbers(next.Op, left, right); !ok {
			continue
		}
		sign := int8(1)
		if next.Op == "*" {
			left.num *= right.num
		} else {
			if right.num == 0 {
				e.fail(OutOfRange, right.at, "", "division by zero")
				ok = false
				continue
			}
			left.num /= right.num
			sign = -1
		}
		if left.dim, ok = left.dim.times(right.dim, sign); !ok {
			e.fail(WrongDimension, right.at, "", "no quantity has this dimension")
			continue
		}
		left.at = nodeSpan(e.src, n.Tokens)
	}
	return left, ok && e.finite(left)
}

func (e *evaluator) numbers(op string, vs ...value) bool {
	for _, v := range vs {
		if v.kind != isNumber {
			e.fail(WrongType, v.at, "", "`%s` needs numbers, found %s", op, v)
			return false
		}
	}
	return true
}

func (e *evaluator) finite(v value) bool {
	if v.kind == isNumber && (math.IsInf(v.num, 0) || math.IsNaN(v.num)) {
		e.fail(OutOfRange, v.at, "", "the number is too large")
		return false
	}
	return true
}

func (e *evaluator) factor(n *factorNode) (v value, ok bool) {
	switch {
	case n.Number != "":
		v, ok = e.number(n)
	case n.Text != "":
		v, ok = e.text(n)
	case n.Call != nil:
		v, ok = e.call(n.Call)
	case n.List != nil:
		v, ok = e.list(n)
	default:
		v, ok = e.expr(n.Group)
		v.at = nodeSpan(e.src, n.Tokens)
	}
	if ok && n.Negative {
		if ok = e.numbers("-", v); ok {
			v.num = -v.num
			v.at = nodeSpan(e.src, n.Tokens)
		}
	}
	return v, ok
}

func (e *evaluator) number(n *factorNode) (value, bool) {
	at := nodeSpan(e.src, n.Tokens)
	x, unitName, ok := splitNumber(n.Number)
	if !ok {
		e.fail(OutOfRange, at, "", "the number is too large")
		return value{}, false
	}
	u := unit{1, dimCount}
	if unitName != "" {
		if u, ok = units[unitName]; !ok {
			e.fail(UnknownUnit, at, e.unitHint(unitName), "unknown unit `%s`", unitName)
			return value{}, false
		}
	}
	return value{kind: isNumber, num: u.of(x), dim: u.dim, at: at}, true
}

// unitHint suggests the unit that the user may have meant, among those of the key's dimension if it has one.
func (e *evaluator) unitHint(name string) string {
	known, hint := sortedKeys(units), "units are"
	if e.takes != nil {
		known, hint = unitsOf(e.takes.dim), "units of "+e.takes.dim.String()+" are"
	}
	for _, unit := range known {
		if strings.EqualFold(unit, name) {
			return "did you mean `" + unit + "`?"
		}
	}
	if near := nearest(name, known); near != "" {
		return "did you mean `" + near + "`?"
	}
	if e.takes != nil {
		return hint + " " + joinAnd(known)
	}
	for _, d := range dimensions {
		for _, u := range unitsOf(d.dim) {
			hint += " " + u
		}
	}
	return hint
}

func (e *evaluator) text(n *factorNode) (value, bool) {
	at := nodeSpan(e.src, n.Tokens)
	text, err := strconv.Unquote(n.Text)
	if err != nil {
		e.fail(Syntax, at, `write a backslash as \\`, "invalid escape in a string")
		return value{}, false
	}
	return value{kind: isText, text: text, at: at}, true
}

func (e *evaluator) list(n *factorNode) (value, bool) {
	v, all := value{kind: isList, at: nodeSpan(e.src, n.Tokens)}, true
	for _, item := range n.List.Items {
		x, ok := e.expr(item)
		all = all && ok
		v.list = append(v.list, x)
	}
	return v, all
}

// call resolves a bare name, or returns a call, whose arguments are left for the key to check.
func (e *evaluator) call(n *callNode) (value, bool) {
	at := nodeSpan(e.src, n.Tokens)
	if n.Args == nil {
		return e.name(n.Name, at)
	}
	v, all := value{kind: isCall, name: n.Name, at: at}, true
	defer func(outer []string) { e.enum = outer }(e.enum)
	for _, arg := range n.Args.Args {
		e.enum = e.namesOf(n.Name, arg.Name)
		x, ok := e.expr(arg.Value)
		if all = all && ok; !ok {
			continue
		}
		if arg.Name == "" {
			v.list = append(v.list, x)
			continue
		}
		v.named = append(v.named, namedValue{arg.Name, tokenSpan(e.src, arg.Tokens[0]), x})
	}
	return v, all
}

func (e *evaluator) name(name string, at span) (value, bool) {
	if slices.Contains(e.enum, name) {
		return value{kind: isName, name: name, at: at}, true
	}
	if b := e.scope.find(name); b != nil {
		if b.bad {
			return value{}, false
		}
		v := b.value
		v.at = at
		if b.given {
			v.at = b.value.at
		}
		return v, true
	}
	if slices.Contains(plainNames(), name) {
		return value{kind: isName, name: name, at: at}, true
	}
	e.fail(UnknownName, at, e.nameHint(name), "unknown name `%s`", name)
	return value{}, false
}

// namesOf returns the names that an argument of a call accepts as values, or nil if the key does not accept the
// call.
func (e *evaluator) namesOf(call, argument string) []string {
	for _, c := range e.calls {
		if k := FindKey(c.block + "." + argument); c.name == call && k != nil {
			return k.takes.allNames()
		}
	}
	return nil
}

// otherNames maps names that other systems use for values to the names here.
var otherNames = map[string]string{"bfloat16": "bf16", "float32": "f32", "fp32": "f32", "float": "f32", "torch.bfloat16": "bf16", "torch.float32": "f32"}

func (e *evaluator) nameHint(name string) string {
	bound := e.scope.all()
	for i := range name { // `a-1` is a single name
		if name[i] == '-' && e.scope.find(name[:i]) != nil {
			return "put blanks around `-` to subtract"
		}
	}
	candidates := append(slices.Clone(e.enum), bound...)
	if near := nearest(name, candidates); near != "" {
		return "did you mean `" + near + "`?"
	}
	if slices.Contains(e.enum, otherNames[name]) {
		return "the name here is `" + otherNames[name] + "`"
	}
	if len(e.enum) > 0 && e.takes != nil {
		return "it takes " + e.takes.String() + ", or " + orList(e.enum)
	}
	if len(e.enum) > 0 {
		return "it may be " + orList(e.enum)
	}
	if e.takes != nil {
		return "it takes " + e.takes.String() + ", in digits"
	}
	if near := nearest(name, plainNames()); near != "" {
		return "did you mean `" + near + "`?"
	}
	return ""
}

func (e *evaluator) fail(code Code, at span, hint, format string, args ...any) {
	e.report(newDiagnostic(code, at, hint, format, args...))
}
