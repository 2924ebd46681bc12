package train

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"sppo.dev/internal/train/store"
	"sppo.dev/ir"
)

// Saver writes checkpoints of a job to a folder, each at the end of a step. Begin copies the state to host
// memory, and each process writes its ranks' copies while training continues. At most one checkpoint is written
// at a time.
type Saver struct {
	job    *Job
	folder *store.Folder
	saving *saving // checkpoint being written, or nil
}

// saving is a checkpoint that is being written.
type saving struct {
	temporary  string
	everywhere string // its absolute path
	manifest   *store.Manifest
	waited     time.Duration
	told       bool // the user has been told that writing is slow
}

// Saved describes a complete checkpoint.
type Saved struct {
	Path   string
	Step   int
	Bytes  int64
	Waited time.Duration // time for which training waited
	Took   time.Duration // time taken to write it
}

// SaveError reports a checkpoint that could not be written. The job can continue, and earlier checkpoints are
// unchanged.
type SaveError struct {
	Step int
	err  error
}

func (e *SaveError) Error() string {
	return fmt.Sprintf("cannot save the checkpoint of step %d: %v", e.Step, e.err)
}

// Unwrap returns the cause.
func (e *SaveError) Unwrap() error { return e.err }

// NewSaver opens a folder for the checkpoints of a job, subject to the conditions of store.Create. Retire keeps
// the newest `keep` checkpoints. Only the leader of a crew has a saver.
func (j *Job) NewSaver(dir string, keep int, resumed bool) (*Saver, error) {
	done := j.step
	if !resumed {
		done = -1
	}
	s := &Saver{job: j}
	if err := j.OnDisk(dir, func() (err error) { s.folder, err = store.Create(dir, keep, done); return err }); err != nil {
		return nil, err
	}
	return s, nil
}

// Begin starts to save the current state. If wait is set, it makes no copy and returns when the shards are
// written.
func (s *Saver) Begin(ctx context.Context, wait bool) error {
	j := s.job
	if s.saving != nil {
		return errors.New("internal: a checkpoint is being written")
	}
	began, now := time.Now(), &saving{manifest: j.manifest()}
	err := j.OnDisk(s.folder.Dir, func() (err error) { now.temporary, err = s.folder.Begin(j.step); return err })
	if err != nil {
		return failedSave(j.step, err)
	}
	if now.everywhere, err = filepath.Abs(now.temporary); err != nil {
		return err
	}
	o := Order{What: OrderSave, Question: now.everywhere}
	if wait {
		o.Round = 1
	}
	if _, err := j.together(o, func() error { return j.saveHere(ctx, now.temporary, wait) }); err != nil {
		j.dead = err
		return s.drop(now, err)
	}
	now.waited = time.Since(began)
	s.saving = now
	return nil
}

// failedSave turns a file system error into a SaveError, unless the file system has stalled.
func failedSave(step int64, err error) error {
	if errors.As(err, new(*StallError)) {
		return err
	}
	return &SaveError{int(step), err}
}

// drop removes an incomplete checkpoint after an error, and returns this error joined with any error from the
// removal. After a stall it removes nothing, because the file system might not respond.
func (s *Saver) drop(x *saving, err error) error {
	if errors.As(err, new(*StallError)) || s.job.Stuck() {
		return err
	}
	return errors.Join(err, s.job.OnDisk(x.temporary, func() error { return s.folder.Drop(x.temporary) }))
}

// Busy reports whether a checkpoint is being written.
func (s *Saver) Busy() bool { return s.saving != nil }

// Poll completes and returns the checkpoint being written if all processes have written their shards. If some
// have not, it waits for them if wait is set, and otherwise returns nil. After a SaveError the job can
// continue.
func (s *Saver) Poll(wait bool) (*Saved, error) {
	if s.saving == nil {
		return nil, nil
	}
	j, now := s.job, s.saving
	o := Order{What: OrderSaved, Question: now.everywhere}
	if wait {
		o.Round = 1
	}
	var all []saveReport
	answers, err := j.together(o, func() error { all = append(all, j.savedHere(wait)); return nil })
	if err != nil {
		j.dead = err
		return nil, err
	}
	for _, text := range answers {
		var r saveReport
		if err := json.Unmarshal(text, &r); err != nil {
			return nil, fmt.Errorf("internal: %w", err)
		}
		all = append(all, r)
	}
	if slices.ContainsFunc(all, func(r saveReport) bool { return !r.Done }) {
		s.tell(all)
		return nil, nil
	}
	s.saving = nil
	return s.finish(now, all)
}

