package safetensors

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// file returns the contents of a file with the given header and the given number of bytes of values.
func file(header string, values int) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	out = append(out, header...)
	for i := range values {
		out = append(out, byte(i))
	}
	return out
}

func tensor(name, dtype, shape string, begin, end int) string {
	return fmt.Sprintf(`%q:{"dtype":%q,"shape":%s,"data_offsets":[%d,%d]}`, name, dtype, shape, begin, end)
}

func object(members ...string) string { return "{" + strings.Join(members, ",") + "}" }

// folder creates a folder with the given files.
func folder(t *testing.T, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestBrokenHeaders(t *testing.T) {
	a, b := tensor("a", "F32", "[2]", 0, 8), tensor("b", "F16", "[2,1]", 8, 12)
	for _, c := range []struct {
		name string
		text []byte
		want string // part of the error; empty: the file is valid
	}{
		{"right", file(object(a, b), 12), ""},
		{"order of names", file(object(b, a), 12), ""},
		{"padding", file(object(a, b)+"  ", 12), ""},
		{"metadata", file(object(`"__metadata__":{"format":"pt"}`, a, b), 12), ""},
		{"no tensors", file("{}", 0), ""},
		{"scalar", file(object(tensor("a", "F32", "[]", 0, 4)), 4), ""},
		{"empty tensors", file(object(tensor("a", "F32", "[0]", 0, 0), tensor("b", "F32", "[2]", 0, 8), tensor("c", "F32", "[0,3]", 8, 8)), 8), ""},
		{"other types", file(object(tensor("a", "F8_E4M3", "[3]", 0, 3), tensor("b", "F4", "[2]", 3, 4)), 4), ""},
		{"empty", nil, "has 0 bytes"},
		{"short", file("{}", 0)[:9], "truncated"},
		{"too long", append(binary.LittleEndian.AppendUint64(nil, MaxHeader+1), "{}"...), "limit is 100000000"},
		{"longest length", append(bytes.Repeat([]byte{0xff}, 8), "{}"...), "limit is 100000000"},
		{"not utf-8", file("{\"\xff\":1}", 0), "UTF-8"},
		{"not an object", file("[]", 0), "begin with {"},
		{"padding before", file(" {}", 0), "begin with {"},
		{"not closed", file(`{"a":{}`, 0), "invalid header"},
		{"after the object", file("{} x", 0), "follows the JSON object"},
		{"twice", file(object(a, a), 8), `"a" occurs twice`},
		{"field twice", file(object(`"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}`), 8), `"dtype" occurs twice`},
		{"metadata twice", file(object(`"__metadata__":{}`, `"__metadata__":{}`), 0), "occurs twice"},
		{"metadata no string", file(object(`"__metadata__":{"a":1}`), 0), "not a string"},
		{"missing field", file(object(`"a":{"dtype":"F32","shape":[2]}`), 8), "is missing"},
		{"unknown field", file(object(`"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}`), 8), `unknown field "x"`},
		{"other case", file(object(`"a":{"DType":"F32","shape":[2],"data_offsets":[0,8]}`), 8), `unknown field "DType"`},
		{"fraction", file(object(`"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}`), 8), "shape is [2.0]"},
		{"null", file(object(`"a":{"dtype":"F32","shape":null,"data_offsets":[0,8]}`), 8), "shape is null"},
		{"null within", file(object(`"a":{"dtype":"F32","shape":[null],"data_offsets":[0,8]}`), 8), "shape is [null]"},
		{"offsets", file(object(`"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}`), 8), "3 numbers instead of 2"},
		{"negative size", file(object(tensor("a", "F32", "[-2]", 0, 8)), 8), "negative size"},
		{"unknown type", file(object(tensor("a", "F12", "[2]", 0, 8)), 8), "unknown dtype"},
		{"half a byte", file(object(tensor("a", "F4", "[3]", 0, 2)), 2), "inside a byte"},
		{"overflow", file(object(tensor("a", "F32", "[4294967296,4294967296,2]", 0, 8)), 8), "too many"},
		{"overflow of bytes", file(object(tensor("a", "F64", "[4611686018427387904]", 0, 8)), 8), "too many"},
		{"wrong length", file(object(tensor("a", "F32", "[2]", 0, 4)), 4), "takes 8"},
		{"backwards", file(object(tensor("a", "F32", "[2]", 8, 0)), 8), "from byte 8 to 0"},
		{"negative place", file(object(tensor("a", "F32", "[2]", -8, 0)), 8), "from byte -8"},
		{"hole", file(object(a, tensor("b", "F16", "[2]", 10, 14)), 14), "covers bytes 8 to 10"},
		{"hole at the start", file(object(tensor("b", "F16", "[2]", 1, 5)), 5), "covers bytes 0 to 1"},
		{"overlap", file(object(a, tensor("b", "F16", "[2]", 6, 10)), 10), "overlap"},
		{"same place", file(object(a, tensor("b", "F32", "[2]", 0, 8)), 8), "overlap"},
		{"cut short", file(object(a, b), 11), "truncated"},
		{"bytes after", file(object(a, b), 13), "1 bytes after"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := folder(t, map[string][]byte{SingleFile: c.text})
			f, err := Open(dir)
			if c.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				f.Close()
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.HasPrefix(err.Error(), filepath.Join(dir, SingleFile)+" ") {
				t.Errorf("got %v, want the file's name and %q", err, c.want)
			}
		})
	}
}

