// Package plantest provides helpers for tests of the passes: example plans and sources of random numbers.
package plantest

import (
	"bytes"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/lang"
)

// Run is passes.Run without options, and Verify is passes.Verify, for tests of packages that package passes
// imports.
var (
	Run    func(*lang.Spec, *plan.Plan) error
	Verify func(*plan.Plan) error
)

// Load reads an example, with overrides as given to --set.
func Load(t testing.TB, file string, set ...string) *lang.Spec {
	t.Helper()
	sp, err := lang.Load(FolderOfExamples()+file, lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		t.Fatal(err)
	}
	return sp
}

// Plan runs all passes over an example.
func Plan(t testing.TB, file string, set ...string) *plan.Plan {
	t.Helper()
	sp := Load(t, file, set...)
	p := plan.New(sp)
	if err := Run(sp, p); err != nil {
		t.Fatal(err)
	}
	return p
}

// FolderOfExamples returns the path of the examples relative to the folder of the running test.
func FolderOfExamples() string {
	up := "../"
	for range 3 {
		if _, err := os.Stat(up + "examples"); err == nil {
			break
		}
		up += "../"
	}
	return up + "examples/"
}

// Expect runs the passes over an invalid request and checks the diagnostic.
func Expect(t *testing.T, sp *lang.Spec, code lang.Code, words, key, name string) {
	t.Helper()
	err := Run(sp, plan.New(sp))
	ds, ok := err.(lang.Diagnostics)
	if !ok || len(ds) == 0 || ds[0].Code != code || !strings.Contains(ds[0].Message, words) {
		t.Errorf("%s: %v, want %s: %s", name, err, code, words)
		return
	}
	if want := sp.At(key); ds[0].Pos != want {
		t.Errorf("%s: at %s, want %s of %s", name, ds[0].Pos, want, key)
	}
}

// Kept returns the number of bytes per token that one layer of a rank keeps for later subsequences and for the
// backward pass.
func Kept(p *plan.Plan) (bytes float64) {
	for _, u := range p.Units {
		if u.Block == graph.BlockLayer && u.Type != plan.Type2 {
			bytes += u.BytesPerToken
		}
	}
	return bytes
}

// Random returns a random source. A failing test prints its seed, and SPPO_SEED sets it. `make test` always
// uses the same seed; the long tests use a new one each time.
func Random(t *testing.T) *rand.Rand { return rand.New(rand.NewPCG(irtest.Seed(t), 0)) }

// JSON returns a plan as JSON.
func JSON(t *testing.T, p *plan.Plan) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := p.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