// tell warns the user, once per checkpoint, of a process that has written nothing for a long time.
func (s *Saver) tell(all []saveReport) {
	stall := &s.job.overseer.stall
	for i, r := range all {
		if !r.Done && stall.After > 0 && r.Quiet >= stall.After/2 && stall.Tell != nil && !s.saving.told {
			s.saving.told = true
			stall.Tell(fmt.Sprintf("saving the checkpoint to %s: process %d has written nothing for %s", s.saving.everywhere, i, r.Quiet.Round(100*time.Millisecond)))
		}
	}
}

// finish completes a checkpoint after all processes have finished writing, or drops it if one of them failed.
func (s *Saver) finish(now *saving, all []saveReport) (*Saved, error) {
	step := now.manifest.Step
	fail := func(err error) error { return failedSave(step, s.drop(now, err)) }
	saved := &Saved{Step: int(step), Waited: now.waited}
	for i, r := range all {
		if r.Err != "" && i > 0 {
			r.Err = fmt.Sprintf("process %d: %s", i, r.Err)
		}
		if r.Err != "" {
			return nil, fail(errors.New(r.Err))
		}
		now.manifest.Shards, saved.Took = append(now.manifest.Shards, r.Shards...), max(saved.Took, r.Took)
		for _, shard := range r.Shards {
			saved.Bytes += shard.Bytes
		}
	}
	began := time.Now()
	err := s.job.OnDisk(now.everywhere, func() (err error) { saved.Path, err = s.folder.Complete(now.temporary, now.manifest); return err })
	if err != nil {
		return nil, fail(err)
	}
	saved.Waited += time.Since(began)
	saved.Took = max(saved.Took+time.Since(began), saved.Waited)
	return saved, nil
}

// Retire removes all but the newest checkpoints. Call it once the newest one has been verified.
func (s *Saver) Retire() error { return s.job.OnDisk(s.folder.Dir, s.folder.Retire) }

// Close discards a checkpoint that is still being written and lets other runs write to the folder.
func (s *Saver) Close() error {
	var err error
	if s.saving != nil && s.job.writer.stop(s.job) {
		err = s.drop(s.saving, nil)
	}
	s.saving = nil
	if s.job.Stuck() {
		return err // the folder is closed when the process ends
	}
	return errors.Join(err, s.folder.Close())
}

// Save writes a checkpoint of the current state to a folder of checkpoints, without removing older ones.
func (j *Job) Save(dir string) error {
	s, err := j.NewSaver(dir, 1<<30, true)
	if err != nil {
		return fmt.Errorf("saving the checkpoint: %w", err)
	}
	defer s.Close()
	if err := s.Begin(context.Background(), true); err != nil {
		return err
	}
	_, err = s.Poll(true)
	return err
}

// writer writes the shards of this process's ranks.
type writer struct {
	parts  [][]savedPart // by rank
	sizes  []ir.Bytes    // of the parts of each rank
	copies [][]byte      // by rank, outside the Go heap; kept for the next checkpoint
	cancel context.CancelFunc
	done   chan struct{} // closed when shards and err are final; nil before the first checkpoint
	shards []store.Shard
	took   time.Duration
	err    error

	// for checkpoints that are written during training
	stalled chan struct{} // closed when writing stalls
	rank    atomic.Int64  // the rank whose shard is being written
	written atomic.Int64  // bytes written so far
	quiet   atomic.Int64  // nanoseconds since the last byte was written
}

// saveReport lists the shards that a process has written.
type saveReport struct {
	Done   bool
	Shards []store.Shard
	Took   time.Duration
	Quiet  time.Duration // if not done, time since it last wrote something
	Err    string
}

// saveHere copies the state of this process's ranks and starts writing the copies. If wait is set, it writes
// the state directly instead. It does not return write errors; savedHere reports them.
func (j *Job) saveHere(ctx context.Context, dir string, wait bool) error {
	w := &j.writer
	if w.parts == nil {
		var err error
		if w.parts, w.sizes, err = divide(j.program, j.ranks); err != nil {
			return err
		}
		w.copies = make([][]byte, len(w.parts))
	}
	if w.done != nil {
		<-w.done
	}
	w.shards, w.err, w.done = nil, nil, make(chan struct{})
	ctx, w.cancel = context.WithCancel(context.WithoutCancel(ctx))
	began := time.Now()
	if wait {
		defer close(w.done)
		w.err = j.writeDirectly(ctx, dir)
		w.took = time.Since(began)
		return nil
	}
	if err := j.each(func(r *rank) error { return j.copy(r) }); err != nil {
		close(w.done)
		return err
	}
	w.stalled = make(chan struct{})
	w.quiet.Store(0)
	go func() {
		defer close(w.done)
		defer func() { w.took = time.Since(began) }()
		for rank, memory := range w.copies {
			if memory != nil && w.err == nil {
				w.rank.Store(int64(rank))
				w.err = j.writeCopy(ctx, dir, rank)
			}
		}
	}()
	go j.overseeWriter(dir, w.done, w.stalled)
	return nil
}

