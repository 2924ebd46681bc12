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
	"syscall"

	"sppo.dev/ir"
)

// A checkpoint is the state of the training, not of the ranks: whole tensors, so that it does not depend on how a
// model is divided, and one program's checkpoint continues under another of the same model. Which that is stands in it: names and
// shapes of tensors do not say what is computed with them. Data and optimizer may change from one run to the next.
//
//	magic        16 bytes
//	size         of the header, 8 bytes, little-endian
//	header       JSON: checkpointHeader
//	values       of every entry, f32, little-endian, rows first, in the header's order
//	checksum     CRC-32C of all that stands before, 4 bytes, little-endian

const (
	checkpointMagic = "sppo checkpoint2"
	// Format 1 does not say of which model a checkpoint is, so nobody could tell whether it goes on.
	firstMagic = "sppo checkpoint1"
)

type checkpointHeader struct {
	Program string            `json:"program"`
	Model   ir.Model          `json:"model"`
	Step    int64             `json:"step"`
	Seed    int64             `json:"seed"`
	Entries []checkpointEntry `json:"entries"`
}

type checkpointEntry struct {
	Tensor string   `json:"tensor"`
	Role   string   `json:"role"`
	Shape  [2]int64 `json:"shape"`
	role   ir.Role
}

// entries lists what a checkpoint of this program holds. A weight that has a master is not among them: it is the
// master rounded. Gradients are not either: every step makes its own.
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

// Save writes a checkpoint. The path always holds a whole one, after a loss of power too.
func (j *Job) Save(path string) error {
	err := ir.ReplaceFile(path, func(file *os.File) error {
		err := j.writeCheckpoint(file)
		if sync := file.Sync(); err == nil && !errors.Is(sync, syscall.EINVAL) { // which pipes and devices say
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
	header := checkpointHeader{Program: j.program.Name, Model: j.program.Model, Step: j.step, Seed: j.program.Run.Seed, Entries: j.entries()}
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

// Restore takes up the state of a checkpoint, after which the next step is what it would have been. The whole file is
// checked before any state changes.
func (j *Job) Restore(path string) error {
	file, err := os.Open(path)
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
	j.step = header.Step
	return nil
}

// checkFile reads the header and verifies the checksum, and leaves the file at the first value.
func checkFile(file *os.File) (*checkpointHeader, error) {
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	prefix := make([]byte, len(checkpointMagic)+8)
	_, err = io.ReadFull(file, prefix)
	switch found := string(prefix[:len(checkpointMagic)]); {
	case err == nil && found == firstMagic:
		return nil, errors.New("is of format 1, which does not say of which model it is, and this release reads format 2: the release that wrote it goes on from it")
	case err != nil || found != checkpointMagic:
		return nil, errors.New("is not a checkpoint of this version")
	}
	size := binary.LittleEndian.Uint64(prefix[len(checkpointMagic):])
	if size > uint64(info.Size()) {
		return nil, errors.New("is cut short")
	}
	text := make([]byte, size)
	var header checkpointHeader
	if _, err := io.ReadFull(file, text); err != nil {
		return nil, errors.New("is cut short")
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
		return nil, fmt.Errorf("is damaged or cut short: %d bytes of values where its header announces %d", have, values)
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
		return errors.New("is damaged: its checksum is wrong")
	}
	return nil
}

// acceptsModel holds a checkpoint to the program's own model. A program that nobody compiled may not say which that is.
func (j *Job) acceptsModel(header *checkpointHeader) error {
	mine, theirs := j.program.Model.Difference(&header.Model)
	switch {
	case mine == "":
		return nil
	case j.program.Model == ir.Model{}:
		return fmt.Errorf("is of model %q, and this program does not say of which model it is: compile it again", header.Model.Name)
	case header.Model == ir.Model{}:
		return fmt.Errorf("of program %q does not say of which model it is, and this program is of model %q", header.Program, j.program.Model.Name)
	}
	return fmt.Errorf("of program %q is of another model: it has %s where this program has %s", header.Program, theirs, mine)
}

// accepts compares a checkpoint's model and contents with what this program holds.
func (j *Job) accepts(header *checkpointHeader) error {
	if err := j.acceptsModel(header); err != nil {
		return err
	}
	if header.Seed != j.program.Run.Seed {
		return fmt.Errorf("was made with seed %d, this program runs with %d", header.Seed, j.program.Run.Seed)
	}
	entries := j.entries()
	for i, e := range entries {
		if i >= len(header.Entries) {
			return fmt.Errorf("of program %q lacks %s of %s", header.Program, e.Role, e.Tensor)
		}
		got := header.Entries[i]
		if got.Tensor != e.Tensor || got.Role != e.Role || got.Shape != e.Shape {
			return fmt.Errorf("of program %q holds %s of %s %v where this program has %s of %s %v",
				header.Program, got.Role, got.Tensor, got.Shape, e.Role, e.Tensor, e.Shape)
		}
	}
	if n := len(header.Entries); n > len(entries) {
		return fmt.Errorf("of program %q holds %s of %s, which this program has not", header.Program, header.Entries[n-1].Role, header.Entries[n-1].Tensor)
	}
	return nil
}
