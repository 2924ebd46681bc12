package kernels_test

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// TestRandom compares every kernel with the cpu device on random values, shapes and element types, with a random
// order of lanes. The rows of the opcode table define which shapes are valid.
func TestRandom(t *testing.T) {
	library := emu.Need(t)
	seed := irtest.Seed(t)
	for op := range ir.NumOps {
		if ir.Ops[op].Class != ir.ClassKernel {
			continue
		}
		t.Run(ir.Ops[op].Name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, uint64(op)))
			for i := range 12 {
				compare(t, drawn(t, rng, op, limits[i%len(limits)]), &device{library: library, seed: rng.Uint64() >> uint(rng.IntN(2)*63)})
			}
			for _, fixed := range shapes[op] {
				for _, card := range []device{{}, {hopper: true}, {hopper: true, engine: true}} {
					if card.hopper && !kernels.OnHopper(fixed["head_dim"], cmp.Or(fixed["value_dim"], fixed["head_dim"])) { // there are no such kernels
						break
					}
					card.library, card.seed, card.edged = library, rng.Uint64(), rng.IntN(2) == 0
					card.odd = !card.engine && rng.IntN(4) == 0
					compare(t, drawn(t, rng, op, fixed), &card)
				}
			}
		})
	}
}

// limits lists upper bounds for drawn dimensions, under the empty name. Small shapes find errors at edges;
// larger ones span several tiles. Dimensions that have an entry of their own are fixed.
var limits = []map[string]int64{{"": 5}, {"": 20}, {"": 70}}

// shapes lists further shapes, which random draws would rarely find, such as attention on tensor cores with
// several tiles in each direction.
var shapes = map[ir.Op][]map[string]int64{
	ir.Matmul: {
		{"": 5, "m": 128, "n": 128, "k": 64, "T": 1}, {"": 5, "m": 136, "n": 40, "k": 96, "T": 1},
		{"": 5, "m": 3, "n": 260, "k": 33, "T": 1}, {"": 5, "m": 150, "n": 136, "k": 40, "T": 1},
	},
	ir.Attention:     attentionShapes,
	ir.AttentionGrad: attentionShapes,
	ir.EmbedGrad:     {{"": 40, "r": 600, "v": 7}, {"": 40, "h": 2100}},
	ir.LayerNormGrad: {{"": 40, "r": 200, "c": 264}},
	ir.LayerNorm:     {{"": 3, "c": 2100}, {"": 3, "c": 4096}},
	ir.BiasGrad:      {{"": 40, "r": 300, "c": 264}},
	ir.Scan:          scanShapes,
	ir.ScanGrad:      scanShapes,
	ir.DecayGrad:     {{"": 40, "r": 150, "heads": 3, "head_dim": 90}},

	ir.ScaleColumnsGrad: {{"": 40, "r": 150, "heads": 3, "head_dim": 90}},
	ir.ConvGrad:         {{"": 40, "n": 150, "c": 300, "width": 4}},

	ir.ConcatHeads:     {{"": 3, "r": 70, "heads": 3, "first": 8, "rest": 16}, {"": 3, "r": 9, "heads": 2, "first": 300, "rest": 5}},
	ir.ConcatHeadsGrad: {{"": 3, "r": 70, "heads": 3, "first": 8, "rest": 16}, {"": 3, "r": 9, "heads": 2, "first": 300, "rest": 5}},
}

// scanShapes have several chunks; the last has two segments.
var scanShapes = []map[string]int64{
	{"": 3, "n": 150, "heads": 2, "shared": 2, "key_dim": 64, "value_dim": 70, "batch": 1, "channels": 1, "delta": 1, "T": 1, "positions": 0},
	{"": 3, "n": 140, "heads": 1, "shared": 2, "key_dim": 20, "value_dim": 16, "batch": 2, "channels": 20, "delta": 1, "state": 1},
	{"": 3, "n": 200, "heads": 1, "shared": 1, "key_dim": 16, "value_dim": 16, "batch": 1, "channels": 1, "delta": 0, "T": 1, "positions": 1},
	{"": 3, "n": 1100, "heads": 1, "shared": 1, "key_dim": 8, "value_dim": 8, "batch": 1, "channels": 1, "delta": 1, "state": 1, "positions": 1},
}

