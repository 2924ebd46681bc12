package graph

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

func (b *Block) text() string {
	var w strings.Builder
	fmt.Fprintf(&w, "block %s\n", b.Name)
	for _, p := range b.Params {
		fmt.Fprintf(&w, "  param %-10s whole %v local %v reduce=%q once=%q start=%q\n", p.Name, p.Shape, p.Local, p.Reduce, p.Once, p.Start)
	}
	print := func(title string, nodes []Node) {
		fmt.Fprintf(&w, "  %s\n", title)
		for _, n := range nodes {
			fmt.Fprintf(&w, "    %-20s", ir.Ops[n.Op].Name)
			for i, a := range n.Args {
				if a.Value == Missing {
					continue
				}
				fmt.Fprintf(&w, " %s=%s%s", ir.Ops[n.Op].Operands[i].Name, b.Values[a.Value].Name, [...]string{"", "[tail]", "[seen]", "[flat]", "[chunk]"}[a.Span])
			}
			if n.Chunked {
				w.WriteString(" (chunk)")
			}
			if n.Weights {
				w.WriteString(" (weights)")
			}
			w.WriteByte('\n')
		}
	}
	print("forward", b.Forward)
	print("backward", b.Backward)
	print("gradients of weights", b.Halves[WeightGradient])
	for _, u := range b.Units {
		fmt.Fprintf(&w, "  unit %s:", u.Name)
		for _, v := range u.Values {
			fmt.Fprintf(&w, " %s", b.Values[v].Name)
		}
		w.WriteByte('\n')
	}
	return w.String()
}

func TestMain(m *testing.M) { irtest.Main(m) }

func small(family, positions string) lang.Model {
	m, err := lang.ParseModel(fmt.Sprintf("family = %s positions = %s layers = 2 hidden = 32 heads = 4 ffn = 96 vocab = 37 dtype = f32", family, positions))
	if err != nil {
		panic(err)
	}
	return m
}

// The golden file lets people read the derived backward pass.
func TestDataflow(t *testing.T) {
	grouped := small("llama", lang.PositionsRope)
	grouped.KVHeads, grouped.DType, grouped.Tied = 2, "bf16", true
	for _, c := range []struct {
		name      string
		model     lang.Model
		sp        int
		recompute string
		mode      string
	}{
		{"gpt", small("gpt", lang.PositionsLearned), 1, RecomputeNone, ModeMegatron},
		{"gpt-sp2", small("gpt", lang.PositionsLearned), 2, RecomputeNone, ModeMegatron},
		{"llama-sp4", grouped, 4, RecomputeNone, ModeMegatron},
		{"gpt-selective", small("gpt", lang.PositionsLearned), 1, RecomputeSelective, ModeMegatron},
		{"gpt-keep_attention", small("gpt", lang.PositionsRope), 2, RecomputeKeepAttention, ModeMegatron},
		{"llama-full", grouped, 2, RecomputeFull, ModeMegatron},
		{"gpt-ulysses2", small("gpt", lang.PositionsLearned), 2, RecomputeNone, ModeUlysses},
		{"llama-ulysses4", grouped, 4, RecomputeNone, ModeUlysses},
		{"llama-ulysses2-full", grouped, 2, RecomputeFull, ModeUlysses},
		{"gpt-ring2", small("gpt", lang.PositionsLearned), 2, RecomputeNone, ModeRing},
		{"llama-ring4", grouped, 4, RecomputeKeepAttention, ModeRing},
		{"llama-ring2-full", grouped, 2, RecomputeFull, ModeRing},
	} {
		g := New(c.model, Split{SP: c.sp, Mode: c.mode}, 64)
		irtest.Golden(t, "testdata/"+c.name+".want", []byte(g.Embedding.text()+g.LayerWithout(0, g.RecomputedBy(c.recompute)).text()+g.Head.text()))
	}
}

