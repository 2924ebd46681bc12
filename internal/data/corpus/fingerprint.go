package corpus

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path/filepath"
)

// samples is the number of samples of a file that a fingerprint reads, and sampleBytes is the length of each.
const samples, sampleBytes = 16, 4 << 10

// Fingerprint detects with high probability whether a file has changed, without reading all of it.
type Fingerprint struct {
	Name    string   `json:"name"` // without folders
	Size    int64    `json:"size"`
	Tokens  int64    `json:"tokens"`
	Samples []uint32 `json:"samples"`          // CRC-32C of samples spread evenly over the file
	Beside  []uint32 `json:"beside,omitempty"` // the same for its index and its mask, one after another, if they are used
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fingerprint takes the fingerprint of a file.
func (f *file) fingerprint() (Fingerprint, error) {
	out := Fingerprint{Name: filepath.Base(f.name), Size: f.size, Tokens: f.count}
	var err error
	if out.Samples, err = sample(nil, f.name, f.data, f.size); err != nil {
		return out, err
	}
	for _, b := range f.beside {
		if out.Beside, err = sample(out.Beside, b.name, b.data, b.size); err != nil {
			return out, err
		}
	}
	return out, nil
}

// sample appends the checksums of a file's samples.
func sample(sums []uint32, name string, data io.ReaderAt, size int64) ([]uint32, error) {
	buf := make([]byte, min(sampleBytes, size))
	for i := range int64(samples) {
		if _, err := data.ReadAt(buf, samplePlace(size, i)); err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		sums = append(sums, crc32.Checksum(buf, castagnoli))
	}
	return sums, nil
}

func samplePlace(size, i int64) int64 { return mulDiv(max(0, size-sampleBytes), i, samples-1) }

// Fingerprints returns the fingerprints of all files, in order, as taken when the corpus was opened.
func (c *Corpus) Fingerprints() []Fingerprint { return c.prints }

// Unchanged returns an error if the content of a file differs from the earlier fingerprint with the same name
// and position in the order. A file with another name counts as different data, which is not an error.
func (c *Corpus) Unchanged(before []Fingerprint) error {
	n := 0
	for i := range c.parts {
		for j := range c.parts[i].files {
			f := &c.parts[i].files[j]
			if n < len(before) && before[n].Name == c.prints[n].Name {
				if err := changed(f, &before[n], &c.prints[n]); err != nil {
					return err
				}
			}
			n++
		}
	}
	return nil
}

func changed(f *file, before, now *Fingerprint) error {
	const advice = "restore it, or rename the changed data"
	for i := range min(len(before.Samples), len(now.Samples)) {
		if before.Samples[i] != now.Samples[i] && before.Size == now.Size {
			at := samplePlace(f.size, int64(i))
			return fmt.Errorf("%s changed since the checkpoint: bytes %d to %d differ; %s",
				f.name, at, min(f.size, at+sampleBytes), advice)
		}
	}
	if before.Size != now.Size || before.Tokens != now.Tokens {
		return fmt.Errorf("%s changed since the checkpoint: it has %d tokens in %d bytes, but had %d in %d; %s",
			f.name, now.Tokens, now.Size, before.Tokens, before.Size, advice)
	}
	for i := range before.Beside {
		if len(before.Beside) == len(now.Beside) && before.Beside[i] != now.Beside[i] {
			b := f.beside[i/samples]
			at := samplePlace(b.size, int64(i%samples))
			return fmt.Errorf("%s changed since the checkpoint: bytes %d to %d differ; %s",
				b.name, at, min(b.size, at+sampleBytes), advice)
		}
	}
	return nil
}
