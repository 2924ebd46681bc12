package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
)

// asCommand is an environment variable that makes the test binary act as sppoc, so that commands in the pages
// can run it.
const asCommand = "SPPOC_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

// pages lists the Markdown documents at the root, under docs, and those of internal packages. Their code blocks marked "console" hold
// commands, each after "$ " and followed by its complete output.
func pages(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, pattern := range []string{"*.md", "docs/*.md", "internal/*/README.md"} {
		found, err := filepath.Glob(filepath.Join("../..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range found {
			names = append(names, filepath.ToSlash(strings.TrimPrefix(name, filepath.FromSlash("../../"))))
		}
	}
	for _, name := range []string{"README.md", "ARCHITECTURE.md", "docs/tour.md", "docs/walkthrough.md"} {
		if !slices.Contains(names, name) {
			t.Fatalf("%s is not among %v", name, names)
		}
	}
	return names
}

var console = regexp.MustCompile("(?s)```console\n(.*?)```\n")

// Every console block shows the current output of its commands. -update rewrites the blocks.
func TestPages(t *testing.T) {
	if _, err := exec.LookPath("sh"); err != nil {
		t.Skip("no sh to run the pages' commands with")
	}
	path := commandFolder(t)
	for _, page := range pages(t) {
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
		if !irtest.Update() {
			t.Errorf("%s shows outdated output; go test ./cmd/sppoc -update rewrites it\n%s",
				page, unified(page, "today", strings.Split(string(text), "\n"), strings.Split(string(now), "\n"), 1))
			continue
		}
		if err := os.WriteFile(name, now, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

var (
	pageLink   = regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)|(?:src|srcset)="([^":]+)"`)
	pageFile   = regexp.MustCompile("`([a-z][a-z0-9_.-]*/[a-zA-Z0-9_./-]+\\.(?:go|md|cu|sppo|sh|css))`")
	pageSymbol = regexp.MustCompile("`([A-Za-z]+)` (?:in|of) `([a-z][a-z0-9_/]*/[a-z0-9_]+\\.go)`")
)

// Links in the pages lead to existing files, all files that the pages name exist, and every name that a page
// attributes to a Go file occurs in that file.
func TestPageReferences(t *testing.T) {
	links, paths, symbols := 0, 0, 0
	for _, page := range pages(t) {
		text, err := os.ReadFile(filepath.Join("../..", page))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range pageLink.FindAllSubmatch(text, -1) {
			links++
			target := string(m[1]) + string(m[2])
			if _, err := os.Stat(filepath.Join("../..", filepath.Dir(page), target)); err != nil {
				t.Errorf("%s links to %s: %v", page, target, err)
			}
		}
		for _, m := range pageFile.FindAllSubmatch(text, -1) {
			paths++
			if _, err := os.Stat(filepath.Join("../..", string(m[1]))); err != nil && page != "CHANGELOG.md" {
				t.Errorf("%s names %s: %v", page, m[1], err)
			}
		}
		for _, m := range pageSymbol.FindAllSubmatch(text, -1) {
			symbols++
			source, err := os.ReadFile(filepath.Join("../..", string(m[2])))
			if err != nil || !regexp.MustCompile(`\b`+string(m[1])+`\b`).Match(source) {
				t.Errorf("%s says that %s is in %s: %v", page, m[1], m[2], err)
			}
		}
	}
	if links < 20 || paths < 40 || symbols < 5 {
		t.Errorf("only %d links, %d files and %d names were checked", links, paths, symbols)
	}
}

// commandFolder returns a value for PATH whose first folder contains sppoc.
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

// transcript runs the commands of a block in the root folder of the repository. Standard error is part of the
// output.
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