var attentionShapes = []map[string]int64{
	{"": 3, "n": 70, "prefix": 61, "heads": 2, "kv_heads": 2, "head_dim": 192, "value_dim": 128, "batch": 1, "T": 1},
	{"": 3, "n": 66, "prefix": 70, "keys": 100, "heads": 2, "kv_heads": 1, "head_dim": 192, "value_dim": 128, "batch": 1, "T": 1, "window": 40, "accumulate": 1, "accumulate_q": 1},
	{"": 3, "n": 67, "prefix": 5, "heads": 2, "kv_heads": 1, "head_dim": 192, "value_dim": 128, "batch": 2, "T": 1, "positions": 1, "softcap": 2},
	{"": 3, "n": 40, "prefix": 9, "heads": 2, "kv_heads": 1, "head_dim": 24, "value_dim": 40, "batch": 2, "T": 1},
	{"": 3, "n": 70, "prefix": 0, "heads": 2, "kv_heads": 1, "head_dim": 64, "batch": 1, "T": 1},
	{"": 3, "n": 33, "prefix": 97, "heads": 1, "kv_heads": 1, "head_dim": 128, "batch": 2, "T": 1},
	{"": 3, "n": 5, "prefix": 61, "heads": 3, "kv_heads": 1, "head_dim": 96, "batch": 1, "T": 1},
	{"": 3, "n": 129, "prefix": 3, "heads": 1, "kv_heads": 1, "head_dim": 64, "batch": 1, "T": 1},
	{"": 3, "n": 40, "prefix": 40, "heads": 2, "kv_heads": 2, "head_dim": 256, "batch": 1, "T": 1},
	{"": 3, "n": 20, "prefix": 9, "heads": 2, "kv_heads": 1, "head_dim": 80, "batch": 1},
	{"": 3, "n": 20, "prefix": 9, "heads": 2, "kv_heads": 1, "head_dim": 40, "batch": 1, "T": 1},
	{"": 3, "n": 70, "prefix": 20, "heads": 2, "kv_heads": 1, "head_dim": 80, "batch": 1, "T": 1},
	{"": 3, "n": 66, "prefix": 70, "keys": 100, "heads": 2, "kv_heads": 1, "head_dim": 192, "batch": 1, "T": 1, "window": 40, "accumulate": 1, "accumulate_q": 1},
	{"": 3, "n": 67, "prefix": 5, "heads": 1, "kv_heads": 1, "head_dim": 192, "batch": 2, "T": 1, "positions": 1, "softcap": 2},
	{"": 3, "n": 66, "prefix": 0, "heads": 2, "kv_heads": 1, "head_dim": 256, "batch": 1, "T": 1, "window": 50, "positions": 1},
	{"": 3, "n": 35, "prefix": 70, "keys": 90, "heads": 2, "kv_heads": 1, "head_dim": 256, "batch": 1, "T": 1, "softcap": 2, "accumulate": 1, "accumulate_q": 1},
	{"": 3, "n": 260, "prefix": 150, "heads": 2, "kv_heads": 1, "head_dim": 192, "batch": 1, "T": 1},
	{"": 3, "n": 260, "prefix": 150, "heads": 2, "kv_heads": 1, "head_dim": 256, "batch": 1, "T": 1},
	{"": 3, "n": 200, "prefix": 300, "keys": 500, "heads": 1, "kv_heads": 1, "head_dim": 192, "batch": 2, "T": 1, "window": 33},
	{"": 3, "n": 129, "prefix": 61, "heads": 2, "kv_heads": 2, "head_dim": 256, "batch": 2, "T": 1, "accumulate": 1, "accumulate_q": 1},
	{"": 3, "n": 150, "prefix": 128, "keys": 278, "heads": 2, "kv_heads": 1, "head_dim": 256, "batch": 1, "T": 1, "window": 90, "softcap": 3, "positions": 1},
	{"": 3, "n": 70, "prefix": 90, "keys": 77, "heads": 2, "kv_heads": 2, "head_dim": 64, "batch": 1, "T": 1},
	{"": 3, "n": 70, "prefix": 200, "keys": 65, "heads": 4, "kv_heads": 2, "head_dim": 128, "batch": 1, "T": 1},
	{"": 3, "n": 260, "prefix": 150, "heads": 2, "kv_heads": 1, "head_dim": 128, "batch": 1, "T": 1},
	{"": 3, "n": 129, "prefix": 0, "heads": 1, "kv_heads": 1, "head_dim": 128, "batch": 2, "T": 1},
	{"": 3, "n": 200, "prefix": 300, "keys": 500, "heads": 2, "kv_heads": 1, "head_dim": 64, "batch": 1, "T": 1, "window": 1},
	{"": 3, "n": 200, "prefix": 300, "keys": 500, "heads": 2, "kv_heads": 2, "head_dim": 128, "batch": 1, "T": 1, "window": 33},
	{"": 3, "n": 260, "prefix": 128, "keys": 388, "heads": 1, "kv_heads": 1, "head_dim": 96, "batch": 2, "T": 1, "window": 128},
	{"": 3, "n": 300, "prefix": 60, "keys": 200, "heads": 1, "kv_heads": 1, "head_dim": 64, "batch": 1, "T": 1, "window": 100, "accumulate": 1, "accumulate_q": 1},
	{"": 3, "n": 90, "prefix": 200, "keys": 290, "heads": 2, "kv_heads": 1, "head_dim": 80, "batch": 1, "window": 40},
	{"": 3, "n": 260, "prefix": 150, "heads": 2, "kv_heads": 1, "head_dim": 80, "batch": 1, "T": 1},
	{"": 3, "n": 300, "prefix": 60, "keys": 200, "heads": 1, "kv_heads": 1, "head_dim": 80, "batch": 2, "T": 1, "window": 100, "accumulate": 1, "accumulate_q": 1},
	{"": 3, "n": 150, "prefix": 128, "keys": 278, "heads": 2, "kv_heads": 2, "head_dim": 80, "batch": 1, "T": 1, "window": 90, "softcap": 3, "positions": 1},
	{"": 3, "n": 130, "prefix": 5, "keys": 40, "heads": 1, "kv_heads": 1, "head_dim": 96, "batch": 2, "T": 1},
	{"": 3, "n": 260, "prefix": 150, "heads": 2, "kv_heads": 1, "head_dim": 128, "batch": 1, "T": 1, "softcap": 2},
	{"": 3, "n": 150, "prefix": 128, "keys": 278, "heads": 2, "kv_heads": 2, "head_dim": 96, "batch": 1, "T": 1, "window": 70, "softcap": 3},
	{"": 3, "n": 90, "prefix": 200, "keys": 290, "heads": 2, "kv_heads": 1, "head_dim": 64, "batch": 2, "T": 1, "softcap": 1},
	{"": 3, "n": 40, "prefix": 40, "heads": 2, "kv_heads": 2, "head_dim": 256, "batch": 1, "T": 1, "softcap": 50},
	{"": 3, "n": 150, "prefix": 70, "keys": 220, "heads": 2, "kv_heads": 1, "head_dim": 64, "batch": 2, "T": 1, "softcap": 2, "positions": 1},
	{"": 3, "n": 150, "prefix": 128, "keys": 278, "heads": 1, "kv_heads": 1, "head_dim": 128, "batch": 1, "T": 1, "window": 90, "softcap": 3, "positions": 1},
	{"": 3, "n": 140, "prefix": 3, "keys": 143, "heads": 2, "kv_heads": 2, "head_dim": 96, "batch": 1, "T": 1, "softcap": 1, "positions": 1},
	{"": 3, "n": 40, "prefix": 30, "keys": 70, "heads": 2, "kv_heads": 1, "head_dim": 256, "batch": 1, "softcap": 4, "positions": 1},
}

