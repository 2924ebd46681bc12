package graph

import (
	"fmt"
	"maps"
	"slices"

	"sppo.dev/ir"
)

// builder appends values and nodes to a block.
type builder struct {
	Block
	act     ir.DType // storage type of activations and weights
	split   Split
	role    *role
	nodes   *[]Node            // the list to which node appends: Forward or Backward
	chunked bool               // nodes belong to the head's loop
	looping bool               // nodes belong to a loop over pieces of the keys
	loop    int                // its number, or that of the next
	grads   map[int]Arg        // gradient of a forward value, while differentiating
	remat   map[int]int        // forward value -> its copy recomputed in the backward pass
	casts   map[Arg]Arg        // f32 gradient -> its copy in the activation type
	losses  map[int]routerLoss // by the logits of a router
	downs   map[string]int     // name of an adapter's first matrix -> the result of that matrix
	keep    map[int]bool       // forward nodes whose results are saved; nil: all except those that only move data

	named   map[string]bool // names of values
	writers map[int][]int   // forward value -> forward nodes that write it, while differentiating
}

func (g *Model) newBuilder(name string) *builder {
	b := &builder{
		act: g.DType(), split: g.Split, loop: 1, role: &role{input: true}, grads: map[int]Arg{}, remat: map[int]int{},
		casts: map[Arg]Arg{}, losses: map[int]routerLoss{}, downs: map[string]int{}, named: map[string]bool{},
	}
	b.Block = Block{Name: name, Input: Missing, Output: Missing, DOutput: Missing, DInput: Missing, Loss: Missing, Losses: Missing}
	b.nodes = &b.Forward
	return b
}

func (b *builder) value(v Value) int {
	if b.named[v.Name] {
		panic("internal: block " + b.Name + " has two values " + v.Name)
	}
	b.named[v.Name] = true
	b.Values = append(b.Values, v)
	return len(b.Values) - 1
}

// activation adds a value of the activation type.
func (b *builder) activation(name string, rows Rows, cols int64) int {
	return b.value(Value{Name: name, Rows: rows, Cols: cols, DType: b.act})
}

// given returns a value of kind Given, adding it to the block unless it is already there.
func (b *builder) given(v Value) int {
	if i := b.Given(v.Name); i != Missing {
		return i
	}
	v.Kind = Given
	return b.value(v)
}

// param adds a parameter with its weight and gradient values and returns the weight.
func (b *builder) param(p Param) int {
	i := len(b.Params)
	p.Frozen = b.role.frozen[p.Name]
	b.Params = append(b.Params, p)
	rows, count, cols := Fixed, p.Local[0], p.Local[1]
	if p.Shard == ByTokens {
		rows, count = WholeTokens, 0
	}
	if p.Vector {
		cols = 0
	}
	planes := p.Planes // on this rank
	if planes > 0 {
		count = p.Shape[0] / planes
		planes = p.Local[0] / count
	}
	w := b.value(Value{Name: p.Name, Kind: Weight, Planes: planes, Rows: rows, Count: count, Cols: cols, DType: p.DType(b.act), Param: i})
	b.value(Value{Name: "d" + p.Name, Kind: WeightGrad, Planes: planes, Rows: rows, Count: count, Cols: cols, DType: ir.F32, Param: i})
	return w
}

// weightGrad returns the gradient value of a weight value.
func (b *builder) weightGrad(w int) int { return w + 1 }

// node appends an operation. The operands are in the order of the opcode's table entry; absent operands at
// the end may be omitted.
func (b *builder) node(op ir.Op, attrs []Attr, args ...Arg) {
	for len(args) < len(ir.Ops[op].Operands) {
		args = append(args, Arg{Value: Missing})
	}
	n := Node{Op: op, Args: args, Attrs: orderAttrs(op, attrs), Chunked: b.chunked}
	if b.looping {
		n.Loop = b.loop
		for k, a := range args {
			if a.Value != Missing && (b.Values[a.Value].Kind == Cache || b.Values[a.Value].Kind == CacheGrad) {
				args[k].Span = Tail // the rows of the piece
			}
		}
	}
	*b.nodes = append(*b.nodes, n)
}

// rowsFrom returns the rows of a function of x: those of a piece if x is a cache.
func (b *builder) rowsFrom(x int) Rows {
	if b.Values[x].Kind == Cache {
		return Piece
	}
	return b.Values[x].Rows
}

// endLoop ends a loop over pieces of the keys: what it computes of a piece exists in it only.
func (b *builder) endLoop() {
	b.loop++
	maps.DeleteFunc(b.remat, func(v, _ int) bool { return b.Values[v].Rows == Piece })
}

func orderAttrs(op ir.Op, attrs []Attr) []Attr {
	row := ir.Ops[op].Attrs
	ordered := make([]Attr, len(row))
	for i, info := range row {
		ordered[i] = Attr{Name: info.Name}
	}
	for _, a := range attrs {
		ordered[attrIndex(op, a.Name)] = a
	}
	return ordered
}

func attrIndex(op ir.Op, name string) int {
	for i, info := range ir.Ops[op].Attrs {
		if info.Name == name {
			return i
		}
	}
	panic(fmt.Sprintf("internal: %s has no attribute %s", ir.Ops[op].Name, name))
}

func all(v int) Arg   { return Arg{Value: v} }
func tail(v int) Arg  { return Arg{Value: v, Span: Tail} }
func seen(v int) Arg  { return Arg{Value: v, Span: Seen} }
func flat(v int) Arg  { return Arg{Value: v, Span: Flat} }
func chunk(v int) Arg { return Arg{Value: v, Span: Chunk} }

func elements(v int) Arg { return Arg{Value: v, Span: Elements} }

// by returns an operand with each row split into one row per head.
func by(heads int64, a Arg) Arg { a.Heads = heads; return a }

func integer(name string, v int64) Attr   { return Attr{Name: name, Value: ir.Int(v)} }
func float(name string, v float64) Attr   { return Attr{Name: name, Value: ir.Float(v)} }
func function(name string) Attr           { return integer("function", int64(slices.Index(ir.Functions, name))) }
func truth(name string) Attr              { return Attr{Name: name, Value: ir.Int(1)} }
func from(name string, s AttrSource) Attr { return Attr{Name: name, Source: s} }
func constant(name, c string) Attr        { return Attr{Name: name, Source: FromConst, Const: c} }
func group(index int) Attr                { return Attr{Name: "group", Value: ir.Int(int64(index))} }

// allGather and reduceScatter exchange rows among the ranks of a stage.
func (b *builder) allGather(x int, name string) int {
	return b.regroup(ir.AllGather, GroupSP, b.split.SP, Full, x, name)
}

func (b *builder) reduceScatter(x int, name string) int {
	return b.regroup(ir.ReduceScatter, GroupSP, b.split.SP, Local, x, name)
}

// regroup appends a collective that changes which rows of x each rank holds, unless the group has only one
// member.
func (b *builder) regroup(op ir.Op, of, members int, rows Rows, x int, name string) int {
	if members == 1 {
		return x
	}
	v := b.Values[x]
	y := b.value(Value{Name: name, Rows: rows, Cols: v.Cols, DType: v.DType})
	b.node(op, []Attr{group(of)}, all(y), all(x))
	return y
}
