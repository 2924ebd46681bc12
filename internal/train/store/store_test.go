package store_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/internal/train/store"
	"sppo.dev/ir"
)

// value returns one element of a test tensor.
func value(tensor int, row, col int64) float32 {
	return float32(tensor+1)*1000 + float32(row) + float32(col)/64
}

// write writes a checkpoint of two tensors, divided among ranks at random rows and columns.
func write(t *testing.T, f *store.Folder, step int64) string {
	t.Helper()
	m := &store.Manifest{
		Program: "p", Model: ir.Model{Name: "m"}, Step: step,
		Tensors: []store.Tensor{
			{Tensor: "matrix", Role: "weight", DType: "F32", Shape: [2]int64{7, 10}},
			{Tensor: "matrix", Role: "moment1", DType: "F32", Shape: [2]int64{7, 10}},
			{Tensor: "vector", Role: "weight", DType: "BF16", Shape: [2]int64{9, 1}},
		},
	}
	temporary, err := f.Begin(step)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, uint64(step)))
	const ranks = 3
	parts := make([][]store.Part, ranks)
	for i := range m.Tensors {
		e := &m.Tensors[i]
		rows := []int64{0, 1 + rng.Int64N(e.Shape[0]-1), e.Shape[0]}
		cols := []int64{0, e.Shape[1]}
		if e.Shape[1] > 1 {
			cols = []int64{0, 1 + rng.Int64N(e.Shape[1]-1), e.Shape[1]}
		}
		for r := range len(rows) - 1 {
			for c := range len(cols) - 1 {
				p := store.Part{Of: e, Row: rows[r], Col: cols[c], Rows: rows[r+1] - rows[r], Cols: cols[c+1] - cols[c]}
				p.Write = func(w io.Writer) error { return writeValues(w, i, &p) }
				rank := rng.IntN(ranks) // random, so that a rank may have two parts of a tensor, or none at all
				parts[rank] = append(parts[rank], p)
			}
		}
	}
	for rank := range parts {
		shards, err := store.WriteShards(t.Context(), temporary, rank, parts[rank])
		if err != nil {
			t.Fatal(err)
		}
		m.Shards = append(m.Shards, shards...)
	}
	path, err := f.Complete(temporary, m)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Retire(); err != nil {
		t.Fatal(err)
	}
	return path
}

func writeValues(w io.Writer, tensor int, p *store.Part) error {
	for row := range p.Rows {
		for col := range p.Cols {
			bits := math.Float32bits(value(tensor, p.Row+row, p.Col+col))
			if p.Of.DType == "BF16" {
				if _, err := w.Write(binary.LittleEndian.AppendUint16(nil, uint16(bits>>16))); err != nil {
					return err
				}
			} else if _, err := w.Write(binary.LittleEndian.AppendUint32(nil, bits)); err != nil {
				return err
			}
		}
	}
	return nil
}

