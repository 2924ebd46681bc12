package safetensors

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// ShardBytes is the default limit on the bytes of values in a file, as in transformers 4. A single tensor may
// exceed it.
const ShardBytes = 5_000_000_000

// Source is a tensor to write. Write must write exactly the bytes of the tensor's values.
type Source struct {
	Info
	Write func(w io.Writer) error
}

// Write writes the tensors to an existing folder: one file, or several with an index if they take more than
// shardBytes. It streams, so only the sources determine its memory use. Tensors keep their order across files.
// Within a file, tensors with the widest values come first, so that all are aligned.
func Write(ctx context.Context, dir string, sources []Source, metadata map[string]string, shardBytes int64) error {
	shards := divide(sources, shardBytes)
	index := struct {
		Metadata struct {
			TotalSize int64 `json:"total_size"`
		} `json:"metadata"`
		WeightMap map[string]string `json:"weight_map"`
	}{WeightMap: map[string]string{}}
	for i, shard := range shards {
		name := SingleFile
		if len(shards) > 1 {
			name = fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		}
		if err := WriteFile(ctx, filepath.Join(dir, name), shard, metadata, io.Discard); err != nil {
			return err
		}
		for j := range shard {
			index.WeightMap[shard[j].Name] = name
			index.Metadata.TotalSize += shard[j].Bytes()
		}
	}
	if len(shards) <= 1 {
		return nil
	}
	text, err := json.MarshalIndent(&index, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, IndexFile), append(text, '\n'), 0o644)
}

// divide assigns tensors to files in order.
func divide(sources []Source, shardBytes int64) [][]Source {
	shards, room := [][]Source{nil}, shardBytes
	for _, s := range sources {
		last := len(shards) - 1
		if s.Bytes() > room && len(shards[last]) > 0 {
			shards, room = append(shards, nil), shardBytes
			last++
		}
		shards[last] = append(shards[last], s)
		room -= s.Bytes()
	}
	return shards
}

// WriteFile writes one file and syncs it to disk. The writer `also` gets a copy of all bytes, for checksums.
func WriteFile(ctx context.Context, path string, sources []Source, metadata map[string]string, also io.Writer) (err error) {
	sources = slices.Clone(sources)
	slices.SortStableFunc(sources, func(a, b Source) int { return int(typeBits[b.DType]) - int(typeBits[a.DType]) })
	text, err := headerOf(sources, metadata)
	if err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if closing := file.Close(); err == nil {
			err = closing
		}
	}()
	total := int64(8 + len(text))
	for i := range sources {
		total += sources[i].Bytes()
	}
	disk := newDiskWriter(file, total)
	out := io.MultiWriter(disk, also)
	header := append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
	if _, err := out.Write(header); err != nil {
		return err
	}
	for i := range sources {
		if err := ctx.Err(); err != nil {
			return err
		}
		counted := &counter{to: out}
		if err := sources[i].Write(counted); err != nil {
			return fmt.Errorf("tensor %q: %w", sources[i].Name, err)
		}
		if want := sources[i].Bytes(); counted.n != want {
			return fmt.Errorf("internal: tensor %q has %d bytes, but %d were written", sources[i].Name, want, counted.n)
		}
	}
	return disk.finish()
}

// headerOf returns the header of a file, padded with spaces so that values start at a multiple of 8 bytes.
func headerOf(sources []Source, metadata map[string]string) ([]byte, error) {
	var b strings.Builder
	member := func(name string, value any) error {
		key, err := encode(name)
		if err != nil {
			return err
		}
		text, err := encode(value)
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(key + ":" + text)
		return err
	}
	if len(metadata) > 0 {
		if err := member("__metadata__", metadata); err != nil {
			return nil, err
		}
	}
	seen, at := map[string]bool{}, int64(0)
	for i := range sources {
		s := &sources[i]
		size, err := s.size()
		if err != nil {
			return nil, err
		}
		if seen[s.Name] {
			return nil, fmt.Errorf("tensor %q occurs twice", s.Name)
		}
		seen[s.Name] = true
		value := struct {
			DType   string   `json:"dtype"`
			Shape   []int64  `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}{s.DType, append([]int64{}, s.Shape...), [2]int64{at, at + size}}
		if err := member(s.Name, value); err != nil {
			return nil, err
		}
		at += size
	}
	text := "{" + b.String() + "}"
	text += strings.Repeat(" ", (8-len(text)%8)%8)
	if len(text) > MaxHeader {
		return nil, fmt.Errorf("the header of %d tensors takes %d bytes; the limit is %d", len(sources), len(text), MaxHeader)
	}
	return []byte(text), nil
}

// encode returns v as JSON, without the escapes for HTML.
func encode(v any) (string, error) {
	var b strings.Builder
	out := json.NewEncoder(&b)
	out.SetEscapeHTML(false)
	err := out.Encode(v)
	return strings.TrimSuffix(b.String(), "\n"), err
}

// counter counts the bytes written through it.
type counter struct {
	to io.Writer
	n  int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.to.Write(p)
	c.n += int64(n)
	return n, err
}
