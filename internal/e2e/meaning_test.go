package e2e

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/meaning"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
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

// judged is a row of the table of mutants: of those that run, how many are refused, how many have other results, how many of the latter
// are accepted, and how many are refused although their results are the same.
type judged struct{ tried, run, refused, changed, missed, harmless int }

// TestMeaningOfMutants breaks programs of all kinds such that they still run. The proof must refuse every mutant whose results over
// finite fields differ.
func TestMeaningOfMutants(t *testing.T) {
	each, seed, long := 1, irtest.Seed(t), os.Getenv("SPPO_LONG") != ""
	if long {
		each = 18
	}
	var mu sync.Mutex
	table := map[string]*judged{}
	kinds := append(slices.Clone(mutations), meaningMutations...)
	t.Run("kinds", func(t *testing.T) {
		for i, k := range programKinds {
			t.Run(k.name, func(t *testing.T) {
				t.Parallel()
				p := programOf(t, i)
				if _, err := meaning.Prove(p); err != nil {
					t.Fatal(err)
				}
				want, err := outcomeOver(t, p)
				if err != nil {
					t.Fatal(err)
				}
				for k, kind := range kinds {
					if !long && (k+i)%7 != 0 {
						continue
					}
					for n := range each {
						m := newMutant(rand.New(rand.NewPCG(seed+uint64(i), uint64(k<<16+n))), p)
						if !kind.apply(m) {
							continue
						}
						one := judge(t, m, kind.name, want)
						mu.Lock()
						if table[kind.name] == nil {
							table[kind.name] = &judged{}
						}
						table[kind.name].add(one)
						mu.Unlock()
					}
				}
			})
		}
	})
	printJudged(t, kinds, table)
}

func (j *judged) add(k judged) {
	j.tried, j.run, j.refused, j.changed, j.missed, j.harmless = j.tried+k.tried, j.run+k.run, j.refused+k.refused, j.changed+k.changed, j.missed+k.missed, j.harmless+k.harmless
}

// judge compares what the proof says of a mutant with its results.
func judge(t *testing.T, m *mutant, kind string, want []float64) (j judged) {
	j.tried = 1
	if !executes(m.p) {
		return j
	}
	j.run = 1
	_, refused := meaning.Prove(m.p)
	got, err := outcomeOver(t, m.p)
	changed := err != nil || !slices.EqualFunc(got, want, func(x, y float64) bool { return x == y || x != x && y != y }) // NaN is the loss of a label that does not count
	if refused != nil {
		j.refused = 1
	}
	if changed {
		j.changed = 1
	}
	switch {
	case changed && refused == nil:
		j.missed = 1
		t.Errorf("%s: accepted: %s (%v)", kind, m.what, err)
	case !changed && refused != nil:
		j.harmless = 1
		t.Logf("%s: refused, but has the same results: %s\n%v", kind, m.what, refused)
	}
	return j
}

// executes reports whether a program can be executed, in the order of its instructions: the verifier finds nothing wrong with any
// instruction by itself. The finite-field device and the proof both follow this order, so they must agree even where streams race.
func executes(p *ir.Program) bool {
	err := ir.VerifyOptions{AllowOverCapacity: true}.Verify(p)
	var found *ir.VerifyError
	return err == nil || errors.As(err, &found) && !slices.ContainsFunc(found.Findings, func(f ir.Finding) bool {
		return slices.Contains([]ir.FindingKind{ir.FindMalformed, ir.FindHeader, ir.FindPlace, ir.FindShape, ir.FindBounds, ir.FindOverlap, ir.FindEvent}, f.Kind)
	})
}

func printJudged(t *testing.T, kinds []mutation, table map[string]*judged) {
	t.Helper()
	var b strings.Builder
	all := judged{}
	fmt.Fprintf(&b, "\n%-28s %6s %6s %8s %8s %8s %9s\n", "mutation", "tried", "run", "refused", "changed", "missed", "harmless")
	row := func(name string, j judged) {
		fmt.Fprintf(&b, "%-28s %6d %6d %8d %8d %8d %9d\n", name, j.tried, j.run, j.refused, j.changed, j.missed, j.harmless)
	}
	for _, k := range kinds {
		if j := table[k.name]; j != nil {
			row(k.name, *j)
			all.add(*j)
		}
	}
	row("all", all)
	t.Log(b.String())
}

