package clitest

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sppo.dev/cmd/internal/cli"
)

// odd lists the kinds of unusual files, each with a function that creates one.
var odd = []struct {
	name string
	make func(path string) error
}{
	{"pipe", func(path string) error { return unix.Mkfifo(path, 0o644) }},
	{"device", func(path string) error { return os.Symlink("/dev/zero", path) }},
	{"folder", func(path string) error { return os.Mkdir(path, 0o755) }},
	{"binary", func(path string) error { return os.WriteFile(path, []byte("\x00\x1b[2J\xff\x9b"), 0o644) }},
	{"sparse", func(path string) error {
		return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, 1<<40))
	}},
}

// Hostile runs commands with unusual files at a path that the commands read. Each command must finish quickly, report
// at most a few errors, exit with code 2, and use little memory. The except parameter lists the kinds to omit: "pipe",
// "device", "folder", "binary", "sparse".
func Hostile(t *testing.T, app *cli.App, path string, except []string, commands ...string) {
	t.Helper()
	for _, kind := range odd {
		if slices.Contains(except, kind.name) {
			continue
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), kind.make(path)); err != nil {
			t.Skip(err)
		}
		for _, command := range commands {
			hostile(t, app, kind.name, command)
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
}

// mostMemory is the maximum number of bytes that a command may allocate to read an unusual file.
const mostMemory = 64 << 20

func hostile(t *testing.T, app *cli.App, kind, command string) {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var out, errs bytes.Buffer
	code := make(chan int, 1)
	go func() {
		code <- app.Main(&cli.Env{Context: t.Context(), Stdout: &out, Stderr: &errs}, fields(command)[1:])
	}()
	select {
	case <-time.After(time.Minute):
		t.Fatalf("%s: %s: it does not end", kind, command)
	case c := <-code:
		runtime.ReadMemStats(&after)
		text := errs.String()
		if c != cli.BadInput || text == "" || strings.Count(text, "error:") > 3 {
			t.Errorf("%s: %s: exit %d\n%s", kind, command, c, text)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > mostMemory {
			t.Errorf("%s: %s: %d MiB allocated", kind, command, n>>20)
		}
		if strings.ContainsAny(text, "\x00\x1b") || strings.Contains(text, "\x9b") {
			t.Errorf("%s: %s: control characters in %q", kind, command, text)
		}
	}
}
