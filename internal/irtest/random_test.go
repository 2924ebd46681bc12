package irtest_test

import (
	"reflect"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

func TestRandomProgramsCoverTheTable(t *testing.T) {
	var ops [ir.NumOps]int
	var streams [ir.NumStreams]int
	for seed := range uint64(20) {
		p := irtest.Random(seed, 400)
		if !reflect.DeepEqual(p, irtest.Random(seed, 400)) {
			t.Fatalf("seed %d: equal seeds, different programs", seed)
		}
		for i := range p.Codes {
			for s := range p.Codes[i].Sections {
				for _, in := range p.Codes[i].Sections[s] {
					ops[in.Op]++
					streams[in.Stream]++
				}
			}
		}
	}
	for op, n := range ops {
		if n == 0 {
			t.Errorf("no random program has a %s", ir.Ops[op].Name)
		}
	}
	for s, n := range streams {
		if n == 0 {
			t.Errorf("no random program uses stream %s", ir.Stream(s))
		}
	}
}
