package tokenizer

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// cutEverywhere cuts a text at each border where Cut says that it may be cut, and compares the IDs with those of the
// whole. It returns the number of cuts.
func cutEverywhere(t *testing.T, name string, tok *Tokenizer, text string) (cuts int) {
	t.Helper()
	whole, err := tok.Encode(nil, text, false)
	if err != nil {
		t.Fatal(err)
	}
	for end := len(text); ; {
		at := tok.Cut([]byte(text[:end]))
		if at == 0 {
			return cuts
		}
		_, n := utf8.DecodeLastRuneInString(text[:at])
		cuts, end = cuts+1, at
		got, err := tok.Encode(nil, text[:at], false)
		if err != nil {
			t.Fatal(err)
		}
		if got, err = tok.EncodeNext(got, text[at-n:at], text[at:]); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, whole) {
			t.Fatalf("%s: %q cut at %d becomes %v, but %v as a whole", name, text, at, got, whole)
		}
	}
}

// randomText returns text that stresses the places where tokens can begin and end.
func randomText(r *rand.Rand, added []string) string {
	parts := append([]string{"a", "the", "New", "'s", "don't", " ", "  ", "\n", "\n\n", "\t", "7", "1234", "你好", "の", "，", ".", "...", "!", "é", "e\u0301",
		"\u00a0", "ﬁ", "ä", "가", "\u1100\u1161", "🙂", "\xff", "\xe4\xbd", "▁", "_", "-", "$", "Ⅷ", "\u200d", "//", "\r\n"}, added...)
	var b strings.Builder
	for range 1 + r.IntN(24) {
		b.WriteString(parts[r.IntN(len(parts))])
	}
	return b.String()
}

func TestCut(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(reference, "*.[jm]*"))
	if err != nil || len(files) < 12 {
		t.Fatal(files, err)
	}
	var texts []string
	lines(t, filepath.Join(reference, "strings.gz"), func(i int, line []byte) {
		left, _, _ := bytes.Cut(line, []byte("\t"))
		if text, err := base64.StdEncoding.DecodeString(string(left)); err == nil && i > 0 && i%4 == 1 && len(text) < 400 {
			texts = append(texts, string(text))
		}
	})
	for _, file := range files {
		if strings.HasSuffix(file, ".py") || strings.HasSuffix(file, ".md") {
			continue
		}
		tok, err := Open(file)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Base(file)
		sentence := "People who read this, in 1984 or later: it can be cut before many of its spaces"
		if cuts := cutEverywhere(t, name, tok, sentence); cuts < 8 {
			t.Errorf("%s: %d cuts in %q", name, cuts, sentence)
		}
		var added []string
		for text := range tok.added.decoded {
			added = append(added, tok.names[text])
		}
		for _, m := range []matcher{tok.added.raw, tok.added.normalized} {
			for text := range m.tokens {
				added = append(added, text)
			}
		}
		slices.Sort(added)
		r, cuts := rand.New(rand.NewPCG(1, 2)), 0
		for _, text := range texts {
			cuts += cutEverywhere(t, name, tok, text)
		}
		for range 1500 {
			cuts += cutEverywhere(t, name, tok, randomText(r, added))
		}
		if cuts < 1000 {
			t.Errorf("%s: only %d cuts", name, cuts)
		}
	}
}

