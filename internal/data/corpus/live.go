package corpus

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"path/filepath"
	"strings"

	"sppo.dev/internal/data/tokenizer"
	"sppo.dev/internal/infile"
)

// maxLive is the maximum total size, in bytes, of text files that are tokenized when they are opened; their
// tokens stay in memory.
const maxLive = 256 << 20

// openText tokenizes a file of text or jsonl.
func (r *reader) openText(s *stream, name string) error {
	switch ext := filepath.Ext(name); ext {
	case ".gz", ".zst", ".parquet":
		return fmt.Errorf("%s: only plain text and jsonl are tokenized when a run opens them: tokenize %s files first with sppoc tokenize", name, ext)
	}
	in, size, err := infile.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	if r.text += size; r.text > maxLive {
		return fmt.Errorf("%s: more than %d MiB of text; tokenize it first with sppoc tokenize", name, maxLive>>20)
	}
	if r.tok == nil {
		if r.tok, err = tokenizer.Open(r.Tokenizer); err != nil {
			return err
		}
	}
	eos, ok := r.tok.EOS()
	if r.AppendEOS && !ok {
		return fmt.Errorf("%s: append_eos = true, but the tokenizer does not name the end-of-sequence token", r.Tokenizer)
	}
	f := file{name: name, width: 4, vocab: r.vocab}
	var ids []uint32
	var out []byte
	starts := startList{}
	take := func(d Document) error {
		var err error
		if ids, err = d.Encode(ids[:0], r.tok); err != nil {
			return err
		}
		if d.Ends && r.AppendEOS {
			ids = append(ids, eos)
		}
		for _, id := range ids {
			out = binary.LittleEndian.AppendUint32(out, id)
		}
		if d.Ends {
			starts = append(starts, int64(len(out))/4)
		}
		return nil
	}
	if strings.HasSuffix(name, ".jsonl") {
		err = Lines(in, Fields{Text: r.Field}, take)
	} else {
		err = Text(&TextReader{From: in}, r.tok.Cut, take)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	f.data, f.size, f.count = bytes.NewReader(out), int64(len(out)), int64(len(out))/4
	f.borders = starts[:max(0, len(starts)-1)] // the last is the end
	return s.add(f)
}
