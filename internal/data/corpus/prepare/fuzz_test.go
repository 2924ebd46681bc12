package prepare

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress"
	"github.com/parquet-go/parquet-go/encoding/thrift"
	"github.com/parquet-go/parquet-go/format"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/data/tokenizer"
)

// A parquet file that declares a footer of 4 GiB is refused before that is allocated.
func TestParquetFooter(t *testing.T) {
	text := "some text"
	var b bytes.Buffer
	w := parquet.NewGenericWriter[row](&b)
	if _, err := w.Write([]row{{1, &text}}); err != nil {
		t.Fatal(err)
	}
	w.Close()
	name := filepath.Join(t.TempDir(), "a.parquet")
	if err := os.WriteFile(name, append(b.Bytes()[:b.Len()-8], "\xff\xff\xff\xffPAR1"...), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := Check(t.Context(), name, corpus.Options{Field: "text"}, 0)
	if err != nil || len(out.Damage) != 1 || !strings.Contains(out.Damage[0].Error(), "its footer should have 4294967295 bytes") {
		t.Errorf("%v, %v", out, err)
	}
}

// codecs lists the compression codecs of parquet files.
var codecs = []compress.Codec{&parquet.Uncompressed, &parquet.Snappy, &parquet.Gzip, &parquet.Brotli, &parquet.Zstd, &parquet.Lz4Raw}

// encoded is a column of every encoding that texts have.
type encoded struct {
	Text   *string `parquet:"text,optional"`
	Plain  string  `parquet:"plain,plain"`
	Dict   string  `parquet:"dict,dict"`
	Delta  string  `parquet:"delta,delta"`
	Repeat []string
}

// parquetFile returns a file with several pages in two row groups.
func parquetFile(t testing.TB, codec compress.Codec, version int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := parquet.NewGenericWriter[encoded](&b, parquet.Compression(codec), parquet.DataPageVersion(version), parquet.MaxRowsPerRowGroup(30), parquet.PageBufferSize(256))
	for i := range 50 {
		text := strings.Repeat("some text ", i%7+1)
		rows := []encoded{{&text, text, text, text, []string{text}}}
		if i%5 == 0 {
			rows[0].Text = nil
		}
		if _, err := w.Write(rows); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// checkParquet reads all columns of text of a file, and returns the documents of the first and the damage.
func checkParquet(t testing.TB, data []byte) (documents int64, damage []error) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "a.parquet")
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
	for i, field := range []string{"text", "plain", "dict", "delta"} {
		out, err := Check(t.Context(), name, corpus.Options{Field: field}, 0)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			documents = out.Documents
		}
		damage = append(damage, out.Damage...)
	}
	return documents, damage
}

// Files of every codec and version are read, and damage to any byte takes little memory.
func TestParquetPages(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, codec := range codecs {
		for version := 1; version <= 2; version++ {
			data := parquetFile(t, codec, version)
			if n, damage := checkParquet(t, data); n != 40 || damage != nil {
				t.Fatalf("%s, version %d: %d documents, %v", codec, version, n, damage)
			}
			found, flips := 0, 40
			most := peak(func() {
				for range flips {
					bad := bytes.Clone(data)
					bad[r.IntN(len(bad))] ^= byte(1 + r.IntN(255))
					if _, damage := checkParquet(t, bad); damage != nil {
						found++
					}
				}
			})
			if found < flips/6 || most > 256<<20 {
				t.Errorf("%s, version %d: %d of %d damaged files are found, with at most %d MiB", codec, version, found, flips, most>>20)
			}
		}
	}
}

// withCodec returns a parquet file whose footer names another codec for all columns.
func withCodec(t testing.TB, data []byte, codec format.CompressionCodec) []byte {
	t.Helper()
	file, err := parquet.OpenFile(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	meta := file.Metadata()
	for i := range meta.RowGroups {
		for j := range meta.RowGroups[i].Columns {
			meta.RowGroups[i].Columns[j].MetaData.Codec = codec
		}
	}
	footer, err := thrift.Marshal(new(thrift.CompactProtocol), meta)
	if err != nil {
		t.Fatal(err)
	}
	end := len(data) - 8 - int(binary.LittleEndian.Uint32(data[len(data)-8:]))
	out := binary.LittleEndian.AppendUint32(append(bytes.Clone(data[:end]), footer...), uint32(len(footer)))
	return append(out, "PAR1"...)
}

// Pages that their codec cannot decompress are refused, without much memory. For LZ4 the library would ask for more and more.
func TestParquetCodec(t *testing.T) {
	for _, is := range codecs[1:] {
		for _, said := range codecs[1:] {
			for version := 1; version <= 2; version++ {
				data := withCodec(t, parquetFile(t, is, version), said.CompressionCodec())
				var damage []error
				most := peak(func() { _, damage = checkParquet(t, data) })
				if (damage == nil) != (is == said) || most > 256<<20 {
					t.Errorf("%s, said to be %s, version %d: %v, at most %d MiB", is, said, version, damage, most>>20)
				}
			}
		}
	}
}

// The size of an LZ4 block is known before it is decompressed, and those that cannot be are refused.
func TestLZ4Size(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for i := range 2000 {
		text := make([]byte, r.IntN(2000))
		for j := range text {
			text[j] = byte(r.IntN(1 + i%20))
		}
		block, err := parquet.Lz4Raw.Encode(nil, text)
		if err != nil {
			t.Fatal(err)
		}
		if n := lz4Size(block); n != int64(len(text)) {
			t.Fatalf("%d bytes rather than %d", n, len(text))
		}
		bad := bytes.Clone(block)
		bad[r.IntN(len(bad))] ^= byte(1 + r.IntN(255))
		if n := lz4Size(bad); n >= 0 && n < 1<<20 {
			if out, err := parquet.Lz4Raw.Decode(nil, bad); err != nil || int64(len(out)) != n {
				t.Fatalf("%d bytes rather than %d, %v", len(out), n, err)
			}
		}
	}
}

// FuzzParquet reads hostile parquet files. None may panic, take much memory, or cause an error of several lines.
func FuzzParquet(f *testing.F) {
	for _, codec := range codecs {
		for version := 1; version <= 2; version++ {
			data := parquetFile(f, codec, version)
			f.Add(data)
			f.Add(withCodec(f, data, format.Lz4Raw))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<20 {
			return
		}
		var damage []error
		most := peak(func() { _, damage = checkParquet(t, data) })
		if most > 3<<30 {
			t.Errorf("%d MiB of memory", most>>20)
		}
		for _, err := range damage {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("an error of several lines: %q", err)
			}
		}
	})
}

// FuzzRecords continues jobs from hostile records of shards.
func FuzzRecords(f *testing.F) {
	f.Add([]byte(`{"name":"00000","tokens":1,"documents":1,"highest":5,"checksum":"0000000000000000","next":{"input":0,"skip":1},"last":false}`))
	f.Add([]byte(`{"name":"00000","tokens":1,"next":{"input":-1,"skip":-1},"last":true}`))
	tok, err := tokenizer.Open(filepath.Join("..", "..", "tokenizer", "testdata", "reference", "gpt2.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		for name, data := range map[string][]byte{"00000" + recordEnding: text, "00000.bin": {5, 0}} {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		records, err := (&Job{Dir: dir, Tokenizer: tok}).readRecords()
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("an error of several lines: %q", err)
		}
		for _, r := range records {
			if r.Next.Input < 0 || r.Next.Skip < 0 {
				t.Errorf("it continues at %+v", r.Next)
			}
		}
	})
}
