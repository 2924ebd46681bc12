package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"sppo.dev"
	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/meaning"
)

// TestForceOverRefusal checks that --force passes over a refusal of the proof, which it prints, and over nothing else.
func TestForceOverRefusal(t *testing.T) {
	refused := error(&sppo.BugError{Err: &meaning.Refusal{Problem: "x is incomplete"}})
	for _, c := range []struct {
		err    error
		force  bool
		passed bool
	}{{refused, false, false}, {refused, true, true}, {context.Canceled, true, false}, {errors.New("no space"), true, false}} {
		var out bytes.Buffer
		err := refusal(&cli.Env{Name: "sppoc", Stderr: &out}, c.err, c.force)
		if (err == nil) != c.passed || strings.Contains(out.String(), "x is incomplete") != c.passed {
			t.Errorf("%v, force %t: %v, printed %q", c.err, c.force, err, out.String())
		}
	}
}