// draw holds the state while one instruction is drawn.
type draw struct {
	*testing.T
	rng   *rand.Rand
	fixed map[string]int64
	names map[string]int64
	info  *ir.OpInfo
	in    *ir.Instr
}

// drawn returns a program of one instruction on random operands.
func drawn(t *testing.T, rng *rand.Rand, op ir.Op, fixed map[string]int64) *ir.Program {
	if dim := fixed["head_dim"]; ir.Ops[op].Rule == ir.RuleAttention && dim > 0 && fixed["value_dim"] == 0 {
		fixed = maps.Clone(fixed)
		fixed["value_dim"] = dim
	}
	d := &draw{T: t, rng: rng, fixed: fixed, names: map[string]int64{}, info: &ir.Ops[op],
		in: &ir.Instr{Op: op, Stream: ir.Ops[op].Streams[0]}}
	code := ir.Code{Name: "random"}
	d.attributes()
	common := ir.DType(ir.F32)
	if v, ok := fixed["T"]; ok && v == 1 || !ok && rng.IntN(2) == 1 {
		common = ir.BF16
	}
	for i, o := range d.info.Operands {
		if d.absent(i) {
			d.in.Args = append(d.in.Args, ir.Absent())
			continue
		}
		v := ir.View{Buffer: uint32(len(code.Buffers)), DType: d.dtype(o.Types, common)}
		if d.info.Rule == ir.RuleGrouped && o.Types == "F" && d.names["trans_b"] != 0 {
			v.DType = common
		}
		for j, n := range d.shape(i) {
			v.Shape[j] = int64(n)
		}
		start := (code.Arenas[ir.Device] + 63) &^ 63
		code.Buffers = append(code.Buffers, ir.Buffer{Name: o.Name, Offset: start, Size: v.Bytes()})
		code.Arenas[ir.Device] = start + v.Bytes()
		d.in.Args = append(d.in.Args, v)
	}
	code.Sections[ir.SectionStep] = []ir.Instr{*d.in}
	if err := d.in.CheckRule(); err != nil {
		t.Fatalf("the drawn instruction itself is wrong: %v", err)
	}
	return &ir.Program{Name: "random", Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}, Lines: []string{""},
		Run: ir.Run{Seed: 7, Sequence: 64, Vocab: 100}, Tensors: []ir.Tensor{{Name: "w", Shape: [2]int64{23, 17}}}}
}

