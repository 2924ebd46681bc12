package train

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Stall defines when an order (a section, or loading, saving or ending a job) is considered stalled. With the
// zero value, orders may take any amount of time.
type Stall struct {
	After time.Duration     // time without progress on any rank
	Tell  func(what string) // called at most once per order, if it is slow, with what the ranks wait for
}

// Inspection is the state of the ranks of another process.
type Inspection struct {
	Name  string // name of the process, for messages
	State []byte // nil: it did not answer in time
}

const (
	patience  = 10 * time.Second // minimum age of an order reported as slow, or half of Stall.After if that is less
	farLonger = 5                // an order is late once it takes this many times as long as the longest recent one
	lastFew   = 8                // number of recent orders remembered for each kind
	lastCall  = 5 * time.Second  // time that ranks have to stop after a failure
)

// situation is the activity of a process that carries out an order; nil between orders.
type situation struct {
	What    string // Order.What
	Section ir.Section
	Round   int64
	Moved   int64              // progress: bytes of weights and checkpoints, and loaded ranks; 0 in a section
	Ranks   map[int][]vm.Doing // in a section; a rank without information is absent
}

// of reports whether the situation belongs to the given order.
func (s *situation) of(o *Order) bool {
	return s != nil && s.What == o.What && s.Section == o.Section && s.Round == o.Round
}

// overseer watches the progress of orders.
type overseer struct {
	stall   Stall
	mu      sync.Mutex
	now     *Order // the order being carried out here; nil: none
	moved   atomic.Int64
	lengths map[string][]time.Duration // durations of the last orders, by kind
	stuck   atomic.Bool                // ranks did not stop after a failure: leave their devices alone
	writing atomic.Pointer[StallError] // ends the job: writing a checkpoint during training has stalled
}

// kind identifies orders whose durations are compared with each other.
func (o *Order) kind() string {
	if o.What == OrderSection {
		return fmt.Sprint(o.What, o.Section)
	}
	return fmt.Sprint(o.What, o.Round) // some orders of this kind wait and some do not
}

// lastCall returns the time that ranks have to stop after a failure.
func (o *overseer) lastCall() time.Duration {
	if o.stall.After > 0 {
		return min(o.stall.After, lastCall)
	}
	return lastCall
}

// enter marks the start of an order in this process; nil marks its end.
func (j *Job) enter(o *Order) {
	j.overseer.mu.Lock()
	j.overseer.now = o
	j.overseer.mu.Unlock()
}

// progress counts the work of orders other than sections, to distinguish an order that continues from one that
// has stalled.
func (j *Job) progress(moved int64) { j.overseer.moved.Add(moved) }

// situation returns the activity of this process.
func (j *Job) situation() *situation {
	j.overseer.mu.Lock()
	defer j.overseer.mu.Unlock()
	o := j.overseer.now
	if o == nil {
		return nil
	}
	s := &situation{What: o.What, Section: o.Section, Round: o.Round, Ranks: map[int][]vm.Doing{}}
	if o.What != OrderSection {
		s.Moved = j.overseer.moved.Load()
		return s
	}
	for _, r := range j.ranks {
		if d, ok := r.device.(vm.Watched); ok && r.work != nil {
			s.Ranks[r.index] = d.Doing()
		}
	}
	return s
}

// inspected returns the situation of this process for another process that asks.
func (j *Job) inspected() []byte {
	text, err := json.Marshal(j.situation())
	if err != nil {
		panic("internal: " + err.Error())
	}
	return text
}

// Stuck reports whether any ranks of this process did not stop after a failure. Nothing that such ranks use may
// be freed.
func (j *Job) Stuck() bool { return j.overseer.stuck.Load() }

// bounded wraps this process's part of an order. The returned function records what this process is doing and,
// after a failure of another process, waits only briefly for this part.
func (j *Job) bounded(o *Order, act func() error) func() error {
	entered := func() error {
		j.enter(o)
		defer j.enter(nil)
		return act()
	}
	if j.crew == nil {
		return entered
	}
	return func() error {
		done := make(chan error, 1)
		go func() { done <- entered() }()
		select {
		case err := <-done:
			return err
		case <-j.crew.Down():
		}
		return j.stop(done, fmt.Errorf("%w: %w", vm.ErrAborted, j.crew.Cause()))
	}
}

// stop waits briefly for ranks that have been told to stop. If they do not stop, it leaves them running.
func (j *Job) stop(done <-chan error, reason error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(j.overseer.lastCall()):
		j.overseer.stuck.Store(true)
		return reason
	}
}

