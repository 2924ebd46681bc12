package kernels

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"sppo.dev/ir"
)

// OnTensorCores reports whether bf16 heads of these dimensions use tensor cores, which take probabilities as
// bf16, too. OnHopper reports whether there are kernels for Hopper.
func OnTensorCores(dim, value int64) bool {
	_, ok := ir.HeadKernelOf(dim, value)
	return ok
}

func OnHopper(dim, value int64) bool { return dim == value && OnTensorCores(dim, value) }

const (
	hopperSource     = "attention_hopper.cu"
	hopperGradSource = "attention_hopper_grad.cu"
)

// hopperTiles gives the numbers of tokens in shared memory of a Hopper kernel and of its loads. A kernel keeps tiles, and
// loops over tiles that it loads into slots.
type hopperTiles struct {
	kept, slots        int64 // tokens in all tiles that are kept, and in all slots
	queryBox, keyBox   int64 // tokens of a box of the copy engine
	block              int64 // queries or keys of a block
	statistics, passed int64 // bytes for the statistics of queries, and for probabilities that warpgroups exchange
	barriers           int64
}

// tilesOf returns the tiles of a Hopper kernel: "", "_dq" or "_dkv". Wide heads have as many tokens as fit.
func tilesOf(name string, dim int64) hopperTiles {
	pick := func(narrow, of192, of256 int64) int64 {
		switch {
		case dim <= 128:
			return narrow
		case dim == 192:
			return of192
		}
		return of256
	}
	switch name {
	case "_dq":
		keys := pick(64, 48, 32)
		return hopperTiles{kept: 2 * 128, slots: 3 * 2 * keys, queryBox: 64, keyBox: keys, block: 128, statistics: 3 * 2 * 64 * 4, barriers: 7}
	case "_dkv":
		keys, slots := pick(128, 64, 64), pick(3, 3, 2)
		return hopperTiles{kept: 2 * keys, slots: slots * 2 * 64, queryBox: 64, keyBox: 64, block: keys, statistics: slots * 2 * 64 * 4,
			passed: pick(0, 64*64*4, 64*64*4), barriers: 7}
	}
	keys := pick(128, 112, 80)
	return hopperTiles{kept: 128, slots: 2 * 2 * keys, queryBox: 128, keyBox: keys, block: 128, barriers: 9}
}

// bytes returns the size of shared memory. Tiles start at a multiple of 1024 bytes.
func (h hopperTiles) bytes(dim int64) int64 {
	return 1024 + 2*dim*(h.kept+h.slots) + h.passed + h.statistics + 8*h.barriers
}

const bulkThreads = 384 // three warpgroups, one of which loads tiles

// maxHeadDim is the largest head dimension of attention.cu.
const maxHeadDim = 256

// attentionShape holds the parameters of the attention kernels.
type attentionShape struct {
	n, keys, heads, kvHeads, dim, batch int64
	wide                                int64 // width of a head of values
	row                                 int64 // row of the first query
	args                                []any
	softcap                             float64 // soft cap of scores; 0: none
	positions                           *Arg    // in documents; nil if each sequence is one document
	tensor                              bool    // uses tensor cores
	hopper                              bool    // uses the kernels for Hopper
}

// attentionShapes returns the shapes of an instruction's parts.
func (b *binder) attentionShapes() (shapes []attentionShape) {
	for _, p := range b.in.AttentionParts(b.consts) {
		shapes = append(shapes, b.attentionShape(p))
	}
	return shapes
}

func (b *binder) attentionShape(p ir.AttentionPart) attentionShape {
	s := attentionShape{n: p.Queries, keys: p.Keys, heads: b.int("heads"), kvHeads: b.int("kv_heads"), dim: b.int("head_dim"), wide: b.in.Work().ValueDim, batch: b.int("batch")}
	s.row = p.Query * s.batch
	s.tensor = b.types("q") == "b" && OnTensorCores(s.dim, s.wide)
	s.hopper = s.tensor && b.card.Hopper && OnHopper(s.dim, s.wide)
	s.args = []any{s.n, s.keys, s.heads, s.kvHeads}
	if !s.tensor {
		s.args = append(s.args, s.dim, s.wide)
	}
	s.softcap = b.float("softcap")
	if b.has("positions") {
		of := b.arg("positions")
		of.Offset = uint64(4 * p.Place)
		s.positions = &of
	}
	s.args = append(s.args, s.batch, p.Prefix, p.Window, s.softcap)
	if s.dim > maxHeadDim || s.wide > maxHeadDim {
		b.err = fmt.Errorf("heads of %d elements are wider than the kernel's %d", max(s.dim, s.wide), maxHeadDim)
	}
	return s
}

