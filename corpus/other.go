package corpus

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"unicode"
	"unicode/utf8"
)

// magics lists the first bytes of files that are no tokens. Each has at least four bytes, so that tokens hardly begin like it.
var magics = []struct{ begins, kind string }{
	{"\x7fELF", "a program (ELF)"}, {"\x89PNG", "a picture (PNG)"}, {"PK\x03\x04", "a zip archive"}, {"\x28\xb5\x2f\xfd", "compressed (zstd)"},
	{"\x93NUMPY", "a NumPy array: write its values with tofile"}, {"PAR1", "a parquet file"}, {"%PDF-", "a PDF"}, {"SQLite format 3", "a database (SQLite)"},
}

// otherThanTokens returns an error for a file that is recognizably not a file of tokens.
func otherThanTokens(f *file) error {
	start := make([]byte, min(f.size, 4096))
	if _, err := f.data.ReadAt(start, 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	for _, m := range magics {
		if bytes.HasPrefix(start, []byte(m.begins)) {
			return fmt.Errorf("%s is not a file of tokens: it is %s", f.name, m.kind)
		}
	}
	if isText(start) {
		return fmt.Errorf("%s is not a file of tokens: it is a text: set tokenizer = ..., or tokenize it first with sppoc tokenize", f.name)
	}
	return nil
}

// isText reports whether the start of a file is a text. A short file may be either.
func isText(start []byte) bool {
	for n := 0; n < len(start); {
		r, size := utf8.DecodeRune(start[n:])
		switch {
		case r == utf8.RuneError && size == 1:
			return n > 0 && len(start)-n < utf8.UTFMax && len(start) >= 64 && !utf8.FullRune(start[n:])
		case unicode.IsControl(r) && r != '\n' && r != '\r' && r != '\t':
			return false
		}
		n += size
	}
	return len(start) >= 64
}
