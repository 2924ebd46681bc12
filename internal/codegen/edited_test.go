package codegen

import (
	"bytes"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// A plan can be edited as JSON. If one of its numbers is replaced, the plan must either be refused or compile
// to a program that the verifier accepts, except perhaps for its memory use.
func TestEditedPlans(t *testing.T) {
	var b bytes.Buffer
	if err := planOf(t, "testdata/two-stages.sppo").WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	built, refused, tried := 0, 0, 0
	for _, at := range regexp.MustCompile(`-?[0-9][0-9.e+-]*`).FindAllStringIndex(text, -1) {
		if inString(text, at[0]) {
			continue
		}
		values := []string{"-1", "0", "1", "3", "1000", "4611686018427387904"}
		if testing.Short() { // one value for each number, in rotation
			values = values[tried%len(values):][:1]
		}
		tried++
		for _, value := range values {
			edited := text[:at[0]] + value + text[at[1]:]
			ok, err := buildEdited(edited)
			if err != nil {
				line := strings.Count(text[:at[0]], "\n") + 1
				t.Errorf("line %d with %s: %v", line, value, err)
			}
			if ok {
				built++
			} else {
				refused++
			}
		}
	}
	if built == 0 || refused == 0 {
		t.Errorf("%d built, %d refused: the test does not reach both", built, refused)
	}
}

func inString(text string, at int) bool { return strings.Count(text[:at], `"`)%2 == 1 }

// buildEdited reports whether the plan was accepted. It returns an error for what must not happen: a panic or
// an invalid program.
func buildEdited(text string) (ok bool, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	plan, readErr := plan.ReadJSON(strings.NewReader(text))
	if readErr != nil {
		return false, nil
	}
	p, buildErr := Build(plan)
	if buildErr != nil {
		return false, nil
	}
	return true, ir.VerifyOptions{AllowOverCapacity: true}.Verify(p)
}