// TestHalves checks that the two halves together make up the whole backward pass, and that the nodes of each half keep
// their original order, except for repeated gathers and collectives that begin earlier. Once a node of the
// weight-gradient half has written a value or read an activation, no node of the other half may write it, because the
// weight-gradient half may run later. In a layer, the weight-gradient half must contain every matmul whose first factor
// is transposed.
func TestHalves(t *testing.T) {
	for _, family := range []string{"gpt", "llama"} {
		for _, split := range []Split{{SP: 1}, {SP: 2, Whole: true}, {SP: 4, Mode: ModeUlysses}, {SP: 3, Mode: ModeRing}, {SP: 2, Mode: ModeRing, Whole: true}, {SP: 4, Ring: 2}, {SP: 4, Mode: ModeUlysses, Ring: 2, Whole: true}} {
			g := New(small(family, lang.PositionsRope), split, 64)
			for recompute := range recomputes {
				for _, b := range []*Block{g.Embedding, g.LayerWithout(0, g.RecomputedBy(recompute)), g.Head} {
					if second := computing(b.Halves[WeightGradient]); len(computing(b.Halves[InputGradient]))+len(second) != len(computing(b.Backward)) {
						t.Errorf("%s: %d and %d nodes are not all %d", b.Name, len(b.Halves[0]), len(b.Halves[1]), len(b.Backward))
					}
					checkHalves(t, b)
				}
				if n := len(g.Head.Halves[WeightGradient]); n > 0 {
					t.Errorf("%d nodes of the head are deferred, though its logits do not live", n)
				}
			}
		}
	}
}

// computing returns the nodes that are not collectives.
func computing(nodes []Node) []Node {
	return slices.DeleteFunc(slices.Clone(nodes), func(n Node) bool { return ir.Ops[n.Op].Class == ir.ClassComm })
}

func checkHalves(t *testing.T, b *Block) {
	halves := [2][]Node{computing(b.Halves[0]), computing(b.Halves[1])}
	for _, v := range b.Between {
		if (b.Values[v].Rows == Full || b.Values[v].Rows == Held) && slices.ContainsFunc(b.Halves[0], func(n Node) bool { return n.Op == ir.AllGather && n.Args[0].Value == v }) {
			t.Errorf("%s: %s is held though it can be gathered again", b.Name, b.Values[v].Name)
		}
	}
	deferred := map[int]bool{} // values that the weight-gradient half has read or written
	at := [2]int{}
	for _, n := range b.Backward {
		half := InputGradient
		if n.Weights {
			half = WeightGradient
		}
		if ir.Ops[n.Op].Class != ir.ClassComm {
			same := func(x, y Arg) bool { return x == y || strings.TrimSuffix(b.name(x), ".again") == b.name(y) }
			if got := halves[half][at[half]]; got.Op != n.Op || !slices.EqualFunc(got.Args, n.Args, same) {
				t.Errorf("%s: node %d of half %d is another than in the whole", b.Name, at[half], half)
			}
			at[half]++
		}
		for k, a := range n.Args {
			written := a.Value != Missing && ir.Ops[n.Op].Operands[k].Dir != ir.Read
			switch {
			case n.Weights && a.Value != Missing:
				deferred[a.Value] = deferred[a.Value] || written || b.Values[a.Value].Kind == Activation
			case !n.Weights && written && deferred[a.Value]:
				t.Errorf("%s: %s changes %s after a deferred node has read it", b.Name, ir.Ops[n.Op].Name, b.Values[a.Value].Name)
			}
		}
		if n.Op == ir.Matmul && b.Name == "layer" && n.Attrs[attrIndex(ir.Matmul, "trans_a")].Value.Bits != 0 && !n.Weights {
			t.Errorf("the gradient %s is not deferred", b.Values[n.Args[0].Value].Name)
		}
	}
}

func (b *Block) name(a Arg) string {
	if a.Value == Missing {
		return ""
	}
	return b.Values[a.Value].Name
}

