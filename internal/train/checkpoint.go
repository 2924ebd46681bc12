package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/infile"
	"sppo.dev/internal/train/store"
	"sppo.dev/ir"
)

// Checkpoint is a checkpoint that is open for reading.
type Checkpoint struct {
	*store.Manifest
	Path   string // path of the checkpoint itself, even if a folder of checkpoints was opened
	values stored
	single bool // it is a single file, which process 0 reads for all processes
}

// stored provides the values of a checkpoint.
type stored interface {
	// Read reads a rectangle of an entry into out: rows by cols values starting at (row, col), row by row.
	Read(name string, row, col, rows, cols int64, out []float32) error
	Close() error
}

// DamagedError reports a checkpoint that is incomplete or has changed since it was written. In a job of several
// processes, all of them have found it damaged.
type DamagedError struct {
	Path string
	err  *store.Damage
}

func (e *DamagedError) Error() string { return fmt.Sprintf("checkpoint %s %s", e.Path, e.err.What) }

// Unwrap returns the cause.
func (e *DamagedError) Unwrap() error { return e.err }

// MismatchError reports a checkpoint that the job cannot continue from, because its model, optimizer, seed or data is
// different.
type MismatchError struct {
	Path string
	err  error // continues a sentence about the checkpoint
}

func (e *MismatchError) Error() string { return fmt.Sprintf("checkpoint %s %v", e.Path, e.err) }

// Unwrap returns the cause.
func (e *MismatchError) Unwrap() error { return e.err }

// opening adds a checkpoint's path to an error of opening or verifying it.
func opening(path string, err error) error {
	if damage := (*store.Damage)(nil); errors.As(err, &damage) {
		return &DamagedError{path, damage}
	}
	return &checkpointError{path, err}
}

// checkpointError is any other error of a checkpoint.
type checkpointError struct {
	Path string
	err  error
}

func (e *checkpointError) Error() string { return fmt.Sprintf("checkpoint %s: %v", e.Path, e.err) }

// Unwrap returns the cause.
func (e *checkpointError) Unwrap() error { return e.err }

// insteadOf says what a folder contains if it is recognizably something other than checkpoints; otherwise it returns "".
func insteadOf(dir string) string {
	if corpus.IsFolder(dir) {
		return fmt.Sprintf("a corpus of tokens: name it in a spec, as in data = tokens(%q)", dir)
	}
	for _, other := range []struct{ file, what string }{
		{"config.json", "the folder of a model: --weights takes such folders"},
		{"tokenizer.json", "the folder of a tokenizer"}, {"tokenizer.model", "the folder of a tokenizer"},
	} {
		if _, err := os.Stat(filepath.Join(dir, other.file)); err == nil {
			return other.what
		}
	}
	return ""
}

// OpenCheckpoint opens a checkpoint and verifies its checksums. The path names a checkpoint, or a folder of
// checkpoints; in the latter case, the newest checkpoint is opened.
func OpenCheckpoint(path string) (*Checkpoint, error) {
	c, err := openCheckpoint(path)
	if err != nil {
		return nil, err
	}
	if err := c.verify(context.Background(), func(*store.Shard) bool { return true }, func(int64) {}); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// openCheckpoint opens a checkpoint without verifying the checksums of shards.
func openCheckpoint(path string) (*Checkpoint, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return openSingle(path)
	}
	_, err = os.Lstat(filepath.Join(path, store.ManifestFile))
	bare := errors.Is(err, fs.ErrNotExist)
	if bare {
		steps, err := store.Steps(path)
		if err != nil {
			return nil, err
		}
		if len(steps) > 0 {
			path, bare = filepath.Join(path, store.StepName(steps[len(steps)-1])), false
		}
	}
	if other := insteadOf(path); other != "" && (bare || corpus.IsFolder(path)) {
		return nil, fmt.Errorf("%s is not a checkpoint, but %s", path, other)
	}
	if bare && !store.IsStep(path) {
		return nil, fmt.Errorf("%s contains no checkpoints", path)
	}
	c, err := store.Open(path)
	if err != nil {
		return nil, opening(path, err)
	}
	return &Checkpoint{Manifest: c.Manifest, Path: path, values: c}, nil
}

func openSingle(path string) (*Checkpoint, error) {
	file, _, err := infile.Open(path)
	if err != nil {
		return nil, err
	}
	c, err := openFile(file)
	if err != nil {
		file.Close()
		if err == errOther {
			return nil, fmt.Errorf("%s is %w", path, err)
		}
		return nil, opening(path, err)
	}
	return c, nil
}

