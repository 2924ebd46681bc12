package vmtest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreePlace returns a local address on which nothing listens. Its port is below those that the system assigns,
// because the system might give one of those to another connection before the test listens on it.
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