// Every instruction of every block has the shapes and types that its opcode's table entry requires.
func TestShapes(t *testing.T) {
	for _, family := range []string{"gpt", "llama"} {
		for _, sp := range []int{1, 2, 4} {
			for _, split := range splits(sp) {
				g := New(small(family, lang.PositionsRope), split, 64)
				for _, b := range []*Block{g.Embedding, g.Plain(0), g.Head} {
					z := Size{Sequence: 64, Prefix: 16, Tokens: 8, Batch: 2}.split(split)
					z.Rows = g.ChunkRows(z)
					checkShapes(t, g, b, z)
				}
			}
		}
	}
}

// splits combines every mode with each of the given numbers of ranks, for a divided sequence. Four ranks may also be a ring
// of pairs that divide heads.
func splits(ranks ...int) (all []Split) {
	for _, mode := range SPModes {
		for _, sp := range ranks {
			if all = append(all, Split{SP: sp, Mode: mode}); sp == 4 && mode != ModeRing {
				all = append(all, Split{SP: sp, Mode: mode, Ring: 2})
			}
		}
	}
	return all
}

// split returns a size with the ranks of a split.
func (s Size) split(of Split) Size {
	ranks := of.Size()
	s.SP, s.Ring = ranks.SP, ranks.Ring
	return s
}

// TestWhole checks that the K and V of an undivided sequence are kept or recomputed like any other activation,
// and that neither they nor their gradients are caches, which would outlive the task.
func TestWhole(t *testing.T) {
	for _, split := range splits(1, 2, 4) {
		split.Whole = true
		g := New(small("llama", lang.PositionsRope), split, 64)
		for _, v := range g.Plain(0).Values {
			if v.Kind == Cache || v.Kind == CacheGrad {
				t.Errorf("%+v: %s is a cache", split, v.Name)
			}
		}
		if units := g.LayerWithout(0, g.RecomputedBy(RecomputeFull)).Units; len(units) != 1 || units[0].Name != "ln1.in" {
			t.Errorf("%+v: with everything recomputed, %v are kept", split, units)
		}
		z := Size{Sequence: 64, Tokens: 64, Batch: 2}.split(split)
		z.Rows = g.ChunkRows(z)
		checkShapes(t, g, g.Plain(0), z)
	}
}

// TestCaching checks that the nodes in Block.Caching compute K and V from nothing but the input of the layer
// and its weights, that they are nodes of the forward pass in the same order, and that none of them can be
// omitted.
func TestCaching(t *testing.T) {
	for _, family := range []string{"gpt", "llama"} {
		for _, split := range splits(1, 2, 4) {
			b := New(small(family, lang.PositionsRope), split, 64).Plain(0)
			known, read := map[int]bool{b.Input: true}, map[int]bool{}
			at := 0
			for _, n := range b.KVNodes {
				for at < len(b.Forward) && !(b.Forward[at].Op == n.Op && slices.Equal(b.Forward[at].Args, n.Args)) {
					at++
				}
				for k, a := range n.Args {
					if a.Value == Missing || b.Values[a.Value].Kind == Weight {
						continue
					}
					if ir.Ops[n.Op].Operands[k].Dir != ir.Read {
						known[a.Value] = true
					} else if read[a.Value] = true; !known[a.Value] {
						t.Errorf("%s %+v: %s is read before it is there", family, split, b.Values[a.Value].Name)
					}
				}
			}
			if at == len(b.Forward) {
				t.Errorf("%s %+v: these are not nodes of the forward in their order", family, split)
			}
			for v := range b.Values {
				if b.Values[v].Kind == Cache && !known[v] {
					t.Errorf("%s %+v: %s is not computed", family, split, b.Values[v].Name)
				}
			}
			for _, n := range b.KVNodes {
				if v := n.Args[0].Value; !read[v] && b.Values[v].Kind != Cache {
					t.Errorf("%s %+v: nothing reads %s", family, split, b.Values[v].Name)
				}
			}
		}
	}
}

