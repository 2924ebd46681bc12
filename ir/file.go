package ir

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// ReadFile reads a program in either form, whatever the file is called.
func ReadFile(path string) (*Program, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if looksBinary(data, path) {
		p, err := Decode(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		return p, nil
	}
	return ParseText(path, data)
}

// looksBinary tells the forms apart by content. A damaged start is told by the name, so that the message speaks of the
// form that was meant.
func looksBinary(data []byte, path string) bool {
	if strings.HasPrefix(string(data), magic[:4]) {
		return true
	}
	return strings.HasSuffix(path, ".sppb") && !strings.HasPrefix(string(data), textMagic)
}

// WriteFile writes a program beside path and renames it, so that a failure leaves what was there. A name that ends in
// .sppir gets the text form, every other the binary one.
func WriteFile(path string, p *Program) error {
	write := Encode
	if strings.HasSuffix(path, ".sppir") {
		write = Print
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<16)
	err = errors.Join(write(w, p), w.Flush(), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