// watched carries out an order in all processes, and ends the job if the order stalls. Only the leader watches;
// its followers do not.
func (j *Job) watched(o *Order, act func() error) error {
	if j.overseer.stall.After <= 0 {
		return act()
	}
	began, done := time.Now(), make(chan error, 1)
	go func() { done <- act() }()
	w := j.newWatch(o)
	tick := time.NewTicker(w.every)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			lengths := append(j.overseer.lengths[o.kind()], time.Since(began))
			j.overseer.lengths[o.kind()] = lengths[max(0, len(lengths)-lastFew):]
			return err
		case <-tick.C:
			if stalled := w.look(); stalled != nil {
				j.transport.Abort(stalled.what)
				_ = j.stop(done, nil) // any error at this point is a consequence of the stall
				return stalled
			}
		}
	}
}

// StallError reports an order that has stalled.
type StallError struct {
	what  error
	ranks []string
}

func (e *StallError) Error() string {
	return strings.Join(append([]string{e.what.Error()}, e.ranks...), "\n  ")
}

// watch follows the progress of one order. It counts time in ticks, so a process that was suspended and resumed
// does not mistake its own pause for a stall in other processes.
type watch struct {
	job     *Job
	order   *Order
	every   time.Duration
	looked  time.Time
	took    time.Duration // since the order was given
	quiet   time.Duration // since the last progress on any rank
	longest time.Duration // longest duration of a recent order of this kind
	limit   time.Duration // value of quiet at which the order counts as stalled
	here    string        // the last situation of this process
	there   [][]byte      // the last situations of the others
	told    bool
}

func (j *Job) newWatch(o *Order) *watch {
	w := &watch{job: j, order: o, looked: time.Now(), every: tickOf(j.overseer.stall.After)}
	for _, d := range j.overseer.lengths[o.kind()] {
		w.longest = max(w.longest, d)
	}
	w.limit = max(j.overseer.stall.After, farLonger*w.longest)
	return w
}

// tickOf returns the interval between checks, given the time after which an order counts as stalled.
func tickOf(after time.Duration) time.Duration {
	return min(max(after/20, 10*time.Millisecond), time.Second)
}

// passed returns the time since the last check, but at most twice the interval.
func passed(looked *time.Time, every time.Duration) time.Duration {
	now := time.Now()
	d := min(now.Sub(*looked), 2*every)
	*looked = now
	return d
}

// look checks the progress of the order. It reports a slow order, and returns an error if the order has
// stalled.
func (w *watch) look() *StallError {
	d := passed(&w.looked, w.every)
	w.took, w.quiet = w.took+d, w.quiet+d
	here := w.job.situation()
	if text := fmt.Sprint(here); text != w.here {
		w.here, w.quiet = text, 0
	}
	after := w.job.overseer.stall.After
	late := !w.told && (w.quiet >= after/2 || w.longest > 0 && w.took >= max(min(patience, after/2), farLonger*w.longest))
	if w.quiet == 0 && !late {
		return nil
	}
	there := w.inspect()
	if w.quiet >= w.limit {
		quiet := "no rank has made progress"
		if w.order.What == OrderDisk {
			quiet = "its file system has not responded"
		}
		what := fmt.Errorf("%s has stalled: %s for %s", w.order.inWords(), quiet, w.limit.Round(time.Millisecond))
		return &StallError{what, w.describe(here, there)}
	}
	if late && w.job.overseer.stall.Tell != nil {
		what := fmt.Sprintf("%s has taken %s", w.order.inWords(), w.took.Round(100*time.Millisecond))
		if w.longest > 0 {
			what += fmt.Sprintf(", although the last ones took at most %s", w.longest.Round(time.Millisecond))
		}
		w.job.overseer.stall.Tell(strings.Join(append([]string{what}, w.describe(here, there)...), "\n  "))
	}
	w.told = w.told || late
	return nil
}

// inWords describes an order in a phrase.
func (o *Order) inWords() string {
	switch o.What {
	case OrderSection:
	case OrderVerify, OrderRestore, OrderSave, OrderSaved, OrderDisk:
		return inWords[o.What] + " " + o.Question
	default:
		return inWords[o.What]
	}
	if o.Section == ir.SectionInit {
		return "the start"
	}
	return fmt.Sprintf("%s %d", map[ir.Section]string{ir.SectionStep: "step", ir.SectionEval: "validation section"}[o.Section], o.Round)
}

// inspect asks the other processes for their situations. Any change counts as progress.
func (w *watch) inspect() []Inspection {
	if w.job.crew == nil {
		return nil
	}
	all := w.job.crew.Inspect(w.every)
	for i, x := range all {
		if i == len(w.there) {
			w.there = append(w.there, nil)
		}
		if x.State != nil && !bytes.Equal(w.there[i], x.State) {
			w.there[i], w.quiet = x.State, 0
		}
	}
	return all
}

