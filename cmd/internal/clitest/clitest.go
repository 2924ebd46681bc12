// Package clitest runs commands within the test process and compares their output with transcripts. It is for
// tests only.
//
// A transcript is a text file. It begins with commands, one per line after "$ ". Input files follow, each
// after a line "-- NAME --". The last part, "-- want --", is the result: each command, its output ("> "
// before standard output, "! " before standard error), its exit code unless it is 0, and at the end the
// files that were created. `go test -update` writes that part.
//
// Besides the commands under test, these commands prepare inputs:
//
//	cp FROM TO             copy a file
//	truncate FILE BYTES    keep only the first bytes
//	flip FILE OFFSET       invert one byte; a negative offset counts from the end
//	replace FILE OLD NEW   replace text, which must be present
//	compile FILE TO        compile a spec to a program
package clitest

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
)

// Run runs all transcripts whose paths match pattern, each in a new folder that starts as a copy of the folder
// base.
func Run(t *testing.T, pattern, base string, app *cli.App, update bool) {
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) == 0 {
		t.Fatalf("no transcripts at %s: %v", pattern, err)
	}
	if base, err = filepath.Abs(base); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		path, err := filepath.Abs(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) { runOne(t, path, base, app, update) })
	}
}

func runOne(t *testing.T, path, base string, app *cli.App, update bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	parts := split(string(text))
	t.Chdir(t.TempDir())
	if err := os.CopyFS(".", os.DirFS(base)); err != nil {
		t.Fatal(err)
	}
	for _, p := range parts[1:] {
		if p.name != "want" {
			write(t, p.name, p.text)
		}
	}
	before := list(t)
	var got strings.Builder
	for _, line := range strings.Split(parts[0].text, "\n") {
		if command, ok := strings.CutPrefix(line, "$ "); ok {
			if words := fields(command); words[0] != app.Name {
				prepare(t, words)
				before = append(before, list(t)...)
				continue
			}
			got.WriteString(perform(command, app))
		}
	}
	for _, name := range list(t) {
		if !slices.Contains(before, name) {
			fmt.Fprintf(&got, "made %s\n", name)
		}
	}
	compare(t, path, parts, got.String(), update)
}

// part is a piece of a transcript: the commands, which have no name, or a file.
type part struct{ name, text string }

var header = regexp.MustCompile(`(?m)^-- (\S+) --\n`)

func split(text string) []part {
	marks := header.FindAllStringSubmatchIndex(text, -1)
	end := func(i int) int {
		if i < len(marks) {
			return marks[i][0]
		}
		return len(text)
	}
	parts := []part{{"", text[:end(0)]}}
	for i, m := range marks {
		parts = append(parts, part{text[m[2]:m[3]], text[m[1]:end(i+1)]})
	}
	return parts
}

func compare(t *testing.T, path string, parts []part, got string, update bool) {
	t.Helper()
	if last := &parts[len(parts)-1]; last.name != "want" {
		parts = append(parts, part{name: "want"})
	}
	want := &parts[len(parts)-1].text
	if got == *want {
		return
	}
	if !update {
		t.Errorf("%s\n--- want\n%s--- got\n%s", filepath.Base(path), *want, got)
		return
	}
	*want = got
	var b strings.Builder
	for i, p := range parts {
		if i > 0 {
			fmt.Fprintf(&b, "-- %s --\n", p.name)
		}
		b.WriteString(p.text)
	}
	write(t, path, b.String())
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// list returns all files below the current folder.
func list(t *testing.T) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, filepath.ToSlash(name))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// perform runs one command line and returns its result in the format of a transcript.
func perform(line string, app *cli.App) string {
	var out, errs bytes.Buffer
	code := app.Main(&cli.Env{Context: context.Background(), Stdout: &out, Stderr: &errs}, fields(line)[1:])
	var b strings.Builder
	fmt.Fprintf(&b, "$ %s\n", line)
	prefixed(&b, ">", out.String())
	prefixed(&b, "!", errs.String())
	if code != cli.Done {
		fmt.Fprintf(&b, "exit %d\n", code)
	}
	return b.String()
}

func prefixed(b *strings.Builder, prefix, text string) {
	if text == "" {
		return
	}
	for _, line := range strings.Split(strings.TrimSuffix(text, "\n"), "\n") {
		b.WriteString(strings.TrimRight(prefix+" "+line, " ") + "\n")
	}
}

// fields splits a line at spaces; single quotes keep words together.
func fields(line string) []string {
	var words []string
	for i, piece := range strings.Split(line, "'") {
		if i%2 == 1 {
			words = append(words, piece)
		} else {
			words = append(words, strings.Fields(piece)...)
		}
	}
	return words
}

// prepare runs a command that prepares an input.
func prepare(t *testing.T, words []string) {
	t.Helper()
	if words[0] == "compile" {
		job, err := cli.OpenProgram(nil, words[1], nil)
		if err == nil {
			err = ir.WriteFile(words[2], job.Program)
		}
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	data, err := os.ReadFile(words[1])
	if err != nil {
		t.Fatal(err)
	}
	to := words[1]
	switch words[0] {
	case "cp":
		to = words[2]
	case "truncate":
		data = data[:place(t, words[2], len(data))]
	case "flip":
		data[place(t, words[2], len(data))] ^= 0xff
	case "replace":
		if !bytes.Contains(data, []byte(words[2])) {
			t.Fatalf("%s does not contain %q", words[1], words[2])
		}
		data = bytes.Replace(data, []byte(words[2]), []byte(words[3]), 1)
	default:
		t.Fatalf("no command %s", words[0])
	}
	write(t, to, string(data))
}

// place returns the offset that a word gives; negative offsets count from the end.
func place(t *testing.T, word string, size int) int {
	t.Helper()
	n, err := strconv.Atoi(word)
	if err != nil {
		t.Fatal(err)
	}
	if n < 0 {
		n += size
	}
	return n
}
