package kernels

import (
	"fmt"

	"sppo.dev/ir"
)

// Limits of the kernels for experts: see experts.cu.
const (
	maxExperts = 512
	maxChoices = 32
)

// routing returns the arguments that route and its gradient share, after the operands.
func (b *binder) routing(rows, experts int64) []any {
	if top := b.int("top"); experts > maxExperts || top > maxChoices {
		b.err = fmt.Errorf("%d experts, of which a token chooses %d, exceed %d and %d", experts, top, maxExperts, maxChoices)
	}
	scale := b.float("scale")
	if scale == 0 {
		scale = 1
	}
	return []any{rows, experts, b.int("top"), b.int("scores"), b.int("renormalize"), b.float("eps"), scale}
}

// route chooses experts, counts the choices in chunks, and gives every choice its place.
func route(b *binder) {
	r, experts := b.shape("logits")
	if groups := b.int("groups"); groups > maxChoices {
		b.err = fmt.Errorf("%d groups of experts exceed %d", groups, maxChoices)
	}
	args := append([]any{"weights", "experts", "logits", "correction"}, b.routing(r, experts)...)
	b.launch("route_"+b.types("logits"), rows(ceil(r, 8)), append(args, b.int("groups"), b.int("top_groups"), b.int("group_scores"))...)
	n, own, first := b.elements("experts"), b.elements("ends"), b.int("first")
	chunk := max(256, ceil(n, 512))
	chunks := ceil(n, chunk)
	counts := b.reserve(8 * chunks * own)
	b.launch("count_experts", rows(chunks), counts, "experts", n, chunk, own, first)
	b.launch("expert_ends", rows(1), "ends", counts, chunks, own)
	b.launch("place_rows", rows(chunks), "places", counts, "experts", n, chunk, own, first)
}

func routeGrad(b *binder) {
	r, experts := b.shape("logits")
	b.launch("route_grad_"+b.types("dlogits", "logits"), rows(ceil(r, 8)), append([]any{"dlogits", "dy", "logits", "experts"}, b.routing(r, experts)...)...)
}

// expertCounts chooses experts as route does, into the workspace, and counts them.
func expertCounts(b *binder) {
	r, experts := b.shape("logits")
	batch, top := b.int("batch"), b.int("top")
	if experts > maxExperts || top > maxChoices {
		b.err = fmt.Errorf("%d experts, of which a token chooses %d, exceed %d and %d", experts, top, maxExperts, maxChoices)
	}
	weights, chosen := b.reserve(4*r*top), b.reserve(4*r*top)
	b.launch("route_"+b.types("logits"), rows(ceil(r, 8)), weights, chosen, "logits", absent, r, experts, top, int64(ir.ScoresSoftmax), absent, 0.0, 1.0, absent, absent, absent)
	b.launch("count_sequences", rows(batch*experts), "counts", chosen, r, top, batch, experts, b.int("accumulate"))
}

func expertLoad(b *binder) {
	r, top := b.shape("experts")
	experts := b.elements("load")
	b.launch("count_sequences", rows(experts), "load", "experts", r, top, int64(1), experts, b.int("accumulate"))
}

func expertBias(b *binder) {
	b.launch("expert_bias", rows(1), "w", "load", "norm", b.elements("w"), b.float("rate"))
}

func routerLossGrad(b *binder) {
	r, experts := b.shape("logits")
	b.launch("router_loss_grad_"+b.types("dlogits", "logits"), rows(ceil(r, 8)), "dlogits", "logits", "counts", r, experts, b.int("batch"), b.int("scores"), b.float("z"), b.float("balance"))
}

// absent is an argument in the place of weights that an opcode does not have.
const absent = int64(0)

func permuteRows(b *binder) { b.permute("y", "x", absent) }
func permuteGrad(b *binder) { b.unpermute("dx", "dy", absent) }

func unpermuteRows(b *binder) { b.unpermute("y", "x", "weights") }

func unpermuteGrad(b *binder) {
	b.permute("dx", "dy", "weights")
	n, cols := b.shape("dx")
	choices := b.elements("places")
	b.launch("weight_grads_"+b.types("dy"), rows(ceil(choices, 8)), "dweights", "dy", "x", "places", choices, b.int("top"), cols, n)
}

func (b *binder) permute(to, from string, weights any) {
	n, cols := b.shape(to)
	choices := b.elements("places")
	b.launch("permute_"+b.types(to), spread(choices*cols, 8), to, from, "places", weights, choices, b.int("top"), cols, n)
}

func (b *binder) unpermute(to, from string, weights any) {
	r, cols := b.shape(to)
	n, _ := b.shape(from)
	b.launch("unpermute_"+b.types(to), spread(r*cols, 8), to, from, "places", weights, r, b.int("top"), cols, n)
}

// side is the side of a tile of a product with operands of a type.
func (b *binder) side(operand string) int64 {
	if b.types(operand) == "f" {
		return 64
	}
	return 128
}

// groups returns a grid with enough blocks for the rows of all experts, each of which begins a tile.
func groups(n, experts, cols, side int64) [3]int64 {
	return rows((n/side + experts) * ceil(cols, side))
}

func matmulGrouped(b *binder) {
	n, outer := b.shape("c")
	_, inner := b.shape("a")
	experts := b.elements("ends")
	grid := groups(n, experts, outer, b.side("a"))
	if b.int("trans_b") != 0 { // this kernel's names are those of a gradient, from columns inner to columns outer of a matrix
		b.launch("matmul_grouped_grad_"+b.types("a"), grid, "c", "a", "b", "ends", experts, n, outer, inner, b.int("accumulate"))
		return
	}
	b.launch("matmul_grouped_"+b.types("c", "a"), grid, "c", "a", "b", "bias", "ends", experts, n, inner, outer, b.int("accumulate"))
}

func matmulGroupedWeightGrad(b *binder) {
	n, outer := b.shape("dy")
	_, inner := b.shape("a")
	experts, side := b.elements("ends"), b.side("dy")
	grid := rows(experts * ceil(inner, side) * ceil(outer, side))
	switch kernel := "matmul_grouped_weights_" + b.types("dy"); {
	case !b.has("db"):
	case b.int("trans_b") != 0:
		b.launch(kernel, grid, "db", "dy", "a", "ends", experts, n, outer, inner, b.int("accumulate"))
	default:
		b.launch(kernel, grid, "db", "a", "dy", "ends", experts, n, inner, outer, b.int("accumulate"))
	}
	if b.has("dbias") {
		source := b.source
		b.source = "experts.cu"
		b.launch("grouped_bias_grad_"+b.types("dy"), [3]int64{ceil(outer, threads), experts, 1}, "dbias", "dy", "ends", n, outer, b.int("accumulate_bias"))
		b.source = source
	}
}