// draw returns a random tokenizer.json whose stages are drawn from all that are supported.
func draw(r *rand.Rand) []byte {
	type object = map[string]any
	one := func(all ...string) string { return all[r.IntN(len(all))] }
	expressions := []string{gpt2, trainingSplit, `\p{N}{1,3}`, `[^\s]+`, `\s`, `a|the|'s`, `(?>a?)a`, `(?>th|the) ?`, `\w*x|.`, ` ?[^ ]+`, `\p{L}+(?= )`,
		`\p{L}+(?!\.)`, `(?<= )\S+`, `(?i:new) ?|[^n]`, `[一-龥]+`, `^a`, `a$`, `x*`, `.+?`, `(a|the)+|[\s\S]`, `\p{L}{2,}|\s+`, `(?=a).|e`}
	for i, x := range expressions {
		expressions[i] = strings.ReplaceAll(x, `\w`, `\p{L}`)
	}
	find := func() object {
		if r.IntN(3) == 0 {
			return object{"String": one(" ", "▁", "the", "a", "\n", ". ")}
		}
		return object{"Regex": one(expressions...)}
	}
	normalizer := func() any {
		switch kind := one("NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip", "ByteLevel"); kind {
		case "Prepend":
			return object{"type": kind, "prepend": one("▁", " ", "a")}
		case "Replace":
			return object{"type": kind, "pattern": find(), "content": one("▁", "", "a b", " ")}
		case "Strip":
			return object{"type": kind, "strip_left": r.IntN(2) == 0, "strip_right": r.IntN(2) == 0}
		default:
			return object{"type": kind}
		}
	}
	pre := func() any {
		switch kind := one("ByteLevel", "Split", "Split", "Digits", "Metaspace"); kind {
		case "ByteLevel":
			return object{"type": kind, "add_prefix_space": r.IntN(2) == 0, "use_regex": r.IntN(2) == 0}
		case "Split":
			return object{"type": kind, "pattern": find(), "invert": r.IntN(4) == 0,
				"behavior": one("Isolated", "Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")}
		case "Digits":
			return object{"type": kind, "individual_digits": r.IntN(2) == 0}
		default:
			return object{"type": kind, "replacement": "▁", "prepend_scheme": one("first", "always", "never"), "split": r.IntN(2) == 0}
		}
	}
	list := func(key, items string, f func() any) any {
		all := []any{}
		for range r.IntN(3) {
			all = append(all, f())
		}
		return object{"type": "Sequence", items: all}
	}
	vocab, merges := object{}, [][2]string{}
	add := func(text string) {
		if _, ok := vocab[text]; !ok {
			vocab[text] = len(vocab)
		}
	}
	singles := strings.Split("a b d e h n o r s t w . ' 1 7 ▁ 你 好 Ġ Ċ ä ½ ł ĠĀ", " ")
	for _, s := range append(singles, "<unk>") {
		add(s)
	}
	for range r.IntN(40) {
		x, y := one(singles...), one(singles...)
		add(x + y)
		merges = append(merges, [2]string{x, y})
	}
	var added []object
	for range r.IntN(3) {
		if text := one("<tool>", "<a", " x ", "thing", "the", "\n"); vocab[text] == nil {
			added = append(added, object{"id": len(vocab) + len(added), "content": text, "single_word": r.IntN(3) == 0, "lstrip": r.IntN(3) == 0,
				"rstrip": r.IntN(3) == 0, "normalized": r.IntN(2) == 0, "special": false})
			if len(added) == 2 && added[0]["content"] == added[1]["content"] {
				added = added[:1]
			}
		}
	}
	data, err := json.Marshal(object{"version": "1.0", "added_tokens": added,
		"normalizer": list("normalizer", "normalizers", normalizer), "pre_tokenizer": list("pre_tokenizer", "pretokenizers", pre),
		"model": object{"type": "BPE", "unk_token": "<unk>", "fuse_unk": r.IntN(2) == 0, "ignore_merges": r.IntN(4) == 0, "vocab": vocab, "merges": merges}})
	if err != nil {
		panic(err)
	}
	return data
}

// Random combinations of all stages are cut only where that changes nothing.
func TestCutRandom(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	read, some := 0, 0
	for i := range 1000 {
		data := draw(r)
		tok, err := Read(data)
		if err != nil {
			continue
		}
		read++
		cuts := 0
		for range 20 {
			cuts += cutEverywhere(t, fmt.Sprintf("%d: %s", i, data), tok, randomText(r, []string{"<tool>", "<a", " x ", "thing"}))
		}
		if cuts > 0 {
			some++
		}
	}
	if read < 500 || some < read/4 {
		t.Errorf("%d tokenizers were read, %d of them can be cut", read, some)
	}
}

// An expression that a text cannot be cut with is recognized.
func TestShape(t *testing.T) {
	for _, c := range []struct {
		expression       string
		at               border
		separates, match bool
	}{
		{gpt2, border{'a', ' '}, true, true},
		{gpt2, border{'a', 'b'}, false, true},
		{gpt2, border{'\n', 'a'}, false, true},
		{trainingSplit, border{'a', ' '}, true, true},
		{trainingSplit, border{'.', 'a'}, false, true},
		{`(?>a?)a`, border{'a', ' '}, true, false},
		{`a(?=b)`, border{'a', 'b'}, false, false},
		{`a(?=b)`, border{'a', 'c'}, true, false},
		{`(?<=b)a`, border{'a', ' '}, false, false},
		{`a*`, border{'a', ' '}, false, true},
	} {
		p, err := compile(c.expression)
		if err != nil {
			t.Fatal(err)
		}
		if s, m := p.shape.separates(c.at), p.shape.matches(c.at.a); s != c.separates || m != c.match {
			t.Errorf("%s at %q: separates %v, matches %v", c.expression, c.at, s, m)
		}
	}
}
