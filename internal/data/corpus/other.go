package corpus

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"unicode"
	"unicode/utf8"

	"sppo.dev/internal/infile"
)

// instead says how to get tokens from a file of some formats.
var instead = map[string]string{"a NumPy array": ": write its values with tofile"}

// otherThanTokens returns an error for a file that is recognizably not a file of tokens.
func otherThanTokens(f *file) error {
	start := make([]byte, min(f.size, 4096))
	if _, err := f.data.ReadAt(start, 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	const distinct = 4 // first bytes, so that tokens hardly begin like the format
	if format, begins := infile.Format(string(start)); begins >= distinct {
		return fmt.Errorf("%s is not a file of tokens: it is %s%s", f.name, format, instead[format])
	}
	if isText(start) {
		return fmt.Errorf("%s is not a file of tokens: it is a text: set tokenizer = ..., or tokenize it first with sppoc tokenize", f.name)
	}
	return nil
}

// textEndings lists the endings of files that contain texts, also in formats such as parquet.
var textEndings = []string{".jsonl", ".txt", ".json", ".gz", ".zst", ".parquet", ".md"}

// textIn returns the name of a text in a folder, or "" if the folder has none or also has other files.
func textIn(dir string) (name string) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return ""
	}
	for _, entry := range list {
		switch {
		case !entry.Type().IsRegular():
		case !slices.Contains(textEndings, filepath.Ext(entry.Name())):
			return ""
		case name == "":
			name = entry.Name()
		}
	}
	return name
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
