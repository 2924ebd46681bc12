package codegen

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

const testPass = 7

func TestSynchroniseOrdersEveryConflictAndNothingIsSpare(t *testing.T) {
	seed := irtest.Seed(t)
	rng := rand.New(rand.NewPCG(seed, 1))
	waits := 0
	for trial := range 400 {
		instrs, buffers := randomSection(rng)
		out, events := synchronise(instrs, buffers, testPass)
		checkEvents(t, instrs, out, events)
		if a, b, racy := findRace(out, buffers); racy {
			t.Fatalf("trial %d: instructions %d and %d are not ordered:\n%s", trial, a, b, listing(out))
		}
		for i := range out {
			if out[i].Op != ir.Wait {
				continue
			}
			waits++
			less := append(append([]ir.Instr{}, out[:i]...), out[i+1:]...)
			if _, _, racy := findRace(less, buffers); !racy {
				t.Fatalf("trial %d: wait %d is spare:\n%s", trial, i, listing(out))
			}
		}
	}
	if waits < 1000 {
		t.Errorf("only %d waits in all: the random sections test too little", waits)
	}
}

// The addresses of a section take memory once, however often instructions use them.
func TestHistoryKeepsAddressesOnce(t *testing.T) {
	buffers := []ir.Buffer{{Size: 1024}, {Size: 1024, Offset: 1024}}
	var instrs []ir.Instr
	for i := range 4 * leastStops {
		at := ir.Bytes(i%4) * 256
		instrs = append(instrs, copyInstr(ir.CopyD2D, ir.Compute, view(1, at, 256), view(0, at, 256)))
	}
	h := newHistory(instrs, buffers)
	if len(h.stops) != 9 || cap(h.stops) > 2*leastStops {
		t.Errorf("%d addresses, with room for %d; there are 9", len(h.stops), cap(h.stops))
	}
}

func TestSynchroniseKeepsReadsApart(t *testing.T) {
	buffers := []ir.Buffer{{Size: 1024}, {Size: 1024, Arena: ir.Host}}
	instrs := []ir.Instr{
		copyInstr(ir.CopyD2H, ir.D2H, view(1, 0, 256), view(0, 0, 256)),
		copyInstr(ir.CopyD2D, ir.Compute, view(0, 512, 256), view(0, 0, 256)), // reads the same bytes
		copyInstr(ir.CopyH2D, ir.H2D, view(0, 256, 256), view(1, 256, 256)),   // other bytes of both buffers
	}
	if out, events := synchronise(instrs, buffers, testPass); events != 0 || len(out) != len(instrs) {
		t.Errorf("%d events where nothing conflicts:\n%s", events, listing(out))
	}
}

func TestSynchroniseSharesEventsAndDropsImpliedWaits(t *testing.T) {
	buffers := []ir.Buffer{{Size: 256}, {Size: 256, Offset: 256}, {Size: 256, Offset: 512}, {Size: 256, Arena: ir.Host}}
	instrs := []ir.Instr{
		copyInstr(ir.CopyD2D, ir.Compute, view(1, 0, 256), view(0, 0, 256)),
		copyInstr(ir.CopyD2D, ir.Mux, view(2, 0, 256), view(1, 0, 256)), // waits for 0
		copyInstr(ir.CopyD2H, ir.D2H, view(3, 0, 256), view(1, 0, 256)), // waits for 0, using the same event
		copyInstr(ir.CopyH2D, ir.H2D, view(1, 0, 256), view(3, 0, 256)), // waits for 1 and 2; 0 is implied
	}
	out, events := synchronise(instrs, buffers, testPass)
	want := "compute d2d, compute record 0, mux wait 0, mux d2d, mux record 1, d2h wait 0, d2h d2h, d2h record 2, h2d wait 2, h2d wait 1, h2d h2d"
	if got := listing(out); got != want || events != 3 {
		t.Errorf("got %d events:\n%s\nwant 3:\n%s", events, got, want)
	}
}

