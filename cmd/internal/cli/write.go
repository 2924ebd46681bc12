package cli

import (
	"io"
	"os"
	"path/filepath"

	"sppo.dev/ir"
)

// CheckOutput refuses a path that cannot be written to, before any work is done for it, and one that would replace what it is
// made of.
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
			return Usagef("cannot write %s: it is read, and would be lost", path)
		}
	}
	return nil
}

// WriteFile puts a result at path, whole or not at all.
func WriteFile(path string, write func(io.Writer) error) error {
	return ir.ReplaceFile(path, func(f *os.File) error { return write(f) })
}