func create(t *testing.T, dir string, keep int, done int64) *store.Folder {
	t.Helper()
	f, err := store.Create(dir, keep, done)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// Random rectangles of every tensor are read back as they were written, for many divisions of the tensors among
// the ranks that wrote them.
func TestReadsWhatWasWritten(t *testing.T) {
	f := create(t, t.TempDir(), 100, -1)
	for step := range int64(40) {
		c, err := store.Open(write(t, f, step))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Verify(t.Context(), func(*store.Shard) bool { return true }, func(int64) {}); err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(2, uint64(step)))
		for i := range c.Tensors {
			e := &c.Tensors[i]
			for range 20 {
				row, col := rng.Int64N(e.Shape[0]), rng.Int64N(e.Shape[1])
				rows, cols := 1+rng.Int64N(e.Shape[0]-row), 1+rng.Int64N(e.Shape[1]-col)
				got, want := make([]float32, rows*cols), make([]float32, rows*cols)
				if err := c.Read(e.Name(), row, col, rows, cols, got); err != nil {
					t.Fatal(err)
				}
				for k := range want {
					want[k] = value(i, row+int64(k)/cols, col+int64(k)%cols)
					if e.DType == "BF16" {
						want[k] = math.Float32frombits(math.Float32bits(want[k]) &^ 0xffff)
					}
				}
				if !slices.Equal(got, want) {
					t.Fatalf("step %d: %s from (%d, %d), %d by %d: %v, want %v", step, e.Name(), row, col, rows, cols, got, want)
				}
			}
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A flipped byte anywhere, a truncated file and a missing file each cause one error that names the file.
func TestDamageIsFound(t *testing.T) {
	dir := t.TempDir()
	path := write(t, create(t, dir, 2, -1), 3)
	list, err := os.ReadDir(path)
	if err != nil {
		t.Fatal(err)
	}
	open := func() error {
		c, err := store.Open(path)
		if err != nil {
			return err
		}
		defer c.Close()
		return c.Verify(t.Context(), func(*store.Shard) bool { return true }, func(int64) {})
	}
	if err := open(); err != nil {
		t.Fatal(err)
	}
	check := func(what, file string) {
		t.Helper()
		var damage *store.Damage
		if err := open(); !errors.As(err, &damage) || damage.File != file || !strings.Contains(err.Error(), file) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s of %s: %T %v", what, file, err, err)
		}
	}
	for _, e := range list {
		name := filepath.Join(path, e.Name())
		good, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		put := func(b []byte) {
			if err := os.WriteFile(name, b, 0o666); err != nil {
				t.Fatal(err)
			}
		}
		for at := 0; at < len(good); at += 1 + len(good)/200 {
			bad := bytes.Clone(good)
			bad[at] ^= 1 << (at % 8)
			put(bad)
			check(fmt.Sprint("flipped byte ", at), e.Name())
		}
		put(good[:len(good)-1])
		check("truncation", e.Name())
		put(append(bytes.Clone(good), ' '))
		check("a byte more", e.Name())
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
		check("absence", e.Name())
		put(good)
	}
	if err := open(); err != nil {
		t.Fatal(err)
	}
}

// Only a checkpoint whose files have changed is damaged, not one that cannot be read, that is of another format, or
// whose manifest makes no sense.
func TestWhatIsNotDamage(t *testing.T) {
	const fails = "/proc/self/mem" // a regular file of size 0; reading its first byte fails with EIO
	if _, err := os.Stat(fails); err != nil {
		t.Skip(err)
	}
	for name, c := range map[string]struct {
		change func(manifest, shard string) error
		want   string
	}{
		"I/O error in the manifest": {func(manifest, _ string) error { return errors.Join(os.Remove(manifest), os.Symlink(fails, manifest)) }, "input/output error"},
		"unreadable manifest": {func(manifest, _ string) error {
			return errors.Join(os.Remove(manifest), os.Symlink(manifest, manifest))
		}, "too many levels of symbolic links"},
		"unreadable shard":          {func(_, shard string) error { return errors.Join(os.Remove(shard), os.Symlink(shard, shard)) }, "too many levels of symbolic links"},
		"shard elsewhere":           {func(_, shard string) error { return errors.Join(os.Remove(shard), os.Symlink("nowhere", shard)) }, "rank-00000.safetensors is in the folder, but cannot be found"},
		"folder instead of a shard": {func(manifest, _ string) error { return errors.Join(os.Remove(manifest), os.Mkdir(manifest, 0o777)) }, "it is a folder, not a regular file"},
		"a later format": {func(manifest, _ string) error {
			return resealed(manifest, `"format": 3`, `"format": 4, "program": {"of": "another kind"}, "unknown": 1`)
		}, "manifest.json has format 4; this release reads format 3"},
		"a later format with another end": {func(manifest, _ string) error {
			return os.WriteFile(manifest, []byte(`{"format": 4, "sha256": "abc"}`), 0o666)
		},
			"manifest.json has format 4; this release reads format 3"},
		"an impossible step": {func(manifest, _ string) error { return resealed(manifest, `"step": 3`, `"step": -3`) }, "is invalid: step -3"},
		"too few parts": {func(manifest, _ string) error { return resealed(manifest, " 7,\n", " 8,\n") },
			"is invalid: its shards have 70 of the 80 elements of matrix"},
	} {
		path := write(t, create(t, t.TempDir(), 2, -1), 3)
		if err := c.change(filepath.Join(path, store.ManifestFile), filepath.Join(path, "rank-00000.safetensors")); err != nil {
			t.Fatal(err)
		}
		_, err := store.Open(path)
		if err == nil || errors.As(err, new(*store.Damage)) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %T %v, want %q", name, err, err, c.want)
		}
	}

	// A shard whose contents cannot be read is not damaged, either.
	dir := t.TempDir()
	f := create(t, dir, 2, -1)
	temporary, err := f.Begin(4)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(fails, filepath.Join(temporary, "rank-00000.safetensors")); err != nil {
		t.Fatal(err)
	}
	path, err := f.Complete(temporary, &store.Manifest{Step: 4, Shards: []store.Shard{{File: "rank-00000.safetensors", CRC32C: "00000001"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(path); !errors.Is(err, syscall.EIO) || errors.As(err, new(*store.Damage)) {
		t.Errorf("I/O error in a shard: %T %v", err, err)
	}
}

// resealed replaces a part of a manifest and writes the checksum anew.
func resealed(manifest, before, after string) error {
	text, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	const seal = ",\n\"crc32c\": \""
	body := strings.ReplaceAll(string(text[:bytes.LastIndex(text, []byte(seal))]), before, after)
	return os.WriteFile(manifest, []byte(body+seal+store.Checksum([]byte(body))+"\"}\n"), 0o666)
}

// A checkpoint that is open for reading holds no files open, since a large job has more shards than a process may have
// open files.
func TestShardsAreNotHeldOpen(t *testing.T) {
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip(err)
		}
		return len(list)
	}
	path := write(t, create(t, t.TempDir(), 2, -1), 3)
	before := count()
	c, err := store.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Read("matrix", 0, 0, 7, 10, make([]float32, 70)); err != nil {
		t.Fatal(err)
	}
	if after := count(); after > before {
		t.Errorf("%d files are open, %d more than before", after, after-before)
	}
}

// A folder that is removed while a run writes to it is created again, and is then locked for that run. Its parent is
// not made.
func TestRemovedFolder(t *testing.T) {
	parent := filepath.Join(t.TempDir(), "parent")
	dir := filepath.Join(parent, "dir")
	if err := os.Mkdir(parent, 0o777); err != nil {
		t.Fatal(err)
	}
	f := create(t, dir, 2, -1)
	write(t, f, 1)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	write(t, f, 2)
	if steps, err := store.Steps(dir); err != nil || !slices.Equal(steps, []int64{2}) {
		t.Errorf("checkpoints %v: %v", steps, err)
	}
	if _, err := store.Create(dir, 2, 2); err == nil || !strings.Contains(err.Error(), "another run is writing") {
		t.Errorf("another run: %v", err)
	}
	if err := os.RemoveAll(parent); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Begin(3); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without the parent: %v", err)
	}
}

// The newest checkpoints and files of other kinds are kept, and the remains of killed runs are removed. If an old
// checkpoint is a symbolic link, only the link is removed.
func TestRetention(t *testing.T) {
	root := t.TempDir()
	real, dir, aside := filepath.Join(root, "real"), filepath.Join(root, "link"), filepath.Join(root, "aside")
	if err := os.Mkdir(real, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, dir); err != nil {
		t.Fatal(err)
	}
	f := create(t, dir, 2, -1)
	write(t, f, 1)
	if err := os.Rename(filepath.Join(dir, "step-1"), aside); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(aside, filepath.Join(dir, "step-1")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{".step-9.abc.tmp", ".step-2.abc.removed", ".step-of-mine", "notes"} {
		if err := os.MkdirAll(filepath.Join(dir, name, "rank-00000.safetensors"), 0o777); err != nil {
			t.Fatal(err)
		}
	}
	f.Close()
	f = create(t, dir, 2, 1)
	for step := range int64(3) {
		write(t, f, 10+step)
	}
	list, err := os.ReadDir(real)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	if diff := cmp.Diff([]string{".step-of-mine", "notes", "step-11", "step-12"}, names); diff != "" {
		t.Error(diff)
	}
	if _, err := os.Stat(filepath.Join(aside, store.ManifestFile)); err != nil {
		t.Errorf("what a link pointed to is gone: %v", err)
	}
}

// Only one run at a time can write to a folder, and it must not start before the newest step in the folder.
func TestWhoMayWrite(t *testing.T) {
	dir := t.TempDir()
	f := create(t, dir, 2, -1)
	if _, err := store.Create(dir, 2, -1); err == nil || !strings.Contains(err.Error(), "another run is writing checkpoints to "+dir) {
		t.Errorf("two runs: %v", err)
	}
	write(t, f, 5)
	f.Close()
	for done, want := range map[int64]string{-1: "starts anew", 4: "continues from step 4", 5: ""} {
		f, err := store.Create(dir, 2, done)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), "has a checkpoint of step 5, but this run "+want)) {
			t.Errorf("after step %d: %v", done, err)
		}
		if err == nil {
			f.Close()
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create(filepath.Join(dir, "file"), 2, -1); err == nil {
		t.Error("a file is a folder")
	}
}

// A write that fails leaves no checkpoint.
func TestFullDisk(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("there is no /dev/full")
	}
	dir := t.TempDir()
	f := create(t, dir, 2, -1)
	temporary, err := f.Begin(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/full", filepath.Join(temporary, "rank-00000.safetensors")); err != nil {
		t.Fatal(err)
	}
	e := store.Tensor{Tensor: "t", Role: "weight", DType: "F32", Shape: [2]int64{4, 4}}
	p := store.Part{Of: &e, Rows: 4, Cols: 4, Write: func(w io.Writer) error { return writeValues(w, 0, &store.Part{Of: &e, Rows: 4, Cols: 4}) }}
	if _, err := store.WriteShards(context.Background(), temporary, 0, []store.Part{p}); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("a full disk: %v", err)
	}
	if err := f.Drop(temporary); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v is left: %v", left, err)
	}
}