// absent reports whether to leave out operand i: half of the optional operands, either o or delta, and the bias
// of a matmul that accumulates.
func (d *draw) absent(i int) bool {
	if v, ok := d.fixed[d.info.Operands[i].Name]; ok && d.info.Operands[i].Optional {
		return v == 0
	}
	if d.in.Op == ir.MatmulGrouped && d.info.Operands[i].Name == "bias" && d.names["trans_b"] != 0 {
		return true
	}
	if d.in.Op == ir.AttentionGrad && d.info.Operands[i].Name != "positions" {
		delta := d.names["kv_heads"]%2 == 0
		return d.info.Operands[i].Name == "o" && delta || d.info.Operands[i].Name == "delta" && !delta
	}
	if name := d.info.Operands[i].Name; d.in.Op == ir.MatmulGroupedWeightGrad { // gradients of matrices, of biases, or of both
		biases := d.number("o")%3 == 0
		return (name == "db" || name == "a") && biases || name == "dbias" && !biases && d.rng.IntN(2) == 0
	}
	adds := (d.info.Rule == ir.RuleMatmul || d.in.Op == ir.MatmulGrouped) && d.names["accumulate"] != 0
	return d.info.Operands[i].Optional && (d.rng.IntN(2) == 0 || adds)
}

// number returns the size of a named dimension: the fixed one, or a random one from 1 to the limit of this
// draw.
func (d *draw) number(name string) int64 {
	if v, ok := d.names[name]; ok {
		return v
	}
	v, ok := d.fixed[name]
	if !ok {
		v = 1 + d.rng.Int64N(d.fixed[""])
		switch {
		case name == "e": // experts
			v += d.names["top"]
		case name == "l": // some of them
			v = 1 + d.rng.Int64N(d.number("e"))
			d.names["first"] = d.rng.Int64N(d.number("e") - v + 1)
		case name == "n" && d.info.Rule == ir.RulePlaced: // room for some rows of each token
			v = d.number("r") * (1 + d.rng.Int64N(d.names["top"]))
		}
	}
	d.names[name] = v
	return v
}

