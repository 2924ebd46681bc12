package graph

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Groups of ranks that communicate, as indices into Program.Groups.
const (
	GroupSP    = iota // the ranks of a stage
	GroupDP           // the same rank of every replica
	GroupPP           // the same rank of every stage
	GroupTied         // first and last stage, which both hold a tied embedding
	GroupKV           // ranks of a stage that hold the same key and value heads
	GroupBack         // the ranks of a ring in reverse order, for gathering K and V
	GroupHeads        // adjacent ranks of a stage that divide heads; only if the stage has a ring of such groups
	GroupRing         // the ranks of a stage that hold the same heads and form a ring; only if there are several such rings
)

// GroupNames lists the names of the groups in the order of the constants.
var GroupNames = []string{"sp", "dp", "pp", "tied", "kv", "sp_back", "heads", "ring"}

// Constants of a rank. All except the last two depend only on its position k in the SP group.
const (
	ConstHeads       = "heads_first"    // first column of the rank's query heads
	ConstHead        = "head_first"     // its first query head, if attention has sinks
	ConstKV          = "kv_first"       // first column of its key and value heads
	ConstNope        = "nope_first"     // in latent attention, first column of what its heads of keys do not share
	ConstValue       = "value_first"    // in latent attention, first column of its heads of values
	ConstKVOwner     = "kv_owner"       // 1 on the first rank that holds these heads
	ConstFFN         = "ffn_first"      // first column of its part of the MLP
	ConstExpert      = "expert_first"   // its first expert, if ranks have different ones
	ConstExpertRow   = "expert_row"     // the first row of its matrices of experts, which are one below the other
	ConstVocab       = "vocab_first"    // first entry of its part of the vocabulary
	ConstVocabValid  = "vocab_valid"    // its vocabulary entries that are not padding
	ConstOwner       = "sp_owner"       // 1 on the first rank of the group
	ConstMember      = "sp_member"      // the rank's number on the ring
	ConstFirstOnRing = "ring_owner"     // 1 on the first rank of a ring
	ConstBlock       = "sp_block"       // number of its block of rows, of as many as there are ranks, in the order of the sequence
	ConstPosition    = "position_first" // first entry of its part of the position table, if ranks divide it as they do the vocabulary
	ConstReplica     = "replica"        // index of the replica's first sequence in the batch
	ConstEvalFirst   = "eval_replica"   // index of the replica's first sequence in a validation
)

// SPConstNames lists the constants that every model needs. Some models need others as well: see MemberConsts.
var SPConstNames = []string{ConstHeads, ConstKV, ConstKVOwner, ConstFFN, ConstVocab, ConstVocabValid, ConstOwner}

// Split defines how the work of a stage is divided among its ranks and along the sequence.
type Split struct {
	SP     int
	Mode   string // one of the modes; empty means ModeMegatron
	Spread bool   // ranks that divide heads, or those of a ring if none do, have different experts; otherwise, each has all or a part of all
	Ring   int    // if it is more than 1, as many groups of adjacent ranks form a ring, and the ranks of a group divide heads as in Mode
	Whole  bool   // the sequence is undivided: no later subsequence reads its K and V
	Stream Stream

	Latents   bool // latents are cached, and K and V computed from them for one piece of the keys after another
	Documents bool // a sequence may contain several documents, and attention stays inside each
	Masked    bool // some labels are excluded from the loss

	// Gathers reports whether the ranks of a ring gather K and V of a subsequence, so that each
	// rank holds those of the whole sequence. This is needed if any layer has a window, because the
	// chunks that are passed around contain all earlier tokens.
	Gathers bool
}

// Stream selects which of K and V stay on the device only for the current subsequence. Their rows for earlier
// tokens pass through the device in blocks, for attention. The zero value streams neither.
type Stream struct{ K, V bool }

// kv adds the value for K or V: for the whole sequence or, if it is streamed, only for the subsequence.
func (g *Model) kv(b *builder, name string, streams bool, cols int64) int {
	rows := Whole
	switch {
	case streams:
		rows = Full
	case g.rotates():
		rows = WholeLocal
	}
	return b.value(Value{Name: name, Kind: g.kvKind(Cache), Rows: rows, Cols: cols, DType: b.act})
}

// Modes for dividing a layer. In all of them, ranks divide the rows of the residual stream. In the first two,
// they divide the heads inside attention, and a rank's caches of K and V hold only its own heads. In a ring,
// the caches hold all heads, of the rank's own rows or, with Split.Gathers, of all rows. With Split.Ring, groups
// of ranks that divide heads form a ring: the third mode is the one in which every rank is such a group.
const (
	ModeMegatron = "megatron" // weights of a layer are divided; rows are gathered before them and scattered after them
	ModeUlysses  = "ulysses"  // weights of a layer are whole on every rank; rows are exchanged for heads around attention
	ModeRing     = "ring"     // weights of a layer are whole on every rank; K and V are passed around, and rows are in zigzag order
)

