package compile

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// If a program that the compiler generated fails verification, the error blames the compiler and names the broken
// rule and the instructions.
func TestBugError(t *testing.T) {
	spec, err := lang.Load("../../examples/tiny.sppo", lang.Options{Shipped: shipped.Files})
	if err != nil {
		t.Fatal(err)
	}
	planned, err := Plan(spec, passes.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := Build(planned, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := proved(p); err != nil {
		t.Fatal(err)
	}
	step := &p.Codes[0].Sections[ir.SectionStep]
	*step = slices.DeleteFunc(*step, func(in ir.Instr) bool { return in.Op == ir.Wait })
	err = proved(p)
	var bug *BugError
	var found *ir.VerifyError
	if !errors.As(err, &bug) || !errors.As(err, &found) || len(found.Findings) < 2 {
		t.Fatalf("the error is %v", err)
	}
	first := &found.Findings[0]
	for _, part := range []string{"a bug in sppo, not a mistake in the job", `rule "` + string(first.Kind) + `"`, first.At.Text, "more\n", "please report it"} {
		if part == "" || !strings.Contains(err.Error(), part) {
			t.Errorf("the message lacks %q:\n%v", part, err)
		}
	}
	if strings.Contains(err.Error(), "goroutine") || strings.Count(err.Error(), "\n") > 12 {
		t.Errorf("the message is not one clear error:\n%v", err)
	}
}
