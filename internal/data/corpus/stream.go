package corpus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sort"
	"sync"
)

// file is a run of tokens: little-endian integers of width bytes, starting at a byte offset.
type file struct {
	name   string
	data   io.ReaderAt
	size   int64 // total bytes
	offset int64 // offset of the first token in bytes
	width  int64
	start  int64 // position of its first token in the stream
	count  int64
	vocab  int

	borders borders     // nil: unknown
	mask    io.ReaderAt // a byte for each token, 1 if its label counts; nil: all count
	beside  []beside    // files that hold the boundaries and the mask

	proof, maskProof *proof // checksums of the tokens and the mask; nil: none
}

// beside is a file with information about a token file.
type beside struct {
	name string
	data io.ReaderAt
	size int64
}

// stream is a list of files that follow each other.
type stream struct{ files []file }

func (s *stream) add(f file) error {
	if f.count == 0 {
		return fmt.Errorf("%s: it contains no tokens", f.name)
	}
	f.start = s.tokens()
	s.files = append(s.files, f)
	return nil
}

func (s *stream) tokens() int64 {
	if len(s.files) == 0 {
		return 0
	}
	last := &s.files[len(s.files)-1]
	return last.start + last.count
}

// read puts tokens start+position, start+position+1, ... of a ring into out[0], out[stride], ... The ring
// consists of the stream's tokens base to base+size.
func (s *stream) read(start, position, base, size int64, out []int32, stride int) error {
	n := int64((len(out) + stride - 1) / stride)
	return s.runs(start, position, base, size, n, func(f *file, at, take int64) error {
		err := f.read(at, take, out, stride)
		out = out[min(len(out), int(take)*stride):]
		return err
	})
}

// runs visits n tokens of a ring like that of read, beginning with token start+position. It calls visit for each
// run of tokens in one file, with the position of the run's first token in the file and the length of the run.
func (s *stream) runs(start, position, base, size, n int64, visit func(f *file, at, take int64) error) error {
	for n > 0 {
		at := (start + position) % size // the sum is below 2^61, since start < size
		run := min(n, size-at)
		n, position = n-run, position+run
		at += base
		i := sort.Search(len(s.files), func(i int) bool { return s.files[i].start+s.files[i].count > at })
		for ; run > 0; i++ {
			f := &s.files[i]
			take := min(run, f.start+f.count-at)
			if err := visit(f, at-f.start, take); err != nil {
				return err
			}
			at, run = at+take, run-take
		}
	}
	return nil
}

// TokenError reports a token outside the vocabulary.
type TokenError struct{ what string }

func (e *TokenError) Error() string { return e.what }

// blocks is a pool of buffers for reading.
var blocks = sync.Pool{New: func() any { return new([64 << 10]byte) }}

func (f *file) read(at, n int64, out []int32, stride int) error {
	buf := blocks.Get().(*[64 << 10]byte)
	defer blocks.Put(buf)
	for i := 0; n > 0; {
		take := min(n, int64(len(buf))/f.width)
		offset := f.offset + at*f.width
		b := buf[:take*f.width]
		if err := f.proof.check(f.data, offset, int64(len(b))); err != nil {
			return err
		}
		if got, err := f.data.ReadAt(b, offset); got < len(b) {
			if errors.Is(err, io.EOF) {
				err = errors.New("the file has become shorter")
			}
			return fmt.Errorf("%s: reading %d bytes at byte %d: %w", f.name, len(b), offset, err)
		}
		for j := range take {
			id := f.token(b[j*f.width:])
			if id >= uint64(f.vocab) {
				return &TokenError{fmt.Sprintf("%s: token %d at byte %d is %d, but the vocabulary has %d", f.name, at+j, offset+j*f.width, id, f.vocab)}
			}
			out[i] = int32(id)
			i += stride
		}
		at, n = at+take, n-take
	}
	return nil
}

func (f *file) token(b []byte) uint64 {
	switch f.width {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.LittleEndian.Uint16(b))
	case 4:
		return uint64(binary.LittleEndian.Uint32(b))
	}
	return binary.LittleEndian.Uint64(b)
}
