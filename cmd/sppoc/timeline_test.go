package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir/irtest"
)

// timeline lists the two versions of the README's picture; the value is true for the one with dark colours.
var timeline = map[string]bool{"../../docs/timeline.svg": false, "../../docs/timeline-dark.svg": true}

// The README's picture is what view currently draws; -update rewrites it. The dark version has the page's dark
// colours.
func TestTimelineInREADME(t *testing.T) {
	out := filepath.Join(t.TempDir(), "timeline.svg")
	env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: io.Discard}
	if code := app.Main(env, []string{"view", "../../examples/paper/gpt-7b-512k.sppo", "-o", out}); code != cli.Done {
		t.Fatalf("exit %d", code)
	}
	light, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for name, dark := range timeline {
		want := light
		if dark {
			want = inDarkColours(t, light)
		}
		if irtest.Update() {
			if err := os.WriteFile(name, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what view draws; go test ./cmd/sppoc -update rewrites it", name)
		}
		if len(got) > 200e3 {
			t.Errorf("%s has %d bytes", name, len(got))
		}
	}
}

// inDarkColours replaces each light colour of the page with the dark colour of the same name.
func inDarkColours(t *testing.T, svg []byte) []byte {
	t.Helper()
	light, dark, ok := strings.Cut(pageStyle, `:root[data-theme="dark"]`)
	if !ok {
		t.Fatal("the page has no dark colours")
	}
	darkOf := map[string]string{}
	variable := regexp.MustCompile(`--([a-z0-9]+): (#[0-9a-f]+);`)
	for _, m := range variable.FindAllStringSubmatch(dark, -1) {
		darkOf[m[1]] = m[2]
	}
	replace := map[string]string{}
	for _, m := range variable.FindAllStringSubmatch(light, -1) {
		if was := replace[m[2]]; was != "" && was != darkOf[m[1]] {
			t.Fatalf("two light colours are %s", m[2])
		}
		replace[m[2]] = darkOf[m[1]]
	}
	svg = bytes.ReplaceAll(svg, []byte(`font-size:9px"`), []byte(`font-size:9px;fill:`+colour("back")+`"`)) // names inside bars
	return regexp.MustCompile(`#[0-9a-f]{6}`).ReplaceAllFunc(svg, func(c []byte) []byte {
		d := replace[string(c)]
		if d == "" {
			t.Fatalf("%s is no colour of the page", c)
		}
		return []byte(d)
	})
}