func (d *draw) attributes() {
	small := map[string]int64{"batch": 3, "heads": 1, "kv_heads": 3, "head_dim": 12, "p": 3, "top": 4, "shared": 3, "width": 5}
	for _, a := range d.info.Attrs {
		limit := int64(30)
		if v, ok := small[a.Name]; ok {
			limit = v
		}
		v, ok := d.fixed[a.Name]
		switch {
		case ok:
		case a.Kind == ir.KindBool:
			v = d.rng.Int64N(2)
		case a.Kind == ir.KindTensor, a.Kind == ir.KindOption:
		case a.Kind == ir.KindFunction:
			v = d.rng.Int64N(int64(len(ir.Functions)))
		default:
			v = 1 + d.rng.Int64N(limit)
		}
		if a.Name == "channels" && !ok { // one decay, or one for each row of the state
			v = []int64{1, d.names["key_dim"]}[d.rng.IntN(2)]
		}
		d.names[a.Name] = v
	}
	if _, ok := d.fixed["heads"]; !ok && d.names["kv_heads"] > 0 {
		d.names["heads"] = d.names["kv_heads"] * (1 + d.rng.Int64N(3))
	}
	if _, ok := d.fixed["head_dim"]; !ok {
		d.names["head_dim"] = 2 * d.names["head_dim"]
	}
	if d.info.Rule == ir.RuleConcat {
		d.names["head_dim"] = d.number("first") + d.number("rest")
	}
	if d.names["keys"] = d.number("n") + d.names["prefix"]; d.fixed["keys"] != 0 {
		d.names["keys"] = d.fixed["keys"]
	} else if d.rng.IntN(2) == 0 {
		d.names["keys"] = 1 + d.rng.Int64N(d.names["keys"])
	}
	switch d.in.Op {
	case ir.Route:
		d.number("l")
	case ir.ExpertLoad:
		d.number("top")
	}
	d.window()
	if _, ok := d.names["valid"]; ok {
		d.names["valid"] = 1 + d.rng.Int64N(d.number("v"))
	}
	floats := map[string]float64{"eps": 1e-5, "std": 0.5, "scale": 0.25, "theta": 1e4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1,
		"value": 3, "weight": 1, "max_norm": 2, "norm": 1e-5}
	if fixed, ok := d.fixed["softcap"]; ok && fixed != 0 || !ok && d.rng.IntN(2) == 0 {
		floats["softcap"] = cmp.Or(float64(fixed), 1.5)
	}
	for _, a := range d.info.Attrs {
		if a.Kind.IsFloat() {
			d.in.Attrs = append(d.in.Attrs, ir.Float(floats[a.Name]))
			continue
		}
		d.in.Attrs = append(d.in.Attrs, ir.Int(d.names[a.Name]))
	}
}

// window draws a window that leaves no query without a key. If the instruction continues from results of other
// keys, some queries may have no key, but not all.
func (d *draw) window() {
	fixed, ok := d.fixed["window"]
	if d.info.Rule != ir.RuleAttention || ok && fixed > 0 || !ok && d.rng.IntN(2) == 0 {
		return
	}
	least := d.names["prefix"] + d.number("n") - d.names["keys"] + 1
	if goesOn := map[ir.Op]string{ir.Attention: "accumulate", ir.AttentionGrad: "accumulate_q"}[d.in.Op]; d.names[goesOn] != 0 {
		least -= d.number("n") - 1
	}
	d.names["window"] = max(1, least) + d.rng.Int64N(d.number("n")+2)
}