// SPModes lists all modes.
var SPModes = []string{ModeMegatron, ModeUlysses, ModeRing}

// Model is the dataflow of a model split over SP ranks.
type Model struct {
	lang.Model
	Split
	Freeze    []string // of lang.Train
	Embedding *Block
	Head      *Block
	UnitNames []string      // names of the units of all layers, by number
	Rotations []ir.Rotation // rotations that its layers refer to, numbered from 1
	Untrained int           // number of layers at the start that have no backward pass

	sequence    int64
	maps        []lang.LinearMap   // with adapters
	forms       []*form            // of layers
	roles       []*role            // of layers
	kinds       []kind             // of layers
	rotationsOf map[string][]int64 // each layer's rotation number, for queries and for keys
	mutex       sync.Mutex
	recomputing map[recomputeKey]*Block
	updates     map[updateKey]*Block
}

// New builds the dataflow of a checked model. All parameters are trained or, if there are adapters, only those of the
// adapters. Except in a ring, heads are divided evenly among SP ranks; vocabulary and FFN are padded to a multiple
// of SP.
func New(m lang.Model, split Split, sequence int64) *Model { return NewTuned(m, nil, split, sequence) }

// NewTuned is like New, but does not train the tensors that freeze selects: see lang.Train.
func NewTuned(m lang.Model, freeze []string, split Split, sequence int64) *Model {
	g := &Model{
		Model: m, Split: split, Freeze: freeze, recomputing: map[recomputeKey]*Block{}, updates: map[updateKey]*Block{},
		sequence: sequence, maps: m.Maps(),
	}
	g.findRotations()
	g.findRoles()
	g.findKinds()
	return g
}

// DType returns the storage type of weights and activations.
func (g *Model) DType() ir.DType {
	if g.Model.DType == "bf16" {
		return ir.BF16
	}
	return ir.F32
}

// ulysses reports whether rows are exchanged for heads, which a single rank does not need.
func (g *Model) ulysses() bool { return g.Replicates() && g.HeadRanks() > 1 }

// Replicates reports whether every rank holds the whole weights of a layer.
func (s Split) Replicates() bool { return s.Mode != ModeMegatron && s.Mode != "" && s.SP > 1 }

// Shares reports whether several ranks of a stage hold the same weights of a layer.
func (s Split) Shares() bool { return s.Replicates() || s.rings() > 1 }

// kvKind returns the kind of K and V or of their gradients: for an undivided sequence, they are ordinary
// activations.
func (s Split) kvKind(k Kind) Kind {
	if s.Whole {
		return Activation
	}
	return k
}

// layerRows returns the kind of rows that a layer's matmuls operate on.
func (g *Model) layerRows() Rows {
	if g.Replicates() {
		return Local
	}
	return Held
}

// Sizes on one rank.
func (g *Model) headsLocal() int64      { return int64(g.Heads / g.HeadRanks()) }
func (g *Model) kvHeadsLocal() int64    { return int64(max(1, g.KVHeads/g.HeadRanks())) }
func (g *Model) ffnLocal(ffn int) int64 { return ceilDiv(int64(ffn), int64(g.HeadRanks())) }
func (g *Model) vocabLocal() int64      { return g.Split.vocabLocal(g.Vocab) }

func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }

// SPConst returns the value of one of the constants above for rank k of the SP group.
func (g *Model) SPConst(name string, k int) int64 {
	part, member := k%g.HeadRanks(), k/g.HeadRanks() // of the heads, on the ring
	switch name {
	case ConstHeads, ConstNope, ConstValue:
		return int64(part) * g.headsLocal() * map[string]int64{ConstHeads: int64(g.HeadDim), ConstNope: int64(g.NopeDim), ConstValue: int64(g.ValueHeadDim)}[name]
	case ConstHead:
		return int64(part) * g.headsLocal()
	case ConstKV:
		return int64(part*g.KVHeads/g.HeadRanks()) * int64(g.HeadDim)
	case ConstKVOwner:
		return truthValue(part%g.KVCopies() == 0 && member == 0)
	case ConstFFN:
		return int64(part) * g.ffnLocal(g.FFN)
	case ConstExpert:
		return int64(k%g.ExpertRanks()) * g.expertsLocal()
	case ConstExpertRow:
		return g.SPConst(ConstExpert, k) * g.rowWidth()
	case ConstVocab:
		return int64(k) * g.vocabLocal()
	case ConstVocabValid:
		return min(max(int64(g.Vocab)-int64(k)*g.vocabLocal(), 0), g.vocabLocal())
	case ConstOwner:
		return truthValue(k == 0)
	case ConstLinearKeys, ConstLinearValues, ConstLinearHead:
		return g.linearConst(name, part)
	case ConstPosition:
		return int64(k) * ceilDiv(g.sequence, int64(g.SP))
	}
	if ffn, ok := strings.CutPrefix(name, ConstFFN+"."); ok {
		width, _ := strconv.Atoi(ffn)
		return int64(part) * g.ffnLocal(width)
	}
	return g.ringConst(name, k)
}

