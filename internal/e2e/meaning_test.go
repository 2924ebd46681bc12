package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/meaning"
	"sppo.dev/internal/shipped"
	"sppo.dev/lang"
)

// TestMeaningOfRandomSpecs proves the meaning of the programs of random specs.
func TestMeaningOfRandomSpecs(t *testing.T) {
	draws, seed := 30, irtest.Seed(t)
	if os.Getenv("SPPO_LONG") != "" {
		draws = 500
	}
	for i := range uint64(draws) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 1+i))
			for {
				d := drawSpec(r)
				_, p, err := compile(d.text, d.drawn()...)
				if err != nil {
					continue
				}
				if _, err := meaning.Prove(p); err != nil {
					t.Fatalf("%v\n%s\n%s", err, strings.Join(d.drawn(), "\n"), d.text)
				}
				return
			}
		})
	}
}

// TestMeaningOfExamples proves the meaning of the smaller examples or, in its long form, of all whose files exist.
func TestMeaningOfExamples(t *testing.T) {
	patterns := []string{"*.sppo", "long/llama-8b-1m.sppo"}
	if os.Getenv("SPPO_LONG") != "" {
		patterns = []string{"*.sppo", "long/*.sppo", "paper/*[0-9][km].sppo", "today/*.sppo"} // the others in paper are shared by these
	}
	for _, pattern := range patterns {
		files, err := filepath.Glob(filepath.Join("../../examples", pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", pattern, err)
		}
		for _, file := range files {
			t.Run(filepath.Base(file), func(t *testing.T) {
				spec, err := lang.Load(file, lang.Options{Shipped: shipped.Files})
				if err != nil {
					t.Fatal(err)
				}
				_, p, err := build(spec)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := meaning.Prove(p); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
