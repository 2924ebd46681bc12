package ir_test

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

func TestMain(m *testing.M) { irtest.Main(m) }

func encode(t testing.TB, p *ir.Program) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := ir.Encode(&b, p); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func text(t testing.TB, p *ir.Program) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := ir.Print(&b, p); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestBinaryFormIsExact(t *testing.T) {
	for seed := range uint64(60) {
		p := irtest.Random(seed, 400)
		data := encode(t, p)
		back, err := ir.Decode(data)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !reflect.DeepEqual(p, back) {
			t.Fatalf("seed %d: decoded differs:\n%s", seed, cmp.Diff(p, back))
		}
		if !bytes.Equal(encode(t, back), data) {
			t.Fatalf("seed %d: equal programs, different bytes", seed)
		}
	}
}

func TestTextFormIsExact(t *testing.T) {
	for seed := range uint64(60) {
		p := irtest.Random(seed, 400)
		src := text(t, p)
		back, err := ir.ParseText("random.sppir", src)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !reflect.DeepEqual(p, back) {
			t.Fatalf("seed %d: parsed differs:\n%s", seed, cmp.Diff(p, back))
		}
		if got := text(t, back); !bytes.Equal(got, src) {
			t.Fatalf("seed %d: printed again differs", seed)
		}
	}
}
