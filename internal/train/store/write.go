package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"sppo.dev/internal/data/safetensors"
)

// Part is a rectangle of a tensor. Write writes its values, row by row.
type Part struct {
	Of         *Tensor
	Row, Col   int64 // position of its first element in the tensor
	Rows, Cols int64
	Write      func(w io.Writer) error
}

// Keys of the metadata that torch.distributed.checkpoint uses to locate the parts of tensors.
const (
	torchVersion  = "DCP_VERSION"
	torchSharding = "DCP_SHARDING_INFO"
)

// place is a part's entry in the sharding metadata.
type place struct {
	Offsets []int64 `json:"saved_offsets"`
}

// span returns a part's shape or position as readers of the file expect it: with one number for a vector.
func (p *Part) span(rows, cols int64) []int64 {
	if p.Of.Shape[1] == 1 {
		return []int64{rows}
	}
	return []int64{rows, cols}
}

// WriteShards writes the parts of a rank into the folder of an incomplete checkpoint. A file has at most one
// part of each tensor, so the parts of one tensor go to different files.
func WriteShards(ctx context.Context, dir string, rank int, parts []Part) ([]Shard, error) {
	var shards []Shard
	for len(parts) > 0 {
		var now, later []Part
		seen := map[*Tensor]bool{}
		for _, p := range parts {
			if seen[p.Of] {
				later = append(later, p)
			} else {
				now = append(now, p)
			}
			seen[p.Of] = true
		}
		name := fmt.Sprintf("rank-%05d.safetensors", rank)
		if len(shards) > 0 {
			name = fmt.Sprintf("rank-%05d-%d.safetensors", rank, len(shards))
		}
		shard, err := writeShard(ctx, dir, name, rank, now)
		if err != nil {
			return nil, err
		}
		shards, parts = append(shards, shard), later
	}
	return shards, nil
}

func writeShard(ctx context.Context, dir, name string, rank int, parts []Part) (Shard, error) {
	places := map[string]place{}
	var sources []safetensors.Source
	for i := range parts {
		p := &parts[i]
		places[p.Of.Name()] = place{p.span(p.Row, p.Col)}
		sources = append(sources, safetensors.Source{
			Info:  safetensors.Info{Name: p.Of.Name(), DType: p.Of.DType, Shape: p.span(p.Rows, p.Cols)},
			Write: p.Write,
		})
	}
	text, err := json.Marshal(places)
	if err != nil {
		return Shard{}, err
	}
	metadata := map[string]string{torchVersion: "1.0", torchSharding: string(text)}
	sum := &summed{}
	if err := safetensors.WriteFile(ctx, filepath.Join(dir, name), sources, metadata, sum); err != nil {
		return Shard{}, err
	}
	return Shard{File: name, Rank: rank, Bytes: sum.bytes, CRC32C: fmt.Sprintf("%08x", sum.crc)}, nil
}

// summed counts the bytes written to it and computes their checksum.
type summed struct {
	crc   uint32
	bytes int64
}

func (s *summed) Write(p []byte) (int, error) {
	s.crc = crc32.Update(s.crc, castagnoli, p)
	s.bytes += int64(len(p))
	return len(p), nil
}

// writeManifest checks the sizes of a checkpoint's shards and then writes its manifest to the folder.
func writeManifest(dir string, m *Manifest) error {
	m.Format = Format
	text, err := m.encode()
	if err != nil {
		return err
	}
	for i := range m.Shards { // other processes wrote some of them, to a shared file system
		s := &m.Shards[i]
		info, err := os.Stat(filepath.Join(dir, s.File))
		if err != nil {
			return fmt.Errorf("rank %d wrote %s, but process 0 does not see it: all processes must share the folder", s.Rank, s.File)
		}
		if info.Size() != s.Bytes {
			return fmt.Errorf("%s has %d bytes, but rank %d wrote %d", s.File, info.Size(), s.Rank, s.Bytes)
		}
	}
	file, err := os.Create(filepath.Join(dir, ManifestFile))
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	return errors.Join(err, file.Sync(), file.Close())
}

// syncFolder flushes a folder's list of files to disk. Some file systems do not support this; their errors are
// ignored.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	return nil
}
