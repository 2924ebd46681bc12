package passes

import (
	"bytes"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/examples"
	"sppo.dev/lang"
)

var update = flag.Bool("update", false, "rewrite golden files")

// golden compares with a file beside the package, or rewrites it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatalf("%v; run the test with -update", err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs; run the test with -update if that is meant (-want +got):\n%s", name, diff)
	}
}

// load reads an example, with overrides as behind --set.
func load(t testing.TB, file string, set ...string) *lang.Spec {
	t.Helper()
	sp, err := lang.Load("../examples/"+file, lang.Options{Shipped: examples.Shipped, Set: set})
	if err != nil {
		t.Fatal(err)
	}
	return sp
}

// planOf runs all passes over an example.
func planOf(t testing.TB, file string, set ...string) *Plan {
	t.Helper()
	sp := load(t, file, set...)
	p := New(sp)
	if err := Run(sp, p, Options{}); err != nil {
		t.Fatal(err)
	}
	return p
}

// random is a source whose seed a failing test shows, and SPPO_SEED repeats. `make test` always draws the same, the long tests
// never.
func random(t *testing.T) *rand.Rand { return rand.New(rand.NewPCG(seedOf(t), 0)) }

func seedOf(t *testing.T) uint64 {
	seed := uint64(1)
	if os.Getenv("SPPO_LONG") != "" {
		seed = uint64(time.Now().UnixNano())
	}
	if s, err := strconv.ParseUint(os.Getenv("SPPO_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("seed %d", seed)
	return seed
}

func jsonOf(t *testing.T, p *Plan) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := p.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// simulate predicts how long a plan takes.
func (p *Plan) simulate(t *costs) { newSimulation(p.mustCourse(), t, nil).run().report(p) }
