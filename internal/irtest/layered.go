package irtest

import (
	"fmt"
	"math/rand/v2"

	"sppo.dev/ir"
)

// Size is the extent of a layered program.
type Size struct {
	Stages, Layers, Subsequences, RanksPerStage int
	Rows                                        int // of the first subsequence; later ones are shorter
}

// Layered returns a program with the shape of a real job but without its arithmetic: a sequence pipeline whose layers
// write rows of a cache of keys and values, read the cache from its start, offload and reload the values that they
// save, and reuse a workspace whose buffers have a different size in every subsequence. Speed tests use it.
func Layered(size Size) *ir.Program {
	r := rand.New(rand.NewPCG(1, 1))
	g := &generator{r: r, p: frame(r), pp: size.Stages, sp: size.RanksPerStage, dp: 1}
	g.p.Name = "layered"
	for i := range size.Stages {
		st := &stage{g: g, code: ir.Code{Name: fmt.Sprintf("stage%d", i)}, index: i, exact: true}
		l := layered{stage: st, size: size}
		st.begin(ir.SectionInit)
		l.weights()
		st.section = ir.SectionStep
		st.begin(ir.SectionStep)
		for s := range size.Subsequences {
			l.forward(s)
		}
		for s := size.Subsequences - 1; s >= 0; s-- {
			l.backward(s)
		}
		g.p.Codes = append(g.p.Codes, st.finish())
	}
	g.ranks()
	return g.p
}

// width is the number of columns of every matrix of a layered program.
const width = 64

type layered struct {
	*stage
	size   Size
	at     [ir.NumArenas]ir.Bytes
	kinds  map[string]*place
	starts map[string]ir.Bytes
	named  map[string]int
	layers []layer
	where  ir.Provenance
}

type layer struct{ w, b, dw, k, v, dk, dv int }

func (l *layered) rows(s int) int   { return l.size.Rows - s*l.size.Rows/(2*l.size.Subsequences) }
func (l *layered) prefix(s int) int { return sum(s, l.rows) }

func sum(n int, f func(int) int) int {
	total := 0
	for i := range n {
		total += f(i)
	}
	return total
}

// buffer returns the index of the buffer with the given name, which it creates on first use. All buffers of a
// kind share the bytes of one slot.
func (l *layered) buffer(kind, name string, arena ir.Arena, size, slot ir.Bytes, persistent bool) int {
	if i, ok := l.named[name]; ok {
		return i
	}
	if l.kinds == nil {
		l.kinds, l.starts, l.named = map[string]*place{}, map[string]ir.Bytes{}, map[string]int{}
	}
	if l.kinds[kind] == nil {
		l.kinds[kind], l.starts[kind] = &place{size: slot}, l.at[arena]
		l.at[arena] += slot
	}
	b := buffer{Buffer: ir.Buffer{Name: name, Arena: arena, Offset: l.starts[kind], Size: size}, persistent: persistent, place: l.kinds[kind]}
	l.buffers = append(l.buffers, b)
	l.named[name] = len(l.buffers) - 1
	return l.named[name]
}

func (l *layered) lasting(name string, rows int) int {
	n := ir.Bytes(rows * width * 4)
	i := l.buffer(name, name, ir.Device, n, n, true)
	l.emit(ir.Fill, ir.Compute, []ir.View{view(i, 0, rows*width)}, []ir.Attr{ir.Float(0)})
	return i
}

func (l *layered) weights() {
	total := l.prefix(l.size.Subsequences)
	for i := range l.size.Layers {
		name := func(s string) string { return fmt.Sprintf("l%d.%s", i, s) }
		l.layers = append(l.layers, layer{
			w: l.lasting(name("w"), width), b: l.lasting(name("b"), 1), dw: l.lasting(name("dw"), width),
			k: l.lasting(name("k"), total), v: l.lasting(name("v"), total),
			dk: l.lasting(name("dk"), total), dv: l.lasting(name("dv"), total),
		})
	}
}

// temp returns a workspace buffer for a subsequence and layer. Layers alternate between two slots.
func (l *layered) temp(name string, s, i int) int {
	slot := ir.Bytes(l.size.Rows * width * 4)
	return l.buffer(fmt.Sprint(name, ".", i%2), fmt.Sprintf("%s.s%d.l%d", name, s, i), ir.Device, ir.Bytes(l.rows(s)*width*4), slot, false)
}

func (l *layered) host(name string, s, i int) int {
	n := ir.Bytes(l.rows(s) * width * 4)
	full := fmt.Sprintf("h.%s.s%d.l%d", name, s, i)
	return l.buffer(full, full, ir.Host, n, n, false)
}

func view(buffer int, offset ir.Bytes, shape ...int) ir.View {
	v := ir.View{Buffer: uint32(buffer), Offset: offset}
	for i, d := range shape {
		v.Shape[i] = int64(d)
	}
	return v
}

var attentionAttrs = []ir.Attr{ir.Int(1), ir.Int(1), ir.Int(width), ir.Int(1)}

func (l *layered) matmul(c, a, b ir.View, flags ...ir.Attr) {
	attrs := append([]ir.Attr{ir.Bool(false), ir.Bool(false), ir.Bool(false)}, flags...)
	l.emit(ir.Matmul, ir.Compute, []ir.View{c, a, b, ir.Absent()}, attrs[len(attrs)-3:])
}

