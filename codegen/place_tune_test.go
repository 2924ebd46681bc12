package codegen

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"sppo/ir"
)

func (p *placer) attempt2(order []int32) int {
	p.sky.reset()
	extent := ir.Bytes(0)
	for k, i := range order {
		size := p.lives[i].padded()
		at := p.sky.lowestGap(p.spans[i], size)
		if extent = max(extent, at+size); extent >= p.extent {
			return k
		}
		p.sky.occupy(p.spans[i], byteRange{at, at + size})
		p.offsets[i] = at
	}
	p.extent = extent
	p.offsets, p.best = p.best, p.offsets
	return -1
}


func TestPlaceTune(t *testing.T) {
	run := func(name string, lives []life) {
		fmt.Printf("%-14s %6d", name, len(lives))
		for _, set := range [][]int{{0}, {0, 1}, {0, 1, 3, 4}, {0,1,2,3,4,5}, {3}} {
		for mode := range 2 {
		pl := newPlacer(lives)
		budget := min(30_000_000, 1000*len(lives))
		var order []int32
		for _, n := range set {
			compare := pl.orders()[n]
			if pl.extent <= pl.bound+pl.bound/256 { break }
			o := make([]int32, len(pl.lives))
			for i := range o { o[i] = int32(i) }
			slices.SortFunc(o, func(i, j int32) int { return cmp.Or(compare(i, j), cmp.Compare(i, j)) })
			if pl.attempt2(o) < 0 { order = o }
		}
		last := order
		tries := 0
		for pl.sky.steps < budget && pl.extent > pl.bound+pl.bound/256 {
			tries++
			k := pl.attempt2(last)
			if k < 0 { order = slices.Clone(last); continue }
			i := last[k]
			to := 0
			if mode == 1 { to = max(0, k - k/8 - 1) }
			last = slices.Insert(slices.Delete(slices.Clone(last), k, k+1), to, i)
		}
		fmt.Printf(" %d.%d:%.4f/%d/%dM", len(set), mode, float64(pl.extent)/float64(pl.bound), tries, pl.sky.steps/1000000)
		}
		}
		fmt.Println()
	}
	for _, p := range pipelines {
		run(p.name, p.lives())
	}
	for _, n := range []int{100, 1000, 5000} {
	for kind, name := range lifeKinds {
		run("rand-"+name, randomLives(rand.New(rand.NewPCG(1,2)), n, kind))
	}}
}
