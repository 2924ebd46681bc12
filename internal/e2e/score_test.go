package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/internal/meaning"
	"sppo.dev/ir"
)

// verdict is what became of a mutant, a line of the file that SPPO_MUTANTS names.
type verdict struct {
	Program  string `json:"program"`
	Mutation string `json:"mutation"`
	N        int    `json:"n"` // of the mutation's mutants of this program
	Seed     uint64 `json:"seed"`

	What    string `json:"what,omitempty"` // the change; empty if the program has nothing to change in this way
	Runs    bool   `json:"runs,omitempty"`
	Changed bool   `json:"changed,omitempty"` // the results over finite fields
	Unsafe  bool   `json:"unsafe,omitempty"`  // the verifier refuses it
	Refused string `json:"refused,omitempty"` // what the proof says
}

// TestMeaningOfMutants breaks programs of all kinds such that they still run. The proof must refuse every mutant whose results over
// finite fields differ. If SPPO_MUTANTS names a file, verdicts are appended to it as they are found, and those that it has are not
// found again.
func TestMeaningOfMutants(t *testing.T) {
	each, seed, long := 1, irtest.Seed(t), os.Getenv("SPPO_LONG") != ""
	if long {
		each = 18
	}
	file, err := openVerdicts(os.Getenv("SPPO_MUTANTS"))
	if err != nil {
		t.Fatal(err)
	}
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
				for j, kind := range kinds {
					if !long && (j+i)%7 != 0 {
						continue
					}
					for n := range each {
						v := verdict{Program: k.name, Mutation: kind.name, N: n, Seed: seed}
						if !file.has(&v) {
							judge(t, &v, newMutant(rand.New(rand.NewPCG(seed+uint64(i), uint64(j<<16+n))), p), kind, p, want)
							if err := file.add(v); err != nil {
								t.Fatal(err)
							}
						}
					}
				}
			})
		}
	})
	if err := file.close(); err != nil {
		t.Error(err)
	}
	for _, v := range file.list {
		switch {
		case v.Changed && v.Refused == "":
			t.Errorf("%s: %s: accepted: %s", v.Program, v.Mutation, v.What)
		case v.Runs && !v.Changed && v.Refused != "":
			t.Logf("%s: %s: refused, but has the same results: %s\n%s", v.Program, v.Mutation, v.What, v.Refused)
		}
	}
	printVerdicts(t, "mutation", file.list, func(v *verdict) string { return v.Mutation })
	printVerdicts(t, "program", file.list, func(v *verdict) string { return v.Program })
}

// judge applies a mutation to a copy of a program, and compares what the proof says of the mutant with its results.
func judge(t *testing.T, v *verdict, m *mutant, kind mutation, p *ir.Program, want []float64) {
	if !kind.apply(m) || anotherJob(p, m.p) {
		return
	}
	v.What = m.what
	if v.Runs, v.Unsafe = executes(m.p); !v.Runs {
		return
	}
	if _, err := meaning.Prove(m.p); err != nil {
		v.Refused = err.Error()
	}
	got, err := outcomeUnlike(t, m.p, want)
	v.Changed = err != nil || !sameNumbers(got, want)
}

// anotherJob reports whether a mutant differs in a number of the job on which all instructions agree: it is the program of another job.
func anotherJob(p, q *ir.Program) bool {
	before := jobNumbers(p)
	for name, x := range jobNumbers(q) {
		if before[name] != x && x >= 0 {
			return true
		}
	}
	return false
}

// jobNumbers returns the numbers of the job that the header lacks, by opcode and attribute, or -1 where instructions do not agree. The
// verifier and the proof only demand that they agree.
func jobNumbers(p *ir.Program) map[string]float64 {
	numbers := map[string]float64{}
	for c := range p.Codes {
		for i := range p.Codes[c].Sections[ir.SectionStep] {
			in := &p.Codes[c].Sections[ir.SectionStep][i]
			for k, a := range in.Info().Attrs {
				name := in.Info().Name + " " + a.Name
				if !slices.Contains([]string{"grad_norm max_norm", "adamw eps", "sgd momentum", "nesterov momentum", "normalize eps"}, name) {
					continue
				}
				x := in.Attrs[k].Float(nil)
				if first, ok := numbers[name]; ok && first != x {
					x = -1
				}
				numbers[name] = x
			}
		}
	}
	return numbers
}

// sameNumbers reports whether two results are the same. NaN is the loss of a label that does not count.
func sameNumbers(got, want []float64) bool {
	return slices.EqualFunc(got, want, func(x, y float64) bool { return x == y || x != x && y != y })
}

