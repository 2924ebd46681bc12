package prepare

import (
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"

	kgzip "github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/infile"
)

// Input is a file with documents: jsonl or parquet if its name says so, otherwise text. A file whose name ends
// in .gz or .zst is decompressed.
type Input struct {
	Name     string
	size     int64
	modified int64 // nanoseconds
	invalid  int64 // bytes that are not UTF-8, in what has been read
}

// Invalid returns the number of bytes that have been read and are not UTF-8. In their place, U+FFFD is tokenized.
func (in *Input) Invalid() int64 { return in.invalid }

// Size returns the bytes of the file.
func (in *Input) Size() int64 { return in.size }

// Inputs finds the files that the paths name. A folder stands for all files in it and its subfolders, except hidden
// ones, in the order of their names.
func Inputs(paths []string) ([]Input, error) {
	var out []Input
	seen := map[string]bool{}
	add := func(name string) error {
		if seen[name] {
			return nil
		}
		seen[name] = true
		f, _, err := infile.Open(name)
		if err != nil {
			return err
		}
		info, err := f.Stat()
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		out = append(out, Input{Name: name, size: info.Size(), modified: info.ModTime().UnixNano()})
		return nil
	}
	for _, path := range paths {
		info, err := os.Stat(path)
		if err == nil && !info.IsDir() {
			err = add(path)
		} else if err == nil {
			err = walk(path, add)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(out) == 0 {
		return nil, errors.New("there are no files in the folders")
	}
	return out, nil
}

func walk(dir string, add func(string) error) error {
	return filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		hidden := strings.HasPrefix(entry.Name(), ".") && name != dir
		switch {
		case err != nil:
			return err
		case entry.IsDir() && hidden:
			return fs.SkipDir
		case entry.IsDir() || hidden || !entry.Type().IsRegular():
			return nil
		}
		return add(name)
	})
}

// unchanged returns an error if the file has changed since it was found.
func (in *Input) unchanged() error {
	info, err := os.Stat(in.Name)
	if err == nil && (info.Size() != in.size || info.ModTime().UnixNano() != in.modified) {
		err = errors.New("the file changed while it was being read")
	}
	return err
}

// counter counts the bytes read from a file.
type counter struct {
	file *os.File
	read int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.file.Read(b)
	c.read += int64(n)
	return n, err
}

// each calls yield for every document, with the number of bytes read from the file so far. Text files are cut with the
// function cut; see corpus.Text.
func (in *Input) each(fields corpus.Fields, cut func([]byte) int, yield func(d corpus.Document, read int64) error) error {
	f, _, err := infile.Open(in.Name)
	if err != nil {
		return err
	}
	defer f.Close()
	if strings.HasSuffix(in.Name, ".parquet") {
		if fields.Masks() {
			return errOnlyLines
		}
		return in.parquet(f, fields.Text, yield)
	}
	c := &counter{file: f}
	r, name, err := decompressed(c, in.Name)
	if err != nil {
		return err
	}
	defer r.Close()
	ext := filepath.Ext(name)
	lines := ext == ".jsonl" || ext == ".ndjson"
	text := &corpus.TextReader{From: r, Binary: lines}
	in.invalid = 0
	give := func(d corpus.Document) error { in.invalid = text.Invalid; return yield(d, c.read) }
	if lines {
		return corpus.Lines(text, fields, give)
	}
	if fields.Masks() {
		return errOnlyLines
	}
	return corpus.Text(text, cut, give)
}

var errOnlyLines = errors.New("prompts and segments are only read from jsonl")

// decompressed returns a reader of the decompressed file, and the name without .gz or .zst.
func decompressed(c *counter, name string) (io.ReadCloser, string, error) {
	switch ext := filepath.Ext(name); ext {
	case ".gz":
		r, err := kgzip.NewReader(c)
		if errors.Is(err, gzip.ErrHeader) {
			err = errors.New("it is not a gzip file")
		}
		return r, strings.TrimSuffix(name, ext), err
	case ".zst":
		// one goroutine, because the workers use the other processors; a limited window, because a file could
		// otherwise demand any amount of memory
		r, err := zstd.NewReader(c, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20))
		if err != nil {
			return nil, "", err
		}
		return r.IOReadCloser(), strings.TrimSuffix(name, ext), nil
	}
	return io.NopCloser(c), name, nil
}

// parquet reads a column of texts. Null values are not documents.
func (in *Input) parquet(f *os.File, field string, yield func(d corpus.Document, read int64) error) (err error) {
	row := int64(0)
	defer func() {
		if r := recover(); r != nil { // a damaged file can make the library panic
			err = fmt.Errorf("row %d: the file is damaged: %v", row, r)
		}
	}()
	in.invalid = 0
	var end [8]byte // the size of the footer, for which the library allocates up to 4 GiB before it reads, and a magic number
	if in.size < int64(len(end)) {
		return fmt.Errorf("it has %d bytes, too few for a parquet file", in.size)
	}
	if _, err := f.ReadAt(end[:], in.size-int64(len(end))); err != nil {
		return err
	}
	if n := int64(binary.LittleEndian.Uint32(end[:])); n > in.size-int64(len(end)) {
		return fmt.Errorf("the file is damaged or truncated: its footer should have %d bytes, but the file has %d", n, in.size)
	}
	file, err := parquet.OpenFile(f, in.size, parquet.SkipPageIndex(true), parquet.SkipBloomFilters(true))
	if err != nil {
		return err
	}
	column, ok := file.Schema().Lookup(field)
	if !ok {
		var names []string
		for _, path := range file.Schema().Columns() {
			name := strings.Join(path, ".")
			if quoted := fmt.Sprintf("%.80q", name); quoted != `"`+name+`"` {
				name = quoted // long, or with characters that do not belong in a message
			}
			names = append(names, name)
		}
		slices.Sort(names)
		return fmt.Errorf("there is no column %q: it has %s", field, strings.Join(names[:min(len(names), 20)], ", "))
	}
	if kind := column.Node.Type().Kind(); kind != parquet.ByteArray || column.MaxRepetitionLevel > 0 {
		return fmt.Errorf("column %q does not contain text", field)
	}
	done := int64(0)
	for i, group := range file.RowGroups() {
		if err := checkPages(f, in.size, &file.Metadata().RowGroups[i].Columns[column.ColumnIndex].MetaData); err != nil {
			return err
		}
		chunk := group.ColumnChunks()[column.ColumnIndex]
		n := max(1, group.NumRows())
		start := row
		err := eachValue(chunk, func(v parquet.Value) error {
			row++
			if v.IsNull() {
				return nil
			}
			if !utf8.Valid(v.ByteArray()) {
				in.invalid += corpus.InvalidBytes(v.ByteArray())
			}
			at := min(in.size, (done+(row-start))*in.size/max(1, file.NumRows()))
			return yield(corpus.Document{Text: string(v.ByteArray()), Ends: true}, at)
		})
		if err != nil {
			return fmt.Errorf("row %d: %w", row, err)
		}
		done += n
	}
	return nil
}

func eachValue(chunk parquet.ColumnChunk, f func(parquet.Value) error) error {
	pages := chunk.Pages()
	defer pages.Close()
	buf := make([]parquet.Value, 256)
	for {
		page, err := pages.ReadPage()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		values := page.Values()
		for {
			n, err := values.ReadValues(buf)
			for _, v := range buf[:n] {
				if err := f(v); err != nil {
					parquet.Release(page)
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				parquet.Release(page)
				return err
			}
		}
		parquet.Release(page)
	}
}