func TestBrokenIndexes(t *testing.T) {
	one := file(object(tensor("a", "F32", "[2]", 0, 8)), 8)
	two := file(object(tensor("b", "F32", "[2]", 0, 8)), 8)
	index := func(members ...string) []byte {
		return []byte(object(`"metadata":{}`, `"weight_map":`+object(members...)))
	}
	for _, c := range []struct {
		name  string
		files map[string][]byte
		want  string
	}{
		{"right", map[string][]byte{IndexFile: index(`"a":"x"`, `"b":"y"`), "x": one, "y": two}, ""},
		{"nothing", map[string][]byte{"pytorch_model.bin": nil}, "has neither"},
		{"missing shard", map[string][]byte{IndexFile: index(`"a":"x"`, `"b":"y"`), "x": one}, "y is missing"},
		{"tensor elsewhere", map[string][]byte{IndexFile: index(`"a":"y"`, `"b":"x"`), "x": one, "y": two}, `contains tensor "a"`},
		{"tensor missing", map[string][]byte{IndexFile: index(`"a":"x"`, `"c":"x"`), "x": one}, `has no tensor "c"`},
		{"tensor not named", map[string][]byte{IndexFile: index(`"a":"x"`), "x": file(object(tensor("a", "F32", "[2]", 0, 8), tensor("b", "F32", "[0]", 8, 8)), 8)}, `contains tensor "b"`},
		{"no map", map[string][]byte{IndexFile: []byte(`{}`)}, "no weight_map"},
		{"empty map", map[string][]byte{IndexFile: index()}, "no weight_map"},
		{"twice", map[string][]byte{IndexFile: index(`"a":"x"`, `"a":"y"`), "x": one, "y": one}, `"a" occurs twice`},
		{"no name", map[string][]byte{IndexFile: index(`"a":1`)}, "not a file name"},
		{"elsewhere", map[string][]byte{IndexFile: index(`"a":"../x"`)}, "not a file name"},
		{"the folder above", map[string][]byte{IndexFile: index(`"a":".."`)}, "not a file name"},
		{"backslash", map[string][]byte{IndexFile: index(`"a":"..\\x"`)}, "not a file name"},
		{"damaged shard", map[string][]byte{IndexFile: index(`"a":"x"`), "x": one[:12]}, "truncated"},
		{"no JSON", map[string][]byte{IndexFile: []byte("x")}, "not a JSON object"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := Open(folder(t, c.files))
			if c.want == "" {
				if err != nil || len(f.Tensors()) != 2 || f.Find("b") == nil {
					t.Fatal(err)
				}
				f.Close()
			} else if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// random returns sources of all types that headers can name, some without values.
func random(r *rand.Rand, n int) (list []Source, values map[string][]byte) {
	values = map[string][]byte{}
	types := sortedKeys(typeBits)
	for i := range n {
		info := Info{Name: fmt.Sprintf("t.%d.\"é<\n", i), DType: types[r.IntN(len(types))]}
		for range r.IntN(4) {
			info.Shape = append(info.Shape, 4*r.Int64N(4))
		}
		if info.Elements()*int64(typeBits[info.DType])%8 != 0 {
			info.DType = F16
		}
		data := make([]byte, info.Bytes())
		for j := range data {
			data[j] = byte(r.Uint32())
		}
		values[info.Name] = data
		list = append(list, Source{info, func(w io.Writer) error { _, err := w.Write(data); return err }})
	}
	return list, values
}

// Written tensors are read back byte for byte, from one file or many.
func TestRoundTrip(t *testing.T) {
	for seed := range 40 {
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		sources, values := random(r, 1+r.IntN(20))
		dir := t.TempDir()
		metadata := map[string]string{"format": "pt", "x": "<\n"}
		if err := Write(t.Context(), dir, sources, metadata, 1+r.Int64N(1000)); err != nil {
			t.Fatal(err)
		}
		f, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(f.Tensors()) != len(sources) || cmp.Diff(metadata, f.Metadata) != "" {
			t.Errorf("seed %d: %d tensors of %d, metadata %v", seed, len(f.Tensors()), len(sources), f.Metadata)
		}
		for _, s := range sources {
			got := f.Find(s.Name)
			if got == nil || got.DType != s.DType || fmt.Sprint(got.Shape) != fmt.Sprint(s.Shape) {
				t.Fatalf("seed %d: %+v came back as %+v", seed, s.Info, got)
			}
			data := make([]byte, got.Bytes())
			if _, err := got.ReadAt(data, 0); err != nil || !bytes.Equal(data, values[s.Name]) {
				t.Errorf("seed %d: values of %q differ: %v", seed, s.Name, err)
			}
		}
		f.Close()
	}
}

func TestWriteRefuses(t *testing.T) {
	nothing := func(io.Writer) error { return nil }
	for want, sources := range map[string][]Source{
		"occurs twice":   {{Info{"a", F32, []int64{0}}, nothing}, {Info{"a", F32, []int64{0}}, nothing}},
		"unknown dtype":  {{Info{"a", "F12", []int64{0}}, nothing}},
		"8 bytes, but 0": {{Info{"a", F32, []int64{2}}, nothing}},
		`"a": no space`:  {{Info{"a", F32, []int64{2}}, func(io.Writer) error { return errors.New("no space") }}},
		"too many bytes": {{Info{"a", F32, []int64{1 << 62}}, nothing}},
	} {
		if err := Write(t.Context(), t.TempDir(), sources, nil, ShardBytes); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// Reads stay inside their tensor, and reading a file that has shrunk since it was opened is an error.
func TestReadsStayInside(t *testing.T) {
	dir := folder(t, map[string][]byte{SingleFile: file(object(tensor("a", "F32", "[2]", 0, 8), tensor("b", "F32", "[2]", 8, 16)), 16)})
	f, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a, b := f.Find("a"), f.Find("b")
	if n, err := a.ReadAt(make([]byte, 9), 4); n != 4 || err != io.EOF {
		t.Errorf("%d bytes, %v", n, err)
	}
	for _, off := range []int64{-1, 9} {
		if _, err := a.ReadAt(make([]byte, 1), off); err == nil {
			t.Errorf("read at %d", off)
		}
	}
	if _, err := a.Float32s(make([]float32, 2), 1, nil); err == nil {
		t.Error("read an element beyond the last")
	}
	if err := os.Truncate(b.File, 90); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Float32s(make([]float32, 2), 0, nil); err == nil || !strings.Contains(err.Error(), `ends inside tensor "b"`) {
		t.Errorf("of a file cut short: %v", err)
	}
}

// Every f16 and bf16 value converts to f32 exactly, and back unchanged.
func TestHalvesAreExact(t *testing.T) {
	for bits := range 1 << 16 {
		for _, dtype := range []string{F16, BF16} {
			in := []byte{byte(bits), byte(bits >> 8)}
			var v [1]float32
			widen(v[:], in, dtype)
			if want := halfValue(uint16(bits), dtype); float64(v[0]) != want && !(math.IsNaN(want) && v[0] != v[0]) {
				t.Fatalf("%s %04x is %g, want %g", dtype, bits, v[0], want)
			}
			out, err := Append(nil, v[:], dtype)
			if nan := v[0] != v[0]; err != nil || !nan && !bytes.Equal(in, out) {
				t.Fatalf("%s %04x came back as %x: %v", dtype, bits, out, err)
			} else if nan && math.IsInf(halfValue(binary.LittleEndian.Uint16(out), dtype), 0) {
				t.Fatalf("%s %04x, no number, came back as an infinity", dtype, bits)
			}
		}
	}
}

// halfValue computes a value from its bits, by the definition of the format.
func halfValue(h uint16, dtype string) float64 {
	exponentBits, fractionBits := 5, 10
	if dtype == BF16 {
		exponentBits, fractionBits = 8, 7
	}
	bias := 1<<(exponentBits-1) - 1
	exponent := int(h>>fractionBits) & (1<<exponentBits - 1)
	fraction := float64(int(h)&(1<<fractionBits-1)) / float64(int(1)<<fractionBits)
	v := math.Ldexp(1+fraction, exponent-bias)
	switch {
	case exponent == 1<<exponentBits-1 && fraction != 0:
		return math.NaN()
	case exponent == 1<<exponentBits-1:
		v = math.Inf(1)
	case exponent == 0:
		v = math.Ldexp(fraction, 1-bias)
	}
	if h>>15 == 1 {
		v = -v
	}
	return v
}

// Rounding finds the nearest value, ties to even. This is checked between each pair of neighbouring values: at
// the midpoint and on either side of it.
func TestHalvesRound(t *testing.T) {
	for _, dtype := range []string{F16, BF16} {
		infinity := map[string]uint16{F16: 0x7c00, BF16: 0x7f80}[dtype]
		for low := range infinity - 1 {
			a, b := halfValue(low, dtype), halfValue(low+1, dtype)
			middle := float32((a + b) / 2) // exact in f32
			even := low + low&1
			for v, want := range map[float32]uint16{
				middle: even, math.Nextafter32(middle, float32(a)): low, math.Nextafter32(middle, float32(b)): low + 1,
			} {
				for _, sign := range []float32{1, -1} {
					out, err := Append(nil, []float32{v * sign}, dtype)
					if err != nil || binary.LittleEndian.Uint16(out)&0x7fff != want || out[1]>>7 == 1 != (sign < 0) {
						t.Fatalf("%s of %g is %x, want %04x: %v", dtype, v*sign, out, want, err)
					}
				}
			}
		}
	}
	if _, err := Append(nil, []float32{1, 65520}, F16); err == nil || !strings.Contains(err.Error(), "value 1 is 65520") {
		t.Errorf("beyond f16: %v", err)
	}
	if _, err := Append(nil, []float32{float32(math.Inf(-1)), 65519}, F16); err != nil {
		t.Error(err)
	}
}

// FuzzOpen checks that a file with any contents is refused with an error of one line, or that its tensors cover
// its values exactly and can be read.
func FuzzOpen(f *testing.F) {
	f.Add(file(object(tensor("a", "F32", "[2]", 0, 8), tensor("b", "F16", "[2,1]", 8, 12)), 12))
	f.Add(file(object(`"__metadata__":{"format":"pt"}`, tensor("a", "BF16", "[0,3]", 0, 0)), 0))
	f.Add(file("{}", 3))
	f.Add(file(object(tensor("a", "F32", "[\n1.5]", 0, 8)), 8))
	f.Add(file(object("\"a\":\n[\n]"), 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, start, err := readHeader(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("an error of several lines: %q", err)
			}
			return
		}
		at := start
		for _, e := range h.entries {
			tensor := Tensor{Info: e.Info, begin: start + e.begin, from: bytes.NewReader(data)}
			if tensor.begin != at || e.end-e.begin != tensor.Bytes() {
				t.Fatalf("%+v does not start at %d", e, at)
			}
			if _, err := tensor.ReadAt(make([]byte, tensor.Bytes()), 0); err != nil {
				t.Fatal(err)
			}
			at += tensor.Bytes()
		}
		if at != int64(len(data)) {
			t.Fatalf("tensors end at %d of %d", at, len(data))
		}
	})
}