func TestSynchroniseProvenance(t *testing.T) {
	buffers := []ir.Buffer{{Size: 256}, {Size: 256, Offset: 256}, {Size: 256, Arena: ir.Host}}
	instrs := []ir.Instr{
		copyInstr(ir.CopyD2D, ir.Compute, view(1, 0, 256), view(0, 0, 256)),
		copyInstr(ir.CopyD2H, ir.D2H, view(2, 0, 256), view(1, 0, 256)),
	}
	instrs[0].Prov = ir.Provenance{Subsequence: 3, Layer: 4, Pass: 1}
	instrs[1].Prov = ir.Provenance{Subsequence: 3, Layer: 5, Pass: 2}
	out, _ := synchronise(instrs, buffers, testPass)
	record, wait := instrs[0].Prov, instrs[1].Prov
	record.Pass, wait.Pass = testPass, testPass
	if out[1].Prov != record || out[2].Prov != wait || out[3].Prov != instrs[1].Prov {
		t.Errorf("provenance is not that of producer and consumer:\n%+v", out)
	}
}

// checkEvents checks that all original instructions are present, in their original order. Every event must have
// one record, right after its producer, and waits only after the record and on other streams.
func checkEvents(t *testing.T, instrs, out []ir.Instr, events int32) {
	t.Helper()
	rest, recorded := 0, map[int64]ir.Stream{}
	for i := range out {
		in := &out[i]
		switch in.Op {
		case ir.Record:
			event := in.Attr("event").Int(nil)
			if _, twice := recorded[event]; twice || event != int64(len(recorded)) {
				t.Fatalf("event %d is not the next one at %d", event, i)
			}
			if i == 0 || out[i-1].Stream != in.Stream || out[i-1].Op == ir.Wait {
				t.Fatalf("record %d does not follow its producer", i)
			}
			recorded[event] = in.Stream
		case ir.Wait:
			if stream, ok := recorded[in.Attr("event").Int(nil)]; !ok || stream == in.Stream {
				t.Fatalf("wait %d is before its record or on its stream", i)
			}
		default:
			if in.Op != instrs[rest].Op || &in.Args[0] != &instrs[rest].Args[0] {
				t.Fatalf("instruction %d is not the %dth of the section", i, rest)
			}
			rest++
		}
	}
	if rest != len(instrs) || int(events) != len(recorded) {
		t.Fatalf("%d instructions of %d, %d events of %d", rest, len(instrs), events, len(recorded))
	}
}

// findRace looks for a conflicting pair without a path between them. It computes the transitive closure of the
// order that streams and events impose.
func findRace(instrs []ir.Instr, buffers []ir.Buffer) (a, b int, found bool) {
	before := make([][]bool, len(instrs)) // before[i][j]: j is done when i starts
	lastOf, recordOf := map[ir.Stream]int{}, map[int64]int{}
	for i := range instrs {
		before[i] = make([]bool, len(instrs))
		follow := func(j int) {
			before[i][j] = true
			for k := range before[j] {
				before[i][k] = before[i][k] || before[j][k]
			}
		}
		if j, ok := lastOf[instrs[i].Stream]; ok {
			follow(j)
		}
		if instrs[i].Op == ir.Wait {
			follow(recordOf[instrs[i].Attr("event").Int(nil)])
		}
		if instrs[i].Op == ir.Record {
			recordOf[instrs[i].Attr("event").Int(nil)] = i
		}
		lastOf[instrs[i].Stream] = i
		for j := range i {
			if !before[i][j] && conflict(&instrs[i], &instrs[j], buffers) {
				return j, i, true
			}
		}
	}
	return 0, 0, false
}

