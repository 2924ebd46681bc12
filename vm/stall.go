package vm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"sppo.dev/ir"
)

// Watched is implemented by devices that know, while a section runs, which instruction each stream is at.
type Watched interface {
	// Doing returns the instructions that streams are at; a stream without work has none. Any goroutine may call it during a
	// section.
	Doing() []Doing
}

// Doing is an instruction that has begun but not ended.
type Doing struct {
	Stream ir.Stream
	PC     int32 // or UnknownPC
}

// UnknownPC is the PC of a stream that has work, on a device that cannot tell which instruction is current.
const UnknownPC int32 = -1

// Stall defines when a section counts as stalled. With the zero value, a section may take any amount of time.
type Stall struct {
	After time.Duration     // time without progress on any rank
	Tell  func(what string) // receives, at most once per section, what ranks of a slow section wait for
}

// Inspection is the state of the ranks of another process.
type Inspection struct {
	Name  string // of the process, for messages
	State []byte // nil: it did not answer in time
}

const (
	patience  = 10 * time.Second // a section that takes less is never reported
	farLonger = 5                // multiple of the longest recent section
	lastFew   = 8                // number of recent sections
	lastCall  = 5 * time.Second  // time for ranks to stop after a failure
)

// situation is what the ranks of a process are doing in a section; nil between sections.
type situation struct {
	Section ir.Section
	Round   int64
	Ranks   map[int][]Doing // a rank without information is absent
}

// overseer watches the sections of a job.
type overseer struct {
	stall   Stall
	mu      sync.Mutex
	now     *Order // the section that runs here; nil: none
	lengths [ir.NumSections][]time.Duration
	stuck   atomic.Bool // ranks did not stop after a failure, so their devices must not be touched
}

// lastCall returns the time that ranks have to stop after a failure.
func (o *overseer) lastCall() time.Duration {
	if o.stall.After > 0 {
		return min(o.stall.After, lastCall)
	}
	return lastCall
}

// enter marks the start of a section in this process; nil marks its end.
func (j *Job) enter(o *Order) {
	j.overseer.mu.Lock()
	j.overseer.now = o
	j.overseer.mu.Unlock()
}

// situation returns what the ranks of this process are doing.
func (j *Job) situation() *situation {
	j.overseer.mu.Lock()
	defer j.overseer.mu.Unlock()
	o := j.overseer.now
	if o == nil {
		return nil
	}
	s := &situation{Section: o.Section, Round: o.Round, Ranks: map[int][]Doing{}}
	for _, r := range j.ranks {
		if d, ok := r.device.(Watched); ok && r.work != nil {
			s.Ranks[r.index] = d.Doing()
		}
	}
	return s
}

// inspected answers the questions of other processes.
func (j *Job) inspected() []byte {
	text, err := json.Marshal(j.situation())
	if err != nil {
		panic("internal: " + err.Error())
	}
	return text
}

// Stuck reports whether any ranks of this process failed to stop after a failure. Nothing that they use may be freed.
func (j *Job) Stuck() bool { return j.overseer.stuck.Load() }

// bounded runs a section on the ranks of this process. After a failure elsewhere, it limits how long it waits for
// them.
func (j *Job) bounded(o *Order, act func() error) error {
	j.enter(o)
	if j.crew == nil {
		defer j.enter(nil)
		return act()
	}
	done := make(chan error, 1)
	go func() {
		err := act()
		j.enter(nil)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-j.crew.Down():
	}
	return j.stop(done, fmt.Errorf("%w: %w", ErrAborted, j.crew.Cause()))
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

// watched runs a section on all ranks and ends it if it stalls. Only the leader watches, not its followers.
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
			lengths := append(j.overseer.lengths[o.Section], time.Since(began))
			j.overseer.lengths[o.Section] = lengths[max(0, len(lengths)-lastFew):]
			return err
		case <-tick.C:
			if stalled := w.look(); stalled != nil {
				j.transport.Abort(stalled.what)
				_ = j.stop(done, nil) // errors now are consequences
				return stalled
			}
		}
	}
}

