package corpus

import (
	"bytes"
	"fmt"
	"io"
	"unicode/utf8"
)

// TextReader reads a text and counts its bytes that are not UTF-8. It refuses binary files: those with a byte that is zero.
type TextReader struct {
	From    io.Reader
	Binary  bool  // a zero is not refused
	Invalid int64 // bytes that are not UTF-8, in what has been read
	at      int64
	part    []byte // the start of a character that has not been read whole
}

// Read implements io.Reader.
func (t *TextReader) Read(b []byte) (int, error) {
	n, err := t.From.Read(b)
	if i := bytes.IndexByte(b[:n], 0); i >= 0 && !t.Binary {
		return 0, fmt.Errorf("it is not a text: byte %d is zero; name only text files, in UTF-8", t.at+int64(i))
	}
	t.at += int64(n)
	t.count(b[:n], err != nil)
	return n, err
}

// count counts the bytes of a block that are not UTF-8. A character may go on in the next block, unless this one is the last.
func (t *TextReader) count(b []byte, last bool) {
	for len(t.part) > 0 && (len(b) > 0 || last) {
		if len(b) > 0 && !utf8.FullRune(t.part) {
			t.part, b = append(t.part, b[0]), b[1:]
			continue
		}
		if r, n := utf8.DecodeRune(t.part); r == utf8.RuneError && n == 1 {
			t.Invalid++
			t.part = t.part[1:] // the bytes after it may begin a character
		} else {
			t.part = t.part[n:]
		}
	}
	end := len(b)
	for i := max(0, end-utf8.UTFMax+1); i < end && !last; i++ {
		if utf8.RuneStart(b[i]) && !utf8.FullRune(b[i:]) {
			t.part = append(t.part, b[i:]...)
			end = i
		}
	}
	if !utf8.Valid(b[:end]) {
		t.Invalid += InvalidBytes(b[:end])
	}
}

// InvalidBytes counts the bytes that are not UTF-8.
func InvalidBytes(b []byte) (count int64) {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			count++
		}
		b = b[n:]
	}
	return count
}