// readTorch loads all tensors with torch.distributed.checkpoint and prints the sum of each tensor's elements,
// weighted by their indices, which start at 1.
const readTorch = `
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
reader = HuggingFaceStorageReader(sys.argv[1])
m = reader.read_metadata()
state = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in m.state_dict_metadata.items()}
dcp.load(state, storage_reader=HuggingFaceStorageReader(sys.argv[1]))
for k in sorted(state):
    x = state[k].double()
    weights = torch.arange(1, x.numel() + 1, dtype=torch.float64).reshape(x.shape)
    print(k, list(x.shape), (x * weights).sum().item())
`

// torch.distributed.checkpoint reads the folder, whose tensors are divided among several files.
func TestTorchReads(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON names no Python with torch")
	}
	path := write(t, create(t, t.TempDir(), 2, -1), 3)
	c, err := store.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var want []string
	for i := range c.Tensors {
		e := &c.Tensors[i]
		values, sum := make([]float32, e.Shape[0]*e.Shape[1]), 0.0
		if err := c.Read(e.Name(), 0, 0, e.Shape[0], e.Shape[1], values); err != nil {
			t.Fatal(err)
		}
		for k, v := range values {
			sum += float64(v) * float64(k+1)
		}
		shape := fmt.Sprintf("[%d, %d]", e.Shape[0], e.Shape[1])
		if e.Shape[1] == 1 {
			shape = fmt.Sprintf("[%d]", e.Shape[0])
		}
		text := strconv.FormatFloat(sum, 'f', -1, 64)
		if sum == math.Trunc(sum) {
			text += ".0"
		}
		want = append(want, fmt.Sprint(e.Name(), " ", shape, " ", text))
	}
	slices.Sort(want)
	var errs bytes.Buffer
	command := exec.Command(python, "-c", readTorch, path)
	command.Stderr = &errs
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, errs.String())
	}
	if diff := cmp.Diff(want, strings.Split(strings.TrimSpace(string(out)), "\n")); diff != "" {
		t.Error(diff)
	}
}