// attentionLaunch launches one block for each head, each sequence and each group of 8 or 64 tokens (queries or
// keys). The argument result names the result whose element type varies, or is "" if none does.
func (b *binder) attentionLaunch(s attentionShape, name, result string, tokens, heads int64, args []any) {
	if !s.tensor {
		types := []string{"q"}
		if result != "" {
			types = []string{result, "q"}
		}
		s.vary(b.launch("attention"+name+"_"+b.types(types...), [3]int64{ceil(tokens, 8), heads, s.batch}, args...))
		return
	}
	kernel := "attention_tensor" + name + "_" + strconv.FormatInt(s.dim, 10)
	if s.wide != s.dim {
		kernel += "x" + strconv.FormatInt(s.wide, 10)
	}
	if result != "" {
		kernel += "_" + b.types(result)
	}
	blocks := ceil(tokens, 64)
	if name == "_dkv" && s.dim > 128 {
		blocks *= 2 // different blocks compute dk and dv
	}
	l := b.launch(kernel, [3]int64{blocks, heads, s.batch}, args...)
	l.Source, l.Block = "attention_tensor.cu", 128
	l.SharedBytes = tensorSharedBytes(name, s.dim, s.wide)
	s.vary(l)
}

// vary selects the variant of a kernel that caps scores, supports documents, or both, as the instruction requires.
func (s *attentionShape) vary(l *Launch) {
	ending := ""
	if s.softcap != 0 {
		ending = boundsScores
	}
	if s.positions != nil {
		ending += hasDocuments
		l.Args = append(l.Args, *s.positions)
	}
	if ending != "" {
		l.Source, l.Kernel = variant(l.Source, ending), l.Kernel+ending
	}
}

// tensorSharedBytes returns the size of the shared memory of a kernel on tensor cores, whose tiles have fewer tokens
// for wide heads. In the forward pass, it holds two pairs of tiles of keys and values; for dq, also a tile of 64 rows
// of the gradient of o. The widest heads have a tile of 64 queries, too, which others have in registers. For dk and dv,
// it holds two tiles of 64 keys and two pairs of tiles of queries. Rows have 8 extra elements to avoid bank conflicts.
func tensorSharedBytes(name string, dim, value int64) int64 {
	key, of, wide := 2*(dim+8), 2*(value+8), dim > 128
	tile := int64(64)
	if wide {
		tile /= 2
	}
	switch pair := key + of; {
	case name == "_dkv" || name == "_dq" && wide:
		return 64*pair + tile*pair
	case name == "_dq":
		return 64*key + tile*pair
	case dim > 192:
		return 64*key + 2*tile*pair
	default:
		return 2 * tile * pair
	}
}

func attention(b *binder) {
	for _, s := range b.attentionShapes() {
		args := append(append([]any{rowsOf{"o", s.row}, rowsOf{"lse", s.row}, rowsOf{"q", s.row}, "k", "v"}, s.args...), b.int("accumulate"))
		if s.hopper {
			b.hopperAttention(s, args)
			continue
		}
		b.attentionLaunch(s, "", "o", s.n, s.heads, args)
	}
}

// hopperAttention has the copy engine load tiles if possible; otherwise the threads that multiply load them.
func (b *binder) hopperAttention(s attentionShape, args []any) {
	tiles := tilesOf("", s.dim)
	name, grid := fmt.Sprintf("%d_%s", s.dim, b.types("o")), [3]int64{ceil(s.n, tiles.block), s.heads, s.batch}
	if !b.card.CopyEngine || !b.aligned("q", "k", "v") || !s.mapped() {
		l := b.launch("attention_hopper_"+name, grid, args...)
		l.Source, l.SharedBytes = hopperSource, tiles.bytes(s.dim)
		s.vary(l)
		return
	}
	l := b.launch("attention_bulk_"+name, grid, append([]any{args[0], args[1], tabled}, args[5:]...)...)
	l.Source, l.Block, l.SharedBytes = hopperSource, bulkThreads, tiles.bytes(s.dim)
	l.Boxes = b.boxes(s, tiles, []any{args[2]}, "k", "v")
	s.vary(l)
}

// mapped reports whether tensor maps can describe the operands. The copy engine's coordinates have 31 bits, its
// strides 40.
func (s *attentionShape) mapped() bool {
	return max(s.n, s.keys, s.heads, s.batch) <= math.MaxInt32 && 2*s.dim*max(s.heads, s.kvHeads)*s.batch < 1<<40
}

// boxes returns tensor maps of the operands whose rows are queries, then of those whose rows are keys. A box is a part of a
// panel.
func (b *binder) boxes(s attentionShape, tiles hopperTiles, queries []any, keys ...any) (all []Boxes) {
	panel := int64(64)
	for s.dim%panel != 0 {
		panel /= 2
	}
	for i, operand := range slices.Concat(queries, keys) {
		x := Boxes{Tensor: b.arg(operand), Extent: [4]int64{s.dim, s.heads, s.batch, s.n}, Box: [4]int64{panel, 1, 1, tiles.queryBox}}
		if i >= len(queries) {
			x.Extent[1], x.Extent[3], x.Box[3] = s.kvHeads, s.keys, tiles.keyBox
		}
		all = append(all, x)
	}
	return all
}

