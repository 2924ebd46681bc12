// Command ways prints how long the experts of a layer take, forward and backward, in three ways to divide them among the GPUs of a
// node, according to the cost model. RATIONALE.md has the table.
//
//	A  tokens stay; each GPU gathers the weights of all experts, and their gradients are summed (sp_mode = ulysses, zero = 3)
//	B  each GPU has a part of the columns of every expert; tokens are gathered, results are summed (sp_mode = megatron)
//	D  each GPU has some experts; tokens are gathered, results are summed (expert_parallel = on)
//
// The instructions are those of a layer without attention, as they are compiled. Loads are balanced.
package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"sppo.dev"
	"sppo.dev/internal/cost"
	"sppo.dev/internal/graph"
	"sppo.dev/ir"
)

// mixture is the experts of a layer.
type mixture struct {
	name                       string
	experts, top, hidden, wide int64
}

var mixtures = []mixture{
	{"Qwen3-30B-A3B", 128, 8, 2048, 768},
	{"Qwen3-235B-A22B", 128, 8, 4096, 1536},
	{"gpt-oss-120b", 128, 4, 2880, 2880},
}

// ranks is the number of GPUs.
const ranks = 8

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "ways:", err)
		os.Exit(1)
	}
}

func run(to io.Writer) error {
	head, rule := "| rows per GPU |", "| --- |"
	for _, m := range mixtures {
		head += " " + m.name + ": D | A | A, hidden | B |"
		rule += strings.Repeat(" --- |", 4)
	}
	fmt.Fprintln(to, head+"\n"+rule)
	for rows := int64(1 << 10); rows <= 128<<10; rows *= 2 {
		fmt.Fprintf(to, "| %dK |", rows>>10)
		for _, m := range mixtures {
			cells, err := m.cells(rows)
			if err != nil {
				return err
			}
			fmt.Fprint(to, cells)
		}
		fmt.Fprintln(to)
	}
	return nil
}

// cells returns the time of way D, and by how much the others take longer.
func (m *mixture) cells(rows int64) (string, error) {
	spec, err := sppo.Parse("ways.sppo", fmt.Appendf(nil, `import "clusters/h100.sppo"
cluster node = h100()
model experts {
  family = qwen3_moe dtype = bf16 layers = 2 heads = %d vocab = 1024 ffn = 64 layer_types = [none, full]
  hidden = %d num_experts = %d num_experts_per_tok = %d moe_intermediate_size = %d
}
train { sequence = %d data = random() }
schedule s {}
`, ranks, m.hidden, m.experts, m.top, m.wide, ranks*rows))
	if err != nil {
		return "", err
	}
	p := pricer{cost.New(ir.Machine(spec.Cluster), ranks)}
	layer := func(s graph.Split) ir.Seconds {
		s.SP = ranks
		return p.layer(graph.New(spec.Model, s, ranks*rows), rows)
	}
	const matrices, half, full = 3, 2, 4 // of an expert; bytes of a value in bf16 and in f32
	weights := matrices * m.experts * m.hidden * m.wide
	stay := layer(graph.Split{Mode: graph.ModeUlysses})
	moved := 2*p.collective(ir.AllGather, half*weights) + p.collective(ir.ReduceScatter, full*weights)
	columns, spread := layer(graph.Split{Mode: graph.ModeMegatron}), layer(graph.Split{Mode: graph.ModeMegatron, Spread: true})
	over := func(t ir.Seconds) string { return fmt.Sprintf(" %+.0f%% |", 100*(t/spread-1)) }
	return fmt.Sprintf(" %.1f ms |", 1e3*float64(spread)) + over(stay+moved) + over(max(stay, moved)) + over(columns), nil
}

type pricer struct{ model cost.Model }

// layer returns the time of the first layer, one instruction after another, with the given number of rows on each GPU.
func (p *pricer) layer(g *graph.Model, rows int64) (t ir.Seconds) {
	b, z := g.LayerOf(g.KindOf(0)), graph.Size{Sequence: ranks * rows, Tokens: ranks * rows, Batch: 1, SP: ranks}
	for _, nodes := range [][]graph.Node{b.Forward, b.Backward} {
		for i := range nodes {
			t += p.model.Time(b.Work(&nodes[i], z), link)
		}
	}
	return t
}

var link = cost.Link{Ranks: ranks, Nodes: 1}

// collective returns the time of a collective over values of the given number of bytes in all.
func (p *pricer) collective(op ir.Op, bytes int64) ir.Seconds {
	return p.model.Time(ir.Work{Kind: ir.WorkCollective, Op: op, Bytes: ir.Bytes(bytes)}, link)
}
