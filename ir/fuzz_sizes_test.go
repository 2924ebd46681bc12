package ir_test

import (
	"encoding/binary"
	"math"
	"math/big"
	"slices"
	"testing"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// compiled returns the program of an example spec in which some keys are replaced.
func compiled(t testing.TB, file string, set ...string) *ir.Program {
	t.Helper()
	spec, err := lang.Load("../examples/"+file, lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		t.Fatal(err)
	}
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		t.Fatal(err)
	}
	p, err := codegen.Build(plan)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// mutator turns the fuzzer's bytes into changes to a program that preserve the program's structure.
type mutator struct {
	p    *ir.Program
	data []byte
}

func (m *mutator) number() uint64 {
	var b [8]byte
	m.data = m.data[copy(b[:], m.data):]
	return binary.LittleEndian.Uint64(b[:])
}

func (m *mutator) below(n int) int {
	if n < 1 || len(m.data) == 0 {
		return 0
	}
	b := m.data[:min(4, len(m.data))]
	m.data = m.data[len(b):]
	v := uint64(0)
	for _, x := range b {
		v = v<<8 | uint64(x)
	}
	return int(v % uint64(n))
}

// value returns a replacement for a number: a number near it, a multiple of it, a number near the end of a
// range, the end of a range divided by it, or an arbitrary number.
func (m *mutator) value(was int64) int64 {
	edges := []int64{0, 1, -1, 1 << 31, 1 << 32, 1 << 33, 1 << 40, 1 << 61, 1 << 62, math.MaxInt64, math.MinInt64, math.MaxInt32}
	switch m.below(5) {
	case 0:
		return was + int64(m.below(9)) - 4
	case 1:
		return was * int64(1+m.below(8))
	case 2:
		return edges[m.below(len(edges))] + int64(m.below(3)) - 1
	case 3:
		return edges[m.below(len(edges))] / max(was, 1)
	}
	return int64(m.number())
}

func (m *mutator) view(v *ir.View) {
	switch k := m.below(8); k {
	case 0:
		v.Offset = ir.Bytes(m.value(int64(v.Offset)))
	case 1:
		v.Buffer = uint32(m.value(int64(v.Buffer)))
	case 2:
		v.DType = ir.DType(m.below(int(ir.NumDTypes) + 1))
	default:
		d := &v.Shape[k%ir.MaxDims]
		*d = m.value(*d)
	}
}

// change changes one number of the program.
func (m *mutator) change() {
	p := m.p
	code := &p.Codes[m.below(len(p.Codes))]
	switch m.below(10) {
	case 0:
		b := &code.Buffers[m.below(len(code.Buffers))]
		b.Offset = ir.Bytes(m.value(int64(b.Offset)))
	case 1:
		b := &code.Buffers[m.below(len(code.Buffers))]
		b.Size = ir.Bytes(m.value(int64(b.Size)))
	case 2:
		a := &code.Arenas[m.below(len(code.Arenas))]
		*a = ir.Bytes(m.value(int64(*a)))
	case 3:
		if len(code.States) > 0 {
			m.view(&code.States[m.below(len(code.States))].View)
		}
	case 4:
		if len(code.Results) > 0 {
			m.view(&code.Results[m.below(len(code.Results))].View)
		}
	case 5:
		d := &p.Tensors[m.below(len(p.Tensors))].Shape[m.below(2)]
		*d = m.value(*d)
	case 6:
		consts := p.Ranks[m.below(len(p.Ranks))].Consts
		if i := m.below(len(consts)); i < len(consts) {
			consts[i] = m.value(consts[i])
		}
	default:
		section := code.Sections[m.below(int(ir.NumSections))]
		if len(section) == 0 {
			return
		}
		in := &section[m.below(len(section))]
		if i := m.below(len(in.Args) + len(in.Attrs)); i < len(in.Args) {
			m.view(&in.Args[i])
		} else if i -= len(in.Args); i < len(in.Attrs) && in.Attrs[i].Const == 0 {
			in.Attrs[i].Bits = uint64(m.value(int64(in.Attrs[i].Bits)))
		}
	}
}

// FuzzVerifySizes changes sizes, places and numbers in valid programs, and compares the verifier's verdict with
// one computed with arbitrary-precision integers.
func FuzzVerifySizes(f *testing.F) {
	bases := [][]byte{encode(f, irtest.Random(1, 40)), encode(f, irtest.Random(5, 80)), encode(f, compiled(f, "tiny.sppo", "schedule.subsequences=1", "schedule.sp=1", "train.batch=1"))}
	for i := range bases {
		for seed := range 8 {
			f.Add(uint8(i), []byte{byte(seed), 3, byte(7 * seed), 1, 0, 5, byte(seed), 0, 0, 2, 0, 0, 0, 9, 9, 9, 9})
		}
	}
	f.Fuzz(func(t *testing.T, base uint8, data []byte) {
		p, err := ir.Decode(bases[int(base)%len(bases)])
		if err != nil {
			t.Fatal(err)
		}
		m := mutator{p, data}
		for range 1 + m.below(3) {
			m.change()
		}
		checkSizes(t, p)
	})
}

// TestVerifyAttributes gives the literal attributes of every opcode values at the edges of their ranges, and
// compares the verdicts as FuzzVerifySizes does.
func TestVerifyAttributes(t *testing.T) {
	seen := map[ir.Op]bool{}
	for seed := uint64(1); len(seen) < int(ir.NumOps); seed++ {
		if seed > 100 {
			t.Fatalf("the programs have only %d of %d opcodes", len(seen), ir.NumOps)
		}
		p := irtest.Random(seed, 40)
		for c := range p.Codes {
			for _, section := range p.Codes[c].Sections {
				for i := range section {
					if in := &section[i]; !seen[in.Op] {
						seen[in.Op] = true
						checkEdges(t, p, in)
					}
				}
			}
		}
	}
}

func checkEdges(t *testing.T, p *ir.Program, in *ir.Instr) {
	t.Helper()
	floats := []float64{0, -1, 1, math.MaxFloat32, math.MaxFloat64, math.Inf(1), math.Inf(-1), math.NaN()}
	ints := []int64{0, 1, -1, 2, 1 << 31, 1<<53 + 1, math.MaxInt64, math.MinInt64}
	for j := range in.Attrs {
		was := in.Attrs[j]
		for k := range ints {
			bits := uint64(ints[k])
			if in.Info().Attrs[j].Kind.IsFloat() {
				bits = math.Float64bits(floats[k])
			}
			if in.Attrs[j] = (ir.Attr{Bits: bits}); was.Const == 0 {
				checkSizes(t, p)
			}
		}
		in.Attrs[j] = was
	}
}

func checkSizes(t *testing.T, p *ir.Program) {
	t.Helper()
	views, values := (&exact{p}).verdict(t)
	err := ir.Verify(p)
	if err == nil {
		if !views || !values {
			t.Fatalf("a program is verified whose sizes do not fit: views %v, values %v", views, values)
		}
		checkWork(t, p)
		return
	}
	for _, f := range err.(*ir.VerifyError).Findings {
		switch {
		case f.Kind == ir.FindBounds && f.At.Rank == ir.None && views:
			t.Fatalf("all views fit, but: %v", f)
		case f.Kind == ir.FindBounds && f.At.Rank != ir.None && values:
			t.Fatalf("all values fit, but: %v", f)
		}
	}
}

// exact checks a program with arbitrary-precision integers.
type exact struct{ p *ir.Program }

func number(v int64) *big.Int    { return big.NewInt(v) }
func sum(a, b *big.Int) *big.Int { return new(big.Int).Add(a, b) }
func productOf(v *ir.View) (n *big.Int) {
	n = number(1)
	eachDim(v, func(d int64) { n.Mul(n, number(d)) })
	return n
}
func least(a, b *big.Int) (smaller bool) { return a.Cmp(b) <= 0 }
func largest(bits uint) *big.Int         { return new(big.Int).Lsh(number(1), bits) }
func saturated(n *big.Int) int64 {
	if n.IsInt64() {
		return n.Int64()
	}
	return math.MaxInt64
}
func bytesOf(v *ir.View) *big.Int {
	return new(big.Int).Mul(productOf(v), number(int64(v.DType.Bytes())))
}
func eachDim(v *ir.View, visit func(int64)) {
	for _, d := range v.Dims() {
		visit(d)
	}
}

// verdict reports whether all views fit into their buffers and, if so, whether all rows, tokens and vocabulary
// entries that attributes refer to exist.
func (e *exact) verdict(t *testing.T) (views, values bool) {
	t.Helper()
	views, values = true, true
	for i := range e.p.Codes {
		c := &e.p.Codes[i]
		highest := [ir.NumArenas]*big.Int{number(0), number(0)}
		for j := range c.Buffers {
			b := &c.Buffers[j]
			end := sum(number(int64(b.Offset)), number(int64(b.Size)))
			if b.Offset < 0 || b.Size < 0 || !least(end, number(int64(c.Arenas[b.Arena]))) {
				views = false
			}
			if end.Cmp(highest[b.Arena]) > 0 {
				highest[b.Arena] = end
			}
		}
		for a, n := range c.Arenas {
			views = views && n >= 0 && least(number(int64(n)), highest[a])
		}
		e.each(c, func(v *ir.View) {
			fits := e.fits(c, v)
			if _, _, err := c.Locate(v); wellFormed(v) && fits != (err == nil) {
				t.Fatalf("%+v fits: %v, but Locate says %v", *v, fits, err)
			}
			views = views && fits
		})
	}
	for i := range e.p.Tensors {
		s := e.p.Tensors[i].Shape
		views = views && s[0] > 0 && s[1] > 0 && least(new(big.Int).Mul(number(s[0]), number(s[1])), largest(61))
	}
	return views, values && (!views || e.values())
}

// each visits all views of a code.
func (e *exact) each(c *ir.Code, visit func(*ir.View)) {
	for s := range c.Sections {
		for i := range c.Sections[s] {
			for j := range c.Sections[s][i].Args {
				if v := &c.Sections[s][i].Args[j]; v.Present() {
					visit(v)
				}
			}
		}
	}
	for i := range c.States {
		visit(&c.States[i].View)
	}
	for i := range c.Results {
		visit(&c.Results[i].View)
	}
}

// wellFormed reports whether positive dimensions come first and zeros fill the rest.
func wellFormed(v *ir.View) bool {
	n := len(v.Dims())
	return n > 0 && slices.Min(v.Shape[:n]) > 0 && !slices.ContainsFunc(v.Shape[n:], func(d int64) bool { return d != 0 }) && v.DType < ir.NumDTypes
}

func (e *exact) fits(c *ir.Code, v *ir.View) bool {
	if !wellFormed(v) || int(v.Buffer) >= len(c.Buffers) || v.Offset < 0 {
		return false
	}
	b := &c.Buffers[v.Buffer]
	from := sum(number(int64(b.Offset)), number(int64(v.Offset)))
	return b.Offset >= 0 && b.Size >= 0 && least(sum(number(int64(b.Offset)), number(int64(b.Size))), number(int64(c.Arenas[b.Arena]))) &&
		least(sum(number(int64(v.Offset)), bytesOf(v)), number(int64(b.Size))) &&
		new(big.Int).Mod(from, number(int64(v.DType.Bytes()))).Sign() == 0
}

// values reports whether all tokens, entries and positions that attributes refer to exist, on all ranks.
func (e *exact) values() bool {
	for r := range e.p.Ranks {
		rank := &e.p.Ranks[r]
		c := &e.p.Codes[rank.Code]
		for s := range c.Sections {
			for i := range c.Sections[s] {
				if !e.counts(&c.Sections[s][i], ir.Section(s), rank.Consts) {
					return false
				}
			}
		}
		for i := range c.States {
			s := &c.States[i]
			rows, cols := s.View.Rows(), s.View.Cols()
			if len(s.View.Dims()) == 1 {
				rows, cols = cols, 1
			}
			if !corner(s.Row0.Int(rank.Consts), s.Col0.Int(rank.Consts), rows, cols) || s.End.Int(rank.Consts) < 0 {
				return false
			}
		}
	}
	return true
}

// corner reports whether a rectangle starts at a nonnegative row and column and ends below the largest int64 in
// both directions.
func corner(row, col, rows, cols int64) bool {
	limit := number(math.MaxInt64 - 1)
	return row >= 0 && col >= 0 && least(sum(number(row), number(rows)), limit) && least(sum(number(col), number(cols)), limit)
}

// counts reports whether the tokens, vocabulary entries and positions that an instruction refers to exist.
func (e *exact) counts(in *ir.Instr, s ir.Section, consts []int64) bool {
	value := func(name string) int64 { return in.Attr(name).Int(consts) }
	through := func(first, n, limit int64) bool {
		return first >= 0 && least(sum(number(first), number(n)), number(limit))
	}
	switch in.Op {
	case ir.LoadTokens:
		sequences, batch := int64(e.p.Run.Batch), value("batch")
		if s == ir.SectionEval {
			sequences = int64(e.p.Run.EvalSequences)
		}
		if batch < 1 || value("replica") < 0 || value("first") < 0 {
			return false
		}
		last := sum(sum(number(value("first")), number(value("replica"))), number(batch))
		return value("as") >= ir.AsTokens && value("as") <= ir.AsPositions && least(last, number(sequences)) && through(value("position"), in.Args[0].Elements()/batch, e.p.Run.Sequence+1)
	case ir.InitNormal:
		return corner(value("row"), value("col"), in.Args[0].Rows(), in.Args[0].Cols()) && value("end") >= 0
	case ir.Rope:
		span := new(big.Int).Mul(number(in.Args[0].Rows()), number(max(1, value("chunks"))))
		memberless := value("chunks") == 0 || value("member") >= 0 && value("member") < value("chunks")/2
		if n := value("rotation"); n < 0 || n > int64(len(e.p.Run.Rotations)) ||
			n > 0 && int64(2*len(e.p.Run.Rotations[n-1].Rates)) > value("head_dim") {
			return false
		}
		return memberless && value("position") >= 0 && least(sum(number(value("position")), span), largest(53))
	case ir.Dropout:
		for _, name := range []string{"col", "first", "replica", "position", "member"} {
			if !through(value(name), 0, 1<<53) {
				return false
			}
		}
		rate := in.Attr("rate").Float(consts)
		return rate >= 0 && rate < 1 && (value("chunks") == 0 || value("member") < value("chunks")/2)
	case ir.SGD:
		return through(value("row"), in.Args[0].Rows(), math.MaxInt64-1) && (value("row") == 0 || in.Arg("grad").Elements() > in.Arg("w").Elements())
	case ir.Attention, ir.AttentionGrad:
		z, chunks := value("zigzag"), value("chunks")
		return z >= 0 && z <= ir.ZigzagBehind && (chunks == 0 || value("member") >= 0 && value("member") < chunks/2)
	case ir.Embed, ir.EmbedGrad:
		table := map[ir.Op]string{ir.Embed: "table", ir.EmbedGrad: "dtable"}[in.Op]
		return through(value("first"), in.Arg(table).Rows(), 1<<31)
	case ir.CrossEntropyStats, ir.CrossEntropyGrad:
		n, softcap := in.Arg("logits").Cols(), in.Attr("softcap").Float(consts)
		return softcap >= 0 && softcap <= math.MaxFloat32 && value("valid") >= 0 && value("valid") <= n && through(value("first"), n, 1<<31)
	}
	return true
}

// checkWork checks that Work counts the exact number of bytes for each memory-bound instruction of a verified
// program.
func checkWork(t *testing.T, p *ir.Program) {
	t.Helper()
	for i := range p.Codes {
		for s := range p.Codes[i].Sections {
			for j := range p.Codes[i].Sections[s] {
				in := &p.Codes[i].Sections[s][j]
				w := in.Work()
				if in.Info().Work != ir.WorkMemory {
					continue
				}
				want := number(0)
				for k := range in.Args {
					reads, writes := in.Access(k)
					for _, touched := range []bool{reads, writes} {
						if touched {
							want.Add(want, bytesOf(&in.Args[k]))
						}
					}
				}
				if int64(w.Bytes) != saturated(want) {
					t.Fatalf("%s moves %d bytes, not %v", in.Info().Name, int64(w.Bytes), want)
				}
			}
		}
	}
}