// Only a changed or missing file is damage. Whether a file that cannot be opened is good is unknown.
func TestDamage(t *testing.T) {
	for _, c := range []struct {
		name    string
		change  func(shard, manifest string) error
		damaged bool
	}{
		{"a shard is missing", func(shard, _ string) error { return os.Remove(shard) }, true},
		{"a shard is truncated", func(shard, _ string) error { return os.Truncate(shard, 100) }, true},
		{"the manifest is missing", func(_, manifest string) error { return os.Remove(manifest) }, true},
		{"the manifest is truncated", func(_, manifest string) error { return os.Truncate(manifest, 100) }, true},
		{"a shard cannot be opened", func(shard, _ string) error {
			return errors.Join(os.Remove(shard), os.Symlink(filepath.Base(shard), shard)) // a loop
		}, false},
		{"the manifest cannot be opened", func(_, manifest string) error {
			return errors.Join(os.Remove(manifest), os.Symlink(filepath.Base(manifest), manifest))
		}, false},
		{"the manifest has a later format", func(_, manifest string) error {
			return os.WriteFile(manifest, []byte(`{"format": 4, "seal": "another"}`), 0o666)
		}, false},
		{"the folder is gone", func(shard, _ string) error { return os.RemoveAll(filepath.Dir(shard)) }, false},
	} {
		dir := write(t, create(t, t.TempDir(), 100, -1), 5)
		shards, err := filepath.Glob(filepath.Join(dir, "rank-*"))
		if err != nil || len(shards) == 0 {
			t.Fatal(shards, err)
		}
		if err := c.change(shards[0], filepath.Join(dir, store.ManifestFile)); err != nil {
			t.Fatal(err)
		}
		_, err = store.Open(dir)
		if err == nil || errors.As(err, new(*store.Damage)) != c.damaged {
			t.Errorf("%s: %v; damage: %t, want %t", c.name, err, !c.damaged, c.damaged)
		}
	}
}
