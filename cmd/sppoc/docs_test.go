package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// asCommand makes the test binary the command itself, so that the pages' pipelines can run it.
const asCommand = "SPPOC_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

// pages show what commands print, in blocks marked console: commands behind "$ ", each with its whole output.
var pages = []string{"README.md", "ARCHITECTURE.md", "RATIONALE.md"}

var console = regexp.MustCompile("(?s)```console\n(.*?)```\n")

// Every console block of the pages is what its commands print today. With -update it becomes that.
func TestPages(t *testing.T) {
	if _, err := exec.LookPath("sh"); err != nil {
		t.Skip("no sh to run the pages' commands with")
	}
	path := commandFolder(t)
	for _, page := range pages {
		name := filepath.Join("../..", page)
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		blocks := 0
		now := console.ReplaceAllFunc(text, func(block []byte) []byte {
			blocks++
			return fmt.Appendf(nil, "```console\n%s```\n", transcript(t, path, string(console.FindSubmatch(block)[1])))
		})
		t.Logf("%s: %d blocks", page, blocks)
		if bytes.Equal(text, now) {
			continue
		}
		if !*update {
			t.Errorf("%s shows what its commands no longer print; go test ./cmd/sppoc -update rewrites it\n%s",
				page, unified(page, "today", strings.Split(string(text), "\n"), strings.Split(string(now), "\n"), 1))
			continue
		}
		if err := os.WriteFile(name, now, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// commandFolder is a folder to put before PATH, with sppoc in it.
func commandFolder(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\n%s=1 exec '%s' \"$@\"\n", asCommand, self)
	if err := os.WriteFile(filepath.Join(dir, "sppoc"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir + string(os.PathListSeparator) + os.Getenv("PATH")
}

// transcript runs the commands of a block at the root of the repository. What they print on standard error counts too.
func transcript(t *testing.T, path, block string) string {
	t.Helper()
	var out strings.Builder
	for _, line := range strings.Split(block, "\n") {
		command, ok := strings.CutPrefix(line, "$ ")
		if !ok {
			continue
		}
		c := exec.Command("sh", "-c", command)
		c.Dir = "../.."
		c.Env = append(os.Environ(), "PATH="+path, "LC_ALL=C")
		text, err := c.CombinedOutput()
		if err != nil && c.ProcessState.ExitCode() < 0 {
			t.Fatalf("%s: %v", command, err)
		}
		fmt.Fprintf(&out, "$ %s\n%s", command, text)
		if n := len(text); n > 0 && text[n-1] != '\n' {
			out.WriteByte('\n')
		}
	}
	return out.String()
}
