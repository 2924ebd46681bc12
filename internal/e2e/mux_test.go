package e2e

import (
	"cmp"
	"fmt"
	"math/big"
	"os"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/ir"
)

// muxCases are pipelines of several sizes whose ranks share tasks, with every other setting that interacts with
// sharing.
var muxCases = []Case{
	{PP: 2, N: 4, SP: 1, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "none", Layers: 4},
	{PP: 2, N: 4, SP: 2, DP: 2, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "full", Layers: 3, Zero: "1"},
	{PP: 4, N: 8, SP: 1, DP: 1, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "full", Layers: 5, Recompute: "selective"},
	{PP: 4, N: 8, SP: 2, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "bf16", Offload: "full", Layers: 4, Tied: true},
	{PP: 4, N: 4, SP: 4, DP: 1, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "none", Layers: 4},
	{PP: 4, N: 8, SP: 2, DP: 1, Family: "gpt", KVHeads: 2, Positions: "learned", DType: "f32", Offload: "0.5", Layers: 6, SPMode: "ulysses", Batch: 2},
	{PP: 3, N: 7, SP: 2, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "carry", Layers: 4, Recompute: "full", Batch: 2},
	{PP: 3, N: 7, SP: 1, DP: 2, Family: "llama", KVHeads: 4, Positions: "learned", DType: "bf16", Offload: "adaptive", Layers: 3, Batch: 4, Microbatch: 2},
	{PP: 4, N: 5, SP: 1, DP: 1, Family: "gpt", KVHeads: 2, Positions: "none", DType: "f32", Offload: "full", Layers: 7, Recompute: "keep_attention"},
	{PP: 8, N: 16, SP: 1, DP: 1, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "full", Layers: 8},
	{PP: 8, N: 16, SP: 2, DP: 1, Family: "llama", KVHeads: 1, Positions: "rope", DType: "f32", Offload: "none", Layers: 9, Recompute: "selective"},
}

// completeMux fills in the settings that mux cases have in common.
func (c Case) completeMux() Case {
	c.Mux, c.Batch, c.Microbatch, c.Partition = "left", max(c.Batch, c.DP), max(1, c.Microbatch), "flops"
	rows := 32
	c.Vocab, c.Steps = tinyVocab, steps
	if c.PP == 8 || c.SP == 4 {
		rows, c.Steps = 16, 3
	}
	c.Sequence = cmp.Or(c.Sequence, rows*c.N*c.SP)
	return c
}

// completeCases returns the mux cases with their missing settings filled in.
func completeCases() []Case {
	var all []Case
	for _, c := range muxCases {
		all = append(all, c.completeMux())
	}
	return all
}