// StallError reports a section that has stalled.
type StallError struct {
	what  error
	ranks []string
}

func (e *StallError) Error() string {
	return strings.Join(append([]string{e.what.Error()}, e.ranks...), "\n  ")
}

// watch follows the progress of one section. Time is counted in ticks, so that a process that was suspended and
// resumed does not mistake its own pause for a stall of others.
type watch struct {
	job     *Job
	order   *Order
	every   time.Duration
	looked  time.Time
	took    time.Duration // since the section began
	quiet   time.Duration // since the last progress on any rank
	longest time.Duration // of the last sections
	limit   time.Duration // of quiet
	here    string        // the last situation of this process
	there   [][]byte      // and of the others
	told    bool
}

func (j *Job) newWatch(o *Order) *watch {
	w := &watch{job: j, order: o, looked: time.Now(), every: tickOf(j.overseer.stall.After)}
	for _, d := range j.overseer.lengths[o.Section] {
		w.longest = max(w.longest, d)
	}
	w.limit = max(j.overseer.stall.After, farLonger*w.longest)
	return w
}

// tickOf returns the interval between looks, given the time after which a section is stalled.
func tickOf(after time.Duration) time.Duration {
	return min(max(after/20, 10*time.Millisecond), time.Second)
}

// passed returns the time since the last look, but at most twice the interval.
func passed(looked *time.Time, every time.Duration) time.Duration {
	now := time.Now()
	d := min(now.Sub(*looked), 2*every)
	*looked = now
	return d
}

// look returns an error if the section has stalled.
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
		what := fmt.Errorf("%s has stalled: no rank has made progress for %s", w.order.section(), w.limit.Round(time.Millisecond))
		return &StallError{what, w.describe(here, there)}
	}
	if late && w.job.overseer.stall.Tell != nil {
		what := fmt.Sprintf("%s has taken %s", w.order.section(), w.took.Round(100*time.Millisecond))
		if w.longest > 0 {
			what += fmt.Sprintf(", and the last ones took at most %s", w.longest.Round(time.Millisecond))
		}
		w.job.overseer.stall.Tell(strings.Join(append([]string{what}, w.describe(here, there)...), "\n  "))
	}
	w.told = w.told || late
	return nil
}

// section names the section of an order.
func (o *Order) section() string {
	if o.Section == ir.SectionInit {
		return "the start"
	}
	return fmt.Sprintf("%s %d", map[ir.Section]string{ir.SectionStep: "step", ir.SectionEval: "validation section"}[o.Section], o.Round)
}

// inspect asks the other processes. A state that has changed is progress.
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

// describe returns a line for each rank, and for each process that does not answer.
func (w *watch) describe(here *situation, there []Inspection) (lines []string) {
	known, silent := map[int][]Doing{}, []string{}
	add := func(s *situation) {
		if s != nil && s.Section == w.order.Section && s.Round == w.order.Round {
			maps.Copy(known, s.Ranks)
		}
	}
	add(here)
	for _, x := range there {
		var s *situation
		if x.State == nil || json.Unmarshal(x.State, &s) != nil {
			silent = append(silent, x.Name+" does not answer")
			continue
		}
		add(s)
	}
	for _, rank := range slices.Sorted(maps.Keys(known)) {
		lines = append(lines, fmt.Sprintf("rank %d %s", rank, waiting(w.job.program, rank, w.order.Section, known[rank])))
	}
	return append(lines, silent...)
}

// waiting describes what a rank is doing. It omits streams that wait for other streams of the rank, because those
// others explain the wait.
func waiting(p *ir.Program, rank int, section ir.Section, all []Doing) string {
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
func instrText(rank *ir.Rank, in *ir.Instr, d Doing) string {
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

// attend ends a follower whose leader does not answer although its host is reachable: the leader was suspended or
// hangs.
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
