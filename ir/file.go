package ir

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
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

// WriteFile writes a program. A name that ends in .sppir gets the text form, every other the binary one.
func WriteFile(path string, p *Program) error {
	write := Encode
	if strings.HasSuffix(path, ".sppir") {
		write = Print
	}
	return ReplaceFile(path, func(f *os.File) error {
		w := bufio.NewWriterSize(f, 1<<16)
		return errors.Join(write(w, p), w.Flush())
	})
}

// ReplaceFile writes beside path and renames: path holds the whole result, or what was there before. A link is followed and a file
// keeps its permissions. What is no file, such as a pipe or a device, is written to as it is.
func ReplaceFile(path string, write func(*os.File) error) error {
	target, mode := path, fs.FileMode(0o644)
	if behind, err := filepath.EvalSymlinks(path); err == nil {
		target = behind
	}
	if info, err := os.Stat(target); err == nil {
		if mode = info.Mode(); !mode.IsRegular() {
			return writeInto(path, write)
		}
	}
	f, err := os.CreateTemp(filepath.Dir(target), "."+filepath.Base(target)+".*")
	if err != nil {
		return speakOf(path, err)
	}
	err = errors.Join(write(f), f.Chmod(mode.Perm()), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), target)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return speakOf(path, err)
}

func writeInto(path string, write func(*os.File) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return speakOf(path, errors.Join(write(f), f.Close()))
}

// speakOf names the path that the user knows where a temporary one failed.
func speakOf(path string, err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return &fs.PathError{Op: p.Op, Path: path, Err: p.Err}
	}
	return err
}
