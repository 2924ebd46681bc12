package codegen

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// This file divides parameters into slices. Of the ranks that hold the same matrix, each completes the gradient
// of one slice and, with ZeRO, keeps only the optimizer state of that slice. The sums and their order are the
// same with and without ZeRO.

// slicePlace determines the first row of a rank's slice, or the row after the piece that is sliced.
type slicePlace struct {
	start string // constant with the first row of the piece, or empty for row 0
	rows  int64  // of a slice, or of the piece
	cut   plan.Slicing
	after bool // the row after the piece
}

func (c slicePlace) name() string {
	if c.after {
		return fmt.Sprintf("slice.%s.%d.end", c.start, c.rows)
	}
	return fmt.Sprintf("slice.%s.%d.%dx%d", cmp.Or(c.start, "top"), c.rows, c.cut.SP, c.cut.DP)
}

// constFirst names a constant that is 1 on the first replica and 0 on others. As a prefix of another constant's
// name, it names a constant that has the other's value on the first replica and is 0 on others.
const constFirst = "first_replica"

func onFirstReplica(name string) string {
	if name == "" {
		return constFirst
	}
	return constFirst + "." + name
}

// sliceConsts returns the constants that the slices of this plan need.
func (l *layout) sliceConsts() []string {
	var names []string
	if l.plan.Parallel.DP > 1 {
		names = append(names, constFirst, onFirstReplica(graph.ConstOwner), onFirstReplica(graph.ConstKVOwner))
		if slices.Contains(l.model.MemberConsts(), graph.ConstFirstOnRing) {
			names = append(names, onFirstReplica(graph.ConstFirstOnRing))
		}
	}
	if l.plan.Parallel.Zero == 0 {
		return names
	}
	l.tables.slices = map[string]slicePlace{}
	blocks := []*graph.Block{l.model.Embedding}
	for kind := range l.model.Kinds() {
		blocks = append(blocks, l.model.Plain(kind))
	}
	for _, b := range append(blocks, l.model.Head) {
		for i := range b.Params {
			cut := l.plan.Slicing(&b.Params[i])
			if cut.Slices() == 1 {
				continue
			}
			add := func(place slicePlace) {
				if _, known := l.tables.slices[place.name()]; !known {
					l.tables.slices[place.name()] = place
					names = append(names, place.name())
				}
			}
			for _, part := range l.pieces(&b.Params[i]) {
				add(part.slice(cut))
				if end, padded := part.end(cut); padded {
					add(end)
				}
			}
			if l.plan.OptimizerOf(b, &b.Params[i]).Whole {
				add(slicePlace{rows: cut.Rows, cut: cut})
			}
		}
	}
	return names
}

// firstReplica returns the value of a constant named by onFirstReplica.
func (l *layout) firstReplica(name string, d, i, k int) int64 {
	switch {
	case d > 0:
		return 0
	case name == constFirst:
		return 1
	}
	return l.constValue(strings.TrimPrefix(name, constFirst+"."), d, i, k)
}

// slice returns the place of a rank's slice of a piece.
func (x piece) slice(cut plan.Slicing) slicePlace {
	return slicePlace{start: x.start, rows: x.sliceRows(cut), cut: cut}
}

// sliceRows returns the number of rows of a slice of the piece. Only a parameter with one piece has padding.
func (x piece) sliceRows(cut plan.Slicing) int64 {
	return (x.rows + cut.Slices() - 1) / cut.Slices()
}

// end returns the place of the row after the piece, and whether a slice with padding needs it: other rows of the
// tensor follow the piece, and belong to other ranks.
func (x piece) end(cut plan.Slicing) (slicePlace, bool) {
	return slicePlace{start: x.start, rows: x.rows, after: true}, x.start != "" && x.sliceRows(cut)*cut.Slices() > x.rows
}

// sliceRow returns the first row of the slice of rank (d, i, k).
func (l *layout) sliceRow(c slicePlace, d, i, k int) int64 {
	row := int64(0)
	if c.start != "" {
		row = l.constValue(c.start, d, i, k)
	}
	if c.after {
		return row + c.rows
	}
	if c.cut.DP == 1 {
		d = 0
	}
	member := int64(k) * c.cut.SP / int64(l.plan.Parallel.SP) // of the ranks of the stage that hold the parameter
	return row + (member*c.cut.DP+int64(d))*c.rows
}

