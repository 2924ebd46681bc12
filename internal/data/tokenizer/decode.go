package tokenizer

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// decoder turns the names of tokens into parts of the text.
type decoder func(tokens []string) []string

func readDecoder(out []decoder, raw json.RawMessage, where string, depth int) ([]decoder, error) {
	if isNull(raw) {
		return out, nil
	}
	var d struct {
		Type           string
		Decoders       []json.RawMessage
		Pattern        json.RawMessage
		Content        string
		Start, Stop    int
		Replacement    string
		PrependScheme  string `json:"prepend_scheme"`
		AddPrefixSpace *bool  `json:"add_prefix_space"`
	}
	if err := unmarshal(raw, &d, where); err != nil {
		return nil, err
	}
	switch d.Type {
	case "Sequence":
		return readSequence(out, d.Decoders, where+".decoders", depth, readDecoder)
	case "ByteLevel":
		return append(out, decodeBytes), nil
	case "ByteFallback":
		return append(out, decodeFallback), nil
	case "Fuse":
		return append(out, func(tokens []string) []string { return []string{strings.Join(tokens, "")} }), nil
	case "Metaspace":
		keep := d.PrependScheme == "never" || d.AddPrefixSpace != nil && !*d.AddPrefixSpace
		return append(out, func(tokens []string) []string {
			for i, t := range tokens {
				by := " "
				if i == 0 && !keep {
					by = ""
				}
				tokens[i] = strings.ReplaceAll(t, d.Replacement, by)
			}
			return tokens
		}), nil
	case "Strip":
		if d.Start < 0 || d.Stop < 0 || utf8.RuneCountInString(d.Content) != 1 {
			return nil, fmt.Errorf("%s: Strip needs one character of content, and start and stop of 0 or more", where)
		}
		return append(out, func(tokens []string) []string {
			for i, t := range tokens {
				tokens[i] = stripped(t, d.Content, d.Start, d.Stop)
			}
			return tokens
		}), nil
	case "Replace":
		p, err := readPattern(d.Pattern, where+".pattern")
		if err != nil {
			return nil, err
		}
		return append(out, func(tokens []string) []string {
			var e encoder
			for i, t := range tokens {
				if s, err := p.replace(&e, t, d.Content); err == nil {
					tokens[i] = s
				}
			}
			return tokens
		}), nil
	}
	return nil, unsupported(where, d.Type, "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip and Sequence")
}

// stripped removes up to `start` copies of content from the start of s, and up to `stop` copies from its end.
func stripped(s, content string, start, stop int) string {
	for ; start > 0 && strings.HasPrefix(s, content); start-- {
		s = s[len(content):]
	}
	for ; stop > 0 && strings.HasSuffix(s, content); stop-- {
		s = s[:len(s)-len(content)]
	}
	return s
}

// decodeBytes joins byte-level names into text.
func decodeBytes(tokens []string) []string {
	var b strings.Builder
	for _, t := range tokens {
		s, _ := unmapBytes(t)
		b.WriteString(s)
	}
	return []string{validUTF8(b.String())}
}

// decodeFallback turns runs of <0x00> to <0xFF> into text. In a run that is not valid UTF-8, each byte becomes U+FFFD.
func decodeFallback(tokens []string) []string {
	out := make([]string, 0, len(tokens))
	var run []byte
	flush := func() {
		if utf8.Valid(run) {
			out = append(out, string(run))
		} else {
			out = append(out, strings.Repeat("\ufffd", len(run)))
		}
		run = run[:0]
	}
	for _, t := range tokens {
		if b, ok := fallbackByte(t); ok {
			run = append(run, b)
			continue
		}
		if len(run) > 0 {
			flush()
		}
		out = append(out, t)
	}
	if len(run) > 0 {
		flush()
	}
	return out
}

// fallbackByte reads the name of a byte's token, such as <0x41>.
func fallbackByte(name string) (byte, bool) {
	if len(name) != 6 || !strings.HasPrefix(name, "<0x") || name[5] != '>' {
		return 0, false
	}
	b, err := strconv.ParseUint(name[3:5], 16, 8)
	return byte(b), err == nil
}
