package tokenizer

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"
)

// normalizer rewrites a piece of text.
type normalizer struct {
	rewrite func(e *encoder, s string) (string, error)
	cross   crossing
}

var forms = map[string]norm.Form{"NFC": norm.NFC, "NFD": norm.NFD, "NFKC": norm.NFKC, "NFKD": norm.NFKD}

// readNormalizer appends the normalizers of one JSON object; an object of type Sequence has several.
func readNormalizer(out []normalizer, raw json.RawMessage, where string, depth int) ([]normalizer, error) {
	var n struct {
		Type        string
		Normalizers []json.RawMessage
		Prepend     string
		Pattern     json.RawMessage
		Content     string
		Left        bool `json:"strip_left"`
		Right       bool `json:"strip_right"`
	}
	if isNull(raw) {
		return out, nil
	}
	if err := unmarshal(raw, &n, where); err != nil {
		return nil, err
	}
	if form, ok := forms[n.Type]; ok {
		return append(out, normalizer{func(_ *encoder, s string) (string, error) { return normalForm(form, s), nil }, crossForm(form)}), nil
	}
	switch n.Type {
	case "Sequence":
		return readSequence(out, n.Normalizers, where+".normalizers", depth, readNormalizer)
	case "Prepend":
		return append(out, normalizer{func(_ *encoder, s string) (string, error) { return n.Prepend + s, nil }, keeps}), nil
	case "ByteLevel":
		return append(out, normalizer{func(_ *encoder, s string) (string, error) { return mapBytes(s), nil }, crossBytes}), nil
	case "Strip":
		return append(out, normalizer{func(_ *encoder, s string) (string, error) {
			if n.Left {
				s = strings.TrimLeftFunc(s, unicode.IsSpace)
			}
			if n.Right {
				s = strings.TrimRightFunc(s, unicode.IsSpace)
			}
			return s, nil
		}, crossStrip}), nil
	case "Replace":
		p, err := readPattern(n.Pattern, where+".pattern")
		if err != nil {
			return nil, err
		}
		return append(out, normalizer{func(e *encoder, s string) (string, error) { return p.replace(e, s, n.Content) }, p.crossReplace(n.Content)}), nil
	}
	return nil, unsupported(where, n.Type, "NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, ByteLevel and Sequence")
}

// maxNested limits nested sequences.
const maxNested = 8

// readSequence calls the function read, which appends its results, for each item.
func readSequence[T any](out []T, items []json.RawMessage, where string, depth int,
	read func([]T, json.RawMessage, string, int) ([]T, error)) ([]T, error) {
	if depth >= maxNested {
		return nil, fmt.Errorf("%s: sequences are nested more than %d deep", where, maxNested)
	}
	for i, item := range items {
		var err error
		if out, err = read(out, item, fmt.Sprintf("%s[%d]", where, i), depth+1); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func unsupported(where, kind, supported string) error {
	return fmt.Errorf("%s: type %.40q is not supported; supported are %s", where, kind, supported)
}