// verify verifies the checksums of the wanted shards.
func (c *Checkpoint) verify(ctx context.Context, wanted func(*store.Shard) bool, progress func(bytes int64)) error {
	s, ok := c.values.(*store.Checkpoint)
	if !ok {
		return nil // already verified when the file was opened
	}
	err := s.Verify(ctx, wanted, progress)
	if err != nil && ctx.Err() == nil {
		err = opening(c.Path, err)
	}
	return err
}

// Close closes the files.
func (c *Checkpoint) Close() error { return c.values.Close() }

// Weights lists the parameters, in the program's order.
func (c *Checkpoint) Weights() (list []ir.Tensor) {
	for i := range c.Tensors {
		if e := &c.Tensors[i]; e.IsWeight() {
			list = append(list, ir.Tensor{Name: e.Tensor, Shape: e.Shape})
		}
	}
	return list
}

// Read reads a rectangle of a parameter into out: rows by cols values starting at (row, col), row by row.
func (c *Checkpoint) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	for i := range c.Tensors {
		if c.Tensors[i].Name() == tensor {
			return c.values.Read(tensor, row, col, rows, cols, out)
		}
	}
	return fmt.Errorf("the checkpoint has no tensor %q", tensor)
}

// ReadEntry reads all values of an entry into out, row by row.
func (c *Checkpoint) ReadEntry(e *store.Tensor, out []float32) error {
	return c.values.Read(e.Name(), 0, 0, e.Shape[0], e.Shape[1], out)
}

// remembered is data whose fingerprints a checkpoint stores, because a position in the data means nothing once
// the data has changed.
type remembered interface {
	Fingerprints() []corpus.Fingerprint
	Unchanged(before []corpus.Fingerprint) error
}

// entry is a tensor in one of its roles, as it appears in checkpoints of the program.
type entry struct {
	store.Tensor
	tensor int
	role   ir.Role
}

// entriesOf lists the contents of a checkpoint of this program. Weights with a master copy are not included,
// because they are the master copy, rounded. Neither are gradients, which every step computes anew.
func entriesOf(p *ir.Program) []entry {
	types := map[[2]int]ir.DType{} // by tensor and role
	for c := range p.Codes {
		for i := range p.Codes[c].States {
			s := &p.Codes[c].States[i]
			key := [2]int{int(s.Tensor), int(s.Role)}
			if t, ok := types[key]; !ok || t == ir.BF16 {
				types[key] = s.View.DType
			}
		}
	}
	var list []entry
	for i, t := range p.Tensors {
		for role := range ir.NumRoles {
			dtype, held := types[[2]int{i, int(role)}]
			if _, rounded := types[[2]int{i, int(ir.RoleMaster)}]; !held || role == ir.RoleGrad || role == ir.RoleWeight && rounded {
				continue
			}
			list = append(list, entry{store.Tensor{Tensor: t.Name, Role: role.String(), DType: strings.ToUpper(dtype.String()), Shape: t.Shape}, i, role})
		}
	}
	return list
}

// Division describes how the job is divided among its ranks.
func (j *Job) Division() store.Division {
	d := store.Division{Sums: j.program.Run.Sums, Devices: slices.Compact(slices.Sorted(slices.Values(j.kinds)))}
	for _, r := range j.program.Ranks {
		d.DP, d.PP, d.SP = max(d.DP, int(r.DP)+1), max(d.PP, int(r.PP)+1), max(d.SP, int(r.SP)+1)
	}
	return d
}

// manifest describes a checkpoint of the job's current state, without its shards.
func (j *Job) manifest() *store.Manifest {
	m := &store.Manifest{
		Program: j.program.Name, Model: j.program.Model, Step: j.step, Sequence: j.program.Run.Sequence, Skipped: j.skipped, Norms: slices.Clone(j.norms), Seed: j.program.Run.Seed, Origin: j.origin,
		Run: j.program.Run.Recipe(), Made: j.Division(),
	}
	for _, e := range entriesOf(j.program) {
		m.Tensors = append(m.Tensors, e.Tensor)
	}
	if d, ok := j.tokens.(remembered); ok {
		m.Data = d.Fingerprints()
	}
	return m
}