func conflict(a, b *ir.Instr, buffers []ir.Buffer) bool {
	for i, v := range a.Args {
		for j, w := range b.Args {
			if !v.Present() || !w.Present() || buffers[v.Buffer].Arena != buffers[w.Buffer].Arena {
				continue
			}
			_, vWrites := a.Access(i)
			_, wWrites := b.Access(j)
			lo, other := buffers[v.Buffer].Offset+v.Offset, buffers[w.Buffer].Offset+w.Offset
			if (vWrites || wWrites) && lo < other+w.Bytes() && other < lo+v.Bytes() {
				return true
			}
		}
	}
	return false
}

// randomSection returns instructions that use few bytes, with overlapping buffers and every kind of access.
func randomSection(rng *rand.Rand) ([]ir.Instr, []ir.Buffer) {
	const extent = 64
	buffers := make([]ir.Buffer, 2+rng.IntN(8))
	for i := range buffers {
		size := 1 + rng.IntN(extent/2)
		buffers[i] = ir.Buffer{Arena: ir.Arena(rng.IntN(2)), Offset: ir.Bytes(rng.IntN(extent - size)), Size: ir.Bytes(size)}
	}
	anyView := func() ir.View {
		if rng.IntN(10) == 0 {
			return ir.Absent()
		}
		b := rng.IntN(len(buffers))
		offset := rng.IntN(int(buffers[b].Size))
		return view(uint32(b), ir.Bytes(offset), ir.Bytes(1+rng.IntN(int(buffers[b].Size)-offset)))
	}
	ops := []ir.Op{ir.Matmul, ir.Attention, ir.CopyD2D, ir.Fill, ir.AllReduce, ir.Send, ir.AdamW, ir.LayerNormGrad}
	streams := 2 + rng.IntN(int(ir.NumStreams)-1)
	instrs := make([]ir.Instr, 5+rng.IntN(40))
	for i := range instrs {
		in := ir.Instr{Op: ops[rng.IntN(len(ops))], Stream: ir.Stream(rng.IntN(streams))}
		info := in.Info()
		for range info.Operands {
			in.Args = append(in.Args, anyView())
		}
		for range info.Attrs {
			in.Attrs = append(in.Attrs, ir.Int(rng.Int64N(2)))
		}
		instrs[i] = in
	}
	return instrs, buffers
}

func view(buffer uint32, offset, size ir.Bytes) ir.View {
	return ir.View{Buffer: buffer, Offset: offset, Shape: [ir.MaxDims]int64{int64(size)}, DType: ir.U8}
}

func copyInstr(op ir.Op, stream ir.Stream, y, x ir.View) ir.Instr {
	return ir.Instr{Op: op, Stream: stream, Args: []ir.View{y, x}}
}

// listing prints stream, opcode and event of every instruction.
func listing(instrs []ir.Instr) string {
	text := ""
	for i := range instrs {
		if i > 0 {
			text += ", "
		}
		text += fmt.Sprintf("%v %s", instrs[i].Stream, instrs[i].Info().Name)
		if instrs[i].Info().Class == ir.ClassSync {
			text += fmt.Sprintf(" %d", instrs[i].Attr("event").Int(nil))
		}
	}
	return text
}