// holders returns the group of the ranks of a stage that hold the parameter.
func (p *param) holders() int64 { return int64(slices.Index(graph.GroupNames, p.Reduce)) }

// stateSlices returns the number of slices into which ranks divide the parameter's optimizer state.
func (p *param) stateSlices() int64 {
	if p.zero >= plan.ZeroState {
		return p.cut.Slices()
	}
	return 1
}

// stateRows returns the rows for which this rank has optimizer state.
func (p *param) stateRows() int64 { return p.SliceRows(p.stateSlices()) }

func (p *param) stateElements() int64 { return p.stateRows() * p.Local[1] }

// stateView returns the view of a buffer of optimizer state.
func (p *param) stateView(b uint32, d ir.DType) ir.View {
	if p.zero >= plan.ZeroState {
		return matrix(b, d, p.stateRows(), p.Local[1])
	}
	return p.view(b, d)
}

// stateRectangles maps the rows of a buffer of optimizer state to rectangles of the tensor. The buffer holds
// the slices of the pieces one after another.
func (e *emitter) stateRectangles(p *param, b uint32, d ir.DType) []rectangle {
	if p.zero < plan.ZeroState {
		return e.rectangles(p, p.whole(b, d))
	}
	var list []rectangle
	at := int64(0)
	for _, part := range e.pieces(p.Param) {
		place := part.slice(p.cut)
		r := rectangle{view: rowsOf(p.whole(b, d), at, place.rows, p.Local[1]), row: e.constRef(place.name()), col: e.colAttr(p)}
		if end, padded := part.end(p.cut); padded {
			r.end = e.constRef(end.name())
		}
		list = append(list, r)
		at += place.rows
	}
	return list
}

// paramStream returns the stream of collectives on weights and gradients. Those of replicas cross the network and may take
// longer than the computation of a layer, so they must not delay the layer's own collectives. All collectives among replicas are on one
// stream, because each stream has an NCCL communicator of its own, with buffers.
func (e *emitter) paramStream() ir.Stream {
	if e.plan.Parallel.DP > 1 {
		return ir.Params
	}
	return ir.Coll
}

// ready returns the gradient of a parameter as collectives read it: with padding, together with that of the other copy of a tied
// embedding, and rounded if sums over ranks are. The rank's own gradient is then no longer needed.
func (s *lowering) ready(p *param) ir.View {
	g := p.view(s.gradBuffer(p), ir.F32)
	if rows := p.cut.Whole(); rows > p.Local[0] {
		s.op(ir.Fill, ir.Compute, []ir.View{rowsOf(g, p.Local[0], rows-p.Local[0], p.Local[1])}, ir.Float(0))
		g = rowsOf(g, 0, rows, p.Local[1])
	}
	if s.plan.Model.Tied && s.first() != s.last() && s.tables.tensors[p.tensor].Name == "embed" {
		s.allReduce(ir.Coll, g, graph.GroupTied)
	}
	if d := s.plan.ReducedType(p.Param); d != ir.F32 {
		own := g
		g = s.scratch(p, ".grad.reduced", p.cut.Whole(), d)
		s.op(ir.Cast, ir.Compute, []ir.View{g, own})
		p.grad = g.Buffer
	}
	return g
}

// sumOverStage sums a gradient over the ranks of a stage.
func (s *lowering) sumOverStage(p *param, g ir.View) ir.View {
	switch {
	case p.cut.SP > 1:
		part := s.scratch(p, ".grad.stage", p.cut.Part(), g.DType)
		s.op(ir.ReduceScatter, s.paramStream(), []ir.View{part, g}, ir.Int(p.holders()))
		return part
	case p.Reduce != "":
		s.allReduce(s.paramStream(), g, p.holders())
	}
	return g
}

