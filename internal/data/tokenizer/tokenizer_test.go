package tokenizer

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// tiny is a tokenizer.json with one merge; build fills in the words in capitals.
const tiny = `{"version":"1.0","added_tokens":[ADDED],"normalizer":NORM,"pre_tokenizer":PRE,"post_processor":POST,"decoder":DEC,
"model":{"type":"BPE","unk_token":UNK,"vocab":{"a":0,"b":1,"ab":2,"<u>":3},"merges":["a b"]}}`

func build(fields map[string]string) []byte {
	out := tiny
	for _, name := range []string{"ADDED", "NORM", "PRE", "POST", "DEC", "UNK"} {
		by, ok := fields[name]
		if !ok && name != "ADDED" {
			by = "null"
		}
		out = strings.Replace(out, name, by, 1)
	}
	return []byte(out)
}

func TestUnknown(t *testing.T) {
	for unk, want := range map[string][]uint32{`null`: {2, 0}, `"<u>"`: {3, 3, 2, 3, 0}} {
		tok, err := Read(build(map[string]string{"UNK": unk}))
		if err != nil {
			t.Fatal(err)
		}
		got, err := tok.Encode(nil, "xyabza", false)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("unk_token = %s: %v\n%s", unk, err, diff)
		}
	}
}

// Parts of a file that the package does not implement, or that are broken, cause one error that names the place.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		fields map[string]string
		want   string
	}{
		{map[string]string{"NORM": `{"type":"Lowercase"}`}, `normalizer: type "Lowercase" is not supported`},
		{map[string]string{"NORM": `{"type":"Sequence","normalizers":[{"type":"NFC"},{"type":"Nmt"}]}`}, `normalizer.normalizers[1]: type "Nmt"`},
		{map[string]string{"PRE": `{"type":"Whitespace"}`}, `pre_tokenizer: type "Whitespace" is not supported`},
		{map[string]string{"PRE": `{"type":"Split","pattern":{"Regex":"a++"},"behavior":"Isolated"}`}, `possessive quantifier at byte 1`},
		{map[string]string{"PRE": `{"type":"Split","pattern":{"Regex":"[a&&b]"},"behavior":"Isolated"}`}, `intersection of classes`},
		{map[string]string{"PRE": `{"type":"Split","pattern":{"Regex":"\\w+"},"behavior":"Isolated"}`}, `"\\w" at byte 0 is not supported`},
		{map[string]string{"PRE": `{"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated"}`}, `pre_tokenizer.pattern: expression "("`},
		{map[string]string{"PRE": `{"type":"Split","pattern":{"String":"a"},"behavior":"Sideways"}`}, `behavior "Sideways"`},
		{map[string]string{"PRE": `{"type":"Metaspace","replacement":"__"}`}, `replacement "__" is not one character`},
		{map[string]string{"DEC": `{"type":"CTC"}`}, `decoder: type "CTC"`},
		{map[string]string{"POST": `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}}],"special_tokens":{}}`}, `names "x"`},
		{map[string]string{"POST": `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"x"}},{"Sequence":{"id":"A"}}],"special_tokens":{"x":{"ids":[7]}}}`}, `the id 7, which is not a token`},
		{map[string]string{"ADDED": `{"id":9,"content":"new"}`}, `"new" has id 9 in the file, but 4 by its position`},
		{map[string]string{"UNK": `"nowhere"`}, `unk_token is "nowhere"`},
	} {
		_, err := Read(build(c.fields))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.fields, err, c.want)
		}
	}
	for text, want := range map[string]string{
		``:   "unexpected end",
		`{}`: "it has no model",
		`{"model":{"type":"Unigram","vocab":[["a",0]]}}`:                    `type "Unigram" is not supported`,
		`{"model":{"vocab":{"a":0}}}`:                                       "no merges",
		`{"model":{"vocab":{"a":4000000000},"merges":[]}}`:                  "ids must be below",
		`{"model":{"vocab":{"a":0},"merges":["a b"]}}`:                      `merges[0] joins "a" and "b", but the vocabulary has no "b"`,
		`{"model":{"vocab":{"a":0},"merges":["a"]}}`:                        `does not have exactly one space`,
		`{"model":{"vocab":{"a":0},"merges":[["a"]]}}`:                      `merges[0] has 1 parts`,
		`{"model":{"dropout":0.1,"vocab":{"a":0},"merges":[]}}`:             `dropout = 0.1`,
		`{"model":{"end_of_word_suffix":"</w>","vocab":{},"merges":[]}}`:    `end_of_word_suffix`,
		`{"version":"2.0","model":{"vocab":{},"merges":[]}}`:                `version is "2.0"`,
		strings.Repeat(`[`, 20000):                                          "exceeded max depth",
		`{"model":{"vocab":{},"merges":[]},"normalizer":` + nested(9) + `}`: "nested more than 8 deep",
	} {
		if _, err := Read([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want %s", text, err, want)
		}
	}
}

