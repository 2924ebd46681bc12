package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/store"
	"sppo.dev/ir"
)

// saveFlags are the flags that control when and where checkpoints are written.
type saveFlags struct {
	dir   string
	every string
	keep  int
	wait  bool

	steps  int           // steps between checkpoints; 0: by time, or only at the end
	period time.Duration // time between checkpoints; 0: by steps, or only at the end
}

func (f *saveFlags) define(flags *pflag.FlagSet) {
	flags.StringVar(&f.dir, "save", "", "write checkpoints, named step-N, to this `FOLDER`: at the end of the run and, with --save-every, also during it")
	flags.StringVar(&f.every, "save-every", "", "also write checkpoints at this interval, in steps or time, such as 100, 30s, 10m or 2h")
	flags.IntVar(&f.keep, "keep", 2, "number of checkpoints to keep in the --save folder; older ones are removed")
	flags.BoolVar(&f.wait, "save-wait", false, "pause training while a checkpoint is written; needs no copy of the state in host memory")
}

// resumeAuto is the value of --resume that means the newest checkpoint in the --save folder.
const resumeAuto = "auto"

// check checks the flags. The run may also write to the paths in own.
func (f *saveFlags) check(resume string, own ...string) error {
	if f.dir == "" {
		switch {
		case f.every != "" || f.wait:
			return cli.Usagef("--save-every and --save-wait need --save, the folder for checkpoints")
		case resume == resumeAuto:
			return cli.Usagef("--resume auto needs --save, the folder with the checkpoints")
		}
		return nil
	}
	if f.keep < 1 {
		return cli.Usagef("--keep %d: at least 1 checkpoint is kept", f.keep)
	}
	if f.every != "" {
		if n, err := strconv.Atoi(f.every); err == nil {
			f.steps = n
		} else if f.period, err = time.ParseDuration(f.every); err != nil {
			return cli.Usagef("--save-every %s: write a number of steps, or a time such as 30s, 10m or 2h", f.every)
		}
		if f.steps <= 0 && f.period <= 0 {
			return cli.Usagef("--save-every %s: must be more than 0", f.every)
		}
	}
	parent := filepath.Dir(filepath.Clean(f.dir))
	if info, err := os.Stat(parent); err != nil || !info.IsDir() {
		return cli.Usagef("--save %s: there is no folder %s", f.dir, parent)
	}
	if target, err := os.Readlink(f.dir); err == nil {
		if _, err := os.Stat(f.dir); errors.Is(err, fs.ErrNotExist) {
			return cli.Usagef("--save %s: it is a link to %s, which does not exist", f.dir, target)
		}
	}
	if info, err := os.Stat(f.dir); err == nil && !info.IsDir() {
		return cli.Usagef("--save %s: it is a file: name a folder", f.dir)
	}
	return f.takes(own)
}

