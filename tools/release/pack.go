package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"
)

// file is one file of an archive.
type file struct {
	data []byte
	mode fs.FileMode
}

// files are the files of an archive, by path.
type files map[string]file

func (f files) clone() files { return maps.Clone(f) }

// add adds a file from disk.
func (f files) add(at, from string, mode fs.FileMode) error {
	data, err := os.ReadFile(from)
	f[at] = file{data, mode}
	return err
}

// pack makes a compressed archive. Files are sorted and have neither times nor owners, so archives of the
// same files are identical.
func (f files) pack(folder string) ([]byte, error) {
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	w := tar.NewWriter(z)
	for _, name := range slices.Sorted(maps.Keys(f)) {
		header := &tar.Header{Name: folder + "/" + name, Mode: int64(f[name].mode), Size: int64(len(f[name].data)),
			ModTime: time.Unix(0, 0), Format: tar.FormatUSTAR}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f[name].data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// checksum returns the SHA-256 in hexadecimal.
func checksum(data []byte) string { return fmt.Sprintf("%x", sha256.Sum256(data)) }

// sumLines writes checksums in the format of sha256sum.
func sumLines(sums map[string]string) []byte {
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		fmt.Fprintf(&b, "%s  %s\n", sums[name], name)
	}
	return b.Bytes()
}

func writes(data []byte) func(*os.File) error {
	return func(f *os.File) error { _, err := f.Write(data); return err }
}
