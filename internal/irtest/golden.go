// Package irtest provides test helpers: golden files, random programs, and programs of a given size. It
// imports only package ir, and only tests import it.
package irtest

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

var update = flag.Bool("update", false, "rewrite golden files instead of comparing with them")

// Update reports whether golden files are to be rewritten.
func Update() bool { return *update }

var goldens struct {
	sync.Mutex
	asked map[string]bool
}

// Golden compares got with the file at path or, with -update, rewrites the file.
func Golden(t testing.TB, path string, got []byte) {
	t.Helper()
	goldens.Lock()
	if goldens.asked == nil {
		goldens.asked = map[string]bool{}
	}
	goldens.asked[filepath.Clean(path)] = true
	goldens.Unlock()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (-update writes it)", err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (-update rewrites it): %s", path, firstDifference(got, want))
	}
}

func firstDifference(got, want []byte) string {
	g, w := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := 0; i < len(g) && i < len(w); i++ {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d\n got: %s\nwant: %s", i+1, g[i], w[i])
		}
	}
	return fmt.Sprintf("%d lines, not %d", len(g), len(w))
}

// Main runs the tests of a package. If all of them ran and passed, it fails if there are golden files under
// testdata that no test has used: their tests were probably removed by mistake. A package calls Main from
// TestMain.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 && wholeRun() {
		code = reportOrphans("testdata")
	}
	os.Exit(code)
}

// wholeRun reports whether no flag excludes tests.
func wholeRun() bool {
	for _, name := range []string{"test.run", "test.skip", "test.list", "test.fuzz"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return false
		}
	}
	return !testing.Short()
}

func reportOrphans(dir string) int {
	code := 0
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		switch {
		case os.IsNotExist(err):
			return nil
		case err != nil:
			return err
		case e.IsDir() || !strings.HasSuffix(path, ".want"):
			return nil
		}
		goldens.Lock()
		defer goldens.Unlock()
		if !goldens.asked[filepath.Clean(path)] {
			fmt.Fprintf(os.Stderr, "golden file %s: no test compares with it\n", path)
			code = 1
		}
		return nil
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}
