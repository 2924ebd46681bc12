package ir

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"sppo.dev/internal/infile"
)

// maxFile is the maximum size of a program's file in bytes. A program for thousands of ranks takes a tenth of
// that.
const maxFile = 2 << 30

// ReadFile reads a program in either format, regardless of the file's name. If the file does not
// begin like a program, ReadFile does not read the rest.
func ReadFile(path string) (*Program, error) {
	start, err := readStart(path)
	if err != nil {
		return nil, err
	}
	binary := looksBinary(start, path)
	data := start
	if binary && checkPreamble(start) == nil || !binary && bytes.IndexByte(start, 0) < 0 {
		if data, err = infile.Read(path, maxFile); err != nil {
			return nil, err
		}
	}
	if !binary {
		return ParseText(path, data)
	}
	p, err := Decode(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return p, nil
}

// readStart returns the first 4 KiB of a file, or all of a shorter one.
func readStart(path string) ([]byte, error) {
	f, _, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	start := make([]byte, 4<<10)
	n, err := io.ReadFull(f, start)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return start[:n], err
}

// looksBinary distinguishes the formats by content. If the start is damaged, it uses the file name,
// so that the error message is about the intended format.
func looksBinary(data []byte, path string) bool {
	if strings.HasPrefix(string(data), magic[:4]) {
		return true
	}
	return strings.HasSuffix(path, ".sppb") && !strings.HasPrefix(string(data), textMagic)
}

// WriteFile writes a program. A name ending in .sppir selects the text format, any other the binary format.
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

// ReplaceFile writes a temporary file next to path and renames it, so that path contains either the
// complete result or the old contents. Links are followed, and existing permissions are kept. Pipes
// and devices are written directly.
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

// speakOf replaces the name of the temporary file in an error with the user's path.
func speakOf(path string, err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return &fs.PathError{Op: p.Op, Path: path, Err: p.Err}
	}
	return err
}
