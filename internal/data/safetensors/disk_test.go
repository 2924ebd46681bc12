package safetensors

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// Files of various lengths, written in pieces of random lengths, contain exactly the bytes written, whether
// or not the page cache is bypassed, and even if the file system rejects the alignment of a direct write.
func TestDiskWriter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	content := make([]byte, 2*diskBytes+diskAlign)
	for i := range content {
		content[i] = byte(rng.Uint32())
	}
	for _, size := range []int{0, 1, diskAlign, diskBytes - 1, diskBytes, diskBytes + 1, 2 * diskBytes, len(content) - 1} {
		for _, misaligned := range []bool{false, true} {
			path := filepath.Join(t.TempDir(), "file")
			file, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			d := newDiskWriter(file, int64(size))
			if misaligned && size > diskBytes {
				d.block = make([]byte, 1+diskBytes)[1:1]
			}
			for rest := content[:size]; len(rest) > 0; {
				n := min(len(rest), 1+rng.IntN(diskBytes))
				if wrote, err := d.Write(rest[:n]); wrote != n || err != nil {
					t.Fatalf("%d of %d bytes: %v", wrote, n, err)
				}
				rest = rest[n:]
			}
			if err := d.finish(); err != nil {
				t.Fatal(err)
			}
			if err := file.Close(); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, content[:size]) {
				t.Errorf("size %d, misaligned %t: the file has %d bytes, or others: %v", size, misaligned, len(got), err)
			}
		}
	}
}