// pipelineSection imitates one stage's step: K and V caches that grow with each subsequence and are read as
// prefixes, units that are offloaded and reloaded, collectives, and accumulated weight gradients.
func pipelineSection(subsequences, layers int) ([]ir.Instr, []ir.Buffer) {
	const rows, units = 64, 8
	var instrs []ir.Instr
	var buffers []ir.Buffer
	extent := [ir.NumArenas]ir.Bytes{}
	buffer := func(arena ir.Arena, size ir.Bytes) uint32 {
		buffers = append(buffers, ir.Buffer{Arena: arena, Offset: extent[arena], Size: size})
		extent[arena] += size
		return uint32(len(buffers) - 1)
	}
	emit := func(op ir.Op, stream ir.Stream, accumulate bool, args ...ir.View) {
		in := ir.Instr{Op: op, Stream: stream, Args: args, Attrs: make([]ir.Attr, len(ir.Ops[op].Attrs))}
		for i, attr := range ir.Ops[op].Attrs {
			if attr.Name == "accumulate" {
				in.Attrs[i] = ir.Bool(accumulate)
			}
		}
		instrs = append(instrs, in)
	}
	type layer struct{ k, v, dk, dv, weight, grad uint32 }
	stage := make([]layer, layers)
	for l := range stage {
		for _, b := range []*uint32{&stage[l].k, &stage[l].v, &stage[l].dk, &stage[l].dv, &stage[l].weight, &stage[l].grad} {
			*b = buffer(ir.Device, ir.Bytes(rows*subsequences))
		}
	}
	var ring [2][units]uint32
	for r := range ring {
		for u := range ring[r] {
			ring[r][u] = buffer(ir.Device, rows)
		}
	}
	whole := func(b uint32) ir.View { return view(b, 0, buffers[b].Size) }
	hosts := map[[3]int]uint32{}
	for i := range subsequences {
		for l, s := range stage {
			unit := ring[(i*layers+l)%2]
			at, prefix := ir.Bytes(rows*i), ir.Bytes(rows*(i+1))
			emit(ir.AllGather, ir.Coll, false, whole(unit[0]), whole(unit[units-1]))
			emit(ir.Matmul, ir.Compute, false, view(s.k, at, rows), whole(unit[0]), whole(s.weight), ir.Absent())
			emit(ir.Matmul, ir.Compute, false, view(s.v, at, rows), whole(unit[0]), whole(s.weight), ir.Absent())
			emit(ir.Attention, ir.Compute, false, whole(unit[1]), whole(unit[2]), whole(unit[3]), view(s.k, 0, prefix), view(s.v, 0, prefix))
			for u := 4; u < units; u++ {
				emit(ir.Matmul, ir.Compute, false, whole(unit[u]), whole(unit[u-1]), whole(s.weight), ir.Absent())
			}
			for u := range units {
				host := buffer(ir.Host, rows)
				hosts[[3]int{i, l, u}] = host
				emit(ir.CopyD2H, ir.D2H, false, whole(host), whole(unit[u]))
			}
		}
	}
	for i := subsequences - 1; i >= 0; i-- {
		for l := layers - 1; l >= 0; l-- {
			s, unit := stage[l], ring[(i*layers+l)%2]
			prefix := ir.Bytes(rows * (i + 1))
			for u := range units {
				emit(ir.CopyH2D, ir.H2D, false, whole(unit[u]), whole(hosts[[3]int{i, l, u}]))
			}
			for u := units - 1; u >= 4; u-- {
				emit(ir.Matmul, ir.Compute, i < subsequences-1, whole(s.grad), whole(unit[u-1]), whole(unit[u]), ir.Absent())
			}
			emit(ir.AttentionGrad, ir.Compute, i < subsequences-1, whole(unit[2]), view(s.dk, 0, prefix), view(s.dv, 0, prefix),
				whole(unit[1]), whole(unit[4]), view(s.k, 0, prefix), view(s.v, 0, prefix), whole(unit[0]), whole(unit[3]))
			emit(ir.ReduceScatter, ir.Coll, false, whole(unit[7]), whole(unit[2]))
		}
	}
	return instrs, buffers
}

func TestSynchronisePipeline(t *testing.T) {
	instrs, buffers := pipelineSection(4, 2)
	out, events := synchronise(instrs, buffers, testPass)
	checkEvents(t, instrs, out, events)
	if a, b, racy := findRace(out, buffers); racy {
		t.Errorf("instructions %d and %d are not ordered", a, b)
	}
}

func BenchmarkSynchronise(b *testing.B) {
	for _, layers := range []int{5, 10, 20, 40} {
		instrs, buffers := pipelineSection(128, layers)
		b.Run(fmt.Sprintf("instrs=%d", len(instrs)), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				synchronise(instrs, buffers, testPass)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(instrs)), "ns/instr")
		})
	}
}