// Restore loads a checkpoint. The next step then has the same result as if the run had not been interrupted.
// The path names a checkpoint, or a folder of checkpoints; in the latter case, the newest checkpoint is loaded.
// Everything is checked before any state is changed. Each rank reads its own parts, so all processes must have
// access to the folder.
func (j *Job) Restore(ctx context.Context, path string) error {
	if j.dead != nil {
		return fmt.Errorf("the job has failed: %w", j.dead)
	}
	var c *Checkpoint
	if err := j.OnDisk(path, func() (err error) { c, err = openCheckpoint(path); return err }); err != nil {
		if damaged := (*DamagedError)(nil); errors.As(err, &damaged) {
			return j.agree(ctx, damaged)
		}
		return err
	}
	defer c.Close()
	if err := j.accepts(c); err != nil {
		return &MismatchError{c.Path, err}
	}
	everywhere, err := filepath.Abs(c.Path)
	if err != nil {
		return err
	}
	if err := j.verifyTogether(ctx, c.Path); err != nil {
		return err
	}
	if c.single {
		err = j.spread(c)
	} else {
		_, err = j.together(Order{What: OrderRestore, Question: everywhere}, func() error { return j.restoreHere(ctx, c) })
	}
	if err != nil {
		j.dead = err // some ranks may have loaded new values
		return &checkpointError{c.Path, err}
	}
	j.step, j.skipped, j.norms, j.origin = c.Step, c.Skipped, slices.Clone(c.Norms), c.Origin
	j.restored = c.Path
	j.changes = nil
	if c.Run != nil {
		j.changes = j.program.Run.Changes(c.Run)
	}
	return nil
}

// Restored returns the path of the checkpoint that Restore has loaded, and how the run differs from the one that wrote it, as
// pairs of settings: the checkpoint's and the present one's. A checkpoint of an earlier release does not record its settings.
func (j *Job) Restored() (path string, changes [][2]string) { return j.restored, j.changes }

// finding is the result of a process that has verified a checkpoint, or a part of it.
type finding struct {
	File string // a damaged file; empty: none was found
	What string // its damage
	Err  string // an error that prevented the process from verifying
	err  error  // in process 0: the error itself
}

// verifyTogether verifies the checksums of a checkpoint. Every process verifies its share of the shards. If one finds
// damage, all look at the damaged file.
func (j *Job) verifyTogether(ctx context.Context, path string) error {
	all, err := j.findings(ctx, path, "")
	if err != nil {
		return err
	}
	for _, f := range all {
		if f.File != "" {
			return j.agree(ctx, &DamagedError{path, &store.Damage{File: f.File, What: f.What}})
		}
	}
	return nil
}

// agree returns the error of a damaged checkpoint. This is the given one only if every process finds the damage:
// otherwise the processes see different files, and the checkpoint may be good.
func (j *Job) agree(ctx context.Context, damaged *DamagedError) error {
	all, err := j.findings(ctx, damaged.Path, damaged.err.File)
	if err != nil {
		return err
	}
	return concluded(damaged, all)
}

// concluded returns the error of a damaged checkpoint after each process has looked for the damage.
func concluded(damaged *DamagedError, all []finding) error {
	for i, f := range all {
		if f.File == "" {
			return fmt.Errorf("%s, but process %d finds no damage there: the processes see different files", damaged, i)
		}
	}
	return damaged
}

// findings returns what each process finds in its share of a checkpoint or, if a file is given, in this file. If a
// process cannot verify its share, the result is an error.
func (j *Job) findings(ctx context.Context, path, file string) ([]finding, error) {
	everywhere, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	all := make([]finding, 1)
	answers, err := j.together(Order{What: OrderVerify, Question: everywhere, Data: []byte(file)}, func() error {
		all[0] = j.verifyHere(ctx, path, file)
		return nil
	})
	if err != nil {
		j.dead = err
		return nil, err
	}
	for _, text := range answers {
		var f finding
		if err := json.Unmarshal(text, &f); err != nil {
			return nil, fmt.Errorf("internal: %w", err)
		}
		all = append(all, f)
	}
	for i, f := range all {
		switch {
		case f.err != nil:
			return nil, f.err
		case f.Err != "":
			return nil, fmt.Errorf("process %d: %s", i, f.Err)
		}
	}
	return all, nil
}

// mine reports whether this process verifies a shard, which a rank of a larger job may have written.
func (j *Job) mine(s *store.Shard) bool { return j.ranks[s.Rank%len(j.ranks)].work != nil }

// verifyHere verifies this process's share of a checkpoint or, if a file is given, this file.
func (j *Job) verifyHere(ctx context.Context, path, file string) finding {
	wanted := j.mine
	if file != "" {
		wanted = func(s *store.Shard) bool { return s.File == file }
	}
	c, err := openCheckpoint(path)
	if err == nil {
		err = c.verify(ctx, wanted, j.progress)
		c.Close()
	}
	var damage *store.Damage
	switch {
	case err == nil:
		return finding{}
	case errors.As(err, &damage):
		return finding{File: damage.File, What: damage.What}
	}
	return finding{Err: err.Error(), err: err}
}

