package vmtest

import (
	"fmt"
	"maps"
	"math"
	"slices"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// cases holds the cases of all opcodes except those whose cases are derived by elementwise. All cases run in
// one round for f32 and one for bf16. Most gradients are compared with the numerical derivative of the naive
// forward formula, which shares nothing with the kernel's formula.
var cases = [ir.NumOps]func(*suite){
	ir.LoadTokens:              caseLoadTokens,
	ir.InitNormal:              caseInitNormal,
	ir.Fill:                    caseFill,
	ir.Embed:                   caseEmbed,
	ir.EmbedGrad:               caseEmbedGrad,
	ir.PositionEmbed:           casePositionEmbed,
	ir.PositionEmbedGrad:       casePositionEmbedGrad,
	ir.LayerNorm:               caseLayerNorm,
	ir.LayerNormGrad:           caseLayerNormGrad,
	ir.RMSNorm:                 caseRMSNorm,
	ir.RMSNormGrad:             caseRMSNormGrad,
	ir.Matmul:                  caseMatmul,
	ir.BiasGrad:                caseBiasGrad,
	ir.Rope:                    caseRope,
	ir.Attention:               caseAttention,
	ir.AttentionGrad:           caseAttentionGrad,
	ir.AttentionMerge:          caseAttentionMerge,
	ir.AttentionDelta:          caseAttentionDelta,
	ir.AttentionSink:           caseAttentionSink,
	ir.AttentionSinkGrad:       caseAttentionSinkGrad,
	ir.Cast:                    caseCast,
	ir.CrossEntropyStats:       caseCrossEntropyStats,
	ir.CrossEntropy:            caseCrossEntropy,
	ir.CrossEntropyGrad:        caseCrossEntropyGrad,
	ir.SumSq:                   caseSumSq,
	ir.GradNorm:                caseGradNorm,
	ir.AdamW:                   caseAdamW,
	ir.SGD:                     caseSGD,
	ir.Nesterov:                caseNesterov,
	ir.Normalize:               caseNormalize,
	ir.Dropout:                 caseDropout,
	ir.Route:                   caseRoute,
	ir.RouteGrad:               caseRouteGrad,
	ir.ExpertCounts:            caseExpertCounts,
	ir.ExpertLoad:              caseExpertLoad,
	ir.ExpertBias:              caseExpertBias,
	ir.RouterLossGrad:          caseRouterLossGrad,
	ir.Permute:                 casePermute,
	ir.PermuteGrad:             casePermuteGrad,
	ir.Unpermute:               caseUnpermute,
	ir.UnpermuteGrad:           caseUnpermuteGrad,
	ir.MatmulGrouped:           caseMatmulGrouped,
	ir.MatmulGroupedWeightGrad: caseMatmulGroupedWeightGrad,
	ir.Scan:                    caseScan,
	ir.ScanGrad:                caseScanGrad,
	ir.Conv:                    caseConv,
	ir.ConvGrad:                caseConvGrad,
	ir.Decay:                   caseDecay,
	ir.DecayGrad:               caseDecayGrad,
	ir.ScaleColumns:            caseScaleColumns,
	ir.ScaleColumnsGrad:        caseScaleColumnsGrad,
	ir.ConcatHeads:             caseConcatHeads,
	ir.ConcatHeadsGrad:         caseConcatHeadsGrad,
	ir.CopyD2H:                 caseCopy(ir.CopyD2H),
	ir.CopyH2D:                 caseCopy(ir.CopyH2D),
	ir.CopyD2D:                 caseCopy(ir.CopyD2D),
}

type (
	args  = map[string]*value
	attrs = map[string]float64
)

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// onOff runs a case with and without accumulation.
func (s *suite) onOff(f func(s *suite, accumulate bool)) {
	s.sub("write", func(s *suite) { f(s, false) })
	s.sub("accumulate", func(s *suite) { f(s, true) })
}

// plus returns x, with the operand's previous contents added if the kernel accumulates.
func plus(accumulate bool, before *value, x []float64) []float64 {
	out := append([]float64(nil), x...)
	for i := range out {
		if accumulate {
			out[i] += before.data[i]
		}
	}
	return out
}

// derivative differentiates sum(dy * forward(x)) with respect to x.
func derivative(x, dy []float64, forward func(x []float64) []float64) []float64 {
	return naive.NumericGrad(func(x []float64) float64 {
		total := 0.0
		for i, y := range forward(x) {
			total += y * dy[i]
		}
		return total
	}, x)
}

func caseLoadTokens(s *suite) {
	s.sub("chunks", func(s *suite) {
		const batch, each, position = 2, 3, 7
		out := s.run(call{op: ir.LoadTokens, args: args{"tokens": nothing(ir.I32, []int{4 * each * batch})},
			attrs: attrs{"first": 2, "replica": 4, "position": position, "batch": batch, "chunks": 4}})
		for i, got := range out["tokens"] {
			at := position + []int{0, 3, 1, 2}[i/batch/each]*each + i/batch%each
			if want := tokenAt(ir.SectionStep, 1, int64(6+i%batch), int64(at)); int32(got) != want {
				s.Fatalf("token %d is %v, want %d", i, got, want)
			}
		}
	})
	for _, batch := range []int{1, 3} {
		s.sub(fmt.Sprint("batch ", batch), func(s *suite) {
			const n, position, first, replica = 5, 7, 2, 4
			out := s.run(call{op: ir.LoadTokens, args: args{"tokens": nothing(ir.I32, []int{n * batch})},
				attrs: attrs{"first": first, "replica": replica, "position": position, "batch": float64(batch)}})
			for i, got := range out["tokens"] {
				want := tokenAt(ir.SectionStep, 1, int64(replica+first+i%batch), int64(position+i/batch))
				if int32(got) != want {
					s.Fatalf("token %d is %v, want %d", i, got, want)
				}
			}
		})
	}
}

// caseInitNormal compares rectangles, some of which extend past the tensor's edge, with the whole tensor.
// Elements outside it, and from the row end on, must be 0.
func caseInitNormal(s *suite) {
	const rows, cols = 23, 17
	random := vm.InitialValues(seed, "w")
	whole := make([]float32, rows*cols)
	random.Normals(0, whole, 0.5)
	for _, r := range [][5]int{{0, 0, rows, cols}, {5, 3, 7, 9}, {20, 0, 6, 20}, {24, 0, 2, 3}, {5, 3, 7, 9, 8}, {18, 0, 8, 20, 21}, {20, 0, 6, 20, 25}, {9, 0, 2, 3, 6}} {
		s.sub(fmt.Sprint(r), func(s *suite) {
			out := s.run(call{op: ir.InitNormal, args: args{"w": s.out(r[2], r[3])},
				attrs: attrs{"tensor": 0, "row": float64(r[0]), "col": float64(r[1]), "std": 0.5, "end": float64(r[4])}})
			for i, got := range out["w"] {
				row, col, want := r[0]+i/r[3], r[1]+i%r[3], 0.0
				if row < rows && col < cols && (r[4] == 0 || row < r[4]) {
					want = stored(float64(whole[row*cols+col]), s.dtype)
				}
				if got != want {
					s.Fatalf("element (%d, %d) is %v, want %v", row, col, got, want)
				}
			}
		})
	}
}

func caseFill(s *suite) {
	for _, t := range []ir.DType{s.dtype, ir.I32, ir.U8} {
		for _, n := range []int{1, 5, 20001} {
			s.sub(fmt.Sprint(t, n), func(s *suite) {
				v := nothing(ir.I32, []int{n})
				v.dtype = t
				for i, got := range s.run(call{op: ir.Fill, args: args{"y": v}, attrs: attrs{"value": 3}})["y"] {
					if got != 3 {
						s.Fatalf("element %d is %v", i, got)
					}
				}
			})
		}
	}
}

func caseEmbed(s *suite) {
	const rows, vocab, hidden, first = 13, 11, 7, 5
	for _, scale := range []float64{0, 2.75} {
		s.sub(fmt.Sprint("scale ", scale), func(s *suite) {
			table, tokens := s.normal(vocab, hidden), s.integers(20, rows)
			out := s.run(call{op: ir.Embed, args: args{"y": s.out(rows, hidden), "tokens": tokens, "table": table},
				attrs: attrs{"first": first, "scale": scale}})
			want := naive.Embed(table.data, tokens.ints(), hidden, first)
			s.equal("y", out["y"], scaled(want, scale), s.dtype)
		})
	}
}

// scaled returns a vector times a factor. As in attributes, a factor of 0 means 1.
func scaled(x []float64, factor float64) []float64 {
	y := append([]float64(nil), x...)
	for i := range y {
		if factor != 0 {
			y[i] *= factor
		}
	}
	return y
}

func caseEmbedGrad(s *suite) {
	s.onOff(func(s *suite, accumulate bool) {
		const rows, vocab, hidden, first = 33, 11, 130, 5
		tokens, dy, dtable := s.integers(20, rows), s.normal(rows, hidden), s.sum(accumulate, vocab, hidden)
		for _, scale := range []float64{0, 2.75} {
			out := s.run(call{op: ir.EmbedGrad, args: args{"dtable": dtable, "tokens": tokens, "dy": dy},
				attrs: attrs{"first": first, "accumulate": truth(accumulate), "scale": scale}})
			want := scaled(naive.EmbedGrad(tokens.ints(), dy.data, hidden, first, vocab), scale)
			s.equal("dtable", out["dtable"], plus(accumulate, dtable, want), ir.F32)
		}
	})
}

func positionEmbed(x, table []float64, batch, hidden int) []float64 {
	y := append([]float64(nil), x...)
	for i := range y {
		y[i] += table[i/hidden/batch*hidden+i%hidden]
	}
	return y
}

func casePositionEmbed(s *suite) {
	const n, hidden = 5, 9
	for _, batch := range []int{1, 3} {
		x, table := s.normal(n*batch, hidden), s.normal(n, hidden)
		want := positionEmbed(x.data, table.data, batch, hidden)
		c := call{op: ir.PositionEmbed, args: args{"y": s.out(n*batch, hidden), "x": x, "table": table}, attrs: attrs{"batch": float64(batch)}}
		s.inPlace(c, "y", "x", want)
	}
}

// inPlace runs a case twice: with a separate result, and with the result in place of an operand.
func (s *suite) inPlace(c call, y, x string, want []float64) {
	s.sub("apart", func(s *suite) { s.equal(y, s.run(c)[y], want, s.dtype) })
	s.sub("in place", func(s *suite) {
		inner := args{}
		for name, v := range c.args {
			if name != y {
				inner[name] = v
			}
		}
		c.args, c.alias = inner, map[string]string{y: x}
		s.equal(y, s.run(c)[x], want, s.dtype)
	})
}

func casePositionEmbedGrad(s *suite) {
	s.onOff(func(s *suite, accumulate bool) {
		const n, batch, hidden = 5, 3, 9
		dy, dtable := s.normal(n*batch, hidden), s.sum(accumulate, n, hidden)
		out := s.run(call{op: ir.PositionEmbedGrad, args: args{"dtable": dtable, "dy": dy},
			attrs: attrs{"batch": batch, "accumulate": truth(accumulate)}})
		zero := make([]float64, n*batch*hidden)
		want := derivative(make([]float64, n*hidden), dy.data, func(table []float64) []float64 {
			return positionEmbed(zero, table, batch, hidden)
		})
		s.equal("dtable", out["dtable"], plus(accumulate, dtable, want), ir.F32)
	})
}

// offsets runs a case twice: with gamma unchanged, and with 1 added to gamma.
func (s *suite) offsets(f func(s *suite, offset float64)) {
	f(s, 0)
	s.sub("offset", func(s *suite) { f(s, 1) })
}

func caseLayerNorm(s *suite) { s.offsets((*suite).layerNorm) }

func (s *suite) layerNorm(offset float64) {
	const rows, cols, eps = 5, 37, 0.25
	x, gamma, beta := s.normal(rows, cols), s.normal(cols), s.normal(cols)
	out := s.run(call{op: ir.LayerNorm, attrs: attrs{"eps": eps, "offset": offset}, args: args{
		"y": s.out(rows, cols), "stats": s.outF32(rows, 2), "x": x, "gamma": gamma, "beta": beta}})
	s.equal("y", out["y"], naive.LayerNorm(x.data, naive.Plus(gamma.data, offset), beta.data, eps), s.dtype)
	var stats []float64
	for r := range rows {
		mean, rstd := naive.Moments(x.data[r*cols:][:cols], eps)
		stats = append(stats, mean, rstd)
	}
	s.equal("stats", out["stats"], stats, ir.F32)
}

func caseLayerNormGrad(s *suite) {
	for _, residual := range []bool{false, true} {
		s.sub(fmt.Sprint("residual ", residual), func(s *suite) {
			s.onOff(func(s *suite, accumulate bool) {
				s.offsets(func(s *suite, offset float64) { s.layerNormGrad(residual, accumulate, offset) })
			})
		})
	}
}

func (s *suite) layerNormGrad(residual, accumulate bool, offset float64) {
	const rows, cols, eps = 3, 19, 0.25
	x, gamma, dy := s.normal(rows, cols), s.normal(cols), s.normal(rows, cols)
	stats := s.outF32(rows, 2)
	for r := range rows {
		stats.data[2*r], stats.data[2*r+1] = naive.Moments(x.data[r*cols:][:cols], eps)
	}
	dgamma, dbeta, beta := s.sum(accumulate, cols), s.sum(accumulate, cols), make([]float64, cols)
	a := args{"dx": s.out(rows, cols), "dgamma": dgamma, "dbeta": dbeta, "dy": dy, "x": x, "stats": stats, "gamma": gamma}
	dx := derivative(x.data, dy.data, func(x []float64) []float64 {
		return naive.LayerNorm(x, naive.Plus(gamma.data, offset), beta, eps)
	})
	if residual {
		a["residual"] = s.normal(rows, cols)
		dx = plus(true, a["residual"], dx)
	}
	out := s.run(call{op: ir.LayerNormGrad, args: a, attrs: attrs{"accumulate": truth(accumulate), "offset": offset}})
	s.equal("dx", out["dx"], dx, s.dtype)
	s.equal("dgamma", out["dgamma"], plus(accumulate, dgamma, derivative(gamma.data, dy.data, func(gamma []float64) []float64 {
		return naive.LayerNorm(x.data, gamma, beta, eps)
	})), ir.F32)
	s.equal("dbeta", out["dbeta"], plus(accumulate, dbeta, derivative(beta, dy.data, func(beta []float64) []float64 {
		return naive.LayerNorm(x.data, gamma.data, beta, eps)
	})), ir.F32)
	s.withoutWeights(ir.LayerNormGrad, a, out, accumulate, offset, []string{"dgamma"}, []string{"dbeta"}, []string{"dgamma", "dbeta"})
}

// withoutWeights repeats a norm's backward pass without computing the gradients of some weights. The other
// results must not change.
func (s *suite) withoutWeights(op ir.Op, a args, want map[string][]float64, accumulate bool, offset float64, frozen ...[]string) {
	for _, names := range frozen {
		some := maps.Clone(a)
		for _, name := range names {
			delete(some, name)
		}
		out := s.run(call{op: op, args: some, attrs: attrs{"accumulate": truth(accumulate), "offset": offset}})
		for name, values := range out {
			for i := range values {
				if values[i] != want[name][i] {
					s.Errorf("%s[%d] is %v without %v, and %v with it", name, i, values[i], names, want[name][i])
					break
				}
			}
		}
	}
}

func caseRMSNorm(s *suite) { s.offsets((*suite).rmsNorm) }

func (s *suite) rmsNorm(offset float64) {
	const rows, cols, eps = 5, 37, 0.25
	x, gamma := s.normal(rows, cols), s.normal(cols)
	out := s.run(call{op: ir.RMSNorm, attrs: attrs{"eps": eps, "offset": offset}, args: args{
		"y": s.out(rows, cols), "stats": s.outF32(rows, 1), "x": x, "gamma": gamma}})
	s.equal("y", out["y"], naive.RMSNorm(x.data, naive.Plus(gamma.data, offset), eps), s.dtype)
	s.equal("stats", out["stats"], reciprocals(x.data, cols, eps), ir.F32)
}

func reciprocals(x []float64, cols int, eps float64) (out []float64) {
	for at := 0; at < len(x); at += cols {
		out = append(out, naive.ReciprocalRMS(x[at:at+cols], eps))
	}
	return out
}

func caseRMSNormGrad(s *suite) {
	for _, residual := range []bool{false, true} {
		s.sub(fmt.Sprint("residual ", residual), func(s *suite) {
			s.onOff(func(s *suite, accumulate bool) {
				s.offsets(func(s *suite, offset float64) { s.rmsNormGrad(residual, accumulate, offset) })
			})
		})
	}
}

func (s *suite) rmsNormGrad(residual, accumulate bool, offset float64) {
	const rows, cols, eps = 3, 19, 0.25
	x, gamma, dy, dgamma := s.normal(rows, cols), s.normal(cols), s.normal(rows, cols), s.sum(accumulate, cols)
	stats := s.outF32(rows, 1)
	stats.data = reciprocals(x.data, cols, eps)
	a := args{"dx": s.out(rows, cols), "dgamma": dgamma, "dy": dy, "x": x, "stats": stats, "gamma": gamma}
	dx := derivative(x.data, dy.data, func(x []float64) []float64 {
		return naive.RMSNorm(x, naive.Plus(gamma.data, offset), eps)
	})
	if residual {
		a["residual"] = s.normal(rows, cols)
		dx = plus(true, a["residual"], dx)
	}
	out := s.run(call{op: ir.RMSNormGrad, args: a, attrs: attrs{"accumulate": truth(accumulate), "offset": offset}})
	s.equal("dx", out["dx"], dx, s.dtype)
	s.equal("dgamma", out["dgamma"], plus(accumulate, dgamma, derivative(gamma.data, dy.data, func(gamma []float64) []float64 {
		return naive.RMSNorm(x.data, gamma, eps)
	})), ir.F32)
	s.withoutWeights(ir.RMSNormGrad, a, out, accumulate, offset, []string{"dgamma"})
}

func caseMatmul(s *suite) {
	for _, size := range [][3]int{{1, 1, 1}, {7, 5, 3}, {33, 65, 129}, {130, 40, 400}} {
		for variant := range 16 {
			transA, transB, third, wide := variant&1 != 0, variant&2 != 0, variant&4 != 0, variant&8 != 0
			s.sub(fmt.Sprint(size, " transposed ", transA, transB, " more ", third, " f32 ", wide), func(s *suite) {
				s.matmul(size[0], size[1], size[2], transA, transB, third, wide)
			})
		}
	}
}

// matmul checks a product with a result of the round's type, or of f32 if wide is set. If third is set, the
// former adds a bias and the latter accumulates.
func (s *suite) matmul(m, n, k int, transA, transB, third, wide bool) {
	a, b := s.normal(m, k), s.normal(k, n)
	if transA {
		a = s.normal(k, m)
	}
	if transB {
		b = s.normal(n, k)
	}
	c := s.out(m, n)
	if wide {
		c = s.sum(third, m, n)
	}
	operands := args{"c": c, "a": a, "b": b}
	var bias []float64
	if third && !wide {
		operands["bias"] = s.normal(n)
		bias = operands["bias"].data
	}
	want := plus(third && wide, c, naive.MatMul(a.data, b.data, bias, m, n, k, transA, transB))
	out := s.run(call{op: ir.Matmul, args: operands, attrs: attrs{
		"trans_a": truth(transA), "trans_b": truth(transB), "accumulate": truth(third && wide)}})
	s.equal("c", out["c"], want, c.dtype)
}

func caseBiasGrad(s *suite) {
	s.onOff(func(s *suite, accumulate bool) {
		const rows, cols = 150, 131
		dy, db := s.normal(rows, cols), s.sum(accumulate, cols)
		sums := make([]float64, cols)
		for i, v := range dy.data {
			sums[i%cols] += v
		}
		out := s.run(call{op: ir.BiasGrad, args: args{"db": db, "dy": dy}, attrs: attrs{"accumulate": truth(accumulate)}})
		s.equal("db", out["db"], plus(accumulate, db, sums), ir.F32)
	})
}

// rotations lists the rotations that the cases' programs declare: of part of each head, of entire heads,
// one that only scales, and one that grows with the position.
var rotations = []naive.Rotation{
	{Rates: []float64{1, 0.25, 0.003}, Scale: 1.25, Rest: 0.75},
	{Rates: []float64{0.5, 0.25, 0.125, 0.0625, 0.03125}, Scale: 1.5, Rest: 1},
	{Scale: 1, Rest: 0.5},
	{Rates: []float64{1, 0.25}, Scale: 1.25, Rest: 0.75, Beta: 0.5, Period: 4},
}

// documents returns the position of each token in its document, for documents of random lengths, in the layout
// of load_tokens.
func (s *suite) documents(tokens, batch int) *value {
	v := nothing(ir.I32, []int{tokens * batch})
	for b := range batch {
		at := 0.0
		for t := range tokens {
			if s.rng.IntN(3) == 0 {
				at = 0
			}
			v.data[t*batch+b] = at
			at++
		}
	}
	return v
}

func caseRope(s *suite) {
	const n, heads, headDim, position, theta = 5, 3, 10, 11, 10000
	plain := naive.Rotation{Rates: naive.Rates(headDim, theta), Scale: 1, Rest: 1}
	s.sub("chunks", func(s *suite) {
		const batch, each, chunks, member = 2, 3, 6, 1
		x := s.normal(2*each*batch, heads*headDim)
		half := len(x.data) / 2
		want := naive.Rope(x.data[:half], batch, heads, headDim, position+member*each, plain)
		want = append(want, naive.Rope(x.data[half:], batch, heads, headDim, position+(chunks-1-member)*each, plain)...)
		s.inPlace(call{op: ir.Rope, args: args{"y": s.out(x.shape...), "x": x}, attrs: attrs{"heads": heads, "head_dim": headDim,
			"batch": batch, "position": position, "theta": theta, "chunks": chunks, "member": member}}, "y", "x", want)
	})
	s.sub("documents", func(s *suite) {
		const batch, each, chunks, member = 2, 3, 6, 1
		positions := s.documents(each*chunks, batch)
		whole := s.normal(each*chunks*batch, heads*headDim)
		want := make([]float64, len(whole.data))
		for r := range each * chunks * batch {
			row := whole.data[r*heads*headDim:][:heads*headDim]
			copy(want[r*heads*headDim:], naive.Rope(row, 1, heads, headDim, int(positions.data[r]), plain))
		}
		c := call{op: ir.Rope, args: args{"y": s.out(whole.shape...), "x": whole, "positions": positions}, attrs: attrs{"heads": heads,
			"head_dim": headDim, "batch": batch, "position": position, "theta": theta}}
		s.inPlace(c, "y", "x", want)
		rows := each * batch * heads * headDim
		chunk := func(of []float64) []float64 {
			out := slices.Clone(of[member*rows : (member+1)*rows])
			return append(out, of[(chunks-1-member)*rows:(chunks-member)*rows]...)
		}
		x := s.normal(2*each*batch, heads*headDim)
		x.data = chunk(whole.data)
		c.args["x"], c.args["y"], c.attrs["chunks"], c.attrs["member"] = x, s.out(x.shape...), chunks, member
		s.inPlace(c, "y", "x", chunk(want))
	})
	for i, r := range append([]naive.Rotation{plain}, rotations...) {
		for _, batch := range []int{1, 2} {
			for _, inverse := range []bool{false, true} {
				s.sub(fmt.Sprint("rotation ", i, " batch ", batch, " inverse ", inverse), func(s *suite) {
					x := s.normal(n*batch, heads*headDim)
					want := naive.Rope(x.data, batch, heads, headDim, position, r)
					if inverse {
						want = derivative(make([]float64, len(x.data)), x.data, func(x []float64) []float64 {
							return naive.Rope(x, batch, heads, headDim, position, r)
						})
					}
					s.inPlace(call{op: ir.Rope, args: args{"y": s.out(n*batch, heads*headDim), "x": x}, attrs: attrs{
						"heads": heads, "head_dim": headDim, "batch": float64(batch), "rotation": float64(i),
						"position": position, "theta": theta, "inverse": truth(inverse)}}, "y", "x", want)
				})
			}
		}
	}
}

func caseCast(s *suite) {
	for _, to := range []ir.DType{ir.F32, ir.BF16} {
		x := s.normal(9, 41)
		out := s.run(call{op: ir.Cast, args: args{"y": nothing(to, []int{9, 41}), "x": x}})
		for i, got := range out["y"] {
			if want := stored(x.data[i], to); got != want {
				s.Fatalf("%s to %s: %v becomes %v, want %v", s.dtype, to, x.data[i], got, want)
			}
		}
	}
}

// In the loss cases, the vocabulary is divided into two parts; the second part is padded.
const (
	lossRows, lossWidth, lossValid, lossFirst = 9, 40, 33, 40
	lossVocab                                 = lossFirst + lossValid
)

func caseCrossEntropyStats(s *suite) {
	logits, labels := s.normal(lossRows, lossWidth), s.integers(lossVocab, lossRows)
	for _, softcap := range []float64{0, 1.5} {
		s.sub(fmt.Sprint("softcap ", softcap), func(s *suite) {
			out := s.run(call{op: ir.CrossEntropyStats, attrs: attrs{"first": lossFirst, "valid": lossValid, "softcap": softcap},
				args: args{"stats": s.outF32(lossRows, 3), "logits": logits, "labels": labels}})
			capped := naive.Softcap(logits.data, softcap)
			s.equal("stats", out["stats"], naive.CrossEntropyStats(capped, labels.ints(), lossWidth, lossValid, lossFirst), ir.F32)
		})
	}
}

// lossParts returns random logits of both parts, random labels, and the statistics of both parts.
func (s *suite) lossParts(softcap float64) (first, second, labels, stats *value) {
	first, second = s.normal(lossRows, lossFirst), s.normal(lossRows, lossWidth)
	labels, stats = s.integers(lossVocab, lossRows), s.outF32(2, lossRows, 3)
	stats.data = append(naive.CrossEntropyStats(naive.Softcap(first.data, softcap), labels.ints(), lossFirst, lossFirst, 0),
		naive.CrossEntropyStats(naive.Softcap(second.data, softcap), labels.ints(), lossWidth, lossValid, lossFirst)...)
	return first, second, labels, stats
}

// whole joins the logits of both parts, without padding.
func whole(first, second []float64) (logits []float64) {
	for r := range lossRows {
		logits = append(logits, first[r*lossFirst:][:lossFirst]...)
		logits = append(logits, second[r*lossWidth:][:lossValid]...)
	}
	return logits
}

func caseCrossEntropy(s *suite) {
	first, second, labels, stats := s.lossParts(0)
	loss := s.f32(1)
	losses, _ := naive.CrossEntropy(whole(first.data, second.data), labels.ints(), lossVocab)
	want := loss.data[0]
	for _, l := range losses {
		want += 0.125 * l
	}
	out := s.run(call{op: ir.CrossEntropy, args: args{"loss": loss, "stats": stats}, attrs: attrs{"scale": 0.125}})
	s.equal("loss", out["loss"], []float64{want}, ir.F32)
	out = s.run(call{op: ir.CrossEntropy, args: args{"loss": loss, "losses": nothing(ir.F32, []int{len(losses)}), "stats": stats}, attrs: attrs{"scale": 0.125}})
	s.equal("loss with those of rows", out["loss"], []float64{want}, ir.F32)
	s.equal("losses", out["losses"], losses, ir.F32)
	s.sub("masked", func(s *suite) {
		weight := s.outF32(1)
		weight.data[0] = 0.75
		labels, want := maskedLabels(labels), loss.data[0]
		for r, l := range losses {
			if labels.data[r] >= 0 {
				want += 0.125 * 0.75 * l
			}
		}
		out := s.run(call{op: ir.CrossEntropy, args: args{"loss": loss, "losses": nothing(ir.F32, []int{len(losses)}), "stats": stats, "labels": labels, "weight": weight}, attrs: attrs{"scale": 0.125}})
		s.equal("loss", out["loss"], []float64{want}, ir.F32)
		for r, l := range losses {
			if got := out["losses"][r]; math.IsNaN(got) != (labels.data[r] < 0) || math.Abs(got-l) > 1e-5*max(1, l) {
				s.Errorf("the loss of row %d with label %v is %v, want %v", r, labels.data[r], got, l)
			}
		}
	})
}

// maskedLabels returns the labels with every third one masked.
func maskedLabels(labels *value) *value {
	out := *labels
	out.data = slices.Clone(labels.data)
	for r := 0; r < len(out.data); r += 3 {
		out.data[r] = -1 - float64(r)
	}
	return &out
}

func caseCrossEntropyGrad(s *suite) {
	s.crossEntropyGrad(0)
	s.sub("softcap", func(s *suite) { s.crossEntropyGrad(1.5) })
}

func (s *suite) crossEntropyGrad(softcap float64) {
	first, second, labels, stats := s.lossParts(softcap)
	want := naive.NumericGrad(func(second []float64) float64 {
		total := 0.0
		logits := naive.Softcap(whole(first.data, second), softcap)
		losses, _ := naive.CrossEntropy(logits, labels.ints(), lossVocab)
		for _, l := range losses {
			total += 0.125 * l
		}
		return total
	}, second.data)
	c := call{op: ir.CrossEntropyGrad, attrs: attrs{"scale": 0.125, "first": lossFirst, "valid": lossValid, "softcap": softcap},
		args: args{"dlogits": s.out(lossRows, lossWidth), "logits": second, "stats": stats, "labels": labels}}
	s.inPlace(c, "dlogits", "logits", want)
	s.sub("other type", func(s *suite) {
		other := s.otherType()
		c.args["dlogits"] = nothing(other, []int{lossRows, lossWidth})
		s.equal("dlogits", s.run(c)["dlogits"], want, other)
	})
	s.sub("masked", func(s *suite) {
		masked := maskedLabels(labels)
		for i := range want {
			if want[i] *= 0.75; masked.data[i/lossWidth] < 0 {
				want[i] = 0
			}
		}
		weight := s.outF32(1)
		weight.data[0] = 0.75
		c.args["labels"], c.args["weight"], c.args["dlogits"] = masked, weight, s.out(lossRows, lossWidth)
		s.equal("dlogits", s.run(c)["dlogits"], want, s.dtype)
	})
}

func caseSumSq(s *suite) {
	x, total := s.normal(10007), 0.0
	for _, v := range x.data {
		total += v * v
	}
	for _, weight := range []float64{0, 1} {
		out := s.run(call{op: ir.SumSq, args: args{"y": s.outF32(1), "x": x}, attrs: attrs{"weight": weight}})
		s.equal("y", out["y"], []float64{weight * total}, ir.F32)
	}
}

func caseGradNorm(s *suite) {
	sums := s.f32(7)
	total := 0.0
	for i := range sums.data {
		sums.data[i] = math.Abs(sums.data[i])
		total += sums.data[i]
	}
	norm := math.Sqrt(total)
	for _, limit := range []float64{0, norm / 2, norm * 2} {
		factor := 1.0
		if limit > 0 {
			factor = math.Min(1, limit/norm)
		}
		out := s.run(call{op: ir.GradNorm, args: args{"y": s.outF32(2), "sums": sums}, attrs: attrs{"max_norm": limit}})
		s.equal("y", out["y"], []float64{norm, factor}, ir.F32)
	}
	limit := s.f32(1)
	for _, c := range []struct{ sum, limit, norm, factor float64 }{
		{4, 2, 2, 1}, {4, 1.99, 2, -1}, {4, math.Inf(1), 2, 1}, {math.Inf(1), math.Inf(1), math.Inf(1), -1}, {math.NaN(), 9, math.NaN(), -1},
	} {
		sums.data, limit.data[0] = []float64{0, 0, c.sum, 0, 0, 0, 0}, c.limit
		out := s.run(call{op: ir.GradNorm, args: args{"y": s.outF32(2), "sums": sums, "limit": limit}, attrs: attrs{"max_norm": 0}})
		if got := out["y"]; got[1] != c.factor || !(got[0] == c.norm || math.IsNaN(got[0]) && math.IsNaN(c.norm)) {
			s.Fatalf("a sum of %v with limit %v has norm and factor %v, want %v and %v", c.sum, c.limit, got, c.norm, c.factor)
		}
	}
}

func caseAdamW(s *suite) {
	s.sub("f32 moments", func(s *suite) { adamWOf(s, ir.F32) })
	s.sub("bf16 moments", func(s *suite) { adamWOf(s, ir.BF16) })
}

func adamWOf(s *suite, moments ir.DType) {
	const n, step, lr, factor = 1003, 3, 0.02, 0.5
	opt := naive.Optimizer{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8}
	w, m, v, grad := s.f32(n), s.typed(moments, n), s.typed(moments, n), s.f32(n)
	var wantW, wantM, wantV []float64
	for i := range n {
		v.data[i] = math.Abs(v.data[i])
		a, b, c := opt.Scalar(lr, 0.1, step, w.data[i], grad.data[i]*factor, m.data[i], v.data[i])
		wantW, wantM, wantV = append(wantW, a), append(wantM, b), append(wantV, c)
	}
	parameters, norm := s.f32(3), s.f32(2)
	parameters.data = []float64{lr, 1 / (1 - math.Pow(opt.Beta1, step)), 1 / (1 - math.Pow(opt.Beta2, step))}
	norm.data[1] = factor
	operands := args{"w": w, "m": m, "v": v, "grad": grad, "step": parameters, "norm": norm}
	if s.dtype == ir.BF16 {
		operands["copy"] = s.out(n)
	}
	out := s.run(call{op: ir.AdamW, args: operands, attrs: attrs{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}})
	s.equal("w", out["w"], wantW, ir.F32)
	s.equal("m", out["m"], wantM, moments)
	s.equal("v", out["v"], wantV, moments)
	s.isRounded(out)
	norm.data[1], grad.data[7] = -1, math.NaN()
	out = s.run(call{op: ir.AdamW, args: operands, attrs: attrs{"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}})
	s.unchanged(out, operands, "w", "m", "v")
}

// unchanged checks that a skipped step leaves operands unchanged and sets the copy to the rounded weight.
func (s *suite) unchanged(out map[string][]float64, before args, names ...string) {
	s.Helper()
	for _, name := range names {
		for i, got := range out[name] {
			if want := stored(before[name].data[i], ir.F32); got != want {
				s.Fatalf("a skipped step changes %s[%d] from %v to %v", name, i, want, got)
			}
		}
	}
	s.isRounded(out)
}

// isRounded checks that the copy of an updated weight is the rounded weight.
func (s *suite) isRounded(out map[string][]float64) {
	s.Helper()
	for i, got := range out["copy"] {
		if want := stored(out["w"][i], ir.BF16); got != want {
			s.Fatalf("copy[%d] = %v of weight %v, want %v", i, got, out["w"][i], want)
		}
	}
}

// caseSGD takes steps with momentum on a vector, and without momentum on a matrix whose gradient is part of an
// operand with more rows.
func caseSGD(s *suite) {
	const lr, factor, momentum, decay, scale = 0.02, 0.5, 0.9, 0.1, 3
	parameters, norm := s.f32(3), s.f32(2)
	parameters.data[0], norm.data[1] = lr, factor
	momentumOf := func(s *suite, state ir.DType) {
		const n = 1003
		w, m, grad := s.f32(n), s.typed(state, n), s.f32(n)
		operands := args{"w": w, "m": m, "grad": grad, "step": parameters, "norm": norm}
		if s.dtype == ir.BF16 {
			operands["copy"] = s.out(n)
		}
		var wantW, wantM []float64
		for i := range n {
			a, b := naive.Optimizer{Momentum: momentum}.SGD(lr, decay, w.data[i], factor*grad.data[i], m.data[i])
			wantW, wantM = append(wantW, a), append(wantM, b)
		}
		out := s.run(call{op: ir.SGD, args: operands, attrs: attrs{"momentum": momentum, "weight_decay": decay, "scale": 1}})
		s.equal("w", out["w"], wantW, ir.F32)
		s.equal("m", out["m"], wantM, state)
		s.isRounded(out)
		skipped := s.f32(2)
		skipped.data[1], grad.data[5] = -1, math.NaN()
		operands["norm"] = skipped
		out = s.run(call{op: ir.SGD, args: operands, attrs: attrs{"momentum": momentum, "weight_decay": decay, "scale": 1}})
		s.unchanged(out, operands, "w", "m")
	}
	s.sub("momentum", func(s *suite) { momentumOf(s, ir.F32) })
	s.sub("bf16 momentum", func(s *suite) { momentumOf(s, ir.BF16) })
	s.sub("padding", func(s *suite) { // rows of w after the last row of grad
		const rows, cols = 5, 37
		for _, row := range []int{6, 9, 12} {
			w, grad, rounded := s.f32(rows, cols), s.normal(9, cols), nothing(ir.BF16, []int{rows, cols})
			want, copied := []float64(nil), []float64(nil)
			for i := range w.data {
				if row*cols+i < len(grad.data) {
					want = append(want, w.data[i]-lr*(scale*grad.data[row*cols+i]+decay*w.data[i]))
					copied = append(copied, stored(want[i], ir.BF16))
				} else {
					want, copied = append(want, w.data[i]), append(copied, 0)
				}
			}
			out := s.run(call{op: ir.SGD, args: args{"w": w, "copy": rounded, "grad": grad, "step": parameters},
				attrs: attrs{"weight_decay": decay, "scale": scale, "row": float64(row)}})
			s.equal("w", out["w"], want, ir.F32)
			s.equal("copy", out["copy"], copied, ir.BF16)
		}
	})
	s.sub("rows", func(s *suite) {
		const rows, cols, row = 5, 37, 3
		w, grad := s.f32(rows, cols), s.normal(rows+4, cols)
		var want []float64
		for i := range w.data {
			want = append(want, w.data[i]-lr*(scale*grad.data[row*cols+i]+decay*w.data[i]))
		}
		out := s.run(call{op: ir.SGD, args: args{"w": w, "grad": grad, "step": parameters},
			attrs: attrs{"weight_decay": decay, "scale": scale, "row": row}})
		s.equal("w", out["w"], want, ir.F32)
		for _, factor := range []float64{0.25, -1} { // if scaled is set, only the sign of the factor matters
			norm := s.f32(2)
			norm.data[1] = factor
			operands := args{"w": w, "grad": grad, "step": parameters, "norm": norm}
			out := s.run(call{op: ir.SGD, args: operands, attrs: attrs{"weight_decay": decay, "scale": scale, "row": row, "scaled": 1}})
			if factor < 0 {
				s.unchanged(out, operands, "w")
			} else {
				s.equal("w", out["w"], want, ir.F32)
			}
		}
	})
}

func caseNesterov(s *suite) {
	s.sub("f32 momentum", func(s *suite) { nesterovOf(s, ir.F32) })
	s.sub("bf16 momentum", func(s *suite) { nesterovOf(s, ir.BF16) })
}

func nesterovOf(s *suite, state ir.DType) {
	const n, factor, momentum = 1003, 0.5, 0.9
	m, grad, norm := s.typed(state, n), s.f32(n), s.f32(2)
	norm.data[1] = factor
	var wantY, wantM []float64
	for i := range n {
		g := factor * grad.data[i]
		sum := momentum*m.data[i] + g
		wantY, wantM = append(wantY, g+momentum*sum), append(wantM, sum)
	}
	out := s.run(call{op: ir.Nesterov, args: args{"y": s.out(n), "m": m, "grad": grad, "norm": norm}, attrs: attrs{"momentum": momentum}})
	s.equal("y", out["y"], wantY, s.dtype)
	s.equal("m", out["m"], wantM, state)
	norm.data[1], grad.data[9] = -1, math.NaN()
	operands := args{"y": s.out(n), "m": m, "grad": grad, "norm": norm}
	out = s.run(call{op: ir.Nesterov, args: operands, attrs: attrs{"momentum": momentum}})
	s.unchanged(out, operands, "m")
	s.equal("y", out["y"], make([]float64, n), s.dtype)
}

func caseNormalize(s *suite) {
	const rows, cols, eps = 5, 37, 0.25
	x, sum := s.normal(rows, cols), s.f32(1)
	sum.data[0] = 9
	var want []float64
	for _, v := range x.data {
		want = append(want, v/(3+eps))
	}
	out := s.run(call{op: ir.Normalize, args: args{"y": s.out(rows, cols), "x": x, "sum": sum}, attrs: attrs{"eps": eps}})
	s.equal("y", out["y"], want, s.dtype)
}

// caseDropout tests a member's tokens as one contiguous range, for the first and a later member, and as two
// chunks. The first column has an odd index.
func caseDropout(s *suite) {
	const batch, n, first, replica, position, col = 2, 6, 1, 3, 5, 7
	for _, cols := range []int{9, 300} {
		for _, rate := range []float64{0, 0.1, 0.75} {
			for _, place := range []struct{ chunks, member int }{{0, 0}, {0, 2}, {4, 0}, {4, 1}} {
				s.sub(fmt.Sprint(cols, " rate ", rate, place), func(s *suite) {
					x, key := s.normal(n*batch, cols), s.integers(1<<30, 2)
					keys := key.ints()
					mixed := uint64(uint32(keys[0])) | uint64(uint32(keys[1]))<<32 ^ naive.DropoutTensor("w")
					want := naive.Dropout(x.data, cols, col, rate, mixed, func(row int) (sequence, at int) {
						at = row / batch
						switch {
						case place.chunks == 0:
							at += place.member * n
						case at < n/2:
							at += place.member * n / 2
						default:
							at += (place.chunks - 2 - place.member) * n / 2
						}
						return first + replica + row%batch, position + at
					})
					s.inPlace(call{op: ir.Dropout, args: args{"y": s.out(n*batch, cols), "x": x, "key": key}, attrs: attrs{
						"tensor": 0, "rate": rate, "col": col, "first": first, "replica": replica, "position": position, "batch": batch,
						"chunks": float64(place.chunks), "member": float64(place.member)}}, "y", "x", want)
				})
			}
		}
	}
}

func caseCopy(op ir.Op) func(*suite) {
	return func(s *suite) {
		x := s.normal(1237)
		out := s.run(call{op: op, args: args{"y": s.out(1237), "x": x}})
		for i, got := range out["y"] {
			if got != x.data[i] {
				s.Fatalf("element %d is %v, want %v", i, got, x.data[i])
			}
		}
	}
}
