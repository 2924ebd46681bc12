package vm

import (
	"slices"
	"testing"

	"sppo.dev/ir"
)

// Collectives of the same ranks on a stream form a group unless something other than a wait of the stream is between them.
func TestGroups(t *testing.T) {
	at := func(op ir.Op, s ir.Stream, attr int64) ir.Instr {
		return ir.Instr{Op: op, Stream: s, Attrs: []ir.Attr{ir.Int(attr)}}
	}
	code := []ir.Instr{
		at(ir.AllGather, ir.Params, 1), at(ir.Wait, ir.Params, 0), at(ir.AllGather, ir.Params, 1), at(ir.AllReduce, ir.Params, 1), // a group
		at(ir.AllGather, ir.Params, 2),                              // of other ranks
		at(ir.Record, ir.Params, 0), at(ir.AllGather, ir.Params, 2), // behind an event
		at(ir.AllGather, ir.Coll, 2),                            // on another stream
		at(ir.Wait, ir.Params, 0), at(ir.AllGather, ir.Coll, 2), // a wait of another stream
		at(ir.AllToAll, ir.Coll, 2), at(ir.AllGather, ir.Coll, 2), // of another kind
	}
	var grouped, last []int
	for pc, is := range Groups(code) {
		if is {
			grouped = append(grouped, pc)
		}
	}
	for pc, is := range GroupEnds(code) {
		if is {
			last = append(last, pc)
		}
	}
	if !slices.Equal(grouped, []int{2, 3}) || !slices.Equal(last, []int{3, 4, 6, 7, 9, 10, 11}) {
		t.Errorf("grouped: %v, last of their groups: %v", grouped, last)
	}
}
