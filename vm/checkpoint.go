package vm

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"

	"sppo.dev/corpus"
	"sppo.dev/infile"
	"sppo.dev/ir"
)

// A checkpoint is the state of the training, not of the ranks. It holds whole tensors, so it does not depend
// on how a model is divided, and one program's checkpoint continues under another program of the same model.
// It names the model, because names and shapes of tensors do not determine what is computed. Data and
// optimizer settings may change between runs.
//
//	magic        16 bytes
//	size         of the header, 8 bytes, little-endian
//	header       JSON: checkpointHeader
//	values       of every entry, f32, little-endian, rows first, in the header's order
//	checksum     CRC-32C of everything before, 4 bytes, little-endian

const (
	checkpointMagic = "sppo checkpoint2"
	// Format 1 does not name the model of a checkpoint, so it cannot be checked before a run continues from
	// it.
	firstMagic = "sppo checkpoint1"
)

type checkpointHeader struct {
	Program string            `json:"program"`
	Model   ir.Model          `json:"model"`
	Step    int64             `json:"step"`
	Seed    int64             `json:"seed"`
	Origin  string            `json:"origin,omitempty"` // of the weights that the run started from
	Entries []checkpointEntry `json:"entries"`

	Data []corpus.Fingerprint `json:"data,omitempty"` // of files of tokens
}

// remembered is data that a checkpoint remembers, since positions in it mean nothing once it has changed.
type remembered interface {
	Fingerprints() []corpus.Fingerprint
	Unchanged(before []corpus.Fingerprint) error
}

type checkpointEntry struct {
	Tensor string   `json:"tensor"`
	Role   string   `json:"role"`
	Shape  [2]int64 `json:"shape"`
	role   ir.Role
}

// entries lists the contents of a checkpoint of this program. Weights with a master copy are not included,
// because they are the rounded master; nor are gradients, which every step computes anew.
func (j *Job) entries() []checkpointEntry {
	var list []checkpointEntry
	for i, t := range j.program.Tensors {
		for role := range ir.NumRoles {
			skip := role == ir.RoleGrad || role == ir.RoleWeight && j.holds(i, ir.RoleMaster)
			if !skip && j.holds(i, role) {
				list = append(list, checkpointEntry{Tensor: t.Name, Role: role.String(), Shape: t.Shape, role: role})
			}
		}
	}
	return list
}

// Save writes a checkpoint. The file at path is complete at all times, even after a power failure.
func (j *Job) Save(path string) error {
	err := ir.ReplaceFile(path, func(file *os.File) error {
		err := j.writeCheckpoint(file)
		if sync := file.Sync(); err == nil && !errors.Is(sync, syscall.EINVAL) { // returned for pipes and devices
			err = sync
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("saving the checkpoint: %w", err)
	}
	return nil
}

func (j *Job) writeCheckpoint(file io.Writer) error {
	header := checkpointHeader{Program: j.program.Name, Model: j.program.Model, Step: j.step, Seed: j.program.Run.Seed, Origin: j.origin, Entries: j.entries()}
	if d, ok := j.tokens.(remembered); ok {
		header.Data = d.Fingerprints()
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	buffered := bufio.NewWriterSize(file, 1<<20)
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	out := io.MultiWriter(buffered, sum)
	io.WriteString(out, checkpointMagic)
	out.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(text))))
	out.Write(text)
	for _, e := range header.Entries {
		values, _, err := j.Tensor(e.Tensor, e.role)
		if err != nil {
			return err
		}
		if _, err := out.Write(BytesOf(values)); err != nil {
			return err
		}
	}
	buffered.Write(binary.LittleEndian.AppendUint32(nil, sum.Sum32()))
	return buffered.Flush()
}

// Restore loads a checkpoint; the next step is then what it would have been. The whole file is checked before
// any state changes.
func (j *Job) Restore(path string) error {
	file, _, err := infile.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := j.readCheckpoint(file); err != nil {
		return fmt.Errorf("checkpoint %s: %w", path, err)
	}
	return nil
}

func (j *Job) readCheckpoint(file *os.File) error {
	header, err := checkFile(file)
	if err != nil {
		return err
	}
	if err := j.accepts(header); err != nil {
		return err
	}
	if d, ok := j.tokens.(remembered); ok {
		if err := d.Unchanged(header.Data); err != nil {
			return err
		}
	}
	in := bufio.NewReaderSize(file, 1<<20)
	for _, e := range j.entries() {
		values := make([]float32, e.Shape[0]*e.Shape[1])
		if _, err := io.ReadFull(in, BytesOf(values)); err != nil {
			return err
		}
		if err := j.SetTensor(e.Tensor, e.role, values); err != nil {
			return err
		}
	}
	j.step, j.origin = header.Step, header.Origin
	return nil
}

