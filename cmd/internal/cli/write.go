package cli

import (
	"errors"
	"io"
	"os"
	"path/filepath"
)

// CheckOutput refuses a path that cannot be written to, before any work is done for it.
func CheckOutput(path string) error {
	info, err := os.Stat(filepath.Dir(path))
	switch {
	case err != nil || !info.IsDir():
		return Usagef("cannot write %s: there is no folder %s", path, filepath.Dir(path))
	case isDir(path):
		return Usagef("cannot write %s: it is a folder", path)
	}
	return nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// WriteFile writes beside the path and renames: the path holds the whole result, or what was there before.
func WriteFile(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	err = errors.Join(write(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
