package prepare

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"sppo.dev/internal/data/corpus"
)

// batchText is the size of the text that a worker gets at a time, in bytes.
const batchText = 1 << 20

// run is a job in progress.
type run struct {
	*Job
	shown   Progress
	when    time.Time
	records []record
	current *shard
}

// batch is a group of documents on their way through a worker. It is sent to the writer before it is tokenized,
// so that batches stay in order.
type batch struct {
	documents []corpus.Document
	text      int64
	cut       bool  // a shard ends with it if documents follow
	end       bool  // the job ends with it
	next      place // position after it
	read      int64
	ids       [][]uint32
	err       error
	ready     chan struct{}
}

// all tokenizes the missing shards and returns the records of all shards.
func (r *run) all(ctx context.Context) ([]record, error) {
	var err error
	if r.records, err = r.readRecords(); err != nil {
		return nil, err
	}
	for i := range r.Inputs {
		r.shown.Size += r.Inputs[i].size
	}
	from := place{}
	for _, x := range r.records {
		r.shown.Tokens += x.Tokens
		from = x.Next
	}
	if n := len(r.records); n == 0 || !r.records[n-1].Last {
		err = r.pipe(ctx, from)
	}
	return r.records, err
}

// pipe reads documents, tokenizes them with several workers and writes them in order.
func (r *run) pipe(ctx context.Context, from place) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	work, order := make(chan *batch), make(chan *batch, 2*r.Workers)
	var wait sync.WaitGroup
	for range r.Workers {
		wait.Go(func() {
			for b := range work {
				r.tokenize(b)
				close(b.ready)
			}
		})
	}
	var readErr error
	wait.Go(func() {
		defer close(order)
		defer close(work)
		readErr = r.read(ctx, from, func(b *batch) error {
			for _, to := range []chan *batch{order, work} {
				select {
				case to <- b:
				case <-ctx.Done():
					close(b.ready) // no worker has it
					return ctx.Err()
				}
			}
			return nil
		})
	})
	err := r.write(ctx, order)
	cancel()
	for b := range order { // batches that the writer did not receive
		<-b.ready
	}
	wait.Wait()
	if readErr != nil && (errors.Is(err, errUnfinished) || !errors.Is(readErr, context.Canceled)) {
		return readErr
	}
	return err
}

var errUnfinished = errors.New("stopped")

// cutter collects documents into batches. Where a shard ends depends only on the text.
type cutter struct {
	limit   int64 // text of a shard
	inShard int64
	b       *batch
	send    func(*batch) error
}

func newBatch() *batch { return &batch{ready: make(chan struct{})} }

func (c *cutter) add(d corpus.Document, next place, read int64) error {
	b := c.b
	b.documents = append(b.documents, d)
	b.text += int64(len(d.Text))
	b.next, b.read = next, read
	c.inShard += int64(len(d.Text))
	if b.cut = d.Ends && c.inShard >= c.limit; b.cut {
		c.inShard = 0
	}
	if !b.cut && b.text < batchText {
		return nil
	}
	c.b = newBatch()
	return c.send(b)
}

// read sends, in batches, the documents that follow a position.
func (r *run) read(ctx context.Context, from place, send func(*batch) error) error {
	c := cutter{limit: r.ShardText, b: newBatch(), send: send}
	before := int64(0)
	for i := range r.Inputs {
		in, seen := &r.Inputs[i], int64(0)
		take := func(d corpus.Document, read int64) error {
			skipped := i == from.Input && seen < from.Skip
			if d.Ends {
				seen++
			}
			if err := ctx.Err(); err != nil || skipped {
				return err
			}
			return c.add(d, place{i, seen}, before+read)
		}
		if i >= from.Input {
			if err := in.each(r.fields(), r.Tokenizer.Cut, take); err != nil {
				return fmt.Errorf("%s: %w", in.Name, err)
			}
			if err := in.unchanged(); err != nil {
				return fmt.Errorf("%s: %w", in.Name, err)
			}
		}
		before += in.size
	}
	c.b.read, c.b.end = before, true // this batch may be empty
	return send(c.b)
}

func (r *run) tokenize(b *batch) {
	for i := range b.documents {
		d := &b.documents[i]
		ids, err := d.Encode(make([]uint32, 0, len(d.Text)/3+2), r.Tokenizer)
		if err != nil {
			b.err = err
			return
		}
		if d.Ends && r.EOS >= 0 {
			ids = append(ids, uint32(r.EOS))
		}
		b.ids = append(b.ids, ids)
	}
}

// write writes the batches in order, into shards that follow the complete ones.
func (r *run) write(ctx context.Context, order <-chan *batch) (err error) {
	if r.current, err = r.newShard(len(r.records)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.current.drop()) }()
	var last *batch
	for b := range order {
		<-b.ready
		if b.err != nil {
			return fmt.Errorf("%s: %w", r.Inputs[b.next.Input].Name, b.err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if last != nil && last.cut && len(b.documents) > 0 {
			if err := r.finish(last.next, false); err != nil {
				return err
			}
		}
		for k, ids := range b.ids {
			if err := r.current.add(ids, b.documents[k]); err != nil {
				return err
			}
			r.shown.Tokens += int64(len(ids))
		}
		r.shown.Text += b.text
		r.shown.Read = b.read
		r.show(b.end)
		last = b
	}
	if last == nil || !last.end {
		return errors.Join(ctx.Err(), errUnfinished) // the reader failed
	}
	return r.finish(last.next, true)
}

// finish completes the current shard and begins another, unless it is the last.
func (r *run) finish(next place, last bool) error {
	r.current.Next = next
	if err := r.current.finish(last); err != nil {
		return err
	}
	r.records = append(r.records, r.current.record)
	if last {
		return nil
	}
	s, err := r.newShard(len(r.records))
	if err == nil {
		r.current = s
	}
	return err
}

// show reports the progress of the job from time to time.
func (r *run) show(now bool) {
	if r.Progress != nil && (now || time.Since(r.when) >= r.pace) {
		r.when = time.Now()
		r.Progress(r.shown)
	}
}
