// Command ways prints how long the experts of a layer take, forward and backward, in three ways to divide them among the GPUs of a
// node, according to the cost model. RATIONALE.md has the table.
//
//	A  tokens stay; each GPU gathers the weights of all experts, and their gradients are summed
//	B  each GPU has a part of the columns of every expert; tokens are gathered, results are summed
//	D  each GPU has some experts; the rows of tokens are exchanged, in rounds with buffers for 1.25 times the balanced load
//
// A and B are what sppo does (sp_mode = ulysses or ring with zero = 3, and sp_mode = megatron). D is expert parallelism without dropping.
package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"

	"sppo.dev"
	"sppo.dev/internal/cost"
	"sppo.dev/ir"
	"sppo.dev/lang"
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

// Settings of the comparison.
const (
	ranks = 8
	spare = 1.25 // size of the buffers of D, relative to the rows of a balanced load
	half  = 2    // bytes of a value in bf16
)

func main() {
	if err := run(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "ways:", err)
		os.Exit(1)
	}
}

func run(to io.Writer) error {
	spec, err := sppo.Parse("ways.sppo", []byte("import \"clusters/h100.sppo\"\ncluster node = h100()\n"+
		"model tiny {\n  family = llama\n  dtype = bf16\n  layers = 1\n  hidden = 64\n  heads = 8\n  vocab = 64\n}\ntrain {\n  sequence = 1K\n  data = random()\n}\nschedule s {}\n"))
	if err != nil {
		return err
	}
	head, rule := "| rows per GPU |", "| --- |"
	for _, m := range mixtures {
		head += " " + m.name + ": D | A | A, hidden | B |"
		rule += strings.Repeat(" --- |", 4)
	}
	fmt.Fprintln(to, head+"\n"+rule)
	for rows := int64(1 << 10); rows <= 128<<10; rows *= 2 {
		fmt.Fprintf(to, "| %dK |", rows>>10)
		for _, m := range mixtures {
			fmt.Fprint(to, m.cells(rows, &spec.Cluster))
		}
		fmt.Fprintln(to)
	}
	return nil
}

// cells returns the time of way D, and by how much the others take longer.
func (m *mixture) cells(rows int64, c *lang.Cluster) string {
	p := &pricer{model: cost.New(ir.Machine(*c), ranks)}
	total := func(way func(p *pricer, rows int64)) (serial, hidden ir.Seconds) {
		p.compute, p.wires = 0, 0
		way(p, rows)
		return p.compute + p.wires, max(p.compute, p.wires)
	}
	a, hidden := total(m.gatherWeights)
	b, _ := total(m.divideColumns)
	d, _ := total(m.exchangeRows)
	over := func(t ir.Seconds) string { return fmt.Sprintf(" %+.0f%% |", 100*(t/d-1)) }
	return fmt.Sprintf(" %.1f ms |", 1e3*float64(d)) + over(a) + over(hidden) + over(b)
}

// pricer adds up the time of kernels and of collectives.
type pricer struct {
	model          cost.Model
	compute, wires ir.Seconds
}

// products adds the grouped products of a forward and a backward pass: three matrices for each expert, and two gradients of each.
func (p *pricer) products(rows, experts, hidden, wide int64) {
	const matrices, passes = 3, 3
	w := ir.Work{Kind: ir.WorkMatmul, DType: ir.BF16, Flops: ir.Flops(2 * rows * hidden * wide), Rows: max(1, min(rows/experts, hidden, wide)),
		Bytes: ir.Bytes(half * (rows*(hidden+wide) + experts*hidden*wide))}
	p.compute += matrices * passes * p.model.Time(w, cost.Link{})
}

// moves adds kernels that copy rows: in the order of experts and back, in both passes.
func (p *pricer) moves(rows, hidden, times int64) {
	w := ir.Work{Kind: ir.WorkMemory, DType: ir.BF16, Bytes: ir.Bytes(2 * half * rows * hidden)}
	p.compute += ir.Seconds(times) * p.model.Time(w, cost.Link{})
}

// collective adds collectives over values of the given number of bytes in all.
func (p *pricer) collective(op ir.Op, bytes, times int64) {
	w := ir.Work{Kind: ir.WorkCollective, Op: op, Bytes: ir.Bytes(bytes)}
	p.wires += ir.Seconds(times) * p.model.Time(w, cost.Link{Ranks: ranks, Nodes: 1})
}

func (m *mixture) weights() int64 { return 3 * m.experts * m.hidden * m.wide }

// gatherWeights is way A: weights are gathered for each pass, and gradients are summed in f32.
func (m *mixture) gatherWeights(p *pricer, rows int64) {
	p.products(m.top*rows, m.experts, m.hidden, m.wide)
	p.moves(m.top*rows, m.hidden, 4)
	p.collective(ir.AllGather, half*m.weights(), 2)
	p.collective(ir.ReduceScatter, 4*m.weights(), 1)
}

// divideColumns is way B: rows are gathered and results summed in the forward pass; rows and gradients are gathered, and gradients summed, in the
// backward pass.
func (m *mixture) divideColumns(p *pricer, rows int64) {
	all := rows * ranks
	p.products(m.top*all, m.experts, m.hidden, m.wide/ranks)
	p.moves(m.top*all, m.hidden, 4)
	p.collective(ir.AllGather, half*all*m.hidden, 3)
	p.collective(ir.ReduceScatter, half*all*m.hidden, 2)
}

// exchangeRows is way D with balanced loads, which fit in the first round. The others are empty and cost their latencies.
func (m *mixture) exchangeRows(p *pricer, rows int64) {
	p.products(m.top*rows, max(1, m.experts/ranks), m.hidden, m.wide)
	p.moves(m.top*rows, m.hidden, 8)
	p.collective(ir.AllToAll, half*m.top*rows*m.hidden, 4)
	worst := min(m.top, max(1, m.experts/ranks)) * ranks // rows of a token's rank, relative to those of a balanced load times top
	rounds := int64(math.Ceil(float64(worst) / float64(m.top) / spare))
	p.collective(ir.AllToAll, 0, 4*(rounds-1))
}