func attentionGrad(b *binder) {
	shapes := b.attentionShapes()
	delta := func(s attentionShape) any { return rowsOf{"delta", s.row} }
	if !b.has("delta") {
		s := b.attentionShape(ir.AttentionPart{})
		rows := b.elements("lse")
		at := b.reserve(4 * rows)
		b.launch("attention_delta_"+b.types("q"), [3]int64{ceil(rows, 8), 1, 1}, at, "do", "o", rows, s.wide)
		delta = func(s attentionShape) any { return at + workspace(4*s.row*s.heads) }
	}
	accumulate := b.int("accumulate")
	for i, s := range shapes {
		if i == 0 && accumulate == 0 {
			b.clearUnseen(s)
		}
		in := append([]any{rowsOf{"do", s.row}, rowsOf{"q", s.row}, "k", "v", rowsOf{"lse", s.row}, delta(s)}, s.args...)
		keys := append(append([]any{"dk", "dv"}, in...), accumulate)
		b.attentionGradLaunch(s, keys, append(append([]any{rowsOf{"dq", s.row}}, in...), b.int("accumulate_q")))
		accumulate = 1
	}
}

// clearUnseen clears the gradients of keys that no query of the widest part sees.
func (b *binder) clearUnseen(s attentionShape) {
	for _, name := range []string{"dk", "dv"} {
		rows, cols := b.shape(name)
		if seen := s.keys * s.batch; seen < rows {
			bytes := 4 * (rows - seen) * cols
			b.launch("fill", spread(bytes, 16), rowsOf{name, seen}, bytes, int64(0)).Source = "elementwise.cu"
		}
	}
}

func (b *binder) attentionGradLaunch(s attentionShape, keys, queries []any) {
	if s.hopper {
		b.hopperGrad(s, "_dkv", "", s.keys, s.kvHeads, keys[:2], keys[2:])
		b.hopperGrad(s, "_dq", "_"+b.types("dq"), s.n, s.heads, queries[:1], queries[1:])
		return
	}
	b.attentionLaunch(s, "_dkv", "", s.keys, s.kvHeads, keys)
	b.attentionLaunch(s, "_dq", "dq", s.n, s.heads, queries)
}

// hopperGrad launches one of the two gradient kernels for the given number of tokens; args are the gradient of o, then q, k,
// v and the rest.
func (b *binder) hopperGrad(s attentionShape, name, ending string, tokens, heads int64, results, args []any) {
	tiles := tilesOf(name, s.dim)
	name, grid := fmt.Sprint(name, "_", s.dim, ending), [3]int64{ceil(tokens, tiles.block), heads, s.batch}
	if !b.card.CopyEngine || !b.aligned("do", "q", "k", "v") || !s.mapped() {
		l := b.launch("attention_hopper"+name, grid, slices.Concat(results, args)...)
		l.Source, l.SharedBytes = hopperGradSource, tiles.bytes(s.dim)
		s.vary(l)
		return
	}
	l := b.launch("attention_bulk"+name, grid, slices.Concat(results, []any{tabled}, args[4:])...)
	l.Source, l.Block, l.SharedBytes = hopperGradSource, bulkThreads, tiles.bytes(s.dim)
	l.Boxes = b.boxes(s, tiles, []any{args[1], args[0]}, "k", "v")
	s.vary(l)
}

func attentionDelta(b *binder) {
	rows := b.elements("delta")
	b.launch("attention_delta_"+b.types("o"), [3]int64{ceil(rows, 8), 1, 1}, "delta", "do", "o", rows, b.int("head_dim"))
}

func attentionMerge(b *binder) {
	rows := b.elements("lse")
	b.launch("attention_merge_"+b.types("o", "parts"), [3]int64{ceil(rows, 8), 1, 1},
		"o", "lse", "parts", "lses", b.elements("lses")/rows, rows, b.int("head_dim"))
}

func attentionSink(b *binder) {
	rows := b.elements("lse")
	b.launch("attention_sink_"+b.types("o", "sink"), [3]int64{ceil(rows, 8), 1, 1}, "o", "lse", "sink", rows, b.int("heads"), b.int("head_dim"))
}

// attentionSinkGrad sums chunks of rows into the workspace, then the chunks.
func attentionSinkGrad(b *binder) {
	r, heads := b.shape("lse")
	chunk := max(64, ceil(r, 256))
	chunks := ceil(r, chunk)
	partial := b.reserve(4 * chunks * heads)
	b.launch("attention_sink_grad_"+b.types("o", "sink"), [3]int64{heads, chunks, 1},
		partial, "do", "o", "lse", "sink", r, heads, b.int("head_dim"), chunk)
	source := b.source
	b.source = "columns.cu"
	b.launch("join_columns", rows(ceil(heads, threads)), "dsink", partial, chunks, heads, b.int("accumulate"))
	b.source = source
}
