package store

import (
	"strings"
	"testing"
)

// FuzzManifest reads hostile manifests with a right checksum. What is read can be written and read again.
func FuzzManifest(f *testing.F) {
	m := &Manifest{Format: Format, Step: 3, Shards: []Shard{{File: "a", Bytes: 4, CRC32C: "00000000"}}}
	text, err := m.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte("{\n \"format\": 1\n}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, text := range [][]byte{text, sealed(text)} {
			m, err := decode(text)
			if err != nil {
				if strings.Contains(err.Error(), "\n") {
					t.Errorf("an error of several lines: %q", err)
				}
				continue
			}
			again, err := m.encode()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := decode(again); err != nil {
				t.Errorf("%v, after %q was read", err, text)
			}
		}
	})
}

// sealed replaces the checksum of a manifest by the right one.
func sealed(text []byte) []byte {
	if at := strings.LastIndex(string(text), sealBefore); at >= 0 {
		text = text[:at]
	}
	text = append([]byte(nil), text...)
	sum := Checksum(text)
	return append(text, sealBefore+sum+sealAfter...)
}