func truthValue(v bool) int64 {
	if v {
		return 1
	}
	return 0
}

// KVCopies returns the number of ranks, among those that divide heads, that hold the same key and value heads.
func (g *Model) KVCopies() int { return max(1, g.HeadRanks()/g.KVHeads) }

// Parameter shapes, global and local.

func (g *Model) columns(name string, in, out, local int64, start string) Param {
	return g.divided(Param{Name: name, Shape: [2]int64{in, out}, Local: [2]int64{in, local}, Shard: ByCols, Start: start, Std: g.InitStd})
}

// rows returns the parameter for a matrix that is split by row and whose product is added to the residual
// stream. Its initial values are smaller in deeper models, as in GPT-2.
func (g *Model) rows(name string, in, local, out int64, start string) Param {
	std := g.InitStd / math.Sqrt(2*float64(g.Layers))
	return g.divided(Param{Name: name, Shape: [2]int64{in, out}, Local: [2]int64{local, out}, Shard: ByRows, Start: start, Std: std})
}

func (g *Model) slicedBias(name string, whole, local int64, start string) Param {
	return g.divided(Param{Name: name, Vector: true, Shape: [2]int64{whole, 1}, Local: [2]int64{local, 1}, Shard: ByRows, Start: start})
}

// divided returns a layer's parameter: divided as p describes, or undivided if every rank holds whole weights.
func (g *Model) divided(p Param) Param {
	if g.Replicates() {
		p.Local, p.Shard, p.Start = p.Shape, Replicated, ""
		return g.reduced(p)
	}
	return g.onRing(p)
}

// onRing returns a parameter that is divided like heads, so that all ranks of a ring hold the same part.
func (g *Model) onRing(p Param) Param {
	if g.rings() > 1 {
		p.Reduce, p.Once = GroupNames[GroupRing], ConstFirstOnRing
	}
	return p
}

// reduced returns a parameter that every rank holds. Each rank computes a gradient from its own rows, and the
// ranks must sum these gradients.
func (g *Model) reduced(p Param) Param {
	if g.SP > 1 {
		p.Reduce, p.Once = GroupNames[GroupSP], ConstOwner
	}
	return p
}

// replicated returns a vector that every rank holds.
func (g *Model) replicated(name string, size int64, fill float64) Param {
	return g.reduced(Param{Name: name, Vector: true, Shape: [2]int64{size, 1}, Local: [2]int64{size, 1}, Fill: fill})
}

func (g *Model) kvParam(p Param) Param {
	if g.KVCopies() > 1 && !g.Replicates() {
		p.Reduce, p.Once = GroupNames[GroupKV], ConstKVOwner
	}
	return p
}

func (g *Model) vocabTable(name string) Param {
	v, h := int64(g.Vocab), int64(g.Hidden)
	return Param{Name: name, Shape: [2]int64{v, h}, Local: [2]int64{g.vocabLocal(), h}, Shard: ByRows, Start: ConstVocab, Std: g.InitStd}
}

// Names of blocks.
const (
	BlockEmbedding = "embedding"
	BlockLayer     = "layer"
)

// Names of values, for other packages.
const (
	ValueTokens = "tokens"
	ValueLabels = "labels"
)

// Values of kind Given.
const (
	ValuePositions = "positions"   // position of each token of a microbatch in its document, in sequence order
	ValueWeight    = "loss.weight" // 1 / number of labels that count in the loss
	ValueDropout   = "dropout.key" // key of the step's dropout
)

// positions returns the operand that holds the position of each token of the subsequence in its document. The
// operand is Missing if sequences have no documents.
func (g *Model) positions(b *builder) Arg {
	if !g.Documents {
		return Arg{Value: Missing}
	}
	return tail(b.given(Value{Name: ValuePositions, Rows: Whole, DType: ir.I32}))
}

func (g *Model) embedding(sequence int64, r *role) *Block {
	b := g.newBuilder(BlockEmbedding)
	b.role = r
	h := int64(g.Hidden)
	table := b.param(g.vocabTable("embed"))
	tokens := b.value(Value{Name: ValueTokens, Rows: Full, DType: ir.I32})
	b.node(ir.LoadTokens, g.loadAttrs(0), all(tokens))
	part := b.activation("embed.out", Full, h)
	attrs := []Attr{constant("first", ConstVocab)}
	if g.EmbedScale != 1 {
		attrs = append(attrs, float("scale", g.EmbedScale))
	}
	b.node(ir.Embed, attrs, all(part), all(tokens), all(table))
	if g.Positions == lang.PositionsLearned && g.Documents {
		part = g.embedPositions(b, part)
	}
	x := b.reduceScatter(part, "embed.sum")
	if g.Positions == lang.PositionsLearned && !g.Documents {
		rows := sequence / int64(g.SP)
		pos := b.param(Param{Name: "pos", Shape: [2]int64{sequence, h}, Local: [2]int64{rows, h}, Shard: ByTokens, Std: g.InitStd})
		y := b.activation("pos.out", Local, h)
		b.node(ir.PositionEmbed, []Attr{from("batch", FromBatch)}, all(y), all(x), tail(pos))
		x = y
	}
	b.Output = x
	b.DOutput = b.newGrad(x)
	b.Values[b.DOutput].Kind = Input
	b.grads[x] = all(b.DOutput)
	b.differentiate()
	return &b.Block
}

