package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"path/filepath"
	"strings"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/infile"
	"sppo.dev/ir"
)

// ManifestFile is the name of the manifest, which every checkpoint folder contains.
const ManifestFile = "manifest.json"

// Format is the version of the checkpoints that this package writes and reads. Versions 1 and 2 were single
// files.
const Format = 3

// Manifest describes a checkpoint: the state of the training, not of the ranks. Its tensors are not divided, so
// any other program for the same model can continue from the checkpoint, no matter how it divides the model among
// ranks.
type Manifest struct {
	Format   int                  `json:"format"`
	Program  string               `json:"program"`
	Model    ir.Model             `json:"model"` // names and shapes of tensors do not determine the computation
	Step     int64                `json:"step"`
	Sequence int64                `json:"sequence,omitempty"` // tokens per sequence in the last steps
	Skipped  int64                `json:"skipped"`            // number of steps that left the weights unchanged
	Norms    []float32            `json:"norms,omitempty"`    // gradient norms of the last updates, oldest first
	Seed     int64                `json:"seed"`
	Run      *ir.Run              `json:"run,omitempty"`    // what the last steps used; nil in older checkpoints
	Origin   string               `json:"origin,omitempty"` // source of the weights that the run started from
	Data     []corpus.Fingerprint `json:"data,omitempty"`   // fingerprints of token files
	Made     Division             `json:"made"`
	Tensors  []Tensor             `json:"tensors"`
	Shards   []Shard              `json:"shards"`
}

// Division describes how the job that wrote a checkpoint was divided: into replicas, stages, and ranks per stage.
type Division struct {
	DP int `json:"dp"`
	PP int `json:"pp"`
	SP int `json:"sp"`

	// Results can differ in rounding only if one of the following differs; see ir.Run.
	Sums    []string `json:"sums,omitempty"`
	Devices []string `json:"devices,omitempty"` // kinds of the processes' devices, each listed once
}

// Tensor is an entry of a checkpoint: the values of one role of a parameter.
type Tensor struct {
	Tensor string   `json:"tensor"`
	Role   string   `json:"role"`
	DType  string   `json:"dtype"`
	Shape  [2]int64 `json:"shape"`
}

// Name returns the entry's name in shards: the parameter's name for a weight (the most precise copy that the
// job has), and optimizer.ROLE.PARAMETER for an optimizer state.
func (t *Tensor) Name() string {
	if t.IsWeight() {
		return t.Tensor
	}
	return "optimizer." + t.Role + "." + t.Tensor
}

// IsWeight reports whether the entry holds the parameter itself, not an optimizer state.
func (t *Tensor) IsWeight() bool {
	return t.Role == ir.RoleWeight.String() || t.Role == ir.RoleMaster.String()
}

// Shard is a file of a checkpoint.
type Shard struct {
	File   string `json:"file"`
	Rank   int    `json:"rank"` // rank that wrote it
	Bytes  int64  `json:"bytes"`
	CRC32C string `json:"crc32c"` // of the whole file, in hexadecimal
}

// Checksum returns the CRC-32C of a shard's contents as written in manifests.
func Checksum(data []byte) string { return fmt.Sprintf("%08x", crc32.Checksum(data, castagnoli)) }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// The manifest ends with the checksum of all preceding bytes.
const (
	sealBefore = ",\n\"crc32c\": \""
	sealAfter  = "\"}\n"
)

// encode returns the text of a manifest, including its checksum.
func (m *Manifest) encode() ([]byte, error) {
	text, err := json.MarshalIndent(m, "", " ")
	if err != nil {
		return nil, err
	}
	text = bytes.TrimSuffix(text, []byte("\n}"))
	return fmt.Appendf(text, "%s%08x%s", sealBefore, crc32.Checksum(text, castagnoli), sealAfter), nil
}

func decode(text []byte) (*Manifest, error) {
	var version struct {
		Format int `json:"format"`
	}
	err := json.Unmarshal(text, &version)
	other := fmt.Errorf("has format %d; this release reads format %d", version.Format, Format)
	body := len(text) - len(sealBefore) - 8 - len(sealAfter)
	if body < 0 || !bytes.HasPrefix(text[body:], []byte(sealBefore)) || !bytes.HasSuffix(text, []byte(sealAfter)) {
		if err == nil && version.Format > Format {
			return nil, other // a later format may end differently
		}
		return nil, Damaged(ManifestFile, "is damaged or truncated: it does not end with its checksum")
	}
	if want := fmt.Sprintf("%08x", crc32.Checksum(text[:body], castagnoli)); want != string(text[body+len(sealBefore):len(text)-len(sealAfter)]) {
		return nil, Damaged(ManifestFile, "is damaged: wrong checksum")
	}
	if err == nil && version.Format != Format {
		return nil, other
	}
	m := &Manifest{}
	if err := json.Unmarshal(text, m); err != nil {
		return nil, fmt.Errorf("is invalid: %w", err)
	}
	return m, m.check()
}

// check rejects manifests that name files outside the checkpoint's folder or hold impossible values: anyone can
// write a manifest with a correct checksum.
func (m *Manifest) check() error {
	if m.Step < 0 || m.Skipped < 0 || m.Skipped > m.Step {
		return fmt.Errorf("is invalid: step %d with %d skipped", m.Step, m.Skipped)
	}
	names := map[string]bool{}
	for i := range m.Tensors {
		t := &m.Tensors[i]
		switch {
		case t.Shape[0] <= 0 || t.Shape[1] <= 0 || t.Shape[0] > 1<<40/t.Shape[1]:
			return fmt.Errorf("is invalid: %s has shape %v", t.Name(), t.Shape)
		case names[t.Name()]:
			return fmt.Errorf("is invalid: %s occurs twice", t.Name())
		case !safetensors.Convertible(t.DType):
			return fmt.Errorf("is invalid: %s has type %q", t.Name(), t.DType)
		}
		names[t.Name()] = true
	}
	for _, s := range m.Shards {
		if s.File == "" || s.File != filepath.Base(s.File) || s.File == ".." || strings.ContainsAny(s.File, `/\`) {
			return fmt.Errorf("is invalid: %q is not a file name", s.File)
		}
	}
	return nil
}

// longestManifest is the maximum size of a manifest, in bytes.
const longestManifest = 1 << 28

// ReadManifest reads and checks the manifest of a checkpoint. It reads no shards.
func ReadManifest(dir string) (*Manifest, error) {
	path := filepath.Join(dir, ManifestFile)
	text, err := infile.Read(path, longestManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, missing(dir, ManifestFile, fmt.Sprintf("is incomplete: it has no %s", ManifestFile))
	}
	if err != nil {
		return nil, err
	}
	m, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s %w", ManifestFile, err)
	}
	return m, nil
}
