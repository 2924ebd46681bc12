package ir_test

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"reflect"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// preambleBytes is the size of the magic, the version and the hash of the opcode table.
const preambleBytes = 8 + 4 + 8

// sealed restores the start and the checksum of a mutated file, so that the fuzzer gets past the checks of
// both.
func sealed(data, whole []byte) []byte {
	if len(data) < preambleBytes+5 {
		return data
	}
	data = bytes.Clone(data)
	copy(data, whole[:preambleBytes])
	data[len(data)-5] = 'E'
	sum := crc32.Checksum(data[:len(data)-4], crc32.MakeTable(crc32.Castagnoli))
	binary.LittleEndian.PutUint32(data[len(data)-4:], sum)
	return data
}

// checkReadable checks that both formats exactly represent a program that has been read, and that the
// verifier does not panic on it.
func checkReadable(t *testing.T, p *ir.Program) {
	t.Helper()
	data := encode(t, p)
	back, err := ir.Decode(data)
	if err != nil || !reflect.DeepEqual(p, back) {
		t.Fatalf("the binary form is not exact: %v", err)
	}
	src := text(t, p)
	parsed, err := ir.ParseText("fuzz.sppir", src)
	if err != nil {
		t.Fatalf("what was printed does not parse: %v", err)
	}
	if !bytes.Equal(text(t, parsed), src) {
		t.Fatal("the text form is not canonical")
	}
	if !bytes.Equal(encode(t, parsed), data) {
		t.Fatal("the text form is not exact")
	}
	_ = ir.Verify(p)
}

func FuzzDecode(f *testing.F) {
	whole := encode(f, irtest.Random(1, 20))
	for seed := range uint64(8) {
		f.Add(encode(f, irtest.Random(seed, 10+20*int(seed))))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, file := range [][]byte{data, sealed(data, whole)} {
			if p, err := ir.Decode(file); err == nil {
				checkReadable(t, p)
			}
		}
	})
}

func FuzzParseText(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(text(f, irtest.Random(seed, 10+20*int(seed))))
	}
	src, err := os.ReadFile("testdata/small.sppir")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(src)
	f.Fuzz(func(t *testing.T, src []byte) {
		p, err := ir.ParseText("fuzz.sppir", src)
		if err == nil {
			checkReadable(t, p)
			return
		}
		if mistake, ok := err.(*ir.SyntaxError); !ok || mistake.Line < 1 || mistake.Column < 1 {
			t.Fatalf("not a syntax error with a place: %v", err)
		}
		_ = err.Error()
	})
}