// embedPositions adds each token's row of the position table to x. With documents, any token may have any
// position, so ranks divide the table in the same way as the vocabulary.
func (g *Model) embedPositions(b *builder, x int) int {
	h, rows := int64(g.Hidden), ceilDiv(g.sequence, int64(g.SP))
	pos := b.param(Param{Name: "pos", Shape: [2]int64{g.sequence, h}, Local: [2]int64{rows, h}, Shard: ByRows, Start: ConstPosition, Std: g.InitStd})
	places := b.value(Value{Name: "embed.positions", Rows: Full, DType: ir.I32})
	b.node(ir.LoadTokens, g.loadAttrs(0, integer("as", ir.AsPositions)), all(places))
	part, sum := b.activation("pos.part", Full, h), b.activation("pos.out", Full, h)
	b.node(ir.Embed, []Attr{constant("first", ConstPosition)}, all(part), all(places), all(pos))
	b.node(ir.Add, nil, all(sum), all(x), all(part))
	return sum
}

func (g *Model) loadAttrs(shift int64, more ...Attr) []Attr {
	return append([]Attr{
		from("first", FromFirst), constant("replica", ConstReplica),
		{Name: "position", Source: FromPrefix, Value: ir.Int(shift)}, from("batch", FromBatch), integer("chunks", g.Chunks()),
	}, more...)
}

// mixers holds the function that appends the dataflow of each mixer: its result has the rows of x.
var mixers = map[string]func(g *Model, b *builder, x int) int{lang.MixerAttention: (*Model).attention, lang.MixerGatedDelta: (*Model).gatedDelta, lang.MixerMamba2: (*Model).mamba2, lang.MixerKimiDelta: (*Model).kimiDelta, lang.MixerLatent: (*Model).latentAttention}

// layer builds a layer with the given role. It saves the results of the forward nodes in keep, or of all nodes
// if keep is nil.
func (g *Model) layer(r *role, keep map[int]bool) *Block {
	b := g.newBuilder(BlockLayer)
	b.role, b.keep = r, keep
	h := int64(g.Hidden)
	y := b.value(Value{Name: "ln1.in", Kind: Input, Rows: Local, Cols: h, DType: b.act})
	b.Input = y
	middle := "ln2.in"
	if r.form.FFN == 0 {
		middle = "out"
	}
	if mixer := mixers[r.form.Mixer]; mixer != nil {
		biases := lang.BiasAttnOut
		if r.form.scans() {
			biases = ""
		}
		y = g.branch(b, y, "ln1", middle, g.replicated("bo", h, 0), biases, func(x int) int { return mixer(g, b, x) })
	}
	mlpBias := "b2"
	if g.Gated {
		mlpBias = "b_down"
	}
	if r.form.FFN > 0 {
		group, mlp := lang.BiasMLP, (*Model).mlp
		if r.form.Experts > 0 {
			group, mlp = "", (*Model).experts
		}
		y = g.branch(b, y, "ln2", "out", g.replicated(mlpBias, h, 0), group, func(x int) int { return mlp(g, b, x) })
	}
	b.Output = y
	b.DOutput = b.value(Value{Name: "d.out", Kind: Input, Rows: Local, Cols: h, DType: b.act})
	b.grads[y] = all(b.DOutput)
	b.differentiate()
	b.findKVNodes()
	return &b.Block
}

// norm appends the model's norm and returns its result.
func (g *Model) norm(b *builder, name string, x int) int {
	h := int64(g.Hidden)
	y := b.activation(name+".out", Local, h)
	gamma := b.param(g.replicated(name+".gamma", h, 1-g.NormOffset))
	if g.Norm == lang.RMSNorm {
		stats := b.value(Value{Name: name + ".stats", Rows: Local, Cols: 1, DType: ir.F32})
		b.node(ir.RMSNorm, g.normAttrs(), all(y), all(stats), all(x), all(gamma))
		return y
	}
	stats := b.value(Value{Name: name + ".stats", Rows: Local, Cols: 2, DType: ir.F32})
	beta := b.param(g.replicated(name+".beta", h, 0))
	b.node(ir.LayerNorm, g.normAttrs(), all(y), all(stats), all(x), all(gamma), all(beta))
	return y
}

func (g *Model) normAttrs() []Attr {
	attrs := []Attr{float("eps", g.NormEps)}
	if g.NormOffset != 0 {
		attrs = append(attrs, float("offset", g.NormOffset))
	}
	return attrs
}

