package cli

import (
	"fmt"
	"io"
	"sync"
	"unicode"
	"unicode/utf8"
)

// screen writes text with control characters replaced by visible escapes, because files may contain sequences
// that control a terminal. Line breaks and tabs are kept.
type screen struct {
	w     io.Writer
	mutex sync.Mutex
	begun []byte // first bytes of a character that the last write left incomplete
}

// Write implements io.Writer.
func (s *screen) Write(text []byte) (int, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	all := append(s.begun, text...)
	cut := incomplete(all)
	s.begun = append([]byte(nil), all[len(all)-cut:]...)
	if _, err := s.w.Write(visible(all[:len(all)-cut])); err != nil {
		return 0, err
	}
	return len(text), nil
}

// flush writes the bytes of a character that has remained incomplete.
func (s *screen) flush() error {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	_, err := s.w.Write(visible(s.begun))
	s.begun = nil
	return err
}

// incomplete returns the number of bytes at the end of text that begin a character without completing it.
func incomplete(text []byte) int {
	for n := 1; n <= min(utf8.UTFMax-1, len(text)); n++ {
		if rest := text[len(text)-n:]; utf8.RuneStart(rest[0]) {
			if utf8.FullRune(rest) {
				return 0
			}
			return n
		}
	}
	return 0
}

// visible escapes control characters, characters that change the direction of text, and bytes that are not
// UTF-8.
func visible(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && n == 1:
			out = fmt.Appendf(out, `\x%02x`, text[0])
		case r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Bidi_Control, r)):
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			out = append(out, text[:n]...)
		}
		text = text[n:]
	}
	return out
}

// Overwrite replaces the current line of a terminal with one line of text, or clears it if the text is empty. It cuts text that
// is longer than shownColumns.
func Overwrite(w io.Writer, text string) {
	if utf8.RuneCountInString(text) > shownColumns {
		text = string([]rune(text)[:shownColumns-3]) + "..."
	}
	if s, ok := w.(*screen); ok {
		w = s.w
	}
	fmt.Fprintf(w, "\r%s\x1b[K", visible([]byte(text)))
}
