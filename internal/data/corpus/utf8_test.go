package corpus

import (
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"
)

// Bytes that are not UTF-8 are counted wherever blocks end, and a zero ends the reading of a text.
func TestTextReader(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	parts := []string{"a", "é", "你", "🙂", "\xff", "\xe4\xbd", "\xf0\x9f", "\x80", "\xc3", " "}
	for range 2000 {
		text := ""
		for range r.IntN(12) {
			text += parts[r.IntN(len(parts))]
		}
		for _, from := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text)), iotest.HalfReader(strings.NewReader(text)), iotest.DataErrReader(strings.NewReader(text))} {
			in := &TextReader{From: from}
			got, err := io.ReadAll(in)
			if err != nil || string(got) != text || in.Invalid != InvalidBytes([]byte(text)) {
				t.Fatalf("%q: %d bytes are invalid rather than %d, %v", text, in.Invalid, InvalidBytes([]byte(text)), err)
			}
		}
	}
	_, err := io.ReadAll(&TextReader{From: iotest.HalfReader(strings.NewReader(strings.Repeat("a", 1000) + "\x00b"))})
	if err == nil || !strings.Contains(err.Error(), "byte 1000 is zero") {
		t.Error(err)
	}
	if _, err := io.ReadAll(&TextReader{From: strings.NewReader("\x00"), Binary: true}); err != nil {
		t.Error(err)
	}
}