// branch appends a residual branch, x + f(x), with its norms. The bias of its output is part of the same addition.
func (g *Model) branch(b *builder, x int, norm, out string, bias Param, group string, f func(x int) int) int {
	in := x
	if g.NormsBefore() {
		in = g.norm(b, norm, x)
	}
	sum := f(in)
	if g.NormsAfter() {
		sum = g.norm(b, norm+"_post", sum)
	}
	y := b.activation(out, Local, int64(g.Hidden))
	b.node(ir.Add, nil, all(y), all(x), all(sum), g.bias(b, group, bias))
	return y
}

// bias adds a parameter if the linear maps of a group have biases, and returns it or an absent operand. The group "" has none.
func (g *Model) bias(b *builder, group string, p Param) Arg {
	if !g.HasBias(group) {
		return Arg{Value: Missing}
	}
	return all(b.param(p))
}

// linear appends y = x w + bias, plus the output of w's adapter if it has one.
func (g *Model) linear(b *builder, name string, rows Rows, x int, w Param, bias Arg) int {
	weight := b.param(w)
	y := b.activation(name, rows, w.Local[1])
	b.node(ir.Matmul, nil, all(y), all(x), all(weight), bias)
	g.adapt(b, w, all(y), x)
	return y
}

func (g *Model) attention(b *builder, in int) int {
	h, d := int64(g.Hidden), int64(g.HeadDim)
	heads, kv := g.headsLocal(), g.kvHeadsLocal()
	q, kvAll := int64(g.Heads)*d, int64(g.KVHeads)*d
	rows := g.enter(b, in, "ln1.gathered")
	query := b.activation("q", Held, heads*d)
	keys, values := g.kv(b, "k", g.Stream.K, kv*d), g.kv(b, "v", g.Stream.V, kv*d)
	intoK, intoV := tail(keys), tail(values)
	if g.Gathers {
		intoK, intoV = all(b.activation("k.chunks", Held, kv*d)), all(b.activation("v.chunks", Held, kv*d))
	}
	for _, p := range []projection{
		{"q", all(query), heads, 1, g.slicedBias("bq", q, heads*d, ConstHeads), g.columns("wq", h, q, heads*d, ConstHeads), RotationQ},
		{"k", intoK, kv, g.KVCopies(), g.kvParam(g.slicedBias("bk", kvAll, kv*d, ConstKV)), g.kvParam(g.columns("wk", h, kvAll, kv*d, ConstKV)), RotationK},
		{"v", intoV, kv, g.KVCopies(), g.kvParam(g.slicedBias("bv", kvAll, kv*d, ConstKV)), g.kvParam(g.columns("wv", h, kvAll, kv*d, ConstKV)), ""},
	} {
		g.project(b, rows, p)
	}
	if g.Gathers {
		b.gatherChunks(keys, intoK.Value)
		b.gatherChunks(values, intoV.Value)
	}
	return g.attend(b, rows, query, keys, values, ConstHeads)
}

// attend appends attention and its last linear map, given queries, keys and values. rows is the layer's input, as its matmuls read
// it; start is the constant with the first column of the rank's heads of values.
func (g *Model) attend(b *builder, rows, query, keys, values int, start string) int {
	heads, kv, wide := g.headsLocal(), g.kvHeadsLocal(), int64(g.valueDim())
	whole, own := int64(g.Heads)*wide, heads*wide // columns of the values of all heads, and of the rank's
	o := b.activation("attn.out", Held, own)
	lse := b.value(Value{Name: "attn.lse", Rows: Held, Cols: heads, DType: ir.F32})
	attrs := []Attr{integer("heads", heads), integer("kv_heads", kv), integer("head_dim", int64(g.HeadDim)), from("batch", FromBatch)}
	if g.AttnSoftcap != 0 {
		attrs = append(attrs, float("softcap", g.AttnSoftcap))
	}
	switch {
	case g.rotates():
		g.ringAttention(b, attrs, o, lse, query, keys, values)
	default:
		attrs = append(attrs, from("prefix", FromPrefix), from("window", FromWindow))
		if g.Gathers {
			attrs = append(attrs, integer("chunks", g.Chunks()), constant("member", ConstMember))
		}
		b.node(ir.Attention, attrs, all(o), all(lse), all(query), seen(keys), seen(values), g.positions(b))
		b.looping = false
		g.sink(b, o, lse)
	}
	if g.ulysses() {
		local := b.activation("attn.local", Local, whole)
		b.node(ir.AllToAll, g.exchange(1, true), all(local), all(o))
		o = local
	}
	if g.AttnGate {
		gate := g.linear(b, "attn.gate", g.layerRows(), rows, g.columns("wg", int64(g.Hidden), whole, own, start), Arg{Value: Missing})
		gated := b.value(b.like(o, "attn.gated"))
		b.node(ir.GLU, []Attr{function("sigmoid")}, all(gated), all(gate), all(o))
		o = gated
	}
	part := g.linear(b, "attn.proj", g.layerRows(), o, g.rows("wo", whole, own, int64(g.Hidden), start), Arg{Value: Missing})
	return g.leave(b, part, "attn.sum")
}

