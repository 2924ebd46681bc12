package corpus

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
)

// Programs, pictures, archives and texts are not taken for tokens, and tokens are not taken for any of them.
func TestOtherThanTokens(t *testing.T) {
	check := func(data []byte) string {
		err := otherThanTokens(&file{name: "x", data: bytes.NewReader(data), size: int64(len(data))})
		if err == nil {
			return ""
		}
		return err.Error()
	}
	text := strings.Repeat("Ein Satz über nichts, 你好。\r\n\t", 200)
	for _, c := range []struct{ data, want string }{
		{"\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 99), "x is not a file of tokens: it is an executable"},
		{"\x89PNG\r\n\x1a\n", "x is not a file of tokens: it is a PNG image"},
		{"\x93NUMPY\x01\x00", "x is not a file of tokens: it is a NumPy array: write its values with tofile"},
		{text, "x is not a file of tokens: it is a text: set tokenizer = ..., or tokenize it first with sppoc tokenize"},
		{text[:4096-1], "x is not a file of tokens: it is a text: set tokenizer = ..., or tokenize it first with sppoc tokenize"},
		{"", ""}, {"a short file", ""}, {"\x7fEL", ""}, {text[:1000] + "\x00", ""}, {text[:1000] + "\xff" + text, ""},
	} {
		if got := check([]byte(c.data)); got != c.want {
			t.Errorf("%.20q: %q, want %q", c.data, got, c.want)
		}
	}
	for cut := range 16 { // wherever the part that is read ends
		if got := check([]byte(text[cut+len("Ein Satz "):])); !strings.Contains(got, "a text") && text[cut+len("Ein Satz ")]&0xc0 != 0x80 {
			t.Errorf("text from byte %d: %q", cut, got)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for _, vocab := range []int32{128, 256, 50257, 128256} {
		ids := make([]int32, 4096)
		for i := range ids {
			ids[i] = r.Int32N(vocab)
		}
		for _, width := range []int{2, 4} {
			if got := check(packed(width, ids)); got != "" && vocab < 1<<16 {
				t.Errorf("%d bytes for tokens below %d: %s", width, vocab, got)
			}
		}
	}
}

// Text that is tokenized when it is opened must be a text.
func TestLiveText(t *testing.T) {
	dir := t.TempDir()
	tok := put(t, dir, "tok.json", []byte(`{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}`))
	for name, want := range map[string]string{"a.txt": "it is not a text: byte 2 is zero", "a.gz": "sppoc tokenize", "a.txt.zst": "sppoc tokenize", "a.parquet": "sppoc tokenize"} {
		_, err := Open([][]string{{put(t, dir, name, []byte("ab\x00abab"))}}, Options{Tokenizer: tok}, Order{Sequence: 1}, 3)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}
