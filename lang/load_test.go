package lang

import (
	"os"
	"path/filepath"
	"testing"
)

var shipped = os.DirFS("../examples")

func TestExamplesLoad(t *testing.T) {
	var files []string
	for _, pattern := range []string{"../examples/*.sppo", "../examples/paper/gpt-*-*.sppo"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) < 18 {
		t.Fatalf("found %d examples only", len(files))
	}
	for _, file := range files {
		if _, err := Load(file, Options{Shipped: shipped}); err != nil {
			t.Errorf("%s:\n%v", file, err)
		}
	}
}
