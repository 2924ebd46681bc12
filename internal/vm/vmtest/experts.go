package vmtest

import (
	"fmt"
	"math"
	"slices"

	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// routers are the ways in which published models choose experts, with few experts, and one with more experts than a warp has lanes.
var routers = []naive.Router{
	{Experts: 6, Top: 2, Scores: "softmax"},
	{Experts: 7, Top: 3, Scores: "softmax", Renormalize: true},
	{Experts: 8, Top: 3, Scores: "sigmoid", Renormalize: true, Eps: 1e-20, Scale: 2.5, Groups: 4, TopGroups: 2, Correction: []float64{0.5, -0.25, 0, 0.125, 1, 0, -1, 0.25}},
	{Experts: 9, Top: 4, Scores: "chosen", Correction: []float64{1, 0, 0, 0, 0, 0, 0, 0, -1}},
	{Experts: 5, Top: 1, Scores: "sigmoid", Scale: 0.5},
	{Experts: 130, Top: 8, Scores: "softmax", Renormalize: true},
	{Experts: 12, Top: 3, Scores: "softmax", Scale: 16, Groups: 4, TopGroups: 2, GroupsByMax: true},
	{Experts: 5, Top: 2, Scores: "sigmoid", Groups: 5, TopGroups: 3, GroupsByMax: true},
	{Experts: 160, Top: 6, Scores: "softmax", Groups: 8, TopGroups: 3, GroupsByMax: true},
}

func routerAttrs(r naive.Router) attrs {
	return attrs{
		"top": float64(r.Top), "scores": float64(slices.Index([]string{"softmax", "sigmoid", "chosen"}, r.Scores)), "renormalize": truth(r.Renormalize),
		"eps": r.Eps, "scale": r.Scale, "groups": float64(r.Groups), "top_groups": float64(r.TopGroups), "group_scores": truth(r.GroupsByMax),
	}
}

// eachRouter runs a case for every router, with f32 logits and with those of the round's type.
func (s *suite) eachRouter(f func(s *suite, r naive.Router, logits *value)) {
	const rows = 75
	for i, r := range routers {
		s.sub(fmt.Sprintf("router %d", i), func(s *suite) {
			logits := s.normal(rows, r.Experts)
			if i%2 == 0 {
				logits = s.f32(rows, r.Experts)
			}
			copy(logits.data[r.Experts:2*r.Experts], slices.Repeat([]float64{0.5}, r.Experts)) // equal scores
			f(s, r, logits)
		})
	}
}

func integral(x []float64) []int {
	out := make([]int, len(x))
	for i := range x {
		out[i] = int(x[i])
	}
	return out
}

func indices(x []int, shape ...int) *value {
	v := &value{dtype: ir.I32, shape: shape}
	for _, i := range x {
		v.data = append(v.data, float64(i))
	}
	return v
}

func caseRoute(s *suite) {
	s.eachRouter(func(s *suite, r naive.Router, logits *value) {
		for _, own := range [][2]int{{0, r.Experts}, {r.Experts / 2, (r.Experts + 1) / 2}, {1, 1}} {
			s.sub(fmt.Sprint("experts ", own), func(s *suite) { s.route(r, logits, own[0], own[1]) })
		}
	})
}

// route runs a case in which some experts, from the first on, are those of the rank.
func (s *suite) route(r naive.Router, logits *value, first, own int) {
	rows := logits.shape[0]
	in := args{
		"weights": s.outF32(rows, r.Top), "experts": nothing(ir.I32, []int{rows, r.Top}), "places": indices(make([]int, rows*r.Top), rows, r.Top),
		"ends": nothing(ir.I32, []int{own}), "logits": logits,
	}
	if r.Correction != nil {
		in["correction"] = &value{dtype: ir.F32, shape: []int{r.Experts}, data: r.Correction}
	}
	at := routerAttrs(r)
	at["first"] = float64(first)
	out := s.run(call{op: ir.Route, attrs: at, args: in})
	experts := r.Choose(logits.data)
	places, ends := naive.Places(experts, first, own)
	for name, want := range map[string][]int{"experts": experts, "places": places, "ends": ends} {
		if got := integral(out[name]); !slices.Equal(got, want) {
			s.Fatalf("%s is %v, not %v", name, got, want)
		}
	}
	s.equal("weights", out["weights"], r.Weights(logits.data, experts), ir.F32)
}

func caseRouteGrad(s *suite) {
	s.eachRouter(func(s *suite, r naive.Router, logits *value) {
		rows := logits.shape[0]
		experts, dy := r.Choose(logits.data), s.f32(rows, r.Top)
		at := routerAttrs(r)
		out := s.run(call{op: ir.RouteGrad, attrs: at, args: args{
			"dlogits": s.out(rows, r.Experts), "dy": dy, "logits": logits, "experts": indices(experts, rows, r.Top)}})
		var want []float64
		for row := range rows { // rows do not depend on each other
			chosen := experts[row*r.Top : (row+1)*r.Top]
			want = append(want, derivative(logits.data[row*r.Experts:(row+1)*r.Experts], dy.data[row*r.Top:(row+1)*r.Top], func(x []float64) []float64 {
				return r.Weights(x, chosen)
			})...)
		}
		s.equal("dlogits", out["dlogits"], want, s.dtype)
	})
}

func caseExpertCounts(s *suite) {
	s.eachRouter(func(s *suite, r naive.Router, logits *value) {
		s.onOff(func(s *suite, accumulate bool) {
			const batch = 3
			counts := s.sum(accumulate, batch, r.Experts)
			for i := range counts.data {
				counts.data[i] = math.Round(100 * counts.data[i])
			}
			out := s.run(call{op: ir.ExpertCounts, attrs: attrs{"top": float64(r.Top), "batch": batch, "accumulate": truth(accumulate)}, args: args{"counts": counts, "logits": logits}})
			if want := plus(accumulate, counts, r.Counts(logits.data, batch)); !slices.Equal(out["counts"], want) {
				s.Fatalf("counts are %v, not %v", out["counts"], want)
			}
		})
	})
}

func caseExpertLoad(s *suite) {
	s.eachRouter(func(s *suite, r naive.Router, logits *value) {
		s.onOff(func(s *suite, accumulate bool) {
			load, experts := s.sum(accumulate, r.Experts), r.Choose(logits.data)
			for i := range load.data {
				load.data[i] = math.Round(100 * load.data[i])
			}
			want := make([]float64, r.Experts)
			for _, e := range experts {
				want[e]++
			}
			out := s.run(call{op: ir.ExpertLoad, attrs: attrs{"accumulate": truth(accumulate)}, args: args{"load": load, "experts": indices(experts, logits.shape[0], r.Top)}})
			if want = plus(accumulate, load, want); !slices.Equal(out["load"], want) {
				s.Fatalf("load is %v, not %v", out["load"], want)
			}
		})
	})
}

// caseExpertBias has experts with more than the mean, with less and, of the last, exactly the mean.
func caseExpertBias(s *suite) {
	for _, n := range []int{1, 7, 300} {
		s.sub(fmt.Sprint(n), func(s *suite) {
			const rate = 0.125
			w, load, norm := s.f32(n), s.f32(n), s.f32(2)
			for i := range load.data {
				load.data[i] = float64(1000 + i%3)
			}
			if n%3 == 1 {
				load.data[n-1] = 1001
			}
			norm.data[1] = 0.5
			operands := args{"w": w, "load": load, "norm": norm}
			run := func() []float64 {
				return s.run(call{op: ir.ExpertBias, attrs: attrs{"rate": rate}, args: operands})["w"]
			}
			s.equal("w", run(), naive.Balance(w.data, load.data, rate), ir.F32)
			norm.data[1] = -1
			s.equal("w of a skipped step", run(), w.data, ir.F32)
		})
	}
}

func caseRouterLossGrad(s *suite) {
	s.eachRouter(func(s *suite, r naive.Router, logits *value) {
		for i, factors := range [][2]float64{{0.25, 0}, {0, 0.125}, {0.0625, 0.5}} {
			s.sub(fmt.Sprint(factors), func(s *suite) {
				const batch = 3
				z, balance := factors[0], factors[1]
				counts := &value{dtype: ir.F32, shape: []int{batch, r.Experts}, data: r.Counts(logits.data, batch)}
				in := args{"dlogits": s.out(logits.shape[0], r.Experts), "logits": logits, "counts": counts}
				if i == 0 {
					in["counts"] = nil
				}
				at := attrs{"scores": routerAttrs(r)["scores"], "batch": batch, "z": z, "balance": balance}
				out := s.run(call{op: ir.RouterLossGrad, attrs: at, args: in})
				var want []float64
				for row := range logits.shape[0] { // rows do not depend on each other
					own := counts.data[row%batch*r.Experts:][:r.Experts]
					want = append(want, naive.NumericGrad(func(x []float64) float64 { return r.Losses(x, own, z, balance) }, logits.data[row*r.Experts:][:r.Experts])...)
				}
				s.equal("dlogits", out["dlogits"], want, s.dtype)
			})
		}
	})
}

// routed returns places and ends of rows whose experts are drawn, for some of the experts; one has no rows.
func (s *suite) routed(rows, top, experts, first, own int) (places, ends []int) {
	var chosen []int
	for range rows {
		own := s.rng.Perm(experts - 1)
		for _, e := range own[:top] {
			chosen = append(chosen, e+min(1, e/2)) // not 2
		}
	}
	return naive.Places(chosen, first, own)
}

// permuted runs a case for rows of several widths, with places in n rows for all experts or for some.
func (s *suite) permuted(f func(s *suite, rows, top, cols, n int, places []int, at attrs)) {
	for _, size := range [][5]int{{45, 3, 41, 0, 6}, {70, 2, 64, 0, 6}, {33, 1, 7, 0, 6}, {40, 3, 24, 1, 2}, {37, 2, 9, 3, 3}} {
		s.sub(fmt.Sprint(size), func(s *suite) {
			rows, top, own := size[0], size[1], size[4]
			places, _ := s.routed(rows, top, 6, size[3], own)
			f(s, rows, top, size[2], rows*min(top, own), places, attrs{"top": float64(top)})
		})
	}
}

func casePermute(s *suite) {
	s.permuted(func(s *suite, rows, top, cols, n int, places []int, at attrs) {
		x, y := s.normal(rows, cols), s.normal(n, cols)
		out := s.run(call{op: ir.Permute, attrs: at, args: args{"y": y, "x": x, "places": indices(places, rows, top)}})
		s.equal("y", out["y"], naive.Permute(y.data, x.data, places, top), s.dtype)
	})
}

func casePermuteGrad(s *suite) {
	s.permuted(func(s *suite, rows, top, cols, n int, places []int, at attrs) {
		dy := s.normal(n, cols)
		out := s.run(call{op: ir.PermuteGrad, attrs: at, args: args{"dx": s.out(rows, cols), "dy": dy, "places": indices(places, rows, top)}})
		ones := slices.Repeat([]float64{1}, rows*top)
		s.equal("dx", out["dx"], naive.Unpermute(dy.data, cols, places, ones, top), s.dtype)
	})
}

func caseUnpermute(s *suite) {
	s.permuted(func(s *suite, rows, top, cols, n int, places []int, at attrs) {
		x, w := s.normal(n, cols), s.f32(rows, top)
		out := s.run(call{op: ir.Unpermute, attrs: at, args: args{"y": s.out(rows, cols), "x": x, "places": indices(places, rows, top), "weights": w}})
		s.equal("y", out["y"], naive.Unpermute(x.data, cols, places, w.data, top), s.dtype)
	})
}

func caseUnpermuteGrad(s *suite) {
	s.permuted(func(s *suite, rows, top, cols, n int, places []int, at attrs) {
		x, w, dy, into := s.normal(n, cols), s.f32(rows, top), s.normal(rows, cols), s.normal(n, cols)
		out := s.run(call{op: ir.UnpermuteGrad, attrs: at, args: args{
			"dx": into, "dweights": s.outF32(rows, top), "dy": dy, "x": x, "places": indices(places, rows, top), "weights": w}})
		dx := derivative(x.data, dy.data, func(x []float64) []float64 { return naive.Unpermute(x, cols, places, w.data, top) })
		for row := range n { // those without a token remain as they are
			if !slices.Contains(places, row) {
				copy(dx[row*cols:(row+1)*cols], into.data[row*cols:])
			}
		}
		dw := derivative(w.data, dy.data, func(w []float64) []float64 { return naive.Unpermute(x.data, cols, places, w, top) })
		s.equal("dx", out["dx"], dx, s.dtype)
		s.equal("dweights", out["dweights"], dw, ir.F32)
	})
}

// grouped runs a case for products of several sizes.
func (s *suite) grouped(f func(s *suite, n, inner, outer int, ends []int)) {
	for _, size := range [][4]int{{90, 23, 37, 5}, {400, 48, 72, 5}, {3, 8, 16, 5}, {150, 24, 40, 3}} {
		s.sub(fmt.Sprint(size), func(s *suite) {
			_, ends := s.routed(size[0], 1, 5, 0, size[3])
			f(s, size[0], size[1], size[2], ends)
		})
	}
}

// transposedEach transposes matrices that are one below the other.
func transposedEach(data []float64, rows, cols int) []float64 {
	out := make([]float64, len(data))
	for i := range data {
		e, r, c := i/(rows*cols), i/cols%rows, i%cols
		out[(e*cols+c)*rows+r] = data[i]
	}
	return out
}

// onto returns what a value holds once its first elements are overwritten.
func onto(v *value, first []float64) []float64 { return append(first, v.data[len(first):]...) }

func caseMatmulGrouped(s *suite) {
	s.grouped(func(s *suite, n, inner, outer int, ends []int) {
		for _, biased := range []bool{false, true} {
			a, b, bias := s.normal(n, inner), s.normal(len(ends), inner, outer), s.normal(len(ends), outer)
			c := s.normal(n, outer)
			in := args{"c": c, "a": a, "ends": indices(ends, len(ends)), "b": b, "bias": bias}
			if !biased {
				in["bias"], bias = nil, &value{}
			}
			out := s.run(call{op: ir.MatmulGrouped, args: in})
			s.equal("c", out["c"], onto(c, naive.MatMulGrouped(a.data, b.data, bias.data, ends, inner, outer)), s.dtype)
		}
	})
	s.sub("transposed", func(s *suite) {
		s.grouped(func(s *suite, n, inner, outer int, ends []int) {
			a, b, c := s.normal(n, inner), s.normal(len(ends), outer, inner), s.normal(n, outer)
			in := args{"c": c, "a": a, "ends": indices(ends, len(ends)), "b": b}
			out := s.run(call{op: ir.MatmulGrouped, attrs: attrs{"trans_b": truth(true)}, args: in})
			s.equal("c", out["c"], onto(c, naive.MatMulGrouped(a.data, transposedEach(b.data, outer, inner), nil, ends, inner, outer)), s.dtype)
		})
	})
	s.sub("accumulate", func(s *suite) {
		s.grouped(func(s *suite, n, inner, outer int, ends []int) {
			for _, transposed := range []bool{false, true} {
				a, b, c := s.normal(n, inner), s.normal(len(ends), inner, outer), s.normal(n, outer)
				want := naive.MatMulGrouped(a.data, b.data, nil, ends, inner, outer)
				for i := range want {
					want[i] += c.data[i]
				}
				if transposed {
					b = &value{dtype: b.dtype, shape: []int{len(ends), outer, inner}, data: transposedEach(b.data, inner, outer)}
				}
				in := args{"c": c, "a": a, "ends": indices(ends, len(ends)), "b": b}
				out := s.run(call{op: ir.MatmulGrouped, attrs: attrs{"trans_b": truth(transposed), "accumulate": truth(true)}, args: in})
				s.equal("c", out["c"], onto(c, want), s.dtype)
			}
		})
	})
}

func caseMatmulGroupedWeightGrad(s *suite) {
	for _, transposed := range []bool{false, true} {
		s.sub(fmt.Sprint("transposed ", transposed), func(s *suite) {
			s.grouped(func(s *suite, n, inner, outer int, ends []int) {
				s.onOff(func(s *suite, accumulate bool) { s.groupedWeightGrad(n, inner, outer, ends, transposed, accumulate) })
			})
			s.sub("biases only", func(s *suite) {
				dy, dbias, ends := s.normal(90, 37), s.sum(true, 3, 37), []int{10, 10, 71}
				out := s.run(call{op: ir.MatmulGroupedWeightGrad, attrs: attrs{"trans_b": truth(transposed), "accumulate_bias": truth(true)}, args: args{
					"db": nil, "dbias": dbias, "dy": dy, "ends": indices(ends, 3), "a": nil}})
				s.equal("dbias", out["dbias"], plus(true, dbias, sumsOfRows(dy.data, 37, ends)), ir.F32)
			})
		})
	}
}

// sumsOfRows returns the sum of the rows of each expert.
func sumsOfRows(rows []float64, cols int, ends []int) (sums []float64) {
	first := 0
	for _, end := range ends {
		sums = append(sums, naive.MatMul(slices.Repeat([]float64{1}, end-first), rows[first*cols:end*cols], nil, 1, cols, end-first, false, false)...)
		first = end
	}
	return sums
}

func (s *suite) groupedWeightGrad(n, inner, outer int, ends []int, transposed, accumulate bool) {
	dy, a := s.normal(n, outer), s.normal(n, inner)
	rows, cols := inner, outer
	if transposed {
		rows, cols = outer, inner
	}
	db, dbias := s.sum(accumulate, len(ends), rows, cols), s.sum(accumulate != transposed, len(ends), outer)
	if n < 10 {
		dbias = nil
	}
	out := s.run(call{op: ir.MatmulGroupedWeightGrad, attrs: attrs{"trans_b": truth(transposed), "accumulate": truth(accumulate), "accumulate_bias": truth(accumulate != transposed)}, args: args{
		"db": db, "dbias": dbias, "dy": dy, "ends": indices(ends, len(ends)), "a": a}})
	var wantB []float64
	first := 0
	for _, end := range ends {
		own := dy.data[first*outer : end*outer]
		product := naive.MatMul(a.data[first*inner:end*inner], own, nil, inner, outer, end-first, true, false)
		if transposed {
			product = transposedEach(product, inner, outer)
		}
		wantB = append(wantB, product...)
		first = end
	}
	wantBias := sumsOfRows(dy.data, outer, ends)
	s.equal("db", out["db"], plus(accumulate, db, wantB), ir.F32)
	if dbias != nil {
		s.equal("dbias", out["dbias"], plus(accumulate != transposed, dbias, wantBias), ir.F32)
	}
}