func (d *draw) dtype(types string, common ir.DType) ir.DType {
	either := []ir.DType{ir.F32, ir.BF16, ir.I32, ir.U8}
	switch types {
	case "T":
		return common
	case "F":
		return either[d.rng.IntN(2)]
	case "any":
		return either[d.rng.IntN(4)]
	case "bf16":
		return ir.BF16
	case "i32":
		return ir.I32
	}
	return ir.F32
}

// shape draws a shape that follows an operand's rule. Operands without a rule share a shape, except those of matmul.
func (d *draw) shape(i int) []int64 {
	dims := d.info.Operands[i].Dims
	if d.info.Operands[i].Name == "positions" {
		dims = "n*batch"
	}
	if d.in.Op == ir.Matmul && dims == "" {
		dims = []string{"", "m,k", "k,n"}[i]
		if name := []string{"", "trans_a", "trans_b"}[i]; d.names[name] != 0 {
			dims = []string{"", "k,m", "n,k"}[i]
		}
	}
	if d.info.Rule == ir.RuleGrouped && dims == "" {
		if dims = "e,k,o"; d.names["trans_b"] != 0 {
			dims = "e,o,k"
		}
	}
	if dims == "" {
		dims = "any,c"
	}
	var out []int64
	for _, dim := range strings.Split(dims, ",") {
		product := int64(1)
		for _, factor := range strings.Split(dim, "*") {
			if n, err := strconv.ParseInt(factor, 10, 64); err == nil {
				product *= n
			} else {
				product *= d.number(factor)
			}
		}
		out = append(out, product)
	}
	return out
}

// compare runs a program on both devices with the same inputs and compares the results.
func compare(t *testing.T, p *ir.Program, emulated *device) {
	t.Helper()
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	before := make([][]byte, len(in.Args))
	rng := rand.New(rand.NewPCG(1, 2))
	for i, v := range in.Args {
		if v.Present() {
			before[i] = values(rng, in, i)
		}
	}
	want, got := execute(t, p, cpu.New(nil), before), execute(t, p, emulated, before)
	name, slack := describe(p, in), rounded(in, before, want)
	split := in.Info().Rule == ir.RuleScan && in.Arg("q").DType == ir.BF16
	for i, o := range in.Info().Operands {
		if _, writes := in.Access(i); !writes || !in.Args[i].Present() {
			continue
		}
		near(t, name+": "+o.Name, got[i], want[i], in.Args[i], slack[o.Name], split)
	}
}

