package kernels_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/cuda/nvrtc"
)

// recordPath is the file with the figures of all compilations: lines of JSON, first the compiler's release, then for each
// compilation its hash and, on a line each, the figures of its kernels.
const recordPath = "testdata/compiled.jsonl"

// record holds the figures of compilations by one release of the compiler.
type record struct {
	release string
	rows    map[compilation]row
	text    []byte
}

// row holds the figures of a compilation, and a hash of what they depend on.
type row struct {
	hash    string
	figures []figures
}

// head is a line of the record that begins a compilation, or names the release.
type head struct {
	Release string `json:"release,omitempty"`
	Source  string `json:"source,omitempty"`
	Arch    string `json:"arch,omitempty"`
	Hash    string `json:"hash,omitempty"`
}

func readRecord(t *testing.T) record {
	t.Helper()
	text, err := os.ReadFile(recordPath)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	rec, at := record{rows: map[compilation]row{}, text: text}, compilation{}
	lines := json.NewDecoder(bytes.NewReader(text))
	lines.DisallowUnknownFields()
	for {
		line := struct {
			head
			figures
		}{}
		if err := lines.Decode(&line); err == io.EOF {
			return rec
		} else if err != nil {
			t.Fatalf("%s: %v", recordPath, err)
		}
		switch {
		case line.Release != "":
			rec.release = line.Release
		case line.Source != "":
			at = compilation{line.Source, line.Arch}
			if !slices.Contains(compilations(), at) {
				t.Errorf("%s: there is no %s to compile; make kernels rewrites the file", recordPath, at)
			}
			rec.rows[at] = row{hash: line.Hash}
		default:
			rec.rows[at] = row{rec.rows[at].hash, append(rec.rows[at].figures, line.figures)}
		}
	}
}

// write writes the record.
func (r record) write(t *testing.T) {
	t.Helper()
	out := bytes.Buffer{}
	lines := json.NewEncoder(&out)
	lines.SetEscapeHTML(false)
	values := []any{head{Release: r.release}}
	for _, c := range compilations() {
		if row, ok := r.rows[c]; ok {
			if len(row.figures) == 0 {
				t.Fatalf("%s: no figures to record", c)
			}
			values = append(values, head{Source: c.source, Arch: c.arch, Hash: row.hash})
			for _, f := range row.figures {
				values = append(values, f)
			}
		}
	}
	for _, v := range values {
		if err := lines.Encode(v); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Dir(recordPath), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(recordPath, out.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// sample returns the compilation that is repeated to compare: another one for each version of the record.
func (r record) sample() compilation {
	sum := sha256.Sum256(r.text)
	all := compilations()
	return all[binary.BigEndian.Uint64(sum[:])%uint64(len(all))]
}

// compareFigures reports kernels whose recorded figures are not those of a new compilation.
func compareFigures(t *testing.T, c compilation, recorded, fresh []figures) {
	t.Helper()
	text := func(all []figures, i int) string {
		if i >= len(all) {
			return "nothing"
		}
		line, _ := json.Marshal(all[i])
		return string(line)
	}
	for i := range max(len(recorded), len(fresh)) {
		if i >= len(recorded) || i >= len(fresh) || !reflect.DeepEqual(recorded[i], fresh[i]) {
			t.Errorf("%s: %s says\n%s\nbut the compiler makes\n%s\nmake kernels rewrites the file", c, recordPath, text(recorded, i), text(fresh, i))
		}
	}
}

// keyOf returns a hash of everything that the figures of a compilation depend on: the source with its headers, the
// compiler's release and options, and how figures are derived. Comments do not count.
func keyOf(c compilation, release string) string {
	derivation, err := os.ReadFile("machine_test.go")
	if err != nil {
		panic("internal: " + err.Error())
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%s\x00%s\x00%q\x00%s\x00", release, c.arch, options, withoutComments(string(derivation)))
	names := []string{c.source}
	for i := 0; i < len(names); i++ {
		text := withoutComments(kernels.Text(names[i]))
		fmt.Fprintf(sum, "%s\x00%s\x00", names[i], text)
		for _, m := range includeLine.FindAllStringSubmatch(text, -1) {
			if !slices.Contains(names, m[1]) {
				names = append(names, m[1])
			}
		}
	}
	return fmt.Sprintf("%x", sum.Sum(nil)[:16])
}

var (
	includeLine    = regexp.MustCompile(`(?m)^\s*#\s*include\s*"([^"]+)"`)
	commentOrText  = regexp.MustCompile("(?s)\"(?:[^\"\\\\\n]|\\\\.)*\"|'(?:[^'\\\\\n]|\\\\.)'|`[^`]*`|//[^\n]*|/\\*.*?\\*/")
	blanksAtMargin = regexp.MustCompile(`\s*\n\s*`)
)

// withoutComments returns a source in C++ or Go without comments, empty lines and indentation.
func withoutComments(text string) string {
	text = commentOrText.ReplaceAllStringFunc(text, func(found string) string {
		if strings.HasPrefix(found, "/") {
			return " "
		}
		return found
	})
	return blanksAtMargin.ReplaceAllString(text, "\n")
}

// releaseOf returns the compiler's full release, such as 13.0.88, which it writes into everything that it compiles. The API gives
// only the first two numbers.
func releaseOf(api *nvrtc.API) (string, error) {
	out, err := api.Compile(nvrtc.Source{Name: "empty.cu", Text: `extern "C" __global__ void empty() {}`}, "--gpu-architecture=sm_80")
	if err != nil {
		return "", err
	}
	if m := releaseText.FindSubmatch(out.Image); m != nil {
		return string(m[1]), nil
	}
	return api.Version()
}

var releaseText = regexp.MustCompile(`\bV(\d+\.\d+\.\d+)\b`)
