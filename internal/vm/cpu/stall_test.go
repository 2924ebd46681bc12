package cpu

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// slow provides tokens, but calls wait first when rank 1 reads the tokens of step 3.
type slow struct {
	cyclic
	wait func()
}

// Tokens implements vm.Tokens.
func (s slow) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if section == ir.SectionStep && round == 3 && position == 1 && sequence == 2 {
		s.wait()
	}
	return s.cyclic.Tokens(section, round, sequence, position, out, stride)
}

// openSlow opens a job of two ranks and collects the reports on slow steps.
func openSlow(t *testing.T, after time.Duration, wait func()) (job *train.Job, told func() []string) {
	t.Helper()
	var mu sync.Mutex
	var all []string
	tell := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, what)
	}
	job, err := train.Open(unequal(), func(int) (vm.Device, error) { return vm.NewTrace(New(nil)), nil },
		train.Options{Tokens: slow{wait: wait}, Stall: train.Stall{After: after, Tell: tell}})
	if err != nil {
		t.Fatal(err)
	}
	if err := job.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	return job, func() []string { mu.Lock(); defer mu.Unlock(); return all }
}

// whatRanksDo matches what a report says about the ranks of a job whose second rank is reading tokens.
const whatRanksDo = `\n  rank 0 waits in all_reduce for ranks 0, 1 \(coll, pc \d+, [^)]*\)` +
	`\n  rank 1 executes load_tokens \(compute, pc \d, [^)]*\)$`

// A step that makes no progress ends the job, even if a rank cannot be woken. The error reports what each rank
// is doing.
func TestStalledStep(t *testing.T) {
	job, told := openSlow(t, 1500*time.Millisecond, func() { select {} })
	steps(t, job, 2)
	began := time.Now()
	_, err := job.Step(t.Context())
	var stalled *train.StallError
	if want := regexp.MustCompile(`^step 3 has stalled: no rank has made progress for \S+` + whatRanksDo); !errors.As(err, &stalled) || !want.MatchString(err.Error()) {
		t.Errorf("%v, want %s", err, want)
	}
	if want := regexp.MustCompile(`^step 3 has taken [0-9.]+m?s, although the last ones took at most \S+` + whatRanksDo); len(told()) != 1 || !want.MatchString(told()[0]) {
		t.Errorf("%q, want %s", told(), want)
	}
	if !job.Stuck() {
		t.Error("the rank that hangs is not known")
	}
	if _, err := job.Step(t.Context()); !errors.As(err, &stalled) {
		t.Errorf("the next step: %v", err)
	}
	if err := job.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the end took %s", took)
	}
}

// A slow step is reported, but continues.
func TestSlowStep(t *testing.T) {
	var job *train.Job
	var told func() []string
	job, told = openSlow(t, 3*time.Second, func() {
		for len(told()) == 0 {
			time.Sleep(10 * time.Millisecond)
		}
	})
	defer job.Close()
	steps(t, job, 4)
	if want := regexp.MustCompile(`^step 3 has taken [12](\.\d)?s`); len(told()) != 1 || !want.MatchString(told()[0]) || job.Stuck() {
		t.Errorf("%q, want %s; stuck %t", told(), want, job.Stuck())
	}
}

// pipeInstead is a device that puts a full pipe in place of one file of the checkpoint about to be written, so
// that writing this file blocks.
type pipeInstead struct {
	vm.Device
	pipe, dir, file string
}

// Read implements vm.Device.
func (d pipeInstead) Read(v ir.View, out []byte) error {
	if list, _ := filepath.Glob(filepath.Join(d.dir, ".step-*")); len(list) == 1 {
		if err := os.Link(d.pipe, filepath.Join(list[0], d.file)); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
	}
	return d.Device.Read(v, out)
}

// If a file system stops responding while a checkpoint is written during training, the job ends, even if steps
// continue. The error names the folder and says what has stalled. The same holds for the files that only
// process 0 writes, and at the end of a run, when only the checkpoint is left to wait for.
func TestStalledWriter(t *testing.T) {
	for _, c := range []struct {
		file   string
		beside bool // steps continue; otherwise the run waits for the checkpoint
		want   string
	}{
		{"rank-00001.safetensors", true, `^saving the checkpoint to \S+/\.step-2\.\w+\.tmp has stalled: rank 1 has written nothing for 1s$`},
		{"rank-00000.safetensors", false, `^saving the checkpoint to \S+/\.step-2\.\w+\.tmp has stalled: (rank 0 has written nothing|no rank has made progress) for 1s`},
		{"manifest.json", false, `^access to \S+/\.step-2\.\w+\.tmp has stalled: its file system has not responded for 1s$`},
	} {
		t.Run(c.file, func(t *testing.T) {
			dir, pipe := t.TempDir(), vmtest.FullPipe(t)
			var told []string
			job, err := train.Open(bigram(ir.F32), func(int) (vm.Device, error) { return pipeInstead{New(nil), pipe, dir, c.file}, nil },
				train.Options{Tokens: cyclic{}, Stall: train.Stall{After: time.Second, Tell: func(what string) { told = append(told, what) }}})
			if err != nil {
				t.Fatal(err)
			}
			if err := job.Init(t.Context()); err != nil {
				t.Fatal(err)
			}
			saver, err := job.NewSaver(dir, 2, false)
			if err != nil {
				t.Fatal(err)
			}
			steps(t, job, 2)
			began := time.Now()
			failed := saver.Begin(t.Context(), false)
			for c.beside && failed == nil {
				if time.Since(began) > 20*time.Second {
					t.Fatal("steps go on")
				}
				time.Sleep(time.Millisecond)
				if _, failed = job.Step(t.Context()); failed == nil {
					_, failed = saver.Poll(false)
				}
			}
			if failed == nil {
				_, failed = saver.Poll(true)
			}
			var stalled *train.StallError
			if !errors.As(failed, &stalled) || !regexp.MustCompile(c.want).MatchString(failed.Error()) {
				t.Errorf("%v, want %s", failed, c.want)
			}
			if want := `^saving the checkpoint to \S+/\.step-2\.\w+\.tmp: process 0 has written nothing for [0-9.]+m?s$`; c.beside &&
				(len(told) != 1 || !regexp.MustCompile(want).MatchString(told[0])) {
				t.Errorf("told %q, want %s", told, want)
			}
			if job.Failed() == nil {
				t.Error("the job goes on")
			}
			if err := errors.Join(saver.Close(), job.Close()); err != nil || !job.Stuck() {
				t.Errorf("at the end: %v, stuck %t", err, job.Stuck())
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("the end took %s", took)
			}
		})
	}
}
