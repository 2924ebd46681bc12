package lang

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"os"
)

var expected = regexp.MustCompile(`# error: ([^#\n]*)`)

// TestRejected checks that every file in testdata/rejected gives exactly the diagnostics in its comments:
// `# error: code: words` on the offending line, where the words occur in the message or the hint.
func TestRejected(t *testing.T) {
	files, err := filepath.Glob("testdata/rejected/*.sppo")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".sppo"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			base := filepath.Base(file)
			_, err = Parse(base, text, Options{Shipped: shipped, ReadFile: readFrom(map[string]string{"base.sppo": exampleBase, base: string(text)})})
			var got Diagnostics
			if !errors.As(err, &got) {
				t.Fatalf("not rejected: %v", err)
			}
			matchExpected(t, string(text), base, got)
		})
	}
}

func matchExpected(t *testing.T, text, file string, got Diagnostics) {
	t.Helper()
	lines := strings.Split(text, "\n")
	met := map[string]bool{}
	for _, d := range got {
		found := false
		if d.Pos.File == file {
			for _, m := range expected.FindAllStringSubmatch(lines[d.Pos.Line-1], -1) {
				code, words, _ := strings.Cut(strings.TrimSpace(m[1]), ":")
				id := fmt.Sprint(d.Pos.Line, m[1])
				if !met[id] && string(d.Code) == code && strings.Contains(d.Message+"\n"+d.Hint, strings.TrimSpace(words)) {
					met[id], found = true, true
					break
				}
			}
		}
		if !found {
			t.Errorf("not expected:\n%v", d)
		}
	}
	for i, line := range lines {
		for _, m := range expected.FindAllStringSubmatch(line, -1) {
			if !met[fmt.Sprint(i+1, m[1])] {
				t.Errorf("line %d lacks %s", i+1, m[1])
			}
		}
	}
}
