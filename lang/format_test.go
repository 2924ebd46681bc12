package lang

import (
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestFormat(t *testing.T) {
	for _, file := range glob(t, "testdata/format/*.sppo") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Format(file, text)
		if err != nil {
			t.Error(err)
			continue
		}
		golden(t, strings.TrimSuffix(file, ".sppo")+".want", string(got))
		checkFormat(t, string(text))
	}
}

func TestFormatRefusesSyntaxErrors(t *testing.T) {
	if out, err := Format("x.sppo", []byte("train {\n")); err == nil || !strings.HasPrefix(err.Error(), "x.sppo:1:7: error:") {
		t.Errorf("%q, %v", out, err)
	}
}

// checkFormat checks that formatting is idempotent, changes no token, and preserves the meaning.
func checkFormat(t *testing.T, text string) {
	t.Helper()
	once, err := Format("x.sppo", []byte(text))
	if err != nil {
		return
	}
	twice, err := Format("x.sppo", once)
	if err != nil {
		t.Fatalf("the result does not parse: %v\nfrom %q\nto %q", err, text, once)
	}
	if diff := cmp.Diff(string(once), string(twice)); diff != "" {
		t.Fatalf("not idempotent, from %q\n%s", text, diff)
	}
	if diff := cmp.Diff(words(text), words(string(once))); diff != "" {
		t.Fatalf("tokens changed, from %q\n%s", text, diff)
	}
	before, errBefore := Parse("x.sppo", []byte(text), Options{ReadFile: base})
	after, errAfter := Parse("x.sppo", once, Options{ReadFile: base})
	if (errBefore == nil) != (errAfter == nil) {
		t.Fatalf("before: %v\nafter: %v", errBefore, errAfter)
	}
	if diff := cmp.Diff(before, after, cmpopts.IgnoreUnexported(Spec{})); diff != "" {
		t.Fatalf("the meaning changed, from %q\n%s", text, diff)
	}
}

// words returns all tokens except line breaks, with the white space in comments normalised.
func words(text string) []string {
	var out []string
	for _, t := range lex(&sourceText{text: text}) {
		switch t.Type {
		case tokNL:
		case tokComment:
			out = append(out, strings.Join(strings.Fields(strings.TrimPrefix(t.Value, "#")), " "))
		default:
			out = append(out, t.Value)
		}
	}
	return out
}

// TestFormatOfShuffledBlanks checks the formatting of examples after random changes of their spaces, line
// breaks and comments.
func TestFormatOfShuffledBlanks(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, file := range glob(t, "../examples/*.sppo", "../internal/shipped/clusters/*.sppo", "testdata/accepted/*.sppo") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			checkFormat(t, disturb(r, string(text)))
		}
	}
}

func disturb(r *rand.Rand, text string) string {
	var b strings.Builder
	for _, t := range lex(&sourceText{text: text}) {
		b.WriteString(t.Value)
		switch {
		case t.Type == tokComment:
		case t.Type == tokNL || t.Value == "{" || t.Value == "," || t.Value == "[":
			b.WriteString([]string{"", "\n", "\n\n \n", " # why\n", "\t"}[r.IntN(5)])
		case t.Value == "}" && r.IntN(2) == 0:
			b.WriteString(" ")
		}
		b.WriteString(strings.Repeat(" ", 1+r.IntN(3)))
	}
	return b.String()
}
