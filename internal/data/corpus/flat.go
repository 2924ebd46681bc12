package corpus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/internal/data/tokenizer"
	"sppo.dev/internal/infile"
)

// reader opens the files of one corpus.
type reader struct {
	Options
	vocab int
	tok   *tokenizer.Tokenizer // nil until it is needed
	text  int64                // bytes of text that have been tokenized so far
}

// open appends to a stream the files that a name refers to.
func (r *reader) open(s *stream, name string) error {
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return r.openFolder(s, name)
	case r.Tokenizer != "":
		return r.openText(s, name)
	}
	if slices.Contains(textEndings, filepath.Ext(name)) {
		return fmt.Errorf("%s: it is not a token file: set tokenizer = ..., or tokenize it first with sppoc tokenize", name)
	}
	if index := strings.TrimSuffix(name, filepath.Ext(name)) + ".idx"; r.Header == "auto" && index != name && isMegatron(index) {
		return r.openMegatron(s, name, index)
	}
	return r.openFlat(s, name, r.Type)
}

// The header of llm.c consists of 256 32-bit integers, of which three are used.
const headerBytes = 1024

// llmc maps the magic numbers of llm.c's token files to the number of bytes per token.
var llmc = map[uint32]int64{20240520: 2, 20240801: 4}

var widths = map[string]int64{"uint16": 2, "uint32": 4}

func (r *reader) openFlat(s *stream, name, kind string) error {
	data, size, err := infile.Open(name)
	if err != nil {
		return err
	}
	f := file{name: name, data: data, size: size, width: widths[kind], vocab: r.vocab}
	switch r.Header {
	case "none":
	case "llmc":
		err = r.readHeader(&f, kind)
	default:
		if err = otherThanTokens(&f); err == nil {
			err = r.readHeader(&f, kind)
		}
	}
	if f.width == 0 { // as in nanoGPT
		f.width = 2
		if r.vocab > 1<<16 {
			f.width = 4
		}
	}
	if rest := (f.size - f.offset) % f.width; err == nil && rest != 0 {
		err = fmt.Errorf("%s: %d bytes of tokens, which is not a multiple of %d bytes per token", name, f.size-f.offset, f.width)
	}
	f.count = (f.size - f.offset) / f.width
	if err == nil {
		err = s.add(f)
	}
	if err != nil {
		return errors.Join(err, data.Close())
	}
	return nil
}

// readHeader recognizes llm.c's header.
func (r *reader) readHeader(f *file, kind string) error {
	var b [12]byte
	if _, err := f.data.ReadAt(b[:], 0); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	width := llmc[binary.LittleEndian.Uint32(b[:])]
	count := int64(binary.LittleEndian.Uint32(b[8:]))
	fits := width > 0 && headerBytes+count*width == f.size
	switch {
	case fits && f.width != 0 && f.width != width:
		return fmt.Errorf("%s: its header says %d bytes per token, but type = %s", f.name, width, kind)
	case fits:
		f.width, f.offset = width, headerBytes
	case r.Header == "llmc" && width > 0:
		return fmt.Errorf("%s: its header, at byte 8, says %d tokens of %d bytes, but %d bytes follow it", f.name, count, width, f.size-headerBytes)
	case r.Header == "llmc":
		return fmt.Errorf("%s: it does not begin with an llm.c header", f.name)
	}
	return nil
}

// openMarks opens the index and the mask of a shard, if they are used, and takes the checksums of its files.
func (r *reader) openMarks(f *file, m *Manifest, shard *Shard) error {
	if m.Masks && (r.Masks == "off" || r.Masks == "") {
		return fmt.Errorf("%s: it has masks: set masks = on to train on the labels that count, or masks = ignore to train on all labels",
			f.name)
	}
	var index *proof
	f.proof, index, f.maskProof = shard.proofs(strings.TrimSuffix(f.name, ".bin"), f.width, m.Masks)
	if r.Documents == "index" {
		lengths, err := openLengths(strings.TrimSuffix(f.name, ".bin")+".idx", shard.Documents, shard.Tokens, index)
		if err != nil {
			return err
		}
		f.borders = lengths
		f.beside = append(f.beside, beside{lengths.Name(), lengths, 8 * shard.Documents})
	}
	if m.Masks && r.Masks == "on" {
		mask, err := openMask(f.name, shard.Tokens)
		if err != nil {
			return err
		}
		f.mask = mask
		f.beside = append(f.beside, beside{mask.Name(), mask, shard.Tokens})
	}
	return nil
}

// openFolder reads a folder by its manifest.
func (r *reader) openFolder(s *stream, name string) error {
	m, err := ManifestOf(name)
	switch {
	case err != nil:
		return err
	case m.Highest >= int64(r.vocab):
		return fmt.Errorf("%s: it contains token %d, but the vocabulary has %d", filepath.Join(name, ManifestName), m.Highest, r.vocab)
	}
	for i := range m.Shards {
		shard := &m.Shards[i]
		path := filepath.Join(name, shard.Name+".bin")
		data, size, err := infile.Open(path)
		if err != nil {
			return err
		}
		width := widths[m.Type]
		if size != shard.Tokens*width {
			err = fmt.Errorf("%s: it has %d bytes, but the manifest says %d tokens of %d bytes", path, size, shard.Tokens, width)
		} else if size > 0 {
			f := file{name: path, data: data, size: size, width: width, count: shard.Tokens, vocab: r.vocab}
			if err = r.openMarks(&f, m, shard); err == nil {
				err = s.add(f)
			}
		}
		if err != nil {
			return errors.Join(err, data.Close())
		}
	}
	return nil
}