// writeDirectly writes shards from the devices, for all ranks concurrently.
func (j *Job) writeDirectly(ctx context.Context, dir string) error {
	var mu sync.Mutex
	var failed error
	err := j.each(func(r *rank) error {
		var parts []store.Part
		for i := range j.writer.parts[r.index] {
			p := &j.writer.parts[r.index][i]
			parts = append(parts, p.shardPart(func(out io.Writer) error { return p.stream(r.device, j.counted(out)) }))
		}
		shards, err := store.WriteShards(ctx, dir, r.index, parts)
		mu.Lock()
		defer mu.Unlock()
		j.writer.shards = append(j.writer.shards, shards...)
		failed = cmp.Or(failed, err) // on a full disk all ranks fail in the same way
		return nil                   // a full disk must not end the job
	})
	return cmp.Or(err, failed)
}

// counted returns a writer that reports written bytes as progress.
func (j *Job) counted(w io.Writer) io.Writer { return &countedWriter{w, j} }

type countedWriter struct {
	to  io.Writer
	job *Job
}

func (c *countedWriter) Write(p []byte) (int, error) {
	n, err := c.to.Write(p)
	c.job.progress(int64(n))
	return n, err
}

// copy copies a rank's parts of the checkpoint into the rank's block of writer.copies.
func (j *Job) copy(r *rank) error {
	w := &j.writer
	parts := w.parts[r.index]
	if size := int(w.sizes[r.index]); w.copies[r.index] == nil && size > 0 {
		memory, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		if err != nil {
			return fmt.Errorf("allocating %s of host memory for the copy of a checkpoint: %w", ir.Bytes(size), err)
		}
		w.copies[r.index] = memory
	}
	to := &filled{memory: w.copies[r.index]}
	for i := range parts {
		p := &parts[i]
		read := func() error { return p.stream(r.device, to) }
		if p.cols == p.held.cols {
			read = func() error { return p.fill(r.device, to) }
		}
		if err := read(); err != nil {
			return fmt.Errorf("reading %s of %s: %w", p.of.role, p.of.Tensor.Tensor, err)
		}
		j.progress(p.bytes())
	}
	return nil
}

var errCopyFull = errors.New("internal: parts are larger than their copy")

// filled is a writer that fills a fixed block of memory from its start.
type filled struct {
	memory []byte
	n      int
}

func (f *filled) Write(p []byte) (int, error) {
	if len(p) > len(f.memory)-f.n {
		return 0, errCopyFull
	}
	f.n += copy(f.memory[f.n:], p)
	return len(p), nil
}

func (j *Job) writeCopy(ctx context.Context, dir string, rank int) error {
	w := &j.writer
	var parts []store.Part
	at := int64(0)
	for i := range w.parts[rank] {
		p := &w.parts[rank][i]
		values := w.copies[rank][at : at+p.bytes()]
		at += p.bytes()
		parts = append(parts, p.shardPart(func(out io.Writer) error {
			out = j.counted(out)
			for piece := range slices.Chunk(values, blockBytes) {
				if err := ctx.Err(); err != nil {
					return err
				}
				n, err := out.Write(piece)
				w.written.Add(int64(n))
				if err != nil {
					return err
				}
			}
			return nil
		}))
	}
	shards, err := store.WriteShards(ctx, dir, rank, parts)
	w.shards = append(w.shards, shards...)
	return err
}

// savedHere reports the shards that this process has written.
func (j *Job) savedHere(wait bool) saveReport {
	w := &j.writer
	if wait {
		select {
		case <-w.done:
		case <-w.stalled:
		case <-j.down():
		}
	}
	select {
	case <-w.done:
	default:
		return saveReport{Quiet: time.Duration(w.quiet.Load())}
	}
	r := saveReport{Done: true, Shards: w.shards, Took: w.took}
	if w.err != nil {
		r.Err = w.err.Error()
	}
	return r
}

// down returns a channel that is closed when another process fails.
func (j *Job) down() <-chan struct{} {
	if j.crew == nil {
		return nil
	}
	return j.crew.Down()
}

// stop cancels writing and waits for it to end. It returns false if a file system blocks a write; in that case
// the copies must not be touched.
func (w *writer) stop(j *Job) bool {
	if w.done == nil {
		return true
	}
	w.cancel()
	select {
	case <-w.done:
		return true
	case <-time.After(j.overseer.lastCall()):
		j.overseer.stuck.Store(true)
		return false
	}
}

// free stops writing and, if that succeeds, frees the copies.
func (w *writer) free(j *Job) {
	if !w.stop(j) {
		return
	}
	for _, memory := range w.copies {
		if memory != nil {
			_ = syscall.Munmap(memory) // it was mapped above
		}
	}
	w.copies = nil
}
