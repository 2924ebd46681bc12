package tokenizer

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// preTokenizer appends the parts of a piece that the model processes separately.
type preTokenizer struct {
	split func(e *encoder, out []piece, p piece) ([]piece, error)
	cross crossing
}

// gpt2 is the expression that ByteLevel uses to split text.
const gpt2 = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// preTokenizerJSON holds the fields of all supported kinds.
type preTokenizerJSON struct {
	Type           string
	PreTokenizers  []json.RawMessage `json:"pretokenizers"`
	AddPrefixSpace *bool             `json:"add_prefix_space"`
	UseRegex       *bool             `json:"use_regex"`
	Pattern        json.RawMessage
	Behavior       string
	Invert         bool
	Individual     bool `json:"individual_digits"`
	Replacement    string
	PrependScheme  string `json:"prepend_scheme"`
	Split          *bool
}

// preTokenizers holds the steps of one pre-tokenizer of a file. If byteLevel is set, a step that maps bytes
// to characters must follow, unless the model works on bytes.
type preTokenizers struct {
	steps     []preTokenizer
	byteLevel bool
	first     bool // some steps treat the start of the text differently
}

func readPreTokenizer(out []preTokenizers, raw json.RawMessage, where string, depth int) ([]preTokenizers, error) {
	if isNull(raw) {
		return out, nil
	}
	var p preTokenizerJSON
	if err := unmarshal(raw, &p, where); err != nil {
		return nil, err
	}
	var one preTokenizers
	var err error
	switch p.Type {
	case "Sequence":
		return readSequence(out, p.PreTokenizers, where+".pretokenizers", depth, readPreTokenizer)
	case "ByteLevel":
		one, err = byteLevel(&p)
	case "Split":
		var find pattern
		var behave behavior
		if find, err = readPattern(p.Pattern, where+".pattern"); err == nil {
			behave, err = readBehavior(p.Behavior, where)
		}
		plain := !p.Invert && (p.Behavior == "Isolated" || p.Behavior == "Removed")
		one.steps = []preTokenizer{{splitBy(find, behave, p.Invert), find.crossSplit(plain)}}
	case "Digits":
		behave := contiguous
		if p.Individual {
			behave = isolated
		}
		one.steps = []preTokenizer{{func(e *encoder, out []piece, p piece) ([]piece, error) {
			return cut(out, p, behave(digits(e, p.text))), nil
		}, crossDigits(p.Individual)}}
	case "Metaspace":
		one.steps, err = metaspace(&p, where)
		one.first = p.PrependScheme == "first"
	default:
		err = unsupported(where, p.Type, "ByteLevel, Digits, Metaspace, Sequence and Split")
	}
	return append(out, one), err
}

func byteLevel(p *preTokenizerJSON) (preTokenizers, error) {
	out := preTokenizers{byteLevel: true}
	if p.AddPrefixSpace == nil || *p.AddPrefixSpace {
		out.steps = append(out.steps, preTokenizer{func(_ *encoder, out []piece, p piece) ([]piece, error) {
			if !strings.HasPrefix(p.text, " ") {
				p.text = " " + p.text
			}
			return append(out, p), nil
		}, keeps})
	}
	if p.UseRegex == nil || *p.UseRegex {
		find, err := compile(gpt2)
		if err != nil {
			return out, err
		}
		find.source = fmt.Sprintf("expression %.200q", gpt2)
		out.steps = append(out.steps, preTokenizer{splitBy(find, isolated, false), find.crossSplit(true)})
	}
	return out, nil
}

// behavior turns the spans of a pattern into the parts of a text. Matches that are to be dropped keep their
// flag.
type behavior func([]span) []span

var behaviors = map[string]behavior{"Isolated": isolated, "Removed": removed, "Contiguous": contiguous,
	"MergedWithPrevious": mergedWithPrevious, "MergedWithNext": mergedWithNext}

func readBehavior(name, where string) (behavior, error) {
	if b := behaviors[name]; b != nil {
		return b, nil
	}
	return nil, fmt.Errorf("%s: behavior %.40q is not Isolated, Removed, Contiguous, MergedWithPrevious or MergedWithNext", where, name)
}

func isolated(in []span) []span {
	for i := range in {
		in[i].match = false
	}
	return in
}

func removed(in []span) []span { return in }

// merged joins a span to the previous one if the function join, which is told which of the two are matches,
// returns true.
func merged(in []span, join func(before, is bool) bool) []span {
	out, before := in[:0], false
	for _, x := range in {
		if is := x.match; join(before, is) && len(out) > 0 {
			out[len(out)-1].end = x.end
			before = is
		} else {
			before = is
			out = append(out, span{x.start, x.end, false})
		}
	}
	return out
}

