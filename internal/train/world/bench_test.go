package world

import (
	"errors"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest"
)

// BenchmarkWire measures messages of 64 MiB between two processes on the loopback interface, including their CRCs.
func BenchmarkWire(b *testing.B) {
	const size = 64 << 20
	place := vmtest.FreePlace(b)
	worlds, errs := make([]*World, 2), make([]error, 2)
	done := make(chan struct{})
	join := func(i int) {
		worlds[i], errs[i] = Join(b.Context(), Options{Process: i, Processes: 2, Ranks: 2, Rendezvous: place, Timeout: 1 << 34, Local: -1, Wires: true})
	}
	go func() { defer close(done); join(1) }()
	join(0)
	<-done
	if err := errors.Join(errs...); err != nil {
		b.Fatal(err)
	}
	over := transports(worlds)
	from, to := over[0].Link(0, 1, vm.ChannelNext), over[1].Link(0, 1, vm.ChannelNext)
	x, y := make([]byte, size), make([]byte, size)
	b.SetBytes(size)
	for b.Loop() {
		go from.Send(x)
		if err := to.Recv(y); err != nil {
			b.Fatal(err)
		}
	}
	go worlds[0].Close(nil)
	worlds[1].Close(nil)
}
