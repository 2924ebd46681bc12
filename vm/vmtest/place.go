package vmtest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreePlace returns an address of this host where nobody listens. Its port lies below those that a system hands out by itself: one of
// those may be another's connection by the time that it is used.
func FreePlace(t testing.TB) string {
	t.Helper()
	const lowest, many = 10_000, 20_000
	for range 100 {
		place := fmt.Sprintf("127.0.0.1:%d", lowest+rand.IntN(many))
		if l, err := net.Listen("tcp", place); err == nil {
			l.Close()
			return place
		}
	}
	t.Fatal("no port is free")
	return ""
}