// sink adds the sinks to complete results of attention, if the model has them. Ranks divide them as they divide heads.
func (g *Model) sink(b *builder, o, lse int) {
	if !g.AttnSinks {
		return
	}
	p := Param{Name: "sinks", Vector: true, Shape: [2]int64{int64(g.Heads), 1}, Local: [2]int64{g.headsLocal(), 1}, Shard: ByRows, Start: ConstHead}
	if p = g.onRing(p); g.HeadRanks() == 1 {
		p = g.replicated(p.Name, p.Shape[0], 0)
	}
	b.node(ir.AttentionSink, []Attr{integer("heads", g.headsLocal()), integer("head_dim", int64(g.valueDim()))}, all(o), all(lse), all(b.param(p)))
}

// enter gathers the rows of all ranks for the matmuls of a layer, and leave reduces results to the rank's own rows.
func (g *Model) enter(b *builder, x int, name string) int {
	if g.Replicates() {
		return x
	}
	return b.regroup(ir.AllGather, g.headGroup(), g.HeadRanks(), Held, x, name)
}

func (g *Model) leave(b *builder, x int, name string) int {
	if g.Replicates() {
		return x
	}
	return b.regroup(ir.ReduceScatter, g.headGroup(), g.HeadRanks(), Local, x, name)
}

// projection describes the computation of Q, K or V from a layer's rows.
type projection struct {
	name     string
	into     Arg   // the result: this rank's heads; in a ring, only for its own rows
	heads    int64 // of this rank
	copies   int   // ranks that hold the same heads
	bias     Param
	weight   Param
	rotation string // RotationQ or RotationK; empty: V, which is neither normalized nor rotated
}

// project appends the matmul and, where the model has them, the norm of heads, the exchange between ranks and
// the rotation. With qk_norm = rotated, the norm comes last. Each of these nodes except the last writes a separate value.
func (g *Model) project(b *builder, x int, p projection) {
	bias, weight := g.bias(b, lang.BiasQKV, p.bias), b.param(p.weight)
	width := p.heads * int64(g.HeadDim)
	rotated, last := g.rotated(p), p.rotation != "" && g.QKNorm == lang.QKNormRotated
	turned := p.into
	if last {
		turned = all(b.activation(p.name+".turned", Held, width))
	}
	flat := turned
	if rotated {
		flat = all(b.activation(p.name+".flat", Held, width))
	}
	g.projectHeads(b, x, p, weight, bias, flat)
	if rotated {
		b.node(ir.Rope, g.ropeAttrs(p.rotation, p.heads, int64(g.HeadDim)), turned, flat, g.positions(b))
	}
	if last {
		g.headNorm(b, p.name, p.into, turned)
	}
}

// projectHeads appends what comes before the rotation.
func (g *Model) projectHeads(b *builder, x int, p projection, weight int, bias, into Arg) {
	normed, whole := g.normed(p), g.normedWhole(p)
	local := func(name string) Arg { return all(b.activation(p.name+name, Local, p.weight.Shape[1])) }
	product := into
	switch {
	case g.ulysses() && normed:
		product = local(".raw")
	case g.ulysses():
		product = local(".local")
	case normed:
		product = all(b.activation(p.name+".raw", Held, p.heads*int64(g.HeadDim)))
	}
	b.node(ir.Matmul, nil, product, all(x), all(weight), bias)
	g.adapt(b, p.weight, product, x)
	if whole {
		rows := local(".rows")
		b.node(ir.AllToAll, g.exchange(1, true), rows, product)
		product = rows
	}
	if normed {
		to := into
		if g.ulysses() || whole {
			to = local(".normed")
		}
		g.headNorm(b, p.name, to, product)
		product = to
	}
	if g.ulysses() || whole {
		b.node(ir.AllToAll, g.exchange(p.copies, false), into, product) // the rows of attention, with this rank's heads
	}
}

func (g *Model) rotated(p projection) bool {
	return p.rotation != "" && g.rotation(p.rotation) != plainNone
}

// normed reports whether a norm comes before the rotation.
func (g *Model) normed(p projection) bool {
	return p.rotation != "" && (g.QKNorm == lang.QKNormHead || g.QKNorm == lang.QKNormAll)
}

// normedWhole reports whether a norm covers all heads of a row, and ranks that hold only some of them must exchange
// them first.
func (g *Model) normedWhole(p projection) bool {
	return g.normed(p) && g.QKNorm == lang.QKNormAll && !g.Replicates() && g.HeadRanks() > 1
}

// headNorm appends RMSNorm of queries or keys, for each head or over all heads of a row.
func (g *Model) headNorm(b *builder, name string, to, x Arg) {
	v := b.Values[x.Value]
	heads, width := int64(0), v.Cols
	if g.QKNorm != lang.QKNormAll {
		heads, width = v.Cols/int64(g.HeadDim), int64(g.HeadDim)
	}
	stats := b.value(Value{Name: name + ".stats", Rows: v.Rows, Cols: max(1, heads), DType: ir.F32})
	gamma := b.param(g.replicated(name+"_norm.gamma", width, 1-g.NormOffset))
	b.node(ir.RMSNorm, g.normAttrs(), by(heads, to), by(heads, all(stats)), by(heads, x), all(gamma))
}

