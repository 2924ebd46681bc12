package ir

import (
	"slices"
	"testing"
)

// Collectives of the same ranks on a stream form a group unless something other than a wait of the stream is between them.
func TestGroups(t *testing.T) {
	at := func(op Op, s Stream, attr int64) Instr { return Instr{Op: op, Stream: s, Attrs: []Attr{Int(attr)}} }
	code := []Instr{
		at(AllGather, Params, 1), at(Wait, Params, 0), at(AllGather, Params, 1), at(AllReduce, Params, 1), // a group
		at(AllGather, Params, 2),                        // of other ranks
		at(Record, Params, 0), at(AllGather, Params, 2), // behind an event
		at(AllGather, Coll, 2),                      // on another stream
		at(Wait, Params, 0), at(AllGather, Coll, 2), // a wait of another stream
		at(AllToAll, Coll, 2), at(AllGather, Coll, 2), // of another kind
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