func contiguous(in []span) []span {
	return merged(in, func(before, is bool) bool { return before == is })
}

func mergedWithPrevious(in []span) []span {
	return merged(in, func(before, is bool) bool { return is && !before })
}

func mergedWithNext(in []span) []span {
	at, before := len(in), false
	for i := len(in) - 1; i >= 0; i-- {
		x := in[i]
		if x.match && !before && at < len(in) {
			in[at].start = x.start
		} else {
			at--
			in[at] = span{x.start, x.end, false}
		}
		before = x.match
	}
	return in[at:]
}

// cut appends the parts of p whose spans are not flagged as matches.
func cut(out []piece, p piece, spans []span) []piece {
	for _, x := range spans {
		if !x.match && x.start < x.end {
			out = append(out, piece{text: p.text[x.start:x.end], first: p.first && x.start == 0})
		}
	}
	return out
}

func splitBy(find pattern, behave behavior, invert bool) func(e *encoder, out []piece, p piece) ([]piece, error) {
	return func(e *encoder, out []piece, p piece) ([]piece, error) {
		spans, err := find.spans(e, p.text)
		if invert {
			for i := range spans {
				spans[i].match = !spans[i].match
			}
		}
		return cut(out, p, behave(spans)), err
	}
}

// digits divides a text into numeric characters, each flagged as a match, and the text between them.
func digits(e *encoder, s string) []span {
	out, done := e.spans[:0], 0
	for i, r := range s {
		if !isNumeric(r) {
			continue
		}
		if done < i {
			out = append(out, span{done, i, false})
		}
		done = i + utf8.RuneLen(r)
		out = append(out, span{i, done, true})
	}
	if done < len(s) {
		out = append(out, span{done, len(s), false})
	}
	e.spans = out
	return out
}

func isNumeric(r rune) bool {
	if unicode.In(r, unicode.N) || isNewer(r, "Nd") {
		return true
	}
	for _, x := range newerNumbers {
		if r >= x[0] && r <= x[1] {
			return true
		}
	}
	return false
}

// metaspace replaces spaces with a visible character. Depending on its options, it also adds one such character
// in front of the text, and splits the text before each of them.
func metaspace(p *preTokenizerJSON, where string) ([]preTokenizer, error) {
	by, scheme := p.Replacement, p.PrependScheme
	if utf8.RuneCountInString(by) != 1 {
		return nil, fmt.Errorf("%s: replacement %.40q is not one character", where, by)
	}
	switch scheme {
	case "":
		scheme = "always"
		if p.AddPrefixSpace != nil && !*p.AddPrefixSpace {
			scheme = "never"
		}
	case "first", "never", "always":
		if p.AddPrefixSpace != nil && !*p.AddPrefixSpace && scheme != "never" {
			return nil, fmt.Errorf("%s: add_prefix_space = false contradicts prepend_scheme = %s", where, scheme)
		}
	default:
		return nil, fmt.Errorf("%s: prepend_scheme %.40q is not first, never or always", where, scheme)
	}
	find, split := pattern{text: by}, p.Split == nil || *p.Split
	return []preTokenizer{{func(e *encoder, out []piece, p piece) ([]piece, error) {
		p.text = strings.ReplaceAll(p.text, " ", by)
		if (scheme == "always" || scheme == "first" && p.first) && !strings.HasPrefix(p.text, by) {
			p.text = by + p.text
		}
		if !split {
			return append(out, p), nil
		}
		spans, err := find.spans(e, p.text)
		return cut(out, p, mergedWithNext(spans)), err
	}, crossMetaspace(by, split)}}, nil
}

// byteChars maps bytes to the characters that represent them in byte-level vocabularies: printable bytes to themselves,
// and the others, in order, to the characters from U+0100 on. charBytes is its inverse.
var byteChars, charBytes = func() (chars [256]rune, bytes map[rune]byte) {
	bytes = map[rune]byte{}
	next := rune(0x100)
	for b := range chars {
		chars[b] = rune(b)
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			chars[b] = next
			next++
		}
		bytes[chars[b]] = byte(b)
	}
	return chars, bytes
}()

// mapBytes returns s with each byte replaced by its character.
func mapBytes(s string) string {
	var b strings.Builder
	b.Grow(2 * len(s))
	for i := range len(s) {
		b.WriteRune(byteChars[s[i]])
	}
	return b.String()
}

// unmapBytes inverts mapBytes, if every character of s represents a byte; otherwise it returns s and false.
func unmapBytes(s string) (string, bool) {
	out := make([]byte, 0, len(s))
	for _, r := range s {
		b, ok := charBytes[r]
		if !ok {
			return s, false
		}
		out = append(out, b)
	}
	return string(out), true
}