// executes reports whether a program can be executed, in the order of its instructions: the verifier finds nothing wrong with any
// instruction by itself. The finite-field device and the proof both follow this order, so they must agree even where streams race. It
// also reports whether the verifier refuses the program.
func executes(p *ir.Program) (runs, unsafe bool) {
	err := ir.VerifyOptions{AllowOverCapacity: true}.Verify(p)
	var found *ir.VerifyError
	return err == nil || errors.As(err, &found) && !slices.ContainsFunc(found.Findings, func(f ir.Finding) bool {
		return slices.Contains([]ir.FindingKind{ir.FindMalformed, ir.FindHeader, ir.FindPlace, ir.FindShape, ir.FindBounds, ir.FindOverlap, ir.FindEvent}, f.Kind)
	}), err != nil
}

// verdicts is a list of verdicts, and the file that keeps it.
type verdicts struct {
	mu   sync.Mutex
	list []verdict
	done map[verdict]bool // by what identifies a mutant
	file *os.File         // nil: none
}

// openVerdicts reads the verdicts of a file, if it exists. Without a name, none are kept.
func openVerdicts(name string) (*verdicts, error) {
	f := &verdicts{done: map[verdict]bool{}}
	if name == "" {
		return f, nil
	}
	var err error
	if f.file, err = os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_RDWR, 0o644); err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(f.file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var v verdict
		if err := json.Unmarshal(lines.Bytes(), &v); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		f.keep(v)
	}
	return f, lines.Err()
}

func (v *verdict) mutant() verdict {
	return verdict{Program: v.Program, Mutation: v.Mutation, N: v.N, Seed: v.Seed}
}

func (f *verdicts) has(v *verdict) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.done[v.mutant()]
}

func (f *verdicts) keep(v verdict) {
	f.list, f.done[v.mutant()] = append(f.list, v), true
}

// add keeps a verdict, also in the file.
func (f *verdicts) add(v verdict) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keep(v)
	if f.file == nil {
		return nil
	}
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = f.file.Write(append(line, '\n'))
	return err
}

func (f *verdicts) close() error {
	if f.file == nil {
		return nil
	}
	return f.file.Close()
}

// printVerdicts prints a table with a row for each name, in the order in which names are listed first.
func printVerdicts(t *testing.T, title string, list []verdict, name func(*verdict) string) {
	t.Helper()
	type row struct{ tried, run, changed, unsafe, refused, accepted, same int }
	rows, names := map[string]*row{}, []string{}
	count := func(name string, v *verdict) {
		r := rows[name]
		if r == nil {
			r = new(row)
			rows[name], names = r, append(names, name)
		}
		one := func(is bool) int { return map[bool]int{true: 1}[is] }
		r.tried, r.run, r.changed = r.tried+1, r.run+one(v.Runs), r.changed+one(v.Changed)
		r.unsafe, r.refused = r.unsafe+one(v.Unsafe), r.refused+one(v.Refused != "")
		r.accepted, r.same = r.accepted+one(v.Changed && v.Refused == ""), r.same+one(v.Runs && !v.Changed && v.Refused != "")
	}
	for i := range list {
		if list[i].What != "" {
			count(name(&list[i]), &list[i])
		}
	}
	slices.Sort(names)
	for i := range list {
		if list[i].What != "" {
			count("all", &list[i])
		}
	}
	var b strings.Builder
	line := func(cells ...any) { fmt.Fprintf(&b, "%-28s %6v %6v %8v %7v %8v %9v %9v\n", cells...) }
	fmt.Fprintf(&b, "\n%-28s %6s %6s %8s %17s %10s %13s\n", "", "", "", "changed", "refused by", "changed,", "same results,")
	line(title, "tried", "run", "results", "verify", "meaning", "accepted", "refused")
	for _, name := range names {
		r := rows[name]
		line(name, r.tried, r.run, r.changed, r.unsafe, r.refused, r.accepted, r.same)
	}
	t.Log(b.String())
}