// describe returns a line for each rank in a section, for each process that has not done its part of another
// order, and for each process that does not answer.
func (w *watch) describe(here *situation, there []Inspection) (lines []string) {
	known, processes := map[int][]vm.Doing{}, []string{}
	add := func(name string, s *situation) {
		switch {
		case !s.of(w.order):
		case s.What == OrderSection:
			maps.Copy(known, s.Ranks)
		default:
			processes = append(processes, name+" has not done its part")
		}
	}
	add("this process", here)
	for _, x := range there {
		var s *situation
		if x.State == nil || json.Unmarshal(x.State, &s) != nil {
			processes = append(processes, x.Name+" does not answer")
			continue
		}
		add(x.Name, s)
	}
	for _, rank := range slices.Sorted(maps.Keys(known)) {
		lines = append(lines, fmt.Sprintf("rank %d %s", rank, waiting(w.job.program, rank, w.order.Section, known[rank])))
	}
	return append(lines, processes...)
}

// waiting describes what a rank is doing. It omits streams that wait for other streams of the rank, because
// those other streams explain the wait.
func waiting(p *ir.Program, rank int, section ir.Section, all []vm.Doing) string {
	code := p.Codes[p.Ranks[rank].Code].Sections[section]
	var list []string
	for _, d := range all {
		switch {
		case d.PC < 0 || int(d.PC) >= len(code):
			list = append(list, fmt.Sprintf("waits for its stream %s", d.Stream))
		case code[d.PC].Op != ir.Wait:
			list = append(list, instrText(&p.Ranks[rank], &code[d.PC], d))
		}
	}
	if len(list) == 0 {
		return "has nothing left to do"
	}
	return strings.Join(list, "; ")
}

// instrText describes an instruction that has not ended.
func instrText(rank *ir.Rank, in *ir.Instr, d vm.Doing) string {
	text := "executes " + in.Info().Name
	switch {
	case in.Op == ir.Recv:
		text = fmt.Sprintf("waits for a message from rank %d", in.Attr("peer").Int(rank.Consts))
	case in.Op == ir.Send:
		text = fmt.Sprintf("waits for rank %d to receive", in.Attr("peer").Int(rank.Consts))
	case in.Op.Collective() != nil:
		text = fmt.Sprintf("waits in %s for ranks %s", in.Info().Name, words(rank.Groups[in.Attr("group").Int(rank.Consts)]))
	}
	text += fmt.Sprintf(" (%s, pc %d, %s", d.Stream, d.PC, in.Prov.Phase)
	for _, part := range []struct {
		name string
		n    int32
	}{{"microbatch", in.Prov.Microbatch}, {"subsequence", in.Prov.Subsequence}, {"layer", in.Prov.Layer}} {
		if part.n != ir.None {
			text += fmt.Sprintf(", %s %d", part.name, part.n)
		}
	}
	return text + ")"
}

func words(ranks []int32) string {
	return strings.Join(strings.Fields(strings.Trim(fmt.Sprint(ranks), "[]")), ", ")
}

// OnDisk runs act, which uses the files at a path. It ends the job if act stalls, because a file system that
// does not answer may block its callers forever. After a StallError, act may still be running.
func (j *Job) OnDisk(path string, act func() error) error {
	err := j.watched(&Order{What: OrderDisk, Question: path}, act)
	if errors.As(err, new(*StallError)) {
		j.dead = err
	}
	return err
}

// overseeWriter ends the job if the writer of this process stalls while it writes a checkpoint during training.
// Every process watches its own writer, because no order from the leader waits for it.
func (j *Job) overseeWriter(dir string, done, stalled chan struct{}) {
	w, after := &j.writer, j.overseer.stall.After
	if after <= 0 {
		return
	}
	tick := time.NewTicker(tickOf(after))
	defer tick.Stop()
	looked, quiet, last := time.Now(), time.Duration(0), w.written.Load()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		quiet += passed(&looked, tickOf(after))
		if n := w.written.Load(); n != last {
			last, quiet = n, 0
		}
		w.quiet.Store(int64(quiet))
		if quiet >= after {
			what := fmt.Errorf("saving the checkpoint to %s has stalled: rank %d has written nothing for %s", dir, w.rank.Load(), after)
			j.overseer.writing.Store(&StallError{what: what})
			close(stalled)
			j.transport.Abort(what)
			return
		}
	}
}

// attend aborts the job on a follower if the leader has not answered for too long although its host is
// reachable, which means that the leader is suspended or hangs.
func (j *Job) attend(until <-chan struct{}) {
	after := j.overseer.stall.After
	if after <= 0 {
		return
	}
	every := min(after/10, 10*time.Second)
	looked, quiet := time.Now(), time.Duration(0)
	for {
		select {
		case <-until:
			return
		case <-time.After(every):
		}
		answers := j.crew.Inspect(every)
		quiet += passed(&looked, 2*every)
		if len(answers) == 0 || answers[0].State != nil {
			quiet = 0
		}
		if quiet >= after {
			j.transport.Abort(fmt.Errorf("%s has not answered for %s, although its host has", answers[0].Name, after))
			return
		}
	}
}
