package safetensors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"slices"
	"strings"
	"unicode/utf8"
)

// MaxHeader is the maximum size of a header in bytes, as in the reference implementation.
const MaxHeader = 100_000_000

// Types of values that this package converts. Headers may name others.
const (
	F32  = "F32"
	F16  = "F16"
	BF16 = "BF16"

	F8E4M3 = "F8_E4M3" // only read
)

// Further types of values.
const (
	F4 = "F4"
	U8 = "U8"
)

// typeBits is the size of one value of each type of the format.
var typeBits = map[string]uint64{
	F4: 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, U8: 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
	"I16": 16, "U16": 16, F16: 16, BF16: 16, "I32": 32, "U32": 32, F32: 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}

// Info describes a tensor as a header does.
type Info struct {
	Name  string
	DType string
	Shape []int64
}

// Elements returns the number of values in the tensor. It cannot overflow if the header was checked.
func (t *Info) Elements() int64 {
	n := int64(1)
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Bytes returns the size of the tensor's values.
func (t *Info) Bytes() int64 { return t.Elements() * int64(typeBits[t.DType]) / 8 }

// size returns the number of bytes of the values, computed without overflow.
func (t *Info) size() (int64, error) {
	width, ok := typeBits[t.DType]
	if !ok {
		return 0, fmt.Errorf("tensor %q has the unknown dtype %q", t.Name, t.DType)
	}
	n := uint64(1)
	for _, d := range t.Shape {
		if d < 0 {
			return 0, fmt.Errorf("tensor %q has the negative size %d in its shape", t.Name, d)
		}
		high, low := bits.Mul64(n, uint64(d))
		if high != 0 {
			return 0, fmt.Errorf("tensor %q has too many elements: its shape is %v", t.Name, t.Shape)
		}
		n = low
	}
	high, low := bits.Mul64(n, width)
	switch {
	case high != 0 || low/8 > 1<<62:
		return 0, fmt.Errorf("tensor %q has too many bytes: its shape is %v", t.Name, t.Shape)
	case low%8 != 0:
		return 0, fmt.Errorf("tensor %q of dtype %s ends inside a byte", t.Name, t.DType)
	}
	return int64(low / 8), nil
}

// entry is a tensor with its place among the values of a file.
type entry struct {
	Info
	begin, end int64
}

// header is a checked header: its entries follow each other without gaps, in file order.
type header struct {
	metadata map[string]string
	entries  []entry
}

// readHeader reads and checks the header of a file of the given size. It returns the header and the offset of the
// values.
func readHeader(r io.ReaderAt, size int64) (*header, int64, error) {
	var prefix [8]byte
	if size < int64(len(prefix)) {
		return nil, 0, fmt.Errorf("has %d bytes, too few for the length of a header", size)
	}
	if _, err := r.ReadAt(prefix[:], 0); err != nil {
		return nil, 0, err
	}
	var n uint64
	for i, b := range prefix {
		n |= uint64(b) << (8 * i)
	}
	switch {
	case n > MaxHeader:
		return nil, 0, fmt.Errorf("has a header of %d bytes; the limit is %d", n, MaxHeader)
	case int64(n) > size-8:
		return nil, 0, fmt.Errorf("is truncated: its header should have %d bytes, but only %d follow", n, size-8)
	}
	text := make([]byte, n)
	if _, err := r.ReadAt(text, 8); err != nil {
		return nil, 0, err
	}
	h, err := parseHeader(text)
	if err == nil {
		err = h.check(size - 8 - int64(n))
	}
	return h, 8 + int64(n), err
}

func parseHeader(text []byte) (*header, error) {
	if !utf8.Valid(text) {
		return nil, errors.New("has a header that is not UTF-8")
	}
	if len(text) == 0 || text[0] != '{' {
		return nil, errors.New("has a header that does not begin with {")
	}
	h := &header{}
	err := eachMember(text, func(name string, value json.RawMessage) error {
		if name != "__metadata__" {
			e, err := parseEntry(name, value)
			h.entries = append(h.entries, e)
			return err
		}
		h.metadata = map[string]string{}
		return eachMember(value, func(key string, value json.RawMessage) error {
			var text string
			if len(value) == 0 || value[0] != '"' || json.Unmarshal(value, &text) != nil {
				return fmt.Errorf("__metadata__ has %q with a value that is not a string", key)
			}
			h.metadata[key] = text
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("has an invalid header: %w", err)
	}
	return h, nil
}

func parseEntry(name string, text json.RawMessage) (entry, error) {
	e := entry{Info: Info{Name: name}, begin: -1}
	var offsets []int64
	fields := map[string]any{"dtype": &e.DType, "shape": &e.Shape, "data_offsets": &offsets}
	found := 0
	err := eachMember(text, func(key string, value json.RawMessage) error {
		field, ok := fields[key]
		if !ok {
			return fmt.Errorf("unknown field %q", key)
		}
		found++
		if string(value) == "null" || bytes.Contains(value, []byte("null")) || json.Unmarshal(value, field) != nil {
			return fmt.Errorf("%s is %s", key, clip(string(value)))
		}
		return nil
	})
	switch {
	case err != nil:
	case found < len(fields):
		err = errors.New("dtype, shape or data_offsets is missing")
	case len(offsets) != 2:
		err = fmt.Errorf("data_offsets has %d numbers instead of 2", len(offsets))
	default:
		e.begin, e.end = offsets[0], offsets[1]
		return e, nil
	}
	return e, fmt.Errorf("tensor %q: %w", name, err)
}

// clip shortens text that a message quotes, and puts it on one line.
func clip(text string) string {
	const most = 60
	text = strings.Join(strings.Fields(text), " ")
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + " ..."
}

// eachMember calls f for every member of a JSON object. Unlike decoding into a map, it refuses duplicate names.
func eachMember(text []byte, f func(name string, value json.RawMessage) error) error {
	in := json.NewDecoder(bytes.NewReader(text))
	if first, err := in.Token(); err != nil || first != json.Delim('{') {
		return fmt.Errorf("%s is not a JSON object", clip(string(text)))
	}
	seen := map[string]bool{}
	for in.More() {
		key, err := in.Token()
		if err != nil {
			return err
		}
		name, ok := key.(string)
		if !ok {
			return fmt.Errorf("%v is not a name", key)
		}
		if seen[name] {
			return fmt.Errorf("%q occurs twice", name)
		}
		seen[name] = true
		var value json.RawMessage
		if err := in.Decode(&value); err != nil {
			return err
		}
		if err := f(name, value); err != nil {
			return err
		}
	}
	if _, err := in.Token(); err != nil {
		return err
	}
	if rest := bytes.TrimRight(text[in.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return fmt.Errorf("%q follows the JSON object", clip(string(rest)))
	}
	return nil
}

// check checks that the tensors cover the file's values exactly, without gaps or overlaps and up to the end, and
// that their sizes match their types and shapes.
func (h *header) check(values int64) error {
	slices.SortFunc(h.entries, func(a, b entry) int {
		if a.begin != b.begin {
			return compare(a.begin, b.begin)
		}
		return compare(a.end, b.end) // an empty tensor comes before another that begins at the same place
	})
	at, before := int64(0), ""
	for i := range h.entries {
		e := &h.entries[i]
		size, err := e.size()
		switch {
		case err != nil:
			return err
		case e.begin < 0 || e.end < e.begin:
			return fmt.Errorf("tensor %q extends from byte %d to %d", e.Name, e.begin, e.end)
		case e.begin > at:
			return fmt.Errorf("no tensor covers bytes %d to %d of the values, before %q", at, e.begin, e.Name)
		case e.begin < at:
			return fmt.Errorf("tensors %q and %q overlap at byte %d of the values", before, e.Name, e.begin)
		case e.end-e.begin != size:
			return fmt.Errorf("tensor %q has %d bytes, but %s %v takes %d", e.Name, e.end-e.begin, e.DType, e.Shape, size)
		}
		at, before = e.end, e.Name
	}
	switch {
	case at > values:
		return fmt.Errorf("is truncated: its tensors take %d bytes, but only %d follow the header", at, values)
	case at < values:
		return fmt.Errorf("has %d bytes after its last tensor", values-at)
	}
	return nil
}

func compare(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}
