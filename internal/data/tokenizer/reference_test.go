package tokenizer

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

const reference = "testdata/reference"

// lines calls f for each line of a gzip file.
func lines(t *testing.T, name string, f func(i int, line []byte)) {
	t.Helper()
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	z, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	s := bufio.NewScanner(z)
	s.Buffer(nil, 16<<20)
	for i := 0; s.Scan(); i++ {
		f(i, s.Bytes())
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
}

// checksum computes the checksum of a text's IDs and decoded text, as make.py does, but with this package instead
// of the libraries.
func checksum(t *testing.T, tok *Tokenizer, text string) uint32 {
	t.Helper()
	sum := crc32.NewIEEE()
	var plain []uint32
	for _, special := range []bool{true, false} {
		ids, err := tok.Encode(nil, text, special)
		if err != nil {
			t.Fatal(err)
		}
		if err := binary.Write(sum, binary.LittleEndian, ids); err != nil {
			t.Fatal(err)
		}
		plain = ids
	}
	sum.Write([]byte(tok.Decode(plain, true)))
	return sum.Sum32()
}

func compareStrings(t *testing.T, folder, name string) {
	var tokenizers []*Tokenizer
	var names []string
	wrong := map[string]int{}
	count := 0
	lines(t, name, func(i int, line []byte) {
		if i == 0 {
			if err := json.Unmarshal(line, &names); err != nil {
				t.Fatal(err)
			}
			for _, n := range names {
				tok, err := Open(filepath.Join(folder, n))
				if err != nil {
					t.Fatal(err)
				}
				tokenizers = append(tokenizers, tok)
			}
			return
		}
		count++
		left, right, _ := bytes.Cut(line, []byte("\t"))
		text, err := base64.StdEncoding.DecodeString(string(left))
		sums, err2 := base64.StdEncoding.DecodeString(string(right))
		if err != nil || err2 != nil || len(sums) != 4*len(names) {
			t.Fatal(err, err2, len(sums))
		}
		for j, tok := range tokenizers {
			if want, got := binary.LittleEndian.Uint32(sums[4*j:]), checksum(t, tok, string(text)); got != want {
				if wrong[names[j]]++; wrong[names[j]] <= 3 {
					ids, _ := tok.Encode(nil, string(text), false)
					t.Errorf("%s: string %d, %.300q, becomes %.100v, %.300q", names[j], i, text, ids, tok.Decode(ids, true))
				}
			}
		}
	})
	if count < 1000 || len(names) < 6 {
		t.Errorf("%d strings and %d tokenizers compared", count, len(names))
	}
	for n, x := range wrong {
		t.Errorf("%s: %d of %d strings differ", n, x, count)
	}
}

func TestReference(t *testing.T) {
	compareStrings(t, reference, filepath.Join(reference, "strings.gz"))
}

// TestReferenceLong trains the reference tokenizers again and compares this package with the libraries on
// 100,000 strings. It needs a Python interpreter with the libraries, which SPPO_PYTHON names.
func TestReferenceLong(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with tokenizers and sentencepiece")
	}
	dir := t.TempDir()
	script, out := filepath.Join(reference, "make.py"), filepath.Join(dir, "strings.gz")
	seed := os.Getenv("SPPO_SEED")
	if seed == "" {
		seed = "2"
	}
	for _, args := range [][]string{{"train", dir}, {"strings", dir, "100000", seed, out}} {
		cmd := exec.Command(python, append([]string{script}, args...)...)
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, text)
		}
	}
	compareStrings(t, dir, out)
}

// runesOf returns the set of the characters in the given ranges.
func runesOf(runs [][2]rune) map[rune]bool {
	out := map[rune]bool{}
	for _, r := range runs {
		for c := r[0]; c <= r[1]; c++ {
			out[c] = true
		}
	}
	return out
}

// last is the last character that make.py checks.
const last = 0x323ff

// TestCharacters checks that every character is classified and normalized as in the libraries.
func TestCharacters(t *testing.T) {
	everything := func(f func(r rune)) {
		for r := rune(1); r <= last; r++ {
			if utf8.ValidRune(r) {
				f(r)
			}
		}
	}
	seen := map[string]int{}
	lines(t, filepath.Join(reference, "characters.gz"), func(_ int, line []byte) {
		var kind, what string
		var raw, sum json.RawMessage
		if err := json.Unmarshal(line, &[]any{&kind, &what, &raw, &sum}); err != nil {
			t.Fatal(err)
		}
		seen[kind]++
		if kind == "form" {
			var start rune
			var want uint32
			if json.Unmarshal(raw, &start) != nil || json.Unmarshal(sum, &want) != nil {
				t.Fatalf("%s", line)
			}
			checkForms(t, what, start, want)
			return
		}
		var runs [][2]rune
		if err := json.Unmarshal(raw, &runs); err != nil {
			t.Fatal(err)
		}
		want := runesOf(runs)
		is := isWord
		switch kind {
		case "digits":
			is = isNumeric
		case "class", "quote":
			re, err := compile(what)
			if err != nil {
				t.Fatal(err)
			}
			is = func(r rune) bool {
				text := []rune{r}
				if kind == "quote" {
					text = []rune{'\'', r}
				}
				ok, err := re.regexp.MatchRunes(text)
				return ok && err == nil
			}
		}
		bad := 0
		everything(func(r rune) {
			if is(r) != want[r] {
				if bad++; bad < 5 {
					t.Errorf("%s %s: %U is %v, want %v", kind, what, r, is(r), want[r])
				}
			}
		})
	})
	if seen["class"] < 20 || seen["form"] < 3000 || seen["digits"] == 0 || seen["word"] == 0 || seen["quote"] < 2 {
		t.Errorf("compared: %v", seen)
	}
}

var around = [][2]string{{"", ""}, {"a\u0345", "\u0301"}, {"\U00011935", "\u0323"}}

// checkForms checks a normal form of each of 256 characters, both by itself and next to characters that reveal
// its combining class, composition and order.
func checkForms(t *testing.T, name string, start rune, want uint32) {
	var out []string
	for r, n := start, 0; n < 256 && r <= last; r++ {
		if !utf8.ValidRune(r) {
			continue
		}
		n++
		for _, a := range around {
			in := a[0] + string(r) + a[1]
			fast := normalForm(forms[name], in)
			if a[0] != "" {
				// normalFormSlow is called only for single characters, to save time.
			} else if slow := normalFormSlow(forms[name], in); slow != fast {
				t.Errorf("%s of %+q: %+q, and by the definition %+q", name, in, fast, slow)
			}
			out = append(out, fast)
		}
	}
	if got := crc32.ChecksumIEEE([]byte(strings.Join(out, "\n"))); got != want {
		t.Errorf("%s: characters from %U on differ", name, start)
	}
}

// Package norm breaks up runs of more than 30 combining characters; Hugging Face's library does not, so neither
// does normalForm.
func TestLongMarks(t *testing.T) {
	in := "q" + strings.Repeat("\u0323\u0307", 40)
	want := "q" + strings.Repeat("\u0323", 40) + strings.Repeat("\u0307", 40)
	if got := normalForm(norm.NFC, in); got != want {
		t.Errorf("%+q", got)
	}
	if fmt.Sprint(norm.NFC.String(in)) == want {
		t.Error("package norm no longer cuts")
	}
}
