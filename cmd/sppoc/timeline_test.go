package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
)

// pictures lists the documents' pictures by the name of their file: the spec and the ranks.
var pictures = map[string][2]string{"timeline": {"paper/gpt-7b-512k.sppo", "0,24"}, "memory": {"long/llama-8b-1m.sppo", "stages"}}

// The documents' pictures are what view currently draws; -update rewrites them.
func TestPictures(t *testing.T) {
	for name, of := range pictures {
		spec := of[0]
		job, step, ranks, err := simulated(nil, "../../examples/"+spec, nil, of[1])
		if err != nil {
			t.Fatal(err)
		}
		for theme, end := range map[string]string{"light": ".svg", "dark": "-dark.svg"} {
			written := "../../docs/" + name + end
			var out bytes.Buffer
			if err := timelineFigure(&out, theme, strings.TrimSuffix(filepath.Base(spec), ".sppo"), job.Program, step, ranks); err != nil {
				t.Fatal(err)
			}
			want := out.Bytes()
			if irtest.Update() {
				if err := os.WriteFile(written, want, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := os.ReadFile(written)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s is not what view draws; go test ./cmd/sppoc -update rewrites it", written)
			}
			if len(got) > 120e3 {
				t.Errorf("%s has %d bytes", written, len(got))
			}
		}
	}
}

// In both themes, all text contrasts with what is behind it: the background, or the bar that contains a task's name.
func TestContrast(t *testing.T) {
	for theme := range palettes {
		f := &figure{theme: theme}
		for _, name := range []string{"text", "soft"} {
			if c := contrast(f.colour(name), f.colour("back")); c < 4.5 {
				t.Errorf("%s: the contrast of %s is %.1f", theme, name, c)
			}
		}
		for _, kind := range taskKinds {
			for _, bar := range []string{f.fill(kind), f.shade(showNames[kind][0])} {
				if c := contrast(ink(bar), bar); c < 4.5 {
					t.Errorf("%s: the contrast of a name on %s is %.1f", theme, bar, c)
				}
			}
		}
	}
}

// contrast returns the contrast ratio of two colours, as WCAG defines it, from 1 to 21.
func contrast(a, b string) float64 {
	x, y := luminance(a)+0.05, luminance(b)+0.05
	return max(x, y) / min(x, y)
}