// TestMuxIsEqual compares programs with shared tasks with the plain program, within rounding, and with the same
// program without offload and recomputation, bitwise. Cases take turns with the values of mux; with SPPO_LONG, every case has
// mux = left, and every second case mux = right or on.
func TestMuxIsEqual(t *testing.T) {
	divided := []Case{ // gradients and weights are divided; in the last case, two replicas hold the positions of pieces with an odd number of rows
		{PP: 2, N: 4, SP: 2, DP: 2, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "full", Layers: 5, SPMode: "ulysses", Zero: "2", Batch: 4},
		{PP: 3, N: 7, SP: 1, DP: 2, Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", Offload: "none", Layers: 7, Zero: "3"},
		{PP: 4, N: 8, SP: 2, DP: 2, Family: "llama", KVHeads: 1, Positions: "rope", DType: "bf16", Offload: "0.5", Layers: 4, Zero: "3", Recompute: "selective"},
		{PP: 3, N: 8, SP: 1, DP: 2, Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Offload: "full", Layers: 3, Zero: "1", Sequence: 120},
	}
	long := os.Getenv("SPPO_LONG") != ""
	for turn, mux := range []string{"left", "right", "on"} {
		cases := append(slices.Clone(muxCases), divided...)
		for i, c := range cases {
			wanted := i%3 == turn
			if long {
				wanted = i >= len(muxCases) || mux != [2]string{"on", "right"}[i%2]
			}
			if !wanted {
				continue
			}
			c = c.completeMux()
			c.Mux = mux
			t.Run(c.String(), func(t *testing.T) {
				t.Parallel()
				got := run(t, c)
				checkClose(t, c, "E3: against the plain program", got, run(t, c.plain()))
				kept := c
				kept.Offload, kept.Recompute = "none", "none"
				if c.Zero < "2" {
					kept.Zero = "0"
				}
				checkSame(t, "E1: against nothing offloaded", got, run(t, kept))
			})
		}
	}
}

// TestMuxShares checks in the program that each rank runs attention for its share of a task's rows, to within
// SP rows.
func TestMuxShares(t *testing.T) {
	for _, c := range completeCases() {
		plan, p, err := compile(c.Spec())
		if err != nil {
			t.Fatal(err)
		}
		type task struct{ rank, stage, subsequence int }
		rows := map[task]int64{}
		for rank := range p.Codes {
			for _, in := range stepInstrs(&p.Codes[rank], ir.Attention, ir.PhaseForward) {
				if int(in.Prov.Layer) == plan.Layers(int(in.Prov.Stage))[0] && in.Prov.Microbatch == 0 {
					rows[task{rank, int(in.Prov.Stage), int(in.Prov.Subsequence)}] += in.Args[0].Rows()
				}
			}
		}
		for i := range c.PP {
			for x := range c.N {
				shares := plantest.Shares{Left: true}.Of(c.PP, c.N, i, x)
				for rank := range c.PP {
					share := new(big.Rat)
					if of := shares[rank]; of != nil {
						share = of
					}
					ideal, _ := share.Float64()
					ideal *= float64(plan.Subsequences.Lengths[x])
					got := float64(rows[task{rank, i, x}]) / float64(c.Microbatch)
					if off := got - ideal; off > float64(c.SP) || -off > float64(c.SP) {
						t.Errorf("%v: rank %d attends with %g rows of subsequence %d on stage %d, its share is %g", c, rank, got, x, i, ideal)
					}
				}
			}
		}
	}
}

// TestMuxKeyShares checks the turnaround in the program. Each helper attends to its share of the keys that a
// query of the task sees on average, to within the alignment of subsequences, and the stage itself attends to
// all other keys.
func TestMuxKeyShares(t *testing.T) {
	for _, c := range completeCases() {
		c.Mux = "right"
		plan, p, err := compile(c.Spec())
		if err != nil {
			t.Fatal(err)
		}
		type task struct{ rank, stage, subsequence int }
		keys := map[task]float64{}
		for rank := range p.Codes {
			for _, in := range stepInstrs(&p.Codes[rank], ir.Attention, ir.PhaseForward) {
				if int(in.Prov.Layer) == plan.Layers(int(in.Prov.Stage))[0] && in.Prov.Microbatch == 0 {
					k := in.Arg("k")
					keys[task{rank, int(in.Prov.Stage), int(in.Prov.Subsequence)}] += float64(k.Rows()) / float64(c.Microbatch)
				}
			}
		}
		for i := range c.PP {
			for x := range c.N {
				z := plan.Size(x)
				shares := plantest.Shares{Right: true}.Of(c.PP, c.N, i, x)
				all := 0.0
				for rank := range c.PP {
					got := keys[task{rank, i, x}]
					all += got
					if share := shares[rank]; rank != i && share != nil {
						ideal, _ := share.Float64()
						ideal *= float64(z.Prefix) + float64(z.Tokens+1)/2
						if off := got - ideal; off > float64(plan.Subsequences.Align) || -off > float64(plan.Subsequences.Align) {
							t.Errorf("%v: rank %d attends to %g keys of subsequence %d on stage %d, its share is %g", c, rank, got, x, i, ideal)
						}
					} else if rank != i && got > 0 {
						t.Errorf("%v: rank %d attends to %g keys of subsequence %d on stage %d, and has no share", c, rank, got, x, i)
					}
				}
				if want := float64(z.Prefix + z.Tokens); all != want {
					t.Errorf("%v: of subsequence %d on stage %d ranks attend to %g keys, and there are %g", c, x, i, all, want)
				}
			}
		}
	}
}

// stepInstrs returns the instructions with an opcode in a phase of a training step.
func stepInstrs(code *ir.Code, op ir.Op, phase ir.Phase) []*ir.Instr {
	var list []*ir.Instr
	for i := range code.Sections[ir.SectionStep] {
		if in := &code.Sections[ir.SectionStep][i]; in.Op == op && in.Prov.Phase == phase {
			list = append(list, in)
		}
	}
	return list
}

// TestMuxKeepsActivations checks in the program that tensors saved by a piece for its backward pass are read on
// the rank that computed them, and that no message of a backward pass carries them.
func TestMuxKeepsActivations(t *testing.T) {
	for _, c := range completeCases() {
		plan, p, err := compile(c.Spec())
		if err != nil {
			t.Fatal(err)
		}
		for rank := range p.Codes {
			code := &p.Codes[rank]
			made, read := pieces(code, ir.Attention, ir.PhaseForward), pieces(code, ir.AttentionGrad, ir.PhaseBackward)
			for piece := range made {
				if !read[piece] {
					t.Errorf("%v: rank %d runs %s forward and not backward", c, rank, piece)
				}
			}
			if len(made) != len(read) {
				t.Errorf("%v: rank %d runs %d pieces forward and %d backward", c, rank, len(made), len(read))
			}
			for _, op := range []ir.Op{ir.Send, ir.Recv} {
				for _, in := range stepInstrs(code, op, ir.PhaseBackward) {
					if name := code.Buffers[in.Args[0].Buffer].Name; saved(plan, name) {
						t.Errorf("%v: rank %d has a message of the backward pass with %s", c, rank, name)
					}
				}
			}
		}
	}
}

// pieces names the pieces of layers for which a code has an instruction with the opcode, as in "m0.s1p2.l3".
func pieces(code *ir.Code, op ir.Op, phase ir.Phase) map[string]bool {
	found := map[string]bool{}
	for _, in := range stepInstrs(code, op, phase) {
		name := code.Buffers[in.Args[0].Buffer].Name // name of the output, or of the gradient of the queries
		found[name[:strings.Index(name, fmt.Sprintf(".l%d.", in.Prov.Layer))]+fmt.Sprint(".l", in.Prov.Layer)] = true
	}
	return found
}

// saved reports whether a buffer belongs to a unit that the backward pass reads.
func saved(p *plan.Plan, name string) bool {
	for _, u := range p.Units {
		of, ok := strings.CutSuffix(strings.TrimSuffix(name, ".reload"), "."+u.Name)
		if u.Type == plan.Type1 && ok && !strings.HasSuffix(of, ".d") { // not its gradient
			return true
		}
	}
	return false
}

// If stages share tasks, which layers a stage has determines the order of sums. Otherwise, it does not.
func TestLayersOfSharingStages(t *testing.T) {
	c := Case{Family: "llama", KVHeads: 4, Positions: "rope", DType: "f32", PP: 2, SP: 1, DP: 1, N: 4, Microbatch: 1, Batch: 1,
		Partition: "flops", Offload: "none", Steps: 1, Layers: 6, Sequence: 48, Vocab: tinyVocab}
	for _, mux := range []string{"off", "right"} {
		c.Mux = mux
		var first []string
		var want *Result
		for _, layers := range []string{"[3, 3]", "[4, 2]"} {
			c.LayersPerStage = layers
			_, p := mustCompile(t, c)
			got := trained(t, p, open(t, p, 1, nil), func() {})
			if want == nil {
				first, want = p.Run.Sums, got
				continue
			}
			alike := len(differing(got.Grads, want.Grads, want.Names)) == 0
			if alike != (mux == "off") {
				t.Errorf("mux = %s: with other layers on each stage, gradients have the same bits: %t", mux, alike)
			}
			if slices.Equal(p.Run.Sums, first) != alike {
				t.Errorf("mux = %s: the order of sums is %v, and was %v", mux, p.Run.Sums, first)
			}
		}
	}
}