func (l *layered) forward(s int) {
	n, before := l.rows(s), l.prefix(s)
	start := ir.Bytes(before * width * 4)
	for i := range l.layers {
		y := &l.layers[i]
		l.where = ir.Provenance{Subsequence: int32(s), Layer: int32(i), Stage: int16(l.index), Phase: ir.PhaseForward}
		x, q, o, u := l.temp("x", s, i), l.temp("q", s, i), l.temp("o", s, i), l.temp("u", s, i)
		lse := l.temp("lse", s, i)
		w := view(y.w, 0, width, width)
		if i == 0 {
			l.emit(ir.Fill, ir.Compute, []ir.View{view(x, 0, n, width)}, []ir.Attr{ir.Float(1)})
		} else {
			l.emit(ir.CopyD2D, ir.Compute, []ir.View{view(x, 0, n*width), view(l.temp("u", s, i-1), 0, n*width)}, nil)
		}
		l.emit(ir.AllReduce, ir.Coll, []ir.View{view(x, 0, n, width)}, []ir.Attr{ir.Int(groupSP)})
		l.matmul(view(q, 0, n, width), view(x, 0, n, width), w)
		l.matmul(view(y.k, start, n, width), view(x, 0, n, width), w)
		l.matmul(view(y.v, start, n, width), view(x, 0, n, width), w)
		l.emit(ir.Attention, ir.Compute, []ir.View{
			view(o, 0, n, width), view(lse, 0, n, 1), view(q, 0, n, width), view(y.k, 0, before+n, width), view(y.v, 0, before+n, width),
		}, append(attentionAttrs[:4:4], ir.Int(int64(before)), ir.Bool(false), ir.Int(0)))
		l.matmul(view(u, 0, n, width), view(o, 0, n, width), w)
		l.emit(ir.AllReduce, ir.Coll, []ir.View{view(u, 0, n, width)}, []ir.Attr{ir.Int(groupSP)})
		for range 4 {
			l.emit(ir.Activation, ir.Compute, []ir.View{view(u, 0, n, width), view(u, 0, n, width)}, []ir.Attr{ir.Int(ir.GeluTanh)})
		}
		for _, name := range []string{"x", "q", "o", "lse"} {
			size := n * width
			if name == "lse" {
				size = n
			}
			l.emit(ir.CopyD2H, ir.D2H, []ir.View{view(l.host(name, s, i), 0, size), view(l.temp(name, s, i), 0, size)}, nil)
		}
	}
}

func (l *layered) backward(s int) {
	n, before := l.rows(s), l.prefix(s)
	start := ir.Bytes(before * width * 4)
	for i := len(l.layers) - 1; i >= 0; i-- {
		y := &l.layers[i]
		l.where = ir.Provenance{Subsequence: int32(s), Layer: int32(i), Stage: int16(l.index), Phase: ir.PhaseBackward, Line: 1}
		back := func(name string) int { return l.temp("r."+name, s, i) }
		for _, name := range []string{"x", "q", "o", "lse"} {
			size := n * width
			if name == "lse" {
				size = n
			}
			l.emit(ir.CopyH2D, ir.H2D, []ir.View{view(back(name), 0, size), view(l.host(name, s, i), 0, size)}, nil)
		}
		dy, dx, dq := l.temp("dy", s, i), l.temp("dx", s, i), l.temp("dq", s, i)
		w, dw := view(y.w, 0, width, width), view(y.dw, 0, width, width)
		l.emit(ir.Fill, ir.Compute, []ir.View{view(dy, 0, n, width)}, []ir.Attr{ir.Float(1)})
		l.emit(ir.AllReduce, ir.Coll, []ir.View{view(dy, 0, n, width)}, []ir.Attr{ir.Int(groupSP)})
		l.matmul(dw, view(back("x"), 0, n, width), view(dy, 0, n, width), ir.Bool(true), ir.Bool(false), ir.Bool(true))
		l.emit(ir.AttentionGrad, ir.Compute, []ir.View{
			view(dq, 0, n, width), view(y.dk, 0, before+n, width), view(y.dv, 0, before+n, width), view(dy, 0, n, width),
			view(back("q"), 0, n, width), view(y.k, 0, before+n, width), view(y.v, 0, before+n, width),
			view(back("o"), 0, n, width), view(back("lse"), 0, n, 1), ir.Absent(),
		}, append(attentionAttrs[:4:4], ir.Int(int64(before)), ir.Bool(true), ir.Bool(false), ir.Int(0)))
		for k, d := range []int{y.dk, y.dv} {
			l.matmul(dw, view(back("x"), 0, n, width), view(d, start, n, width), ir.Bool(true), ir.Bool(false), ir.Bool(true))
			l.matmul(view(dx, 0, n, width), view(d, start, n, width), w, ir.Bool(false), ir.Bool(true), ir.Bool(k > 0))
			l.emit(ir.BiasGrad, ir.Compute, []ir.View{view(y.b, 0, width), view(dy, 0, n, width)}, []ir.Attr{ir.Bool(true)})
		}
		for range 8 {
			l.emit(ir.ActivationGrad, ir.Compute, []ir.View{view(dx, 0, n, width), view(dx, 0, n, width), view(dq, 0, n, width)}, []ir.Attr{ir.Int(ir.GeluTanh)})
		}
	}
}

// emit adds an instruction with the provenance of the current layer.
func (l *layered) emit(op ir.Op, s ir.Stream, args []ir.View, attrs []ir.Attr) {
	l.stage.where = l.where
	for len(args) < len(ir.Ops[op].Operands) {
		args = append(args, ir.Absent())
	}
	for len(attrs) < len(ir.Ops[op].Attrs) { // omitted options at the end of the row
		attrs = append(attrs, ir.Int(0))
	}
	l.stage.emit(op, s, args, attrs)
}