// restoreHere loads the state of the ranks of this process.
func (j *Job) restoreHere(ctx context.Context, c *Checkpoint) error {
	return j.each(func(r *rank) error {
		consts := j.program.Ranks[r.index].Consts
		for i := range r.code.States {
			s := &r.code.States[i]
			if s.Role == ir.RoleGrad {
				continue
			}
			t := &j.program.Tensors[s.Tensor]
			e := store.Tensor{Tensor: t.Name, Role: s.Role.String()}
			err := loadRectangle(ctx, r.device, t, rectangleOf(t, s, consts), func(row, col, rows, cols int64, out []float32) error {
				defer j.progress(int64(len(out)))
				return c.values.Read(e.Name(), row, col, rows, cols, out)
			})
			if err != nil {
				return fmt.Errorf("loading %s of %s: %w", s.Role, t.Name, err)
			}
		}
		return nil
	})
}

// spread loads a single-file checkpoint: process 0 reads the values and distributes them.
func (j *Job) spread(c *Checkpoint) error {
	for _, e := range entriesOf(j.program) {
		values := make([]float32, e.Shape[0]*e.Shape[1])
		if err := c.values.Read(e.Name(), 0, 0, e.Shape[0], e.Shape[1], values); err != nil {
			return err
		}
		if err := j.SetTensor(e.Tensor.Tensor, e.role, values); err != nil {
			return err
		}
	}
	return nil
}

// acceptsModel compares a checkpoint's model with the program's. A hand-written program need not describe its model.
func (j *Job) acceptsModel(c *Checkpoint) error {
	mine, theirs := j.program.Model.Difference(&c.Model)
	switch {
	case mine == "":
		return nil
	case j.program.Model.IsZero():
		return fmt.Errorf("is of model %q, but this program does not name its model: compile it again", c.Model.Name)
	case c.Model.IsZero():
		return fmt.Errorf("of program %q does not name its model, but this program is of model %q", c.Program, j.program.Model.Name)
	}
	hint := ""
	moved := j.program.Model.WithPositionsOf(&c.Model)
	if a, _ := moved.Difference(&c.Model); a == "" {
		hint = "; to change positions, start a run with --weights from the folder that sppovm export writes"
	}
	return fmt.Errorf("of program %q is of a different model: it has %s, but this program has %s%s", c.Program, theirs, mine, hint)
}

// statesOf lists the kinds of optimizer state among the entries, in words.
func statesOf(entries []store.Tensor) string {
	var names []string
	for i := range entries {
		if e := &entries[i]; !e.IsWeight() && !slices.Contains(names, e.Role) {
			names = append(names, e.Role)
		}
	}
	if len(names) == 0 {
		return "no states"
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// accepts checks that the model, seed, entries and data of a checkpoint are those of the job. Its errors continue a sentence about
// the checkpoint.
func (j *Job) accepts(c *Checkpoint) error {
	if err := j.acceptsModel(c); err != nil {
		return err
	}
	if c.Seed != j.program.Run.Seed {
		return fmt.Errorf("was made with seed %d, but this program runs with %d", c.Seed, j.program.Run.Seed)
	}
	entries := j.manifest().Tensors
	if mine, theirs := statesOf(entries), statesOf(c.Tensors); mine != theirs {
		return fmt.Errorf("of program %q was saved with a different optimizer: it has %s, but this program has %s", c.Program, theirs, mine)
	}
	theirs := map[string]*store.Tensor{} // in whatever order
	for i := range c.Tensors {
		theirs[c.Tensors[i].Name()] = &c.Tensors[i]
	}
	for _, e := range entries {
		got := theirs[e.Name()]
		switch {
		case got == nil:
			return fmt.Errorf("of program %q lacks %s of %s", c.Program, e.Role, e.Tensor)
		case got.Role != e.Role || got.Shape != e.Shape: // a weight and its master have the same name
			return fmt.Errorf("of program %q has %s of %s %v, but this program has %s of %s %v",
				c.Program, got.Role, got.Tensor, got.Shape, e.Role, e.Tensor, e.Shape)
		}
		delete(theirs, e.Name())
	}
	if more := slices.Sorted(maps.Keys(theirs)); len(more) > 0 {
		return fmt.Errorf("of program %q has %s of %s, which this program lacks", c.Program, theirs[more[0]].Role, theirs[more[0]].Tensor)
	}
	if d, ok := j.tokens.(remembered); ok {
		if err := d.Unchanged(c.Data); err != nil {
			return fmt.Errorf("was made with other data: %w", err)
		}
	}
	return nil
}
