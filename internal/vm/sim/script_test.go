package sim_test

import (
	"fmt"
	"testing"

	"sppo.dev/ir"
)

// machine makes durations readable: a d2d copy of n bytes takes n seconds, as does a copy to or from the host,
// a message, or a collective in which each rank sends n bytes.
var machine = ir.Machine{
	Nodes: 1, GPUsPerNode: 8, PeakF32: 2, PeakBF16: 4, MemoryBandwidth: 2, CopyEfficiency: 1,
	D2HBandwidth: 1, H2DBandwidth: 1, NVLinkBandwidth: 1, NodeNetworkBandwidth: 1, CollectiveEfficiency: 1,
}

// script writes the step of one rank by hand. Each rank has its own code.
type script struct {
	code ir.Code
}

// view returns a view of a new buffer.
func (s *script) view(a ir.Arena, t ir.DType, dims ...int) ir.View {
	v := ir.View{Buffer: uint32(len(s.code.Buffers)), DType: t}
	for i, d := range dims {
		v.Shape[i] = int64(d)
	}
	at := (s.code.Arenas[a] + 3) &^ 3
	s.code.Buffers = append(s.code.Buffers, ir.Buffer{Name: fmt.Sprint("b", v.Buffer), Arena: a, Offset: at, Size: v.Bytes()})
	s.code.Arenas[a] = at + v.Bytes()
	return v
}

func (s *script) bytes(n int) ir.View { return s.view(ir.Device, ir.U8, n) }

func (s *script) add(op ir.Op, stream ir.Stream, args []ir.View, attrs ...ir.Attr) {
	list := &s.code.Sections[ir.SectionStep]
	*list = append(*list, ir.Instr{Op: op, Stream: stream, Args: args, Attrs: attrs})
}

func (s *script) work(stream ir.Stream, seconds int) {
	s.add(ir.CopyD2D, stream, []ir.View{s.bytes(seconds), s.bytes(seconds)})
}

func (s *script) d2h(seconds int) {
	s.add(ir.CopyD2H, ir.D2H, []ir.View{s.view(ir.Host, ir.U8, seconds), s.bytes(seconds)})
}

func (s *script) h2d(seconds int) {
	s.add(ir.CopyH2D, ir.H2D, []ir.View{s.bytes(seconds), s.view(ir.Host, ir.U8, seconds)})
}

func (s *script) send(stream ir.Stream, seconds, peer int) {
	s.add(ir.Send, stream, []ir.View{s.bytes(seconds)}, ir.Int(int64(peer)))
}

func (s *script) recv(stream ir.Stream, seconds, peer int) {
	s.add(ir.Recv, stream, []ir.View{s.bytes(seconds)}, ir.Int(int64(peer)))
}

func (s *script) gather(share, ranks int) {
	s.add(ir.AllGather, ir.Coll, []ir.View{s.bytes(share * ranks), s.bytes(share)}, ir.Int(0))
}

func (s *script) record(stream ir.Stream, event int) {
	s.add(ir.Record, stream, nil, ir.Int(int64(event)))
	s.code.Events[ir.SectionStep] = max(s.code.Events[ir.SectionStep], int32(event+1))
}

func (s *script) wait(stream ir.Stream, event int) {
	s.add(ir.Wait, stream, nil, ir.Int(int64(event)))
}

// then makes stream b wait for everything that stream a has done so far.
func (s *script) then(a, b ir.Stream) {
	event := int(s.code.Events[ir.SectionStep])
	s.record(a, event)
	s.wait(b, event)
}

// program returns a program with one rank for each script; group 0 contains all ranks.
func program(scripts ...*script) *ir.Program {
	p := &ir.Program{Name: "script", Machine: machine, Groups: []string{"all"}, Lines: []string{""}}
	var all []int32
	for r := range scripts {
		all = append(all, int32(r))
	}
	for r, s := range scripts {
		s.code.Name = fmt.Sprint("rank", r)
		p.Codes = append(p.Codes, s.code)
		p.Ranks = append(p.Ranks, ir.Rank{Code: int32(r), Groups: [][]int32{all}})
	}
	return p
}

// pipeline returns a sequence pipeline with the given times for the forward and backward passes of each
// subsequence, and messages that take no time.
func pipeline(stages int, f, b []int) *ir.Program {
	var scripts []*script
	for i := range stages {
		s := &script{}
		for x := range f {
			if i > 0 {
				s.recv(ir.RecvPrev, 0, i-1)
				s.then(ir.RecvPrev, ir.Compute)
			}
			s.work(ir.Compute, f[x])
			if i < stages-1 {
				s.then(ir.Compute, ir.SendNext)
				s.send(ir.SendNext, 0, i+1)
			}
		}
		for x := len(b) - 1; x >= 0; x-- {
			if i < stages-1 {
				s.recv(ir.RecvNext, 0, i+1)
				s.then(ir.RecvNext, ir.Compute)
			}
			s.work(ir.Compute, b[x])
			if i > 0 {
				s.then(ir.Compute, ir.SendPrev)
				s.send(ir.SendPrev, 0, i-1)
			}
		}
		scripts = append(scripts, s)
	}
	return program(scripts...)
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if d := got - want; d > 1e-9*max(want, 1) || d < -1e-9*max(want, 1) {
		t.Errorf("%s is %g, want %g", what, got, want)
	}
}

// phase sets the phase of the last instruction.
func (s *script) phase(p ir.Phase) {
	list := s.code.Sections[ir.SectionStep]
	list[len(list)-1].Prov.Phase = p
}
