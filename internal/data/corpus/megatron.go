package corpus

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"sppo.dev/internal/infile"
)

// Megatron's indexed data set consists of two files. The index contains a magic number, the version, the type
// of a token, the numbers of sequences and of document boundaries, then the length of each sequence in tokens,
// its position in bytes, and the boundaries.
const (
	megatronMagic  = "MMIDIDX\x00\x00"
	megatronHeader = len(megatronMagic) + 8 + 1 + 8 + 8
)

// megatronTypes maps the codes of the types that tokens can have to their sizes in bytes: uint8, int32, int64,
// uint16. Signed types of one or two bytes are too small for current vocabularies.
var megatronTypes = map[byte]int64{1: 1, 4: 4, 5: 8, 8: 2}

// isMegatron reports whether a file begins like a Megatron index.
func isMegatron(name string) bool {
	f, _, err := infile.Open(name)
	if err != nil {
		return false
	}
	defer f.Close()
	b := make([]byte, len(megatronMagic))
	_, err = io.ReadFull(f, b)
	return err == nil && string(b) == megatronMagic
}

func (r *reader) openMegatron(s *stream, name, index string) error {
	in, indexSize, err := infile.Open(index)
	if err != nil {
		return err
	}
	data, size, err := infile.Open(name)
	if err != nil {
		return errors.Join(err, in.Close())
	}
	f := file{name: name, data: data, size: size, vocab: r.vocab}
	if err = checkMegatron(&f, in, index, indexSize); err == nil {
		if r.Documents != "index" {
			err = f.borders.Close()
			f.borders = nil
		} else {
			f.beside = append(f.beside, beside{index, in, indexSize})
		}
		err = errors.Join(err, s.add(f))
	}
	if err != nil {
		return errors.Join(err, in.Close(), data.Close())
	}
	return nil
}

// checkMegatron reads the index once, without keeping it in memory, and checks that it describes the whole
// token file.
func checkMegatron(f *file, in *os.File, index string, indexSize int64) error {
	fail := func(offset int64, format string, args ...any) error {
		return fmt.Errorf("%s: at byte %d: %s", index, offset, fmt.Sprintf(format, args...))
	}
	head := make([]byte, megatronHeader)
	if _, err := io.ReadFull(in, head); err != nil {
		return fail(0, "the header: %v", err)
	}
	version, code := binary.LittleEndian.Uint64(head[9:]), head[17]
	sequences, borders := binary.LittleEndian.Uint64(head[18:]), binary.LittleEndian.Uint64(head[26:])
	if version != 1 {
		return fail(9, "version %d is not supported; only 1 is", version)
	}
	if f.width = megatronTypes[code]; f.width == 0 {
		return fail(17, "tokens of type %d are not supported; only uint8 (1), int32 (4), int64 (5) and uint16 (8) are", code)
	}
	const most = 1 << 40
	if sequences > most || borders > most || indexSize != int64(megatronHeader)+int64(sequences)*12+int64(borders)*8 {
		return fail(18, "%d sequences and %d document boundaries do not match its %d bytes", sequences, borders, indexSize)
	}
	lengths := bufio.NewReaderSize(io.NewSectionReader(in, int64(megatronHeader), int64(sequences)*4), 1<<16)
	placesAt := int64(megatronHeader) + int64(sequences)*4
	places := bufio.NewReaderSize(io.NewSectionReader(in, placesAt, int64(sequences)*8), 1<<16)
	var b [12]byte
	for i := range int64(sequences) {
		if _, err := io.ReadFull(lengths, b[:4]); err != nil {
			return fail(int64(megatronHeader)+4*i, "%v", err)
		}
		if _, err := io.ReadFull(places, b[4:]); err != nil {
			return fail(placesAt+8*i, "%v", err)
		}
		n, place := int64(int32(binary.LittleEndian.Uint32(b[:]))), int64(binary.LittleEndian.Uint64(b[4:]))
		if n < 0 {
			return fail(int64(megatronHeader)+4*i, "sequence %d has %d tokens", i, n)
		}
		if place != f.count*f.width {
			return fail(placesAt+8*i, "sequence %d starts at byte %d, but the previous ones end at %d", i, place, f.count*f.width)
		}
		f.count += n
	}
	if f.count*f.width != f.size {
		return fail(18, "%d tokens of %d bytes, but %s has %d bytes", f.count, f.width, f.name, f.size)
	}
	f.borders = &megatronBorders{File: in, places: placesAt, documents: placesAt + int64(sequences)*8, count: int64(borders),
		sequences: int64(sequences), width: f.width, tokens: f.count}
	return checkBorders(in, placesAt+int64(sequences)*8, int64(borders), int64(sequences), fail)
}

// checkBorders checks that documents begin at the first sequence, end at the last, and do not overlap.
func checkBorders(in *os.File, at, borders, sequences int64, fail func(int64, string, ...any) error) error {
	from := bufio.NewReaderSize(io.NewSectionReader(in, at, borders*8), 1<<16)
	last := int64(0)
	var b [8]byte
	for i := range borders {
		if _, err := io.ReadFull(from, b[:]); err != nil {
			return fail(at+8*i, "%v", err)
		}
		border := int64(binary.LittleEndian.Uint64(b[:]))
		if border < last || border > sequences || i == 0 && border != 0 || i == borders-1 && border != sequences {
			return fail(at+8*i, "document boundary %d is sequence %d, after %d, of %d", i, border, last, sequences)
		}
		last = border
	}
	return nil
}
