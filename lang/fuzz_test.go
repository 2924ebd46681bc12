package lang

import (
	"errors"
	"os"
	"strings"
	"testing"
	"unicode/utf8"
)

// seeds returns specs from the repository: valid, invalid and badly formatted ones.
func seeds(f *testing.F) []string {
	f.Helper()
	var out []string
	for _, pattern := range []string{"../examples/*.sppo", "../internal/shipped/clusters/local.sppo", "../examples/paper/gpt-7b.sppo", "testdata/*/*.sppo"} {
		for _, file := range glob(f, pattern) {
			text, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			out = append(out, string(text))
		}
	}
	for _, c := range Codes {
		out = append(out, c.Example)
	}
	return append(out, exampleBase)
}

// FuzzParse checks that no text and no override causes a panic, and that diagnostics point at positions that
// exist.
func FuzzParse(f *testing.F) {
	for _, text := range seeds(f) {
		f.Add(text, "schedule.sp=4")
	}
	f.Add("import \"base.sppo\"", "train.data=text(\"a\", \"b\")")
	f.Fuzz(func(t *testing.T, text, flag string) {
		opts := Options{ReadFile: readFrom(map[string]string{"base.sppo": exampleBase})}
		if flag != "" {
			opts.Set = []string{flag}
		}
		s, err := Parse("fuzz.sppo", []byte(text), opts)
		if err == nil {
			if s.Model.Hidden < 1 || s.Train.Sequence < 1 || s.Cluster.GPUs() < 1 || s.Train.Data.Kind == "" {
				t.Errorf("accepted without being whole: %+v", s)
			}
			return
		}
		var ds Diagnostics
		if !errors.As(err, &ds) || len(ds) == 0 {
			t.Fatalf("not diagnostics: %v", err)
		}
		for _, d := range ds {
			checkDiagnostic(t, d, map[string]string{"fuzz.sppo": text, "base.sppo": exampleBase, "--set": flag})
		}
	})
}

func checkDiagnostic(t *testing.T, d *Diagnostic, texts map[string]string) {
	t.Helper()
	text, ok := texts[d.Pos.File]
	if !ok || d.Pos.Offset < 0 || d.Pos.Offset > len(text) {
		t.Fatalf("nowhere: %+v", d)
	}
	before := text[:d.Pos.Offset]
	line := 1 + strings.Count(before, "\n")
	column := 1 + utf8.RuneCountInString(before[strings.LastIndexByte(before, '\n')+1:])
	if d.Pos.Line != line || d.Pos.Column != column {
		t.Errorf("offset %d is at %d:%d, not %d:%d: %v", d.Pos.Offset, line, column, d.Pos.Line, d.Pos.Column, d)
	}
	if d.Code == "" || d.Message == "" || d.Width < 1 || !strings.Contains(d.Error(), string(d.Code)) {
		t.Errorf("incomplete: %+v", d)
	}
}

// FuzzFormat checks that formatting is idempotent and changes neither tokens nor meaning.
func FuzzFormat(f *testing.F) {
	for _, text := range seeds(f) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) { checkFormat(t, text) })
}