// TestKeepAttention checks that the policy of this name keeps the result of attention and its statistics, with sinks and without
// them, however ranks divide a layer.
func TestKeepAttention(t *testing.T) {
	for _, sinks := range []bool{false, true} {
		for _, split := range splits(1, 2, 4) {
			m := small("llama", lang.PositionsRope)
			m.DType, m.AttnSinks = "bf16", sinks
			g, kept := New(m, split, 64), []string{}
			b := g.LayerWithout(0, g.RecomputedBy(RecomputeKeepAttention))
			for _, u := range b.Units {
				for _, v := range u.Values {
					kept = append(kept, b.Values[v].Name)
				}
			}
			slices.Sort(kept)
			if !slices.Equal(kept, []string{"attn.lse", "attn.out", "ln1.in"}) {
				t.Errorf("%+v, sinks %v: %v are kept", split, sinks, kept)
			}
		}
	}
}

// TestCachesAreNotRepeated checks that a norm of K that is repeated to obtain its statistics writes K to a new
// value, not to the cache, which still holds K.
func TestCachesAreNotRepeated(t *testing.T) {
	for _, norm := range []string{lang.QKNormHead, lang.QKNormAll} {
		for _, split := range splits(1, 2, 4) {
			m := small("llama", lang.PositionsNone)
			m.QKNorm = norm
			g := New(m, split, 64)
			b := g.LayerWithout(0, g.RecomputedBy(RecomputeFull))
			repeated := false
			for _, v := range b.Values {
				repeated = repeated || v.Name == "k.again"
				if v.Name == "k.again" && v.Kind != Activation {
					t.Errorf("%s %+v: k.again is a cache", norm, split)
				}
			}
			if split.SP == 1 && !repeated {
				t.Errorf("%s %+v: the norm of K is not repeated", norm, split)
			}
			checkShapes(t, g, b, Size{Batch: 1, Tokens: 16, Prefix: 16, Sequence: 64}.split(split))
		}
	}
}

func checkShapes(t *testing.T, g *Model, b *Block, z Size) {
	for _, nodes := range [][]Node{b.Forward, b.Backward} {
		for i := range nodes {
			in := b.Instr(&nodes[i], z, func(_ Arg, v ir.View) ir.View { return v }, func(Attr) ir.Attr { return ir.Int(0) })
			if err := in.CheckRule(); err != nil {
				t.Errorf("%s of %s, %+v: %v", ir.Ops[in.Op].Name, b.Name, g.Split, err)
			}
		}
	}
}

// The SPPO paper counts 32 bytes per token and hidden element over all ranks for a GPT layer in bf16, without
// the logsumexp and the statistics of the norms.
func TestActivationBytesOfThePaper(t *testing.T) {
	m := small("gpt", lang.PositionsNone)
	m.DType, m.FFN = "bf16", 4*m.Hidden
	for _, split := range splits(1, 2, 4) {
		sp, layer := split.SP, New(m, split, 1024).Plain(0)
		z := Size{Sequence: 1024, Tokens: 1024, Batch: 1}.split(split)
		var bytes ir.Bytes
		for _, u := range layer.Units {
			for _, v := range u.Values {
				if layer.Values[v].DType == ir.BF16 {
					bytes += layer.Values[v].Bytes(z)
				}
			}
		}
		for _, v := range layer.Values {
			if v.Kind == Cache {
				bytes += v.Bytes(z)
			}
		}
		if want := ir.Bytes(32 * 1024 * m.Hidden); bytes*ir.Bytes(sp) != want {
			t.Errorf("%+v: %d bytes over all ranks, want %d", split, bytes*ir.Bytes(sp), want)
		}
	}
}

