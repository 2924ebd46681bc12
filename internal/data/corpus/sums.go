package corpus

import (
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"
	"sync/atomic"
)

// BlockBytes is the length of the blocks of a file that have a checksum each. Only the last may be shorter.
const BlockBytes = 64 << 10

// Sums computes the checksums of a file while it is written: CRC-32C of all its bytes, and of each block.
type Sums struct {
	Whole  uint32
	Blocks []uint32
	size   int64
}

// Write never fails.
func (s *Sums) Write(b []byte) (int, error) {
	s.Whole = crc32.Update(s.Whole, castagnoli, b)
	for rest := b; len(rest) > 0; {
		inside := s.size % BlockBytes
		if inside == 0 {
			s.Blocks = append(s.Blocks, 0)
		}
		n := min(int64(len(rest)), BlockBytes-inside)
		last := &s.Blocks[len(s.Blocks)-1]
		*last = crc32.Update(*last, castagnoli, rest[:n])
		rest, s.size = rest[n:], s.size+n
	}
	return len(b), nil
}

// Seal records the checksums of a shard's files: of the tokens, the index and, if there is one, the mask.
func (s *Shard) Seal(files []*Sums) {
	s.Checksum, s.Blocks = "", ""
	for i, f := range files {
		s.Checksum += hexOf(f.Whole)
		if i != 1 { // an index is always read as a whole
			s.Blocks += hexOf(f.Blocks...)
		}
	}
}

func hexOf(sums ...uint32) string {
	var b []byte
	for _, sum := range sums {
		b = append(b, byte(sum>>24), byte(sum>>16), byte(sum>>8), byte(sum))
	}
	return hex.EncodeToString(b)
}

func sumsOf(text string) ([]uint32, error) {
	b, err := hex.DecodeString(text)
	if err != nil || len(b)%4 != 0 {
		return nil, errors.New("is not a list of CRC-32C in hexadecimal")
	}
	out := make([]uint32, len(b)/4)
	for i := range out {
		out[i] = uint32(b[4*i])<<24 | uint32(b[4*i+1])<<16 | uint32(b[4*i+2])<<8 | uint32(b[4*i+3])
	}
	return out, nil
}

// checkSums checks that a shard has as many checksums as files and blocks. Shards that older versions wrote have none
// for their blocks.
func (s *Shard) checkSums(width int64, masks bool) error {
	files, blocks := 2, blocksOf(s.Tokens*width)
	if masks {
		files, blocks = 3, blocks+blocksOf(s.Tokens)
	}
	if sums, err := sumsOf(s.Checksum); err != nil || s.Checksum != "" && len(sums) != files {
		return fmt.Errorf("checksum %.40q is not that of %d files", s.Checksum, files)
	}
	if sums, err := sumsOf(s.Blocks); err != nil || s.Blocks != "" && int64(len(sums)) != blocks {
		return fmt.Errorf("blocks has not %d checksums of 8 hexadecimal digits", blocks)
	}
	return nil
}

func blocksOf(size int64) int64 { return (size + BlockBytes - 1) / BlockBytes }

// proofs returns the checksums of a shard's files, which checkSums has checked. A file without any has a nil proof.
func (s *Shard) proofs(path string, width int64, masks bool) (tokens, index, mask *proof) {
	whole, _ := sumsOf(s.Checksum)
	blocks, _ := sumsOf(s.Blocks)
	if len(whole) == 0 {
		return nil, nil, nil
	}
	index = newProof(path+".idx", 8*s.Documents, whole[1:2], nil)
	n := int64(0)
	if len(blocks) > 0 {
		n = blocksOf(s.Tokens * width)
	}
	tokens = newProof(path+".bin", s.Tokens*width, whole[:1], blocks[:n])
	if masks {
		mask = newProof(path+MaskEnding, s.Tokens, whole[2:], blocks[n:])
	}
	return tokens, index, mask
}

// proof checks the blocks of a file when they are first read. A file without checksums of blocks is one block.
type proof struct {
	name  string
	size  int64
	block int64
	sums  []uint32
	done  []atomic.Bool // by block
	mu    sync.Mutex    // held while a block is checked, so that each is read once
}

func newProof(name string, size int64, whole, blocks []uint32) *proof {
	p := &proof{name: name, size: size, block: max(1, size), sums: whole}
	if len(blocks) > 0 {
		p.block, p.sums = BlockBytes, blocks
	}
	p.done = make([]atomic.Bool, len(p.sums))
	return p
}

// check checks the blocks that contain n bytes at an offset, as far as they have not been checked.
func (p *proof) check(data io.ReaderAt, at, n int64) error {
	if p == nil || n == 0 {
		return nil
	}
	for i := at / p.block; i <= (at+n-1)/p.block && i < int64(len(p.sums)); i++ {
		if p.done[i].Load() {
			continue
		}
		if err := p.checkBlock(data, i); err != nil {
			return err
		}
	}
	return nil
}

func (p *proof) checkBlock(data io.ReaderAt, i int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done[i].Load() {
		return nil
	}
	begin, end := i*p.block, min(p.size, (i+1)*p.block)
	buf := blocks.Get().(*[64 << 10]byte)
	defer blocks.Put(buf)
	sum := uint32(0)
	for at := begin; at < end; {
		b := buf[:min(int64(len(buf)), end-at)]
		if n, err := data.ReadAt(b, at); n < len(b) {
			if errors.Is(err, io.EOF) {
				err = errors.New("the file has become shorter")
			}
			return fmt.Errorf("%s: reading %d bytes at byte %d: %w", p.name, len(b), at, err)
		}
		sum, at = crc32.Update(sum, castagnoli, b), at+int64(len(b))
	}
	if sum != p.sums[i] {
		return p.damaged(begin, end, sum, p.sums[i])
	}
	p.done[i].Store(true)
	return nil
}

func (p *proof) damaged(begin, end int64, is, want uint32) error {
	return fmt.Errorf("%s is damaged: the CRC-32C of bytes %d to %d is %08x, but %s says %08x; restore the file, or tokenize the text again",
		p.name, begin, max(begin, end-1), is, ManifestName, want)
}