// meaningMutations change what a program computes without making it unsafe.
var meaningMutations = []mutation{
	{"flip accumulate", false, (*mutant).flipAccumulate},
	{"send another value", false, (*mutant).sendAnother},
	{"change a factor", false, (*mutant).changeFactor},
	{"change a rank's constant", false, (*mutant).changeConstant},
	{"change a rank's number", false, (*mutant).changeNumber},
	{"change a peer", false, (*mutant).changePeer},
	{"swap members of a group", false, (*mutant).swapMembers},
	{"swap states", false, (*mutant).swapStates},
	{"change initial values", false, (*mutant).changeInit},
	{"swap instructions", false, (*mutant).swapInstructions},
	{"two changes", false, (*mutant).changeTwice},
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

// changeNumber changes the value of a constant of a rank.
func (m *mutant) changeNumber() bool {
	if len(m.p.Consts) == 0 {
		return false
	}
	r, c := m.IntN(len(m.p.Ranks)), m.IntN(len(m.p.Consts))
	m.p.Ranks = slices.Clone(m.p.Ranks)
	values := slices.Clone(m.p.Ranks[r].Consts)
	values[c] = max(0, values[c]+2*m.Int64N(2)-1)
	m.what = fmt.Sprintf("%s of rank %d is %d, not %d", m.p.Consts[c], r, values[c], m.p.Ranks[r].Consts[c])
	changed := values[c] != m.p.Ranks[r].Consts[c]
	m.p.Ranks[r].Consts = values
	return changed
}

// changePeer sends a message to another rank, or receives one from there.
func (m *mutant) changePeer() bool {
	i := m.any(isOp(ir.Send, ir.Recv))
	if i < 0 {
		return false
	}
	in := &m.instrs()[i]
	in.Attrs = slices.Clone(in.Attrs)
	for j, a := range in.Info().Attrs {
		if a.Kind == ir.KindRank {
			in.Attrs[j] = ir.Int(m.Int64N(int64(len(m.p.Ranks))))
			m.what += fmt.Sprintf(" with rank %d", in.Attrs[j].Int(nil))
		}
	}
	return true
}

// swapMembers exchanges the first two members of a group, for all ranks.
func (m *mutant) swapMembers() bool {
	if len(m.p.Groups) == 0 {
		return false
	}
	g, found := m.IntN(len(m.p.Groups)), false
	m.p.Ranks = slices.Clone(m.p.Ranks)
	for r := range m.p.Ranks {
		rank := &m.p.Ranks[r]
		if rank.Groups = slices.Clone(rank.Groups); len(rank.Groups[g]) > 1 {
			members := slices.Clone(rank.Groups[g])
			members[0], members[1] = members[1], members[0]
			rank.Groups[g], found = members, true
		}
	}
	m.what = "members of " + m.p.Groups[g]
	return found
}

// swapStates exchanges the places of two states of equal type.
func (m *mutant) swapStates() bool {
	if len(m.code.States) < 2 {
		return false
	}
	m.code.States = slices.Clone(m.code.States)
	a := &m.code.States[m.IntN(len(m.code.States))]
	for n, at := 0, m.IntN(len(m.code.States)); n < len(m.code.States); n++ {
		b := &m.code.States[(at+n)%len(m.code.States)]
		if a.View != b.View && a.View.Shape == b.View.Shape && a.View.DType == b.View.DType {
			m.what = fmt.Sprintf("%s: the %s of %s and the %s of %s", m.code.Name, a.Role, m.p.Tensors[a.Tensor].Name, b.Role, m.p.Tensors[b.Tensor].Name)
			a.View, b.View = b.View, a.View
			return true
		}
	}
	return false
}

// changeInit changes an instruction that initialises the states.
func (m *mutant) changeInit() bool {
	if m.enter(ir.SectionInit); len(m.instrs()) == 0 {
		return false
	}
	switch m.IntN(4) {
	case 0:
		return m.drop(onlyWrites)
	case 1:
		return m.redirect(onlyWrites, 0)
	case 2:
		return m.shift()
	}
	return m.changeAttribute()
}

// swapInstructions exchanges an instruction with the next one of its stream.
func (m *mutant) swapInstructions() bool {
	list := m.instrs()
	i := m.any(func(in *ir.Instr) bool { return class(in) != ir.ClassSync })
	for k := i + 1; i >= 0 && k < len(list); k++ {
		if list[k].Stream == list[i].Stream && class(&list[k]) != ir.ClassSync {
			list[i], list[k] = list[k], list[i]
			return true
		}
	}
	return false
}

// changeTwice applies two mutations to a section.
func (m *mutant) changeTwice() bool {
	what := ""
	for range 2 {
		kind := mutations[m.IntN(len(mutations))]
		if !kind.apply(m) {
			return false
		}
		what += kind.name + ": " + m.what + "; "
	}
	m.what = what
	return true
}
