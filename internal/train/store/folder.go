package store

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Folder is a folder of checkpoints that one run writes to.
type Folder struct {
	Dir  string
	Keep int // number of complete checkpoints to keep
	lock *os.File
}

const (
	stepPrefix  = "step-"
	temporary   = ".step-" // followed by the step, a random word, and unfinished or removed
	unfinished  = ".tmp"
	removed     = ".removed"
	damagedMark = ".damaged"
)

// StepName returns the name of a checkpoint in its folder.
func StepName(step int64) string { return stepPrefix + strconv.FormatInt(step, 10) }

// stepOf returns the step in a checkpoint's name, or false if the name is not a checkpoint's.
func stepOf(name string) (int64, bool) {
	digits, ok := strings.CutPrefix(name, stepPrefix)
	step, err := strconv.ParseInt(digits, 10, 64)
	return step, ok && err == nil && StepName(step) == name
}

// IsStep reports whether a path has the name of a checkpoint in a folder of checkpoints.
func IsStep(path string) bool {
	_, ok := stepOf(filepath.Base(path))
	return ok
}

// Steps lists the steps of the checkpoints in a folder, first to last. A folder that does not exist has none.
func Steps(dir string) ([]int64, error) {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var steps []int64
	for _, e := range list {
		if step, ok := stepOf(e.Name()); ok {
			steps = append(steps, step)
		}
	}
	slices.Sort(steps)
	return steps, nil
}

// SetAsideIn lists the names of damaged checkpoints that SetAside has renamed in a folder.
func SetAsideIn(dir string) (names []string, err error) {
	list, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range list {
		checkpoint, _, found := strings.Cut(e.Name(), damagedMark)
		if _, ok := stepOf(checkpoint); ok && found {
			names = append(names, e.Name())
		}
	}
	return names, err
}

// Create opens a folder, creating it if necessary, for a run that continues after step `done`, or that starts anew
// if `done` is -1. It removes incomplete checkpoints left by killed runs. It refuses a folder that another run is
// writing to, or that has a checkpoint of a later step.
func Create(dir string, keep int, done int64) (*Folder, error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, fmt.Errorf("%s is a file, but checkpoints are written to a folder: give another name", dir)
	}
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("cannot create the folder %s: %w; choose a folder that can be written to", dir, errors.Unwrap(err))
	}
	f := &Folder{Dir: dir, Keep: max(1, keep)}
	if err := f.take(); err != nil {
		return nil, err
	}
	steps, err := Steps(dir)
	if n := len(steps); err == nil && n > 0 && steps[n-1] > done {
		from := "starts anew"
		if done >= 0 {
			from = fmt.Sprintf("continues from step %d", done)
		}
		err = fmt.Errorf("%s has a checkpoint of step %d, but this run %s: resume from the checkpoint, remove it, or save elsewhere", dir, steps[n-1], from)
	}
	if err == nil {
		err = errors.Join(f.writable(), f.clean())
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// writable returns an error if the folder cannot be written to, which would otherwise go unnoticed until the
// first checkpoint. It ignores a full disk, which may have space by then.
func (f *Folder) writable() error {
	trial, err := f.Begin(0)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("cannot write to %s: %w; choose a folder that can be written to", f.Dir, errors.Unwrap(err))
	}
	if err == nil {
		_ = os.Remove(trial) // clean would remove it, too
	}
	return nil
}

// take locks the folder for this process. Some network file systems do not support locks; there it does
// nothing.
func (f *Folder) take() error {
	file, err := os.Open(f.Dir)
	if err != nil {
		return err
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		file.Close()
		return fmt.Errorf("another run is writing checkpoints to %s", f.Dir)
	}
	f.lock = file
	return nil
}

// clean removes checkpoints that killed runs left half written or half removed.
func (f *Folder) clean() error {
	list, err := os.ReadDir(f.Dir)
	if err != nil {
		return err
	}
	for _, e := range list {
		if name := e.Name(); strings.HasPrefix(name, temporary) && (strings.HasSuffix(name, unfinished) || strings.HasSuffix(name, removed)) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(f.Dir, name)))
		}
	}
	return err
}

// Close unlocks the folder, so that other runs can write to it.
func (f *Folder) Close() error {
	if f.lock == nil {
		return nil
	}
	return f.lock.Close()
}

// Begin creates the temporary folder of a checkpoint and returns its path. If the folder of checkpoints has been removed
// since it was opened, Begin makes it again.
func (f *Folder) Begin(step int64) (string, error) {
	// The name is new, so a process that is left over from a killed run and still writes to its own folder
	// changes nothing here.
	dir := filepath.Join(f.Dir, fmt.Sprintf("%s%d.%s%s", temporary, step, rand.Text()[:8], unfinished))
	err := os.Mkdir(dir, 0o777)
	if errors.Is(err, fs.ErrNotExist) {
		if err := f.again(); err != nil {
			return "", err
		}
		err = os.Mkdir(dir, 0o777)
	}
	return dir, err
}

// again makes a folder that has been removed, and locks it. It does not make the folder's parent: if that is missing,
// too, a file system is probably not mounted.
func (f *Folder) again() error {
	err := os.Mkdir(f.Dir, 0o777)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s and its parent folder are gone; is a file system not mounted? %w", f.Dir, err)
	}
	if err != nil {
		return err
	}
	before := f.lock
	if err := f.take(); err != nil {
		return err
	}
	return before.Close()
}

// Drop removes an incomplete checkpoint.
func (f *Folder) Drop(temporary string) error { return os.RemoveAll(temporary) }

// Complete turns a temporary folder whose shards are on disk into a checkpoint and returns its path.
func (f *Folder) Complete(temporary string, m *Manifest) (string, error) {
	slices.SortFunc(m.Shards, func(a, b Shard) int { return cmp.Compare(a.File, b.File) })
	path := filepath.Join(f.Dir, StepName(m.Step))
	if err := writeManifest(temporary, m); err != nil {
		return "", err
	}
	if err := syncFolder(temporary); err != nil {
		return "", err
	}
	if err := os.Rename(temporary, path); err != nil {
		return "", err
	}
	if err := syncFolder(f.Dir); err != nil {
		return "", err
	}
	return path, nil
}

// Retire removes the oldest checkpoints until Keep are left.
func (f *Folder) Retire() error {
	steps, err := Steps(f.Dir)
	if err != nil {
		return err
	}
	for _, step := range steps[:max(0, len(steps)-f.Keep)] {
		// A half-removed checkpoint must not look complete, so the checkpoint is renamed first. If the
		// checkpoint is a symbolic link, only the link is renamed and removed, not its target.
		gone := filepath.Join(f.Dir, fmt.Sprintf("%s%d.%s%s", temporary, step, rand.Text()[:8], removed))
		if err := os.Rename(filepath.Join(f.Dir, StepName(step)), gone); err != nil {
			return err
		}
		if err := os.RemoveAll(gone); err != nil {
			return err
		}
	}
	return nil
}

// SetAside renames a damaged checkpoint so that it is no longer listed, and returns its new path.
func SetAside(dir string) (string, error) {
	aside := dir + damagedMark
	for n := 2; ; n++ {
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			return aside, os.Rename(dir, aside)
		}
		aside = fmt.Sprintf("%s%s-%d", dir, damagedMark, n)
	}
}
