package cli

import (
	"io"
	"os"
	"path/filepath"

	"sppo.dev/ir"
)

// CheckOutput refuses a path that cannot be written, or that would overwrite an input, before any work is
// done.
func CheckOutput(path string, inputs ...string) error {
	folder, err := os.Stat(filepath.Dir(path))
	if err != nil || !folder.IsDir() {
		return Usagef("cannot write %s: there is no folder %s", path, filepath.Dir(path))
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil
	}
	if info.IsDir() {
		return Usagef("cannot write %s: it is a folder", path)
	}
	for _, input := range inputs {
		if read, err := os.Stat(input); err == nil && info.Mode().IsRegular() && os.SameFile(info, read) {
			return Usagef("cannot write %s: it is also an input and would be lost", path)
		}
	}
	return nil
}

// WriteFile writes a result to path, completely or not at all.
func WriteFile(path string, write func(io.Writer) error) error {
	return ir.ReplaceFile(path, func(f *os.File) error { return write(f) })
}