// TestLayerWithout tries all sets of units or, if there are too many, random ones. A layer that recomputes such
// a set must have the same forward pass as every other layer, and keep the other units unchanged.
func TestLayerWithout(t *testing.T) {
	for _, family := range []string{"gpt", "llama"} {
		for _, split := range splits(1, 2) {
			g := New(small(family, lang.PositionsRope), split, 64)
			all := g.RecomputedBy(RecomputeFull)
			for set := Units(0); set <= all; set++ {
				checkLayerWithout(t, g, set&all)
			}
		}
	}
	after := small("llama", lang.PositionsRope)
	after.NormPlace = lang.NormPrePost
	g := New(after, Split{SP: 1}, 64)
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		checkLayerWithout(t, g, Units(r.Uint64())&g.RecomputedBy(RecomputeFull))
	}
}

func checkLayerWithout(t *testing.T, g *Model, recomputed Units) {
	t.Helper()
	b := g.LayerWithout(0, recomputed)
	if !slices.EqualFunc(b.Forward, g.Plain(0).Forward, func(x, y Node) bool { return x.Op == y.Op && slices.Equal(x.Args, y.Args) }) {
		t.Fatalf("%s without %b: the forward differs", g.Family, recomputed)
	}
	at := 0
	for _, u := range g.Plain(0).Units {
		if recomputed.Has(u.Number) {
			continue
		}
		if (at == len(b.Units) || b.Units[at].Number != u.Number) && g.Plain(0).isStatistics(&u) {
			continue // the norm is recomputed as well, because other units need its result
		}
		if at == len(b.Units) || b.Units[at].Number != u.Number || !slices.Equal(b.Units[at].Values, u.Values) {
			t.Fatalf("%s without %b: unit %s is not kept as it is", g.Family, recomputed, u.Name)
		}
		at++
	}
	if at < len(b.Units) {
		t.Fatalf("%s without %b: unit %s is kept, too", g.Family, recomputed, b.Units[at].Name)
	}
}

// TestRingsTakeLinearTime checks that a layer of a ring of many ranks is built in time proportional to its nodes.
func TestRingsTakeLinearTime(t *testing.T) {
	m := lang.Model{Family: "llama", Layers: 2, Hidden: 512, Heads: 8, KVHeads: 8, HeadDim: 64, FFN: 1024, Vocab: 512}
	build := func(sp int) time.Duration {
		begin := time.Now()
		g := New(m, Split{SP: sp, Mode: ModeRing}, int64(4*sp))
		g.LayerWithout(0, g.RecomputedBy(RecomputeFull))
		return time.Since(begin)
	}
	build(64)
	short := build(256)
	if long := build(4096); long > 100*short {
		t.Errorf("a ring of 4096 ranks took %s, and one of 256 ranks %s", long, short)
	}
}

// TestFrozenConvolutions recomputes layers of which only the end is trained, so that nothing saves what their convolutions begin with.
// These convolutions cannot be repeated, and their results are kept.
func TestFrozenConvolutions(t *testing.T) {
	m, err := lang.ParseModel("family = gpt layers = 2 hidden = 32 heads = 4 ffn = 96 vocab = 37 dtype = f32 layer_types = [kimi_delta, full] linear_num_key_heads = 2 linear_num_value_heads = 2 linear_key_head_dim = 4 linear_value_head_dim = 4 linear_conv_kernel_dim = 3")
	if err != nil {
		t.Fatal(err)
	}
	m = m.Adapted(2, 2, lang.AllLinear)
	g := New(m, Split{SP: 1}, 64)
	for policy := range recomputes {
		b := g.LayerWithout(0, g.RecomputedBy(policy))
		for _, u := range b.Units {
			for _, v := range u.Values {
				if v != b.Input && (u.Producer < 0 || !slices.Contains(b.Forward[u.Producer].Writes(), v)) {
					t.Errorf("%s: no node of the layer computes %s, which it keeps", policy, b.Values[v].Name)
				}
			}
		}
	}
}