// checkFile reads the header, verifies the checksum, and leaves the file at the first value.
func checkFile(file *os.File) (*checkpointHeader, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	prefix := make([]byte, len(checkpointMagic)+8)
	_, err = io.ReadFull(file, prefix)
	switch found := string(prefix[:len(checkpointMagic)]); {
	case err == nil && found == firstMagic:
		return nil, errors.New("has format 1, which does not name its model; this release reads format 2, so continue with the release that wrote it")
	case err != nil || found != checkpointMagic:
		return nil, errors.New("is not a checkpoint of this version")
	}
	size := binary.LittleEndian.Uint64(prefix[len(checkpointMagic):])
	if size > uint64(info.Size()) {
		return nil, errors.New("is truncated")
	}
	text := make([]byte, size)
	var header checkpointHeader
	if _, err := io.ReadFull(file, text); err != nil {
		return nil, errors.New("is truncated")
	}
	if err := json.Unmarshal(text, &header); err != nil {
		return nil, fmt.Errorf("is damaged: header: %w", err)
	}
	values := int64(0)
	for _, e := range header.Entries {
		values += 4 * e.Shape[0] * e.Shape[1]
	}
	start := int64(len(prefix) + len(text))
	if have := info.Size() - start - 4; have != values {
		return nil, fmt.Errorf("is damaged or truncated: %d bytes of values, and its header announces %d", have, values)
	}
	if err := checkSum(file, info.Size()-4); err != nil {
		return nil, err
	}
	_, err = file.Seek(start, io.SeekStart)
	return &header, err
}

func checkSum(file *os.File, size int64) error {
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	sum := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := io.CopyN(sum, file, size); err != nil {
		return err
	}
	var stored [4]byte
	if _, err := io.ReadFull(file, stored[:]); err != nil {
		return err
	}
	if binary.LittleEndian.Uint32(stored[:]) != sum.Sum32() {
		return errors.New("is damaged: wrong checksum")
	}
	return nil
}

// acceptsModel compares a checkpoint's model with the program's. A program that was not compiled may lack its
// model.
func (j *Job) acceptsModel(header *checkpointHeader) error {
	mine, theirs := j.program.Model.Difference(&header.Model)
	switch {
	case mine == "":
		return nil
	case j.program.Model.IsZero():
		return fmt.Errorf("is of model %q, and this program does not name its model: compile it again", header.Model.Name)
	case header.Model.IsZero():
		return fmt.Errorf("of program %q does not name its model, and this program is of model %q", header.Program, j.program.Model.Name)
	}
	return fmt.Errorf("of program %q is of another model: it has %s, this program has %s", header.Program, theirs, mine)
}

// statesOf lists the kinds of optimizer state among the entries, in words.
func statesOf(entries []checkpointEntry) string {
	var names []string
	for _, e := range entries {
		if weight := e.Role == ir.RoleWeight.String() || e.Role == ir.RoleMaster.String(); !weight && !slices.Contains(names, e.Role) {
			names = append(names, e.Role)
		}
	}
	if len(names) == 0 {
		return "no states"
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// accepts compares a checkpoint's model and contents with the program's.
func (j *Job) accepts(header *checkpointHeader) error {
	if err := j.acceptsModel(header); err != nil {
		return err
	}
	if header.Seed != j.program.Run.Seed {
		return fmt.Errorf("was made with seed %d, and this program runs with %d", header.Seed, j.program.Run.Seed)
	}
	entries := j.entries()
	if mine, theirs := statesOf(entries), statesOf(header.Entries); mine != theirs {
		return fmt.Errorf("of program %q was saved under another optimizer: it holds %s, this program has %s", header.Program, theirs, mine)
	}
	for i, e := range entries {
		if i >= len(header.Entries) {
			return fmt.Errorf("of program %q lacks %s of %s", header.Program, e.Role, e.Tensor)
		}
		got := header.Entries[i]
		if got.Tensor != e.Tensor || got.Role != e.Role || got.Shape != e.Shape {
			return fmt.Errorf("of program %q has %s of %s %v, this program has %s of %s %v",
				header.Program, got.Role, got.Tensor, got.Shape, e.Role, e.Tensor, e.Shape)
		}
	}
	if n := len(header.Entries); n > len(entries) {
		return fmt.Errorf("of program %q has %s of %s, which this program lacks", header.Program, header.Entries[n-1].Role, header.Entries[n-1].Tensor)
	}
	return nil
}
