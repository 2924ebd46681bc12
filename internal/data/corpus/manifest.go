package corpus

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"sppo.dev/internal/infile"
)

// ManifestName is the file that makes a folder a corpus. It is written last, so a folder with a manifest is
// complete.
const ManifestName = "manifest.json"

const (
	manifestKind   = "sppo tokens "
	manifestFormat = manifestKind + "1"
)

// Manifest describes a folder of token files.
//
// Each shard consists of NAME.bin, the tokens as little-endian integers, and NAME.idx, the length of each document
// in tokens as a little-endian uint64. If there are masks, the shard also has NAME.mask.
type Manifest struct {
	Format    string  `json:"format"`
	Type      string  `json:"type"` // uint16 | uint32
	Tokens    int64   `json:"tokens"`
	Documents int64   `json:"documents"`
	Highest   int64   `json:"highest"`         // highest token that occurs; -1: none
	Tokenizer string  `json:"tokenizer"`       // hash of its file
	Vocab     int     `json:"vocab"`           // of the tokenizer
	EOS       int64   `json:"eos"`             // appended to each document; -1: none
	Field     string  `json:"field"`           // jsonl field or parquet column with the text
	Masks     bool    `json:"masks,omitempty"` // NAME.mask has one byte for each token, 1 if its label counts
	CRC       string  `json:"crc,omitempty"`   // CRC-32C of the manifest without this field, as json.MarshalIndent writes it
	Shards    []Shard `json:"shards"`          // in the order of the tokens
}

// Shard records the files of a shard.
type Shard struct {
	Name      string `json:"name"`
	Tokens    int64  `json:"tokens"`
	Documents int64  `json:"documents"`
	Highest   int64  `json:"highest"`
	Checksum  string `json:"checksum"`         // CRC-32C of NAME.bin, NAME.idx and, if there is one, NAME.mask, in hexadecimal
	Blocks    string `json:"blocks,omitempty"` // CRC-32C of each block of BlockBytes of NAME.bin and then of NAME.mask
}

// IsFolder reports whether a folder is a corpus, also if it is damaged.
func IsFolder(dir string) bool {
	f, _, err := infile.Open(filepath.Join(dir, ManifestName))
	if err != nil {
		return false
	}
	defer f.Close()
	start, err := io.ReadAll(io.LimitReader(f, 256))
	return err == nil && bytes.Contains(start, []byte(`"format": "`+manifestKind))
}

// ReadManifest reads the manifest of a folder. If there is none, the error is fs.ErrNotExist.
func ReadManifest(dir string) (*Manifest, error) {
	name := filepath.Join(dir, ManifestName)
	f, size, err := infile.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var m Manifest
	if size > 256<<20 {
		return nil, fmt.Errorf("%s: it has %d bytes; the limit for a manifest is 256 MiB", name, size)
	}
	if err := json.NewDecoder(io.LimitReader(f, size)).Decode(&m); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if err := m.check(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if text, err := m.text(); err != nil || m.CRC != "" && m.CRC != hexOf(crc32.Checksum(text, castagnoli)) {
		return nil, fmt.Errorf("%s is damaged: its CRC-32C is not %.40q, as it says; restore it, or, if it was edited, remove crc from it", name, m.CRC)
	}
	return &m, nil
}

// ManifestOf reads the manifest of a folder that is named as data. If there is none, the error says how to read the folder's files.
func ManifestOf(dir string) (*Manifest, error) {
	m, err := ReadManifest(dir)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%s is a folder without %s: append /** to read the files in it", dir, ManifestName)
		if text := textIn(dir); text != "" {
			err = fmt.Errorf("%s is a folder of texts, such as %s: tokenize them first with sppoc tokenize, or append /** and set tokenizer", dir, text)
		}
	}
	return m, err
}

func (m *Manifest) check() error {
	if m.Format != manifestFormat {
		return fmt.Errorf("format is %.40q, but only %q is supported", m.Format, manifestFormat)
	}
	if widths[m.Type] == 0 {
		return fmt.Errorf("type is %.40q, but must be uint16 or uint32", m.Type)
	}
	var tokens, documents int64
	for i, s := range m.Shards {
		if s.Name == "" || s.Name != filepath.Base(s.Name) || strings.HasPrefix(s.Name, ".") {
			return fmt.Errorf("shards[%d]: %.80q is not the name of a file in the folder", i, s.Name)
		}
		if s.Tokens < 0 || s.Documents < 0 || s.Tokens > 1<<60 || s.Highest > m.Highest {
			return fmt.Errorf("shards[%d]: %d tokens, %d documents and highest token %d are impossible", i, s.Tokens, s.Documents, s.Highest)
		}
		if err := s.checkSums(widths[m.Type], m.Masks); err != nil {
			return fmt.Errorf("shards[%d]: %w", i, err)
		}
		tokens += s.Tokens
		documents += s.Documents
	}
	if tokens != m.Tokens || documents != m.Documents {
		return fmt.Errorf("the shards have %d tokens and %d documents in total, but the manifest says %d and %d", tokens, documents, m.Tokens, m.Documents)
	}
	return nil
}

// text returns the text of which CRC is the checksum.
func (m *Manifest) text() ([]byte, error) {
	bare := *m
	bare.CRC = ""
	return json.MarshalIndent(bare, "", "  ")
}

// Write writes the manifest to a folder, completely or not at all.
func (m *Manifest) Write(dir string) error {
	m.Format = manifestFormat
	if err := m.check(); err != nil {
		return err
	}
	text, err := m.text()
	if err != nil {
		return err
	}
	m.CRC = hexOf(crc32.Checksum(text, castagnoli))
	if text, err = json.MarshalIndent(m, "", "  "); err != nil {
		return err
	}
	return Replace(filepath.Join(dir, ManifestName), append(text, '\n'))
}

// Replace replaces the contents of a file, completely or not at all: it writes a temporary file and renames it.
func Replace(name string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".tmp-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	for _, step := range []func() error{func() error { return f.Chmod(0o644) }, f.Sync, f.Close} {
		if e := step(); err == nil {
			err = e
		}
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