// exchange returns the attributes of an all_to_all that turns all heads of a rank's own rows into the rank's
// own heads of all rows, or the reverse.
func (g *Model) exchange(copies int, inverse bool) []Attr {
	attrs := []Attr{group(g.headGroup()), integer("copies", int64(copies))}
	if inverse {
		attrs = append(attrs, truth("inverse"))
	}
	return attrs
}

func (g *Model) ropeAttrs(rotation string, heads, dim int64) []Attr {
	attrs := []Attr{
		integer("heads", heads), integer("head_dim", dim), from("batch", FromBatch),
		from("position", FromPrefix), float("theta", g.RopeTheta),
	}
	switch r := g.rotation(rotation); {
	case r == byLayer:
		attrs = append(attrs, Attr{Name: "rotation", Source: FromLayer, Const: rotation})
	case r > 0:
		attrs = append(attrs, integer("rotation", r))
	}
	if g.rings() > 1 {
		attrs = append(attrs, integer("chunks", g.Chunks()), constant("member", ConstMember))
	}
	return attrs
}

// ffnConst returns the constant with the first column of a rank's part of an MLP of the given width.
func (g *Model) ffnConst(ffn int) string {
	if ffn == g.FFN {
		return ConstFFN
	}
	return fmt.Sprintf("%s.%d", ConstFFN, ffn)
}

// mlp appends a dense MLP.
func (g *Model) mlp(b *builder, x int) int {
	in := g.enter(b, x, "ln2.gathered")
	return g.leave(b, g.dense(b, "", b.role.form.FFN, in, lang.BiasMLP), "mlp.sum")
}

// dense appends an MLP of the given width, whose tensors and values have names with a prefix, up to the sum over ranks.
func (g *Model) dense(b *builder, prefix string, ffn, in int, biases string) int {
	h, f, fl, first := int64(g.Hidden), int64(ffn), g.ffnLocal(ffn), g.ffnConst(ffn)
	act := g.widen(b, prefix, g.layerRows(), nil, func(name, weight, bias string) int {
		return g.linear(b, name, g.layerRows(), in, g.columns(prefix+weight, h, f, fl, first), g.bias(b, biases, g.slicedBias(prefix+bias, f, fl, first)))
	})
	return g.linear(b, prefix+"fc2.out", g.layerRows(), act, g.rows(prefix+g.downName(), f, fl, h, first), Arg{Value: Missing})
}

// downName returns the name of the matrix of an MLP's second linear map.
func (g *Model) downName() string {
	if g.Gated {
		return "w_down"
	}
	return "w2"
}

// widen appends an MLP up to the result of its activation. The function into appends a linear map of the input. With experts, its rows
// are those of a choice.
func (g *Model) widen(b *builder, prefix string, rows Rows, of *choice, into func(name, weight, bias string) int) int {
	attrs, split, ends := []Attr{function(g.Activation)}, int64(0), Arg{Value: Missing}
	if of != nil {
		split = of.slots
		if loads := of.loads(); len(loads) > 0 { // otherwise all rows exist
			attrs, ends = append(attrs, loads...), all(of.ends)
		}
	}
	if !g.Gated {
		fc1 := into(prefix+"fc1.out", "w1", "b1")
		act := b.activation(prefix+strings.TrimSuffix(g.Activation, "_tanh")+".out", rows, b.Values[fc1].Cols)
		b.node(ir.Activation, attrs, by(split, all(act)), by(split, all(fc1)), ends)
		return act
	}
	gate, up := into(prefix+"gate", "w_gate", "b_gate"), into(prefix+"up", "w_up", "b_up")
	name := map[string]string{"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu"}[g.Activation]
	act := b.activation(prefix+cmp.Or(name, g.Activation+"_glu")+".out", rows, b.Values[gate].Cols)
	b.node(ir.GLU, attrs, by(split, all(act)), by(split, all(gate)), by(split, all(up)), ends)
	return act
}