// takes refuses a folder with files but no checkpoints, which would be mixed with those of something else. The run's own files do
// not count, nor do logs: an earlier run or its launcher may have begun them.
func (f *saveFlags) takes(own []string) error {
	if corpus.IsFolder(f.dir) {
		return cli.Usagef("--save %s: the folder is a corpus of tokens: name another folder for checkpoints", f.dir)
	}
	list, err := os.ReadDir(f.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	other := ""
	for _, entry := range list {
		switch name := entry.Name(); {
		case store.IsStep(name): // a folder of checkpoints
			return nil
		case strings.HasPrefix(name, ".") || strings.Contains(name, ".damaged") || name == "lost+found" || slices.Contains(logs, filepath.Ext(name)):
		case slices.ContainsFunc(own, func(path string) bool {
			return strings.HasPrefix(filepath.Clean(path)+"/", filepath.Join(f.dir, name)+"/")
		}):
		case other == "":
			other = name
		}
	}
	if other != "" {
		return cli.Usagef("--save %s: the folder contains %s but no checkpoints: name an empty folder, or one that does not exist", f.dir, other)
	}
	return err
}

// logs lists the endings of files that may be in a folder for checkpoints.
var logs = []string{".jsonl", ".log", ".out", ".err"}

// during reports whether checkpoints are written during the run.
func (f *saveFlags) during() bool { return f.dir != "" && f.every != "" }

// fits refuses a job whose hosts lack the memory for the copies from which checkpoints are written during
// training.
func (f *saveFlags) fits(file string, p *ir.Program, force bool) error {
	if !f.during() || f.wait || force {
		return nil
	}
	c, err := cli.CheckpointCopy(p)
	if err != nil || c.Fits {
		return err
	}
	return cli.DoesNotFit(fmt.Errorf("%s does not fit: the copy from which a checkpoint is written during training takes %s of host memory on a rank of stage %d; "+
		"with the %s of the program, that is %s more than the rank has (%s); "+
		"schedule.checkpoint_copy = on leaves room for it, and --save-wait needs no copy, because training waits",
		file, c.Bytes[c.ShortStage], c.ShortStage, p.Codes[c.ShortStage].Arenas[ir.Host], c.ShortBytes, p.Machine.HostMemoryPerRank()))
}

// noCheckpoint returns the error of opening a checkpoint, or one that names the flag and suggests a checkpoint if there is none.
func noCheckpoint(flag, path string, err error) error {
	if _, missing := os.Stat(path); !errors.Is(missing, fs.ErrNotExist) {
		return err
	}
	hint := "give a folder of checkpoints, as --save writes it, or one of its checkpoints, such as run1/step-100"
	dir := filepath.Dir(filepath.Clean(path))
	if steps, err := store.Steps(dir); err == nil && len(steps) > 0 {
		hint = fmt.Sprintf("the newest checkpoint in %s is %s", dir, store.StepName(steps[len(steps)-1]))
	}
	return cli.Usagef("%s %s: there is no such file or folder: %s", flag, path, hint)
}

// saver writes the checkpoints of a run. A nil saver writes none.
type saver struct {
	*train.Saver
	r        *training
	savedAt  time.Time
	savedFor int // step of the last checkpoint that was begun
	unproven int // step of a checkpoint not yet known to be good, so older ones are kept; -1: none
}

func (r *training) newSaver(resumed bool) (*saver, error) {
	if r.f.saves.dir == "" {
		return nil, nil
	}
	s, err := r.job.NewSaver(r.f.saves.dir, r.f.saves.keep, resumed)
	if err != nil {
		return nil, r.restored(fmt.Errorf("--save: %w", err))
	}
	out := &saver{Saver: s, r: r, savedAt: time.Now(), savedFor: -1, unproven: -1}
	if resumed && out.newest() == int64(r.job.Steps()) { // otherwise the run resumed from another folder
		out.savedFor = r.job.Steps()
	}
	return out, nil
}

// newest returns the step of the newest checkpoint in the folder, or -1 if there is none.
func (s *saver) newest() int64 {
	if steps, err := s.r.stepsSaved(); err == nil && len(steps) > 0 {
		return steps[len(steps)-1]
	}
	return -1
}

// stepsSaved lists the steps of the checkpoints in the --save folder.
func (r *training) stepsSaved() (steps []int64, err error) {
	err = r.job.OnDisk(r.f.saves.dir, func() (err error) { steps, err = store.Steps(r.f.saves.dir); return err })
	if err != nil {
		return nil, err
	}
	return steps, nil
}

// due reports whether it is time for a checkpoint after the step that has just ended.
func (s *saver) due() bool {
	f, step := &s.r.f.saves, s.r.job.Steps()
	switch {
	case f.steps > 0:
		return step/f.steps > max(s.savedFor, 0)/f.steps
	case f.period > 0:
		return time.Since(s.savedAt) >= f.period
	}
	return false
}

// after is called after each step. It reports the checkpoint being written if that is complete, and begins one that
// is due unless another is still being written. The final checkpoint is left to the method last.
func (s *saver) after(ctx context.Context) error {
	if s == nil {
		return nil
	}
	if err := s.retire(); err != nil {
		return err
	}
	if err := s.complete(false); err != nil {
		return err
	}
	if s.Busy() || !s.due() || s.r.job.Steps() >= s.r.f.steps {
		return nil
	}
	if s.r.sick != "" {
		s.r.show.warn("no checkpoint after step %d: %s", s.r.job.Steps(), s.r.sick)
		return nil
	}
	return s.begin(ctx, s.r.f.saves.wait)
}

// begin starts writing a checkpoint. If this fails, begin reports it and the run continues.
func (s *saver) begin(ctx context.Context, wait bool) error {
	s.savedFor, s.savedAt = s.r.job.Steps(), time.Now()
	if err := s.tolerate(s.Begin(ctx, wait)); err != nil || !wait {
		return err
	}
	return s.complete(true)
}

// complete reports the checkpoint being written if that is complete. If wait is true, complete first waits until it
// is.
func (s *saver) complete(wait bool) error {
	saved, err := s.Poll(wait)
	if saved != nil {
		err = s.tell(saved)
	}
	return s.tolerate(err)
}

func (s *saver) tolerate(err error) error {
	var failed *train.SaveError
	if errors.As(err, &failed) {
		s.r.show.warn("%v; the run continues, and earlier checkpoints are unchanged", failed)
		return nil
	}
	return err
}

// last writes the final checkpoint, regardless of --save-every.
func (s *saver) last(ctx context.Context) error {
	if s == nil {
		return nil
	}
	if err := s.complete(true); err != nil {
		return err
	}
	step := s.r.job.Steps()
	if s.newest() == int64(step) {
		return nil // the newest checkpoint already has this state
	}
	if s.r.sick != "" {
		return fmt.Errorf("no checkpoint after step %d: %s", step, s.r.sick)
	}
	if err := s.Begin(ctx, true); err != nil {
		return err
	}
	saved, err := s.Poll(true)
	if err != nil {
		return err
	}
	return s.tell(saved)
}

// retire removes old checkpoints once a loss computed from the weights of the newest one is finite. The loss of
// the checkpoint's own step does not count, because it was computed before the step's update.
func (s *saver) retire() error {
	if s.unproven < 0 || s.unproven > s.r.proven {
		return nil
	}
	s.unproven = -1
	err := s.Retire()
	if err != nil && s.r.job.Failed() == nil {
		s.r.show.warn("cannot remove old checkpoints: %v", err)
		err = nil
	}
	return err
}

func (s *saver) tell(saved *train.Saved) error {
	saved.Path = filepath.Join(s.r.f.saves.dir, store.StepName(int64(saved.Step))) // keeps the user's name for the folder
	s.r.show.saved(saved)
	s.unproven = saved.Step
	return s.retire()
}

// finish completes the checkpoint that is being written when a step fails, if the job can still do that.
func (s *saver) finish() error {
	if s == nil || s.r.job.Failed() != nil {
		return nil
	}
	return s.complete(true)
}

func (s *saver) close() error {
	if s == nil {
		return nil
	}
	return s.Close()
}

// resumeNewest continues from the newest undamaged checkpoint, or starts from the beginning if the folder has none.
// Once it knows from where the run continues, it renames the damaged checkpoints, so that they are no longer found. If
// all are damaged, only --start-over lets the run start from the beginning. Any error other than damage ends the run
// and leaves the folder as it is: the checkpoint may be good.
func (r *training) resumeNewest(ctx context.Context) (resumed bool, err error) {
	dir := r.f.saves.dir
	steps, err := r.stepsSaved()
	if err != nil {
		return false, err
	}
	var damaged []*train.DamagedError
	for _, step := range slices.Backward(steps) {
		path := filepath.Join(dir, store.StepName(step))
		err := r.job.Restore(ctx, path)
		var damage *train.DamagedError
		switch {
		case err == nil:
			if err := r.setAside(damaged); err != nil {
				return false, err
			}
			tell := r.show.say
			if len(damaged) > 0 {
				tell = r.show.warn
			}
			r.resumed(tell)
			return true, nil
		case errors.As(err, new(*train.MismatchError)):
			return false, r.restored(err)
		case !errors.As(err, &damage):
			return false, err
		}
		damaged = append(damaged, damage)
	}
	if !r.f.startOver {
		if err := r.mayStart(damaged); err != nil {
			return false, err
		}
	}
	if err := r.setAside(damaged); err != nil {
		return false, err
	}
	r.show.warn("no checkpoint in %s: starting from the beginning", dir)
	return false, nil
}

// mayStart refuses to start from the beginning if the folder has damaged checkpoints: those given, or those that
// earlier runs have renamed.
func (r *training) mayStart(damaged []*train.DamagedError) error {
	dir := r.f.saves.dir
	const what = "no other checkpoint in %s is undamaged: repair one, or start from the beginning with --start-over"
	if len(damaged) > 0 {
		return fmt.Errorf("%w; "+what, damaged[0], dir)
	}
	var aside []string
	err := r.job.OnDisk(dir, func() (err error) { aside, err = store.SetAsideIn(dir); return err })
	if err == nil && len(aside) > 0 {
		err = fmt.Errorf("%s is damaged; "+what, filepath.Join(dir, aside[len(aside)-1]), dir)
	}
	return err
}

// setAside renames damaged checkpoints.
func (r *training) setAside(damaged []*train.DamagedError) error {
	for _, d := range damaged {
		var aside string
		if err := r.job.OnDisk(d.Path, func() (err error) { aside, err = store.SetAside(d.Path); return err }); err != nil {
			return errors.Join(d, err)
		}
		r.show.warn("%v; it is now %s", d, aside)
	}
	return nil
}