func nested(n int) string {
	return strings.Repeat(`{"type":"Sequence","normalizers":[`, n) + `{"type":"NFC"}` + strings.Repeat(`]}`, n)
}

// An expression whose time grows without bounds ends with an error that names it.
func TestSlowPattern(t *testing.T) {
	defer func(before time.Duration) { maxMatch = before }(maxMatch)
	maxMatch = 300 * time.Millisecond
	for where, fields := range map[string]map[string]string{
		"pre_tokenizer.pattern": {"PRE": `{"type":"Split","pattern":{"Regex":"(a+)+$"},"behavior":"Isolated"}`},
		"normalizer.pattern":    {"NORM": `{"type":"Replace","pattern":{"Regex":"(a+)+$"},"content":"b"}`},
	} {
		tok, err := Read(build(fields))
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = tok.Encode(nil, strings.Repeat("a", 30000)+"b", false)
		if want := where + `: expression "(a+)+$": one match in a text of 30001 bytes takes more than 300ms`; err == nil || err.Error() != want {
			t.Errorf("%.200v, want %s", err, want)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("it took %s", took)
		}
	}
}

func TestOpenFolder(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "it contains no tokenizer.json") {
		t.Error(err)
	}
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("tokenizer.json", string(build(nil)))
	for config, want := range map[string]int64{`{"eos_token":"ab"}`: 2, `{"eos_token":{"content":"b","lstrip":false}}`: 1, `{"eos_token":null}`: -1, `{}`: -1} {
		put("tokenizer_config.json", config)
		tok, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if id, ok := tok.EOS(); ok != (want >= 0) || ok && int64(id) != want {
			t.Errorf("%s: EOS is %d, %v", config, id, ok)
		}
	}
	put("tokenizer_config.json", `{"eos_token":"none such"}`)
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), `eos_token is "none such"`) {
		t.Error(err)
	}
	put("folder.json", "x")
	if _, err := Open(filepath.Join(dir, "folder.json")); err == nil || !strings.Contains(err.Error(), "SentencePiece") {
		t.Error(err)
	}
}

// Goroutines may share a tokenizer.
func TestConcurrent(t *testing.T) {
	tok, err := Open(filepath.Join(reference, "qwen2.json"))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Repeat("one two three 123 é 你好 \n", 20)
	want, err := tok.Encode(nil, text, true)
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	for range 8 {
		wait.Go(func() {
			for range 20 {
				if got, err := tok.Encode(nil, text, true); err != nil || !cmp.Equal(got, want) {
					t.Error("another result", err)
				}
			}
		})
	}
	wait.Wait()
	if tok.Decode(want, false) != text {
		t.Error("decoding does not give the text back")
	}
}

// A hostile file causes an error or yields a tokenizer that works, never a panic.
func FuzzRead(f *testing.F) {
	for _, name := range []string{"gpt2.json", "llama2.json", "metaspace.json", "sp_gemma.model"} {
		data, err := os.ReadFile(filepath.Join(reference, name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, " a b<s>12\n é\xff")
	}
	f.Add(build(map[string]string{"PRE": `{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":" ?\\p{L}+|\\s+(?!\\S)"},"behavior":"MergedWithNext","invert":true},{"type":"ByteLevel"},{"type":"Metaspace","replacement":"▁"}]}`,
		"ADDED": `{"id":4,"content":"x","lstrip":true,"rstrip":true,"single_word":true},{"id":5,"content":" y","normalized":true}`,
		"NORM":  `{"type":"Replace","pattern":{"Regex":"a*"},"content":"b"}`, "DEC": `{"type":"Strip","content":"a","start":1,"stop":1}`}), "abab x y")
	f.Fuzz(func(t *testing.T, data []byte, text string) {
		for _, read := range []func([]byte) (*Tokenizer, error){Read, ReadSentencePiece} {
			tok, err := read(data)
			if err != nil {
				continue
			}
			if len(text) > 64 {
				text = text[:64]
			}
			ids, err := tok.Encode(nil, text, true)
			if err != nil {
				continue
			}
			for _, id := range ids {
				if int(id) >= tok.Size() {
					t.Errorf("ID %d of %d", id, tok.Size())
				}
			}
			tok.Decode(ids, true)
		}
	})
}
