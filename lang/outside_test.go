package lang

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// write makes a file and its folder.
func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A spec from elsewhere may import any file that its user can read. Errors must not print that file.
func TestImportFromOutsidePrintsNothing(t *testing.T) {
	dir := t.TempDir()
	spec, outside := filepath.Join(dir, "job", "job.sppo"), filepath.Join(dir, "secret")
	if err := os.MkdirAll(filepath.Dir(spec), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "job", "link")); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{
		"root:hunter2:0:0:root:/root:/bin/sh\n",
		"-----BEGIN KEY-----\nhunter2\n",
		"hunter2",
		"# a comment\nlet hunter2\n",
		"aws { hunter2 = hunter2 }\n",
		"model m {\n  hidden = hunter2 hunter2\n}\n",
		"model hunter2 {\n  hunter2 = 1\n  layers = \"hunter2\"\n}\n",
		"\"hunter2\"\n\x00\x1b[2J",
	} {
		write(t, outside, text)
		for _, path := range []string{"../secret", outside, "link"} {
			write(t, spec, fmt.Sprintf("import %q\n", path))
			_, err := Load(spec, Options{})
			if err == nil {
				t.Fatalf("importing %q gives no error", text)
			}
			for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
				if strings.Contains(err.Error(), "    "+line) || strings.Contains(text, "hunter2:") && strings.Contains(err.Error(), "hunter2") {
					t.Errorf("import %q of %q prints it:\n%v", path, text, err)
				}
			}
		}
	}
}

// For an error in a file in or below the folder of the spec, the line is shown; for one in a file elsewhere,
// only the position.
func TestImportShowsPlaces(t *testing.T) {
	dir := t.TempDir()
	spec := filepath.Join(dir, "job", "job.sppo")
	write(t, spec, "import \"parts/model.sppo\"\nimport \"../cluster.sppo\"\n")
	write(t, filepath.Join(dir, "job", "parts", "model.sppo"), "model m {\n  hidden = wide\n}\n")
	write(t, filepath.Join(dir, "cluster.sppo"), "cluster c {\n  nodes = many\n}\n")
	_, err := Load(spec, Options{})
	for _, want := range []string{"model.sppo:2:12", "    hidden = wide", "cluster.sppo:2:11"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in\n%v", want, err)
		}
	}
	if err != nil && strings.Contains(err.Error(), "    nodes = many") {
		t.Errorf("the line of the file outside is shown:\n%v", err)
	}
}

// Links can give a file many names, and files that each import two others form a tree, so imports must be
// limited.
func TestManyImports(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "x.sppo"), "import \"a/x.sppo\"\nimport \"b/x.sppo\"\n")
	for _, name := range []string{"a", "b"} {
		if err := os.Symlink(".", filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	_, err := Load(filepath.Join(dir, "x.sppo"), Options{})
	if err == nil || strings.Count(err.Error(), "error:") != 1 || !strings.Contains(err.Error(), "imports are nested more than 32 deep") {
		t.Errorf("%v", err)
	}
}

func TestWideImports(t *testing.T) {
	var text strings.Builder
	for i := range 300 {
		fmt.Fprintf(&text, "import \"f%d.sppo\"\n", i)
	}
	empty := func(string) ([]byte, error) { return nil, nil }
	_, err := Parse("x.sppo", []byte(text.String()), Options{ReadFile: empty})
	if err == nil || strings.Count(err.Error(), "error:") != 1 || !strings.Contains(err.Error(), "x.sppo:257:8") {
		t.Errorf("%v", err)
	}
}
