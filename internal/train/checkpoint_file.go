package train

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/train/store"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Checkpoints of format 2 are single files, which are read but no longer written:
//
//	magic        16 bytes
//	size         of the header, 8 bytes, little-endian
//	header       JSON: fileHeader
//	values       of every entry, f32, little-endian, row by row, in the header's order
//	checksum     CRC-32C of everything before it, 4 bytes, little-endian

const (
	fileMagic = "sppo checkpoint2"
	// Checkpoints of format 1 are refused: they do not name their model, so a job cannot check it.
	firstMagic = "sppo checkpoint1"
)

type fileHeader struct {
	Program string               `json:"program"`
	Model   ir.Model             `json:"model"`
	Step    int64                `json:"step"`
	Seed    int64                `json:"seed"`
	Origin  string               `json:"origin"`
	Entries []store.Tensor       `json:"entries"`
	Data    []corpus.Fingerprint `json:"data"`
}

// singleFile provides the values of a checkpoint of format 2.
type singleFile struct {
	*os.File
	places map[string]filePlace // by name of the entry
}

type filePlace struct{ at, cols int64 }

// openFile opens a checkpoint of format 2 and verifies its checksum.
func openFile(file *os.File) (*Checkpoint, error) {
	header, at, err := checkFile(file)
	if err != nil {
		return nil, err
	}
	values := &singleFile{file, map[string]filePlace{}}
	for i := range header.Entries {
		e := &header.Entries[i]
		e.DType = "F32"
		values.places[e.Name()] = filePlace{at, e.Shape[1]}
		at += 4 * e.Shape[0] * e.Shape[1]
	}
	m := &store.Manifest{Program: header.Program, Model: header.Model, Step: header.Step, Seed: header.Seed, Origin: header.Origin, Data: header.Data, Tensors: header.Entries}
	return &Checkpoint{Manifest: m, Path: file.Name(), values: values, single: true}, nil
}

// Read implements stored.
func (f *singleFile) Read(name string, row, col, rows, cols int64, out []float32) error {
	p := f.places[name]
	if cols == p.cols {
		_, err := f.ReadAt(vm.BytesOf(out), p.at+4*row*cols)
		return err
	}
	for r := range rows {
		line := out[r*cols : (r+1)*cols]
		if _, err := f.ReadAt(vm.BytesOf(line), p.at+4*((row+r)*p.cols+col)); err != nil {
			return err
		}
	}
	return nil
}

var errOther = errors.New("not a checkpoint of this version")

// checkFile reads the header, verifies the checksum, and returns the header and the offset of the first value.
func checkFile(file *os.File) (*fileHeader, int64, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, 0, err
	}
	prefix := make([]byte, len(fileMagic)+8)
	_, err = io.ReadFull(file, prefix)
	switch found := string(prefix[:len(fileMagic)]); {
	case err == nil && found == firstMagic:
		return nil, 0, errors.New("it has format 1, which does not name its model; this release reads formats 2 and 3, so continue with the release that wrote it")
	case err == io.EOF || err == io.ErrUnexpectedEOF || err == nil && found != fileMagic:
		return nil, 0, errOther
	case err != nil:
		return nil, 0, err
	}
	size := binary.LittleEndian.Uint64(prefix[len(fileMagic):])
	if size > uint64(info.Size()) {
		return nil, 0, store.Damaged(filepath.Base(file.Name()), "is truncated")
	}
	text := make([]byte, size)
	var header fileHeader
	if _, err := io.ReadFull(file, text); err != nil {
		return nil, 0, short(file, err)
	}
	if err := json.Unmarshal(text, &header); err != nil {
		return nil, 0, store.Damaged(filepath.Base(file.Name()), "is damaged: header: %v", err)
	}
	values := int64(0)
	for _, e := range header.Entries {
		values += 4 * e.Shape[0] * e.Shape[1]
	}
	start := int64(len(prefix) + len(text))
	if have := info.Size() - start - 4; have != values {
		return nil, 0, store.Damaged(filepath.Base(file.Name()), "is damaged or truncated: it has %d bytes of values, but its header declares %d", have, values)
	}
	return &header, start, checkSum(file, info.Size()-4)
}

func checkSum(file *os.File, size int64) error {
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := io.CopyN(sum, file, size); err != nil {
		return short(file, err)
	}
	var stored [4]byte
	if _, err := io.ReadFull(file, stored[:]); err != nil {
		return short(file, err)
	}
	if binary.LittleEndian.Uint32(stored[:]) != sum.Sum32() {
		return store.Damaged(filepath.Base(file.Name()), "is damaged: wrong checksum")
	}
	return nil
}

// short returns the error of a read: damage if the file ended.
func short(file *os.File, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return store.Damaged(filepath.Base(file.Name()), "is truncated")
	}
	return err
}