// head builds the final norm, the output projection and the loss. Training runs all of it in the backward pass,
// one chunk of rows at a time. No logits outlive their chunk, so those of a whole subsequence never exist at
// the same time. The forward pass is only for validation.
func (g *Model) head(r *role) *Block {
	b := g.newBuilder("head")
	b.role = r
	b.Input = b.value(Value{Name: "ln_f.in", Kind: Input, Rows: Local, Cols: int64(g.Hidden), DType: b.act})
	b.Loss = b.value(Value{Name: "loss", Kind: Loss, Rows: Fixed, Count: 1, DType: ir.F32})
	name := "head"
	if g.Tied {
		name = "embed"
	}
	table := g.vocabTable(name)
	table.Tied = g.Tied

	out := g.norm(b, "ln_f", b.Input)
	own := []Node{b.Forward[len(b.Forward)-1]} // nodes of the rank's own rows
	if g.LogitScale != 1 {
		scaled := b.activation("ln_f.scaled", Local, int64(g.Hidden))
		b.node(ir.Axpby, []Attr{float("alpha", g.LogitScale), float("beta", 0)}, all(scaled), all(out))
		out, own = scaled, append(own, b.Forward[len(b.Forward)-1])
	}
	xg := b.allGather(out, "ln_f.gathered")
	labels := b.value(Value{Name: ValueLabels, Rows: Full, DType: ir.I32})
	if g.Masked {
		b.node(ir.LoadTokens, g.loadAttrs(1, integer("as", ir.AsLabels)), all(labels))
	} else {
		b.node(ir.LoadTokens, g.loadAttrs(1), all(labels))
	}
	w := b.param(table)
	l := g.chunkLoss(b, xg, w, labels)

	// The backward pass begins with the nodes of the forward pass and continues in the same loop over chunks.
	// Only validation uses the losses of individual tokens.
	b.Backward = append(b.Backward, b.Forward...)
	b.Losses = b.value(Value{Name: "losses", Kind: Loss, Rows: Full, DType: ir.F32})
	loss := &b.Forward[len(b.Forward)-1]
	loss.Args = slices.Clone(loss.Args)
	loss.Args[1] = chunk(b.Losses)
	b.nodes, b.chunked = &b.Backward, true
	dxg := g.chunkGradient(b, l, xg, w, labels)
	b.chunked = false
	b.grads[xg] = all(dxg)
	if xg != out {
		gatherGradient(b, Node{Op: ir.AllGather, Attrs: []Attr{group(GroupSP)}, Args: []Arg{all(xg), all(out)}})
	}
	for _, n := range slices.Backward(own) {
		gradients[n.Op](b, n)
	}
	b.DInput = b.grads[b.Input].Value
	b.prune()
	b.findUnits()
	b.halve()
	return &b.Block
}

// losses holds the values that chunkGradient takes over from chunkLoss.
type losses struct {
	logits, stats int
	labels        Arg // labels of the chunk, if some are excluded from the loss
	weight        Arg
}

func (g *Model) chunkLoss(b *builder, xg, w, labels int) losses {
	b.chunked = true
	defer func() { b.chunked = false }()
	v := g.vocabLocal()
	l := losses{
		logits: b.value(Value{Name: "logits", Rows: ChunkRows, Cols: v, DType: ir.F32}),
		stats:  b.value(Value{Name: "ce.stats", Planes: 1, Rows: ChunkRows, Cols: 3, DType: ir.F32}),
		labels: Arg{Value: Missing},
		weight: Arg{Value: Missing},
	}
	if g.Masked {
		l.labels, l.weight = chunk(labels), all(b.value(Value{Name: ValueWeight, Kind: Given, Rows: Fixed, Count: 1, DType: ir.F32}))
	}
	b.node(ir.Matmul, []Attr{truth("trans_b")}, all(l.logits), chunk(xg), all(w))
	part := l.stats
	if g.SP > 1 {
		part = b.value(Value{Name: "ce.part", Rows: ChunkRows, Cols: 3, DType: ir.F32})
	}
	b.Values[l.stats].Planes = int64(g.SP)
	b.node(ir.CrossEntropyStats, g.vocabAttrs(), flat(part), all(l.logits), chunk(labels))
	if g.SP > 1 {
		b.node(ir.AllGather, []Attr{group(GroupSP)}, all(l.stats), all(part))
	}
	b.node(ir.CrossEntropy, []Attr{from("scale", FromLossScale)}, all(b.Loss), Arg{Value: Missing}, all(l.stats), l.labels, l.weight)
	return l
}

func (g *Model) vocabAttrs() []Attr {
	attrs := []Attr{constant("first", ConstVocab), constant("valid", ConstVocabValid)}
	if g.LogitSoftcap != 0 {
		attrs = append(attrs, float("softcap", g.LogitSoftcap))
	}
	return attrs
}

func (g *Model) chunkGradient(b *builder, l losses, xg, w, labels int) int {
	dlogits := l.logits // overwrites the logits if both are f32
	if b.act != ir.F32 {
		dlogits = b.value(Value{Name: "d.logits", Rows: ChunkRows, Cols: g.vocabLocal(), DType: b.act})
	}
	attrs := append(g.vocabAttrs(), from("scale", FromLossScale))
	b.node(ir.CrossEntropyGrad, attrs, all(dlogits), all(l.logits), all(l.stats), chunk(labels), l.weight)
	dxg := b.newGrad(xg)
	b.node(ir.Matmul, nil, chunk(dxg), all(dlogits), all(w))
	b.node(ir.Matmul, []Attr{truth("trans_a"), from("accumulate", NotFirst)}, all(b.weightGrad(w)), all(dlogits), chunk(xg))
	return dxg
}
