package corpus

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"

	"sppo.dev/internal/infile"
)

// borders finds where the documents in a file start.
type borders interface {
	// between calls yield, in order, for each start s of a document with from < s <= to. Positions are counted
	// from the first token in the file. A document without tokens starts where the next one does.
	between(from, to int64, yield func(start int64)) error
	io.Closer
}

// startList holds all starts in memory.
type startList []int64

func (l startList) between(from, to int64, yield func(int64)) error {
	for i := sort.Search(len(l), func(i int) bool { return l[i] > from }); i < len(l) && l[i] <= to; i++ {
		yield(l[i])
	}
	return nil
}

func (startList) Close() error { return nil }

// lengthStride is the distance, in documents, between the starts that a lengthFile keeps in memory.
const lengthStride = 256

// lengthFile is an index that holds the length of each document as a little-endian uint64.
type lengthFile struct {
	*os.File
	count int64
	marks []int64 // start of every lengthStride-th document
}

// openLengths opens the index of a shard and checks it: its checksum, and that its lengths add up to the shard's tokens.
func openLengths(name string, documents, tokens int64, sum *proof) (*lengthFile, error) {
	f, size, err := infile.Open(name)
	if err != nil {
		return nil, err
	}
	x := &lengthFile{File: f, count: documents}
	if size != 8*documents {
		err = fmt.Errorf("%s: it has %d bytes, but the manifest says %d documents of 8 bytes", name, size, documents)
		return nil, errors.Join(err, f.Close())
	}
	if err := sum.check(f, 0, size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	in, at := bufio.NewReaderSize(io.NewSectionReader(f, 0, size), 1<<16), int64(0)
	var b [8]byte
	for i := range documents {
		if i%lengthStride == 0 {
			x.marks = append(x.marks, at)
		}
		if _, err = io.ReadFull(in, b[:]); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: at byte %d: %w", name, 8*i, err), f.Close())
		}
		n := binary.LittleEndian.Uint64(b[:])
		if n > uint64(tokens-at) {
			err = fmt.Errorf("%s: at byte %d: document %d has %d tokens, but only %d are left of the shard's %d", name, 8*i, i, n, tokens-at, tokens)
			return nil, errors.Join(err, f.Close())
		}
		at += int64(n)
	}
	if at != tokens {
		err = fmt.Errorf("%s: its documents have %d tokens in total, but the manifest says %d", name, at, tokens)
		return nil, errors.Join(err, f.Close())
	}
	return x, nil
}

func (x *lengthFile) between(from, to int64, yield func(int64)) error {
	// the next start may be in the block of the last mark <= from
	block := max(0, int64(sort.Search(len(x.marks), func(i int) bool { return x.marks[i] > from }))-1)
	var buf [8 * lengthStride]byte
	for ; block < int64(len(x.marks)); block++ {
		first, at := block*lengthStride, x.marks[block]
		if at > to {
			return nil
		}
		b := buf[:8*min(lengthStride, x.count-first)]
		if _, err := x.ReadAt(b, 8*first); err != nil {
			return fmt.Errorf("%s: reading %d bytes at byte %d: %w", x.Name(), len(b), 8*first, err)
		}
		for ; len(b) > 0; b = b[8:] {
			if at > from && at <= to {
				yield(at)
			}
			at += int64(binary.LittleEndian.Uint64(b))
		}
	}
	return nil
}

// megatronBorders reads the boundaries of documents and the positions of sequences from a Megatron index.
type megatronBorders struct {
	*os.File
	places, documents int64 // offsets of these tables, in bytes
	count, sequences  int64 // number of boundaries and of sequences
	width             int64 // bytes of a token
	tokens            int64 // of the file
}

// start returns the first token of document i or, for the last boundary, the end of the file.
func (m *megatronBorders) start(i int64) (int64, error) {
	var b [8]byte
	if _, err := m.ReadAt(b[:], m.documents+8*i); err != nil {
		return 0, fmt.Errorf("%s: at byte %d: %w", m.Name(), m.documents+8*i, err)
	}
	sequence := int64(binary.LittleEndian.Uint64(b[:]))
	if sequence >= m.sequences {
		return m.tokens, nil
	}
	if _, err := m.ReadAt(b[:], m.places+8*sequence); err != nil {
		return 0, fmt.Errorf("%s: at byte %d: %w", m.Name(), m.places+8*sequence, err)
	}
	return int64(binary.LittleEndian.Uint64(b[:])) / m.width, nil
}

func (m *megatronBorders) between(from, to int64, yield func(int64)) error {
	var failed error
	at := func(i int64) int64 {
		s, err := m.start(i)
		failed = errors.Join(failed, err)
		return s
	}
	i := int64(sort.Search(int(m.count), func(i int) bool { return failed != nil || at(int64(i)) > from }))
	for ; i < m.count && failed == nil; i++ {
		s := at(i)
		if s > to || s >= m.tokens {
			break
		}
		yield(s)
	}
	return failed
}

// byToken finds the documents of a file in which each token with a given ID ends a document.
type byToken struct {
	f  *file
	id int32
}

func (b *byToken) between(from, to int64, yield func(int64)) error {
	var buf [4096]int32
	for from < to {
		out := buf[:min(int64(len(buf)), to-from)]
		if err := b.f.read(from, int64(len(out)), out, 1); err != nil {
			return err
		}
		for i, id := range out {
			if id == b.id {
				yield(from + int64(i) + 1)
			}
		}
		from += int64(len(out))
	}
	return nil
}

func (*byToken) Close() error { return nil }

// MaskEnding is the suffix of a shard's mask file: one byte for each token, 1 if its label counts, otherwise 0.
const MaskEnding = ".mask"

// openMask opens the mask of a token file.
func openMask(name string, tokens int64) (*os.File, error) {
	path := name[:len(name)-len(filepath.Ext(name))] + MaskEnding
	f, size, err := infile.Open(path)
	if err == nil && size != tokens {
		err = errors.Join(fmt.Errorf("%s: it has %d bytes for %d tokens", path, size, tokens), f.Close())
	}
	return f, err
}