// meaningMutations change what a program computes without making it unsafe.
var meaningMutations = []mutation{
	{"flip accumulate", false, (*mutant).flipAccumulate},
	{"send another value", false, (*mutant).sendAnother},
	{"change a factor", false, (*mutant).changeFactor},
	{"change a rank's constant", false, (*mutant).changeConstant},
}

// flipAccumulate flips the attribute by which an instruction adds to its result.
func (m *mutant) flipAccumulate() bool {
	adds := func(in *ir.Instr) int {
		for j, a := range in.Info().Attrs {
			if strings.HasPrefix(a.Name, "accumulate") {
				return j
			}
		}
		return -1
	}
	i := m.any(func(in *ir.Instr) bool { return adds(in) >= 0 })
	if i < 0 {
		return false
	}
	in := &m.instrs()[i]
	in.Attrs = slices.Clone(in.Attrs)
	in.Attrs[adds(in)] = ir.Int(1 - in.Attrs[adds(in)].Int(nil))
	return true
}

// sendAnother exchanges what two messages or collectives of equal size carry.
func (m *mutant) sendAnother() bool {
	carries := func(in *ir.Instr) bool { return class(in) == ir.ClassComm && in.Op != ir.Recv && in.Op != ir.AllReduce }
	i := m.any(carries)
	if i < 0 {
		return false
	}
	a := m.instrs()[i].X()
	for k := range m.instrs() {
		if k == i || !carries(&m.instrs()[k]) {
			continue
		}
		if b := m.instrs()[k].X(); b.Shape == a.Shape && b.DType == a.DType && *b != *a {
			*a, *b = *b, *a
			m.what += " exchanged with " + m.p.Text(m.code, &m.instrs()[k])
			return true
		}
	}
	return false
}

// changeFactor multiplies a number.
func (m *mutant) changeFactor() bool {
	scales := func(in *ir.Instr) int {
		for j, a := range in.Info().Attrs {
			if a.Kind.IsFloat() && slices.Contains([]string{"scale", "alpha", "weight"}, a.Name) && in.Attrs[j].Const == 0 && in.Attrs[j].Float(nil) != 0 {
				return j
			}
		}
		return -1
	}
	i := m.any(func(in *ir.Instr) bool { return scales(in) >= 0 })
	if i < 0 {
		return false
	}
	in := &m.instrs()[i]
	in.Attrs = slices.Clone(in.Attrs)
	in.Attrs[scales(in)] = ir.Float(2 * in.Attrs[scales(in)].Float(nil))
	return true
}

// changeConstant replaces a reference to a constant of the rank by another one.
func (m *mutant) changeConstant() bool {
	refers := func(in *ir.Instr) int {
		return slices.IndexFunc(in.Attrs, func(a ir.Attr) bool { return a.Const != 0 })
	}
	i := m.any(func(in *ir.Instr) bool { return refers(in) >= 0 && class(in) != ir.ClassComm })
	if i < 0 {
		return false
	}
	in := &m.instrs()[i]
	in.Attrs = slices.Clone(in.Attrs)
	in.Attrs[refers(in)] = ir.ConstRef(m.IntN(len(m.p.Consts)))
	m.what += " refers to another constant"
	return true
}

// TestMeaningOfExamples proves the meaning of the smaller examples or, in its long form, of all whose files exist.
func TestMeaningOfExamples(t *testing.T) {
	patterns := []string{"*.sppo", "long/llama-8b-1m.sppo"}
	if os.Getenv("SPPO_LONG") != "" {
		patterns = []string{"*.sppo", "long/*.sppo", "paper/*.sppo", "today/*.sppo"}
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
