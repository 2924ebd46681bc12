package corpus

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"

	"sppo.dev/internal/infile"
)

// Checked is what Check has read.
type Checked struct {
	Tokens, Documents, Files int64
	Sums                     bool    // the files have checksums
	Damage                   []error // at most one for each file, with the place
}

// Check reads all of a corpus of tokens: a folder with a manifest, a Megatron data set or a flat file. It checks
// checksums, indexes, masks and, if vocab is more than 0, that all tokens are in the vocabulary. The error is that of a
// corpus that cannot be opened; damage is listed in the result.
func Check(ctx context.Context, name string, o Options, vocab int) (*Checked, error) {
	if vocab <= 0 {
		vocab = math.MaxInt
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return checkFolder(ctx, name, vocab)
	}
	o.Documents, o.Tokenizer = "index", ""
	r := reader{Options: o, vocab: vocab}
	var s stream
	out := &Checked{Files: 1}
	if vocab == math.MaxInt {
		r.vocab = 1 // only the width of flat files depends on it
	}
	if err := r.open(&s, name); err != nil {
		var path *os.PathError
		if errors.As(err, &path) {
			return nil, err
		}
		out.Damage = append(out.Damage, err)
		return out, nil
	}
	f := &s.files[0]
	defer f.close()
	f.vocab = vocab
	out.Tokens = f.count
	if m, ok := f.borders.(*megatronBorders); ok {
		out.Documents, out.Files = max(0, m.count-1), 2
	}
	buf := make([]int32, 32<<10)
	for at := int64(0); at < f.count && len(out.Damage) == 0; at += int64(len(buf)) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := f.read(at, min(int64(len(buf)), f.count-at), buf, 1); err != nil {
			out.Damage = append(out.Damage, err)
		}
	}
	return out, nil
}

func checkFolder(ctx context.Context, name string, vocab int) (*Checked, error) {
	out := &Checked{}
	m, err := ReadManifest(name)
	var path *os.PathError
	switch {
	case errors.As(err, &path) && errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%s is a folder without %s: name the files in it", name, ManifestName)
	case errors.As(err, &path):
		return nil, err
	case err != nil:
		out.Damage = append(out.Damage, err)
		return out, nil
	}
	out.Tokens, out.Documents, out.Sums = m.Tokens, m.Documents, len(m.Shards) > 0
	if m.Highest >= int64(vocab) {
		out.Damage = append(out.Damage, fmt.Errorf("%s: it contains token %d, but the vocabulary has %d", filepath.Join(name, ManifestName), m.Highest, vocab))
	}
	for i := range m.Shards {
		s := &m.Shards[i]
		width := widths[m.Type]
		base := filepath.Join(name, s.Name)
		tokens, index, mask := s.proofs(base, width, m.Masks)
		out.Sums = out.Sums && tokens != nil
		files := []struct {
			ending string
			size   int64
			sums   *proof
			most   uint64 // highest value
			width  int64
		}{{".bin", s.Tokens * width, tokens, uint64(max(0, s.Highest)), width}, {".idx", 8 * s.Documents, index, uint64(s.Tokens), 8}, {MaskEnding, s.Tokens, mask, 1, 1}}
		if !m.Masks {
			files = files[:2]
		}
		for _, f := range files {
			out.Files++
			err := checkFile(ctx, base+f.ending, f.size, f.sums, f.most, f.width)
			if err == nil && f.ending == ".idx" {
				var x *lengthFile
				if x, err = openLengths(base+f.ending, s.Documents, s.Tokens, nil); err == nil {
					err = x.Close()
				}
			}
			if e := ctx.Err(); e != nil {
				return nil, e
			}
			if err != nil {
				out.Damage = append(out.Damage, err)
			}
		}
	}
	return out, nil
}

// checkFile reads a file of a shard: its size, its checksums, and that no value exceeds the highest.
func checkFile(ctx context.Context, name string, size int64, sums *proof, most uint64, width int64) error {
	f, is, err := infile.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if is != size {
		return fmt.Errorf("%s: it has %d bytes, but %s says %d", name, is, ManifestName, size)
	}
	all := file{width: width}
	buf := make([]byte, BlockBytes)
	in := bufio.NewReaderSize(f, BlockBytes)
	for at := int64(0); at < size; at += int64(len(buf)) {
		b := buf[:min(int64(len(buf)), size-at)]
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := sums.check(f, at, int64(len(b))); err != nil {
			return err
		}
		if _, err := io.ReadFull(in, b); err != nil {
			return fmt.Errorf("%s: reading %d bytes at byte %d: %w", name, len(b), at, err)
		}
		for j := int64(0); j < int64(len(b)); j += width {
			if v := all.token(b[j:]); v > most {
				return fmt.Errorf("%s: the value at byte %d is %d, but %s says at most %d", name, at+j, v, ManifestName, most)
			}
		}
	}
	return nil
}
