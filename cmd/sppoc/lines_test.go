package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Whatever the two texts are, both can be rebuilt from the runs that compare returns.
func TestCompareRebuildsBothTexts(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 0))
	text := func() []string {
		lines := make([]string, random.IntN(30))
		for i := range lines {
			lines[i] = fmt.Sprint("line ", random.IntN(12))
		}
		return lines
	}
	for range 2000 {
		a, b := text(), text()
		var gotA, gotB []string
		for _, e := range compare(a, b) {
			if e.kind != '+' {
				if e.a0 != len(gotA) {
					t.Fatalf("a run begins at %d of a, after %d lines", e.a0, len(gotA))
				}
				gotA = append(gotA, e.lines...)
			}
			if e.kind != '-' {
				if e.b0 != len(gotB) {
					t.Fatalf("a run begins at %d of b, after %d lines", e.b0, len(gotB))
				}
				gotB = append(gotB, e.lines...)
			}
		}
		if !slices.Equal(gotA, a) || !slices.Equal(gotB, b) {
			t.Fatalf("compare of\n%q and\n%q gives\n%q and\n%q", a, b, gotA, gotB)
		}
	}
}

func TestUnified(t *testing.T) {
	lines := func(s string) []string { return strings.Fields(s) }
	for _, c := range []struct{ name, a, b, want string }{
		{"equal", "a b c", "a b c", ""},
		{"changed", "a b c d e f g", "a b c x e f g", "--- A\n+++ B\n@@ -3,3 +3,3 @@\n c\n-d\n+x\n e\n"},
		{"added at the end", "a b", "a b c", "--- A\n+++ B\n@@ -2,1 +2,2 @@\n b\n+c\n"},
		{"all new", "", "a", "--- A\n+++ B\n@@ -0,0 +1,1 @@\n+a\n"},
		{"moved", "a b c d", "b c d a", "--- A\n+++ B\n@@ -1,2 +1,1 @@\n-a\n b\n@@ -4,1 +3,2 @@\n d\n+a\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, unified("A", "B", lines(c.a), lines(c.b), 1)); diff != "" {
				t.Error(diff)
			}
		})
	}
}