// sumOverReplicas sums a gradient over the replicas.
func (s *lowering) sumOverReplicas(p *param, g ir.View) ir.View {
	switch {
	case p.cut.DP > 1:
		slice := s.scratch(p, ".grad.slice", p.cut.Rows, g.DType)
		s.eachPiece(p, g, slice, func(whole, part ir.View) {
			s.op(ir.ReduceScatter, s.paramStream(), []ir.View{part, whole}, ir.Int(graph.GroupDP))
		})
		return slice
	case s.plan.Parallel.DP > 1:
		s.allReduce(s.paramStream(), g, graph.GroupDP)
	}
	return g
}

// widened returns a sum of gradients in f32, as updates read it.
func (s *lowering) widened(p *param, sum ir.View) ir.View {
	if sum.DType == ir.F32 {
		return sum
	}
	wide := sum
	wide.DType, wide.Offset, wide.Buffer = ir.F32, 0, s.allocate(p.name+".grad.sum", ir.Device, ir.Bytes(sum.Elements())*ir.F32.Bytes())
	s.op(ir.Cast, ir.Compute, []ir.View{wide, sum})
	return wide
}

// gather collects the slices of all ranks, with their padding, for which the buffer of whole has bytes. It returns the
// buffer that the last collective reads. The string named of becomes part of the names of new buffers.
func (s *lowering) gather(p *param, of string, whole, slice ir.View) uint32 {
	return s.gatherAll([]gathering{{p, of, func() ir.View { return whole }, slice}})[0]
}

// gathering holds the arguments of gather. The whole is allocated when it is needed.
type gathering struct {
	p     *param
	of    string
	whole func() ir.View
	slice ir.View
}

// gatherAll is gather for several parameters. Their collectives over the same ranks follow each other, so that they can begin together.
func (s *lowering) gatherAll(list []gathering) (read []uint32) {
	whole := func(g *gathering) ir.View { return rowsOf(g.whole(), 0, g.p.cut.Whole(), g.p.Local[1]) }
	parts := make([]ir.View, len(list))
	for i := range list {
		g, p := &list[i], list[i].p
		switch {
		case p.cut.DP == 1:
			parts[i] = g.slice
			continue
		case p.cut.SP > 1:
			parts[i] = s.scratch(p, g.of+".stage", p.cut.Part(), g.slice.DType)
		default:
			parts[i] = whole(g)
		}
		s.eachPiece(p, parts[i], g.slice, func(whole, part ir.View) {
			s.op(ir.AllGather, s.paramStream(), []ir.View{whole, part}, ir.Int(graph.GroupDP))
		})
	}
	for i := range list {
		g, last := &list[i], list[i].slice
		if g.p.cut.SP > 1 {
			last = parts[i]
			s.op(ir.AllGather, s.paramStream(), []ir.View{whole(g), last}, ir.Int(g.p.holders()))
		}
		read = append(read, last.Buffer)
	}
	return read
}

// eachPiece calls visit for each piece of a parameter, with the part that replicas share and this replica's
// slice of it.
func (s *lowering) eachPiece(p *param, whole, slice ir.View, visit func(whole, part ir.View)) {
	at := int64(0)
	for _, part := range s.pieces(p.Param) {
		rows := part.sliceRows(p.cut)
		visit(rowsOf(whole, part.first/p.cut.SP, rows*p.cut.DP, p.Local[1]), rowsOf(slice, at, rows, p.Local[1]))
		at += rows
	}
}

// scratch allocates a temporary buffer for the given number of rows of a parameter.
func (s *lowering) scratch(p *param, ending string, rows int64, d ir.DType) ir.View {
	name := p.name + ending
	if p.zero >= plan.ZeroGradients || p.sliced {
		name = s.byVisit(name)
	}
	return matrix(s.allocate(name, ir.Device, ir.Bytes(rows*p.Local[1])*d.Bytes()), d, rows, p.Local[1])
}

// normWeight returns a number that is 1 on exactly one of the ranks that hold the same part of a gradient, and
// 0 on the others.
func (s *lowering) normWeight(p *param) ir.Attr {
	if !p.owner {
		return ir.Float(0)
	}
	once := ""
	if p.cut.SP == 1 {
		once = p.Once
	}
	if s.plan.Parallel.DP > 1 && p.cut.DP == 1 {
		once = onFirstReplica(once)
	}
	if once == "" {
		return ir.Float(1)
	}
	return s.constRef(once)
}