// rounded returns, by operand name, one number for each element that attention computes on tensor cores: the sum
// of the absolute values of the element's terms. One factor of every term is rounded to the 8 significant bits of
// bf16, with an error of at most 2^-8. For o and dv it is a probability; for dq and dk, the gradient of a score.
func rounded(in *ir.Instr, before, want [][]byte) map[string][]float64 {
	if in.Op != ir.Attention && in.Op != ir.AttentionGrad || in.Arg("q").DType != ir.BF16 {
		return nil
	}
	attr := func(name string) int { return int(in.Attr(name).Int(nil)) }
	a := naive.AttentionShape{Prefix: attr("prefix"), Window: attr("window"), Softcap: in.Attr("softcap").Float(nil), Batch: attr("batch"), Heads: attr("heads"), KVHeads: attr("kv_heads"), HeadDim: attr("head_dim"), ValueDim: int(in.Work().ValueDim)}
	if !kernels.OnTensorCores(int64(a.HeadDim), int64(a.ValueDim)) {
		return nil
	}
	q, k := in.Arg("q"), in.Arg("k")
	a.Queries, a.Keys = int(q.Rows())/a.Batch, int(k.Rows())/a.Batch
	for i, o := range in.Info().Operands {
		if o.Name == "positions" && in.Args[i].Present() {
			a.Positions = vm.Int32s(before[i])
		}
	}
	operand := func(name string, bytes [][]byte) []float64 {
		for i, o := range in.Info().Operands {
			if v := in.Args[i]; o.Name == name && v.Present() {
				return numbers(v, bytes[i])
			}
		}
		return nil
	}
	if in.Op == ir.Attention {
		lse := operand("lse", want) // includes other keys if the instruction continues from their results
		return map[string][]float64{"o": naive.AttentionTerms(operand("q", before), operand("k", before), operand("v", before), lse, a)}
	}
	dout, delta := operand("do", before), operand("delta", before)
	if o := operand("o", before); o != nil {
		delta = make([]float64, len(dout)/a.ValueDim)
		for i := range dout {
			delta[i/a.ValueDim] += dout[i] * o[i]
		}
	}
	dq, dk, dv := naive.AttentionGradTerms(operand("q", before), operand("k", before), operand("v", before), dout, operand("lse", before), delta, a)
	return map[string][]float64{"dq": dq, "dk": dk, "dv": dv}
}

// numbers returns the elements of an operand.
func numbers(v ir.View, bytes []byte) []float64 {
	out := make([]float64, v.Elements())
	for e := range out {
		if v.DType == ir.BF16 {
			out[e] = float64(vm.FromBF16(vm.Uint16s(bytes)[e]))
		} else {
			out[e] = float64(vm.Float32s(bytes)[e])
		}
	}
	return out
}

func describe(p *ir.Program, in *ir.Instr) string {
	text := in.Info().Name
	for i, o := range in.Info().Operands {
		if in.Args[i].Present() {
			text += fmt.Sprintf(" %s:%s%v", o.Name, in.Args[i].DType, in.Args[i].Dims())
		}
	}
	for i, a := range in.Info().Attrs {
		if !a.Kind.IsFloat() {
			text += fmt.Sprintf(" %s=%d", a.Name, in.Attrs[i].Int(nil))
		}
	}
	return text
}

// values returns random bytes that are valid for an operand.
func values(rng *rand.Rand, in *ir.Instr, i int) []byte {
	v, name := in.Args[i], in.Info().Operands[i].Name
	out := make([]byte, v.Bytes())
	switch {
	case name == "positions":
		drawPositions(rng, in, vm.Int32s(out))
		return out
	case v.DType == ir.I32 && strings.Contains(" places ends experts ", " "+name+" "):
		drawExperts(rng, in, name, vm.Int32s(out))
		return out
	}
	positive := strings.Contains(" stats lse lses v sum sums step norm ", " "+name+" ") && (v.DType == ir.F32 || in.Op == ir.AdamW)
	for e := range int(v.Elements()) {
		x := rng.NormFloat64()
		if positive {
			x = math.Abs(x)/2 + 0.5
		}
		switch {
		case name == "lse" || name == "lses":
			x += 5
		case in.Op == ir.AttentionGrad || in.Op == ir.Attention:
			x /= 2
		case (in.Op == ir.Scan || in.Op == ir.ScanGrad) && name == "decay":
			x = -math.Abs(x) * []float64{0.1, 1, 30}[e%3]
		case (in.Op == ir.Scan || in.Op == ir.ScanGrad) && name == "beta":
			x = 1 / (1 + math.Exp(-x))
		}
		switch v.DType {
		case ir.F32:
			vm.Float32s(out)[e] = float32(x)
		case ir.BF16:
			vm.Uint16s(out)[e] = vm.BF16(float32(x))
		case ir.I32:
			vm.Int32s(out)[e] = rng.Int32N(40)
		}
	}
	return out
}

// drawExperts draws the experts of tokens, the places of rows in their order, or the ends of the experts' rows.
func drawExperts(rng *rand.Rand, in *ir.Instr, name string, out []int32) {
	switch name {
	case "places":
		sorted := 1 // the operand in the order of experts
		if in.Op == ir.Permute || in.Op == ir.UnpermuteGrad {
			sorted = 0
		}
		rows, choices := rng.Perm(int(in.Args[sorted].Rows())), rng.Perm(len(out))
		for i := range out {
			out[i] = -1
		}
		for k, at := range rows {
			out[choices[k]] = int32(at)
		}
	case "ends":
		rows := int32(in.Args[in.Info().Written()].Rows())
		for e := range out {
			out[e] = rng.Int32N(rows + 1)
		}
		slices.Sort(out)
	default:
		counted := "logits"
		if in.Op == ir.ExpertLoad {
			counted = "load"
		}
		top := int(in.Arg(name).Cols())
		for i := range out {
			if i%top == 0 {
				for k, e := range rng.Perm(int(in.Arg(counted).Cols()))[:top] {
					out[i+k] = int32(e)
				}
			}
		}
	}
}

// drawPositions draws the positions of tokens in random documents, the first of which may have begun before the
// first token.
func drawPositions(rng *rand.Rand, in *ir.Instr, out []int32) {
	earlier, batch := int64(3), int(in.Attr("batch").Int(nil))
	switch {
	case in.Op == ir.Rope:
		earlier = in.Attr("position").Int(nil)
	case in.Info().Rule == ir.RuleAttention:
		earlier = in.Attr("prefix").Int(nil)
	}
	for b := range batch {
		at, length := rng.Int64N(earlier+1), 1+rng.IntN(len(out)+1)
		for i := b; i < len(out); i += batch {
			if i > b && rng.IntN(length) == 0 {
				at = 0
			}
			out[i] = int32(at)
			at++
		}
	}
}

func execute(t *testing.T, p *ir.Program, d vm.Device, before [][]byte) [][]byte {
	t.Helper()
	in := &p.Codes[0].Sections[ir.SectionStep][0]
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatalf("%s: %v", describe(p, in), err)
		}
	}
	defer func() { must(d.Close()) }()
	must(d.Load(p, 0, &vm.Env{Transport: vm.NewLocal()}))
	after := make([][]byte, len(before))
	for i, b := range before {
		if b != nil {
			must(d.Write(in.Args[i], b))
		}
	}
	must(d.Begin(ir.SectionStep, 1))
	d.Launch(0)
	must(d.Join())
	for i, b := range before {
		if b != nil {
			after[i] = make([]byte, len(b))
			must(d.Read(in.Args[i], after[i]))
		}
	}
	return after
}

// near compares an operand on both devices, with a tolerance: both devices sum in f32, but in different orders,
// and rounding may also change a result by 2^-8 of its terms. With split factors, which have 16 significant bits, those of sums
// over a chunk of 64 tokens differ more.
func near(t *testing.T, what string, got, want []byte, v ir.View, terms []float64, split bool) {
	t.Helper()
	if v.DType == ir.I32 || v.DType == ir.U8 {
		if string(got) != string(want) {
			t.Fatalf("%s differs", what)
		}
		return
	}
	g, w, largest := numbers(v, got), numbers(v, want), 0.0
	for e := range w {
		if !math.IsInf(w[e], 0) {
			largest = max(largest, math.Abs(w[e]))
		}
	}
	absolute, relative := 2e-5*largest, 2e-5
	if split {
		absolute += 0x1p-13 * largest
	}
	if v.DType == ir.BF16 {
		relative = 1.0 / 128 // one unit in the last place, because sums may be rounded differently
	}
	for e := range w {
		tolerance := absolute + relative*math.Abs(w[e])
		if terms != nil {
			tolerance += terms[e] / 256
		}
		if g[e] != w[e] && !(math.Abs(g[e]-w[e]) <= tolerance) {
			t.Fatalf("%s[%d] = %g, the cpu device has %g within %g (largest %g)", what, e, g[e], w[e], tolerance, largest)
		}
	}
}
