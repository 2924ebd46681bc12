package train

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Crew connects the processes of a job. One process is the leader: its job is used as if all ranks
// were in that process. The others are followers: their jobs execute the leader's orders on their
// ranks.
type Crew interface {
	vm.Wires // a crew needs only Here and Failed; Wire is for transports
	Leads() bool
	// Order sends an order to all followers. Answers waits until all followers have executed it, and returns
	// the answer of each.
	Order(o Order) error
	Answers() ([][]byte, error)
	// Ask sends an order to the process of a rank and waits for its answer.
	Ask(rank int, o Order) ([]byte, error)
	// Next returns a follower's next order. Answer reports that the order has been executed.
	Next() (Order, error)
	Answer(data []byte) error
	// Inspect asks other processes what their ranks are doing, and waits at most the given time for answers.
	// The leader asks all followers; a follower asks the leader. OnInspect registers the function that answers
	// for this process; it must answer immediately and may be called from any goroutine.
	Inspect(wait time.Duration) []Inspection
	OnInspect(answer func() []byte)
	// Down returns a channel that is closed when the processes cannot continue. Cause returns the error of the
	// first process that failed, or nil if none has failed.
	Down() <-chan struct{}
	Cause() error
}

// Order is a command from the leader to a follower.
type Order struct {
	What     string
	Section  ir.Section
	Round    int64
	Guard    guard // guard of a step
	Rank     int
	View     ir.View
	Question string
	Data     []byte // bytes to write
}

// Kinds of orders.
const (
	OrderReady   = "ready"   // report that all ranks have loaded; the answer describes data and devices
	OrderSection = "section" // run a section
	OrderLoad    = "load"    // load weights; the answer describes them
	OrderRead    = "read"    // return the bytes of a rank's view
	OrderWrite   = "write"
	OrderPeaks   = "peaks"   // return the peaks of a rank's arenas
	OrderAsk     = "ask"     // return the answer of Options.Reply
	OrderVerify  = "verify"  // verify a share of a checkpoint, or the file that Data names; the answer is a finding
	OrderRestore = "restore" // load a checkpoint
	OrderSave    = "save"    // copy the state and start to write the copy; if Round is 1, write without copying
	OrderSaved   = "saved"   // report the written shards; if Round is 1, wait for them
	OrderFinite  = "finite"  // look for values of the state that are not finite; the answer names the first
	OrderClose   = "close"
	OrderDisk    = "disk" // never sent; stands for this process's own use of the files at a path
)

// inWords describes the kinds of orders that may stall. Order.inWords appends the path that an order names.
var inWords = map[string]string{
	OrderReady: "loading the program", OrderLoad: "loading the weights", OrderRead: "reading a rank's values", OrderWrite: "writing a rank's values",
	OrderPeaks: "the end of the run", OrderAsk: "a question to all processes", OrderVerify: "verifying the checkpoint", OrderRestore: "loading the checkpoint",
	OrderSave: "saving the checkpoint to", OrderSaved: "saving the checkpoint to", OrderFinite: "checking the weights", OrderClose: "the end of the run", OrderDisk: "access to",
}

// together carries out an order on the ranks of this process while the followers carry it out on theirs. It ends
// the job if the order stalls. If there are several errors, it returns the root cause.
func (j *Job) together(o Order, here func() error) ([][]byte, error) {
	if stalled := j.overseer.writing.Load(); stalled != nil && o.What != OrderClose {
		return nil, stalled
	}
	answers, err := j.carryOut(o, here)
	if stalled := j.overseer.writing.Load(); stalled != nil && o.What != OrderClose {
		return nil, stalled // other errors are consequences
	}
	return answers, err
}

func (j *Job) carryOut(o Order, here func() error) ([][]byte, error) {
	here = j.bounded(&o, here)
	if j.crew == nil {
		return nil, j.watched(&o, here)
	}
	if !j.crew.Leads() {
		return nil, here()
	}
	var all [][]byte
	err := j.watched(&o, func() error {
		if err := j.crew.Order(o); err != nil {
			return err
		}
		err := here()
		if err != nil {
			j.transport.Abort(err) // otherwise the followers would wait forever
		}
		var other error
		if all, other = j.crew.Answers(); err == nil || errors.Is(err, vm.ErrAborted) && other != nil {
			err = other
		}
		return err
	})
	if err != nil {
		return nil, err // after a stall, answers may still arrive
	}
	return all, nil
}

// readiness describes a process that has loaded its ranks.
type readiness struct{ Data, Kind string }

// ready loads the program on the ranks of all processes, and checks that they train on the same data.
func (j *Job) ready(load func(r *rank) error) error {
	mine := j.data()
	answers, err := j.together(Order{What: OrderReady}, func() error { return j.each(load) })
	for i, text := range answers {
		var theirs readiness
		if err := json.Unmarshal(text, &theirs); err != nil {
			return fmt.Errorf("internal: %w", err)
		}
		if theirs.Data != mine {
			return fmt.Errorf("process %d reads different data from process 0: %s instead of %s", i+1, theirs.Data, mine)
		}
		j.kinds = append(j.kinds, theirs.Kind)
	}
	return err
}

// data describes the data set of this process.
func (j *Job) data() string {
	if d, ok := j.tokens.(interface{ Describe() string }); ok {
		return d.Describe()
	}
	return "data that cannot differ"
}

// Others asks all other processes a question. Their Options.Reply answers it.
func (j *Job) Others(question string) ([][]byte, error) {
	return j.together(Order{What: OrderAsk, Question: question}, func() error { return nil })
}

// Follow executes the leader's orders until the leader closes the job. When Follow returns an error
// from this process, the error has already been reported to the others.
func (j *Job) Follow() error {
	ended := make(chan struct{})
	defer close(ended)
	go j.attend(ended)
	for {
		o, err := j.crew.Next()
		if err != nil {
			return err
		}
		var data []byte
		err = j.bounded(&o, func() (err error) { data, err = j.obey(o); return err })()
		if err != nil {
			j.transport.Abort(err)
			return j.firstCause(err)
		}
		if err := j.crew.Answer(data); err != nil || o.What == OrderClose {
			return err
		}
	}
}

// firstCause returns the error of the process that failed first, if err is a consequence of that failure;
// otherwise it returns err.
func (j *Job) firstCause(err error) error {
	if j.crew != nil && errors.Is(err, vm.ErrAborted) && j.crew.Cause() != nil {
		return j.crew.Cause()
	}
	return err
}

func (j *Job) obey(o Order) ([]byte, error) {
	switch o.What {
	case OrderReady:
		return json.Marshal(readiness{j.data(), j.kinds[0]})
	case OrderSection:
		return nil, j.runHere(o)
	case OrderLoad:
		if err := j.loadHere(context.Background()); err != nil {
			return nil, err
		}
		return []byte(j.weights.Describe()), nil
	case OrderVerify:
		return json.Marshal(j.verifyHere(context.Background(), o.Question, string(o.Data)))
	case OrderRestore:
		c, err := openCheckpoint(o.Question)
		if err != nil {
			return nil, err
		}
		defer c.Close()
		return nil, j.restoreHere(context.Background(), c)
	case OrderSave:
		return nil, j.saveHere(context.Background(), o.Question, o.Round == 1)
	case OrderSaved:
		return json.Marshal(j.savedHere(o.Round == 1))
	case OrderFinite:
		name, err := j.ruinedHere()
		return []byte(name), err
	case OrderClose:
		return nil, j.Close()
	case OrderAsk:
		return j.reply(o.Question)
	}
	if o.Rank < 0 || o.Rank >= len(j.ranks) || j.ranks[o.Rank].work == nil {
		return nil, fmt.Errorf("internal: asked for rank %d, which is in another process", o.Rank)
	}
	r := j.ranks[o.Rank]
	switch o.What {
	case OrderRead:
		out := make([]byte, o.View.Bytes())
		return out, j.read(r, o.View, out)
	case OrderWrite:
		return nil, j.write(r, o.View, o.Data)
	case OrderPeaks:
		peaks, err := j.peaks(r)
		return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(peaks[ir.Device])), uint64(peaks[ir.Host])), err
	}
	return nil, fmt.Errorf("internal: unknown order %q", o.What)
}

// ask sends an order to the process of the order's rank and waits for the answer, unless the order stalls.
func (j *Job) ask(o Order) ([]byte, error) {
	var answer []byte
	err := j.watched(&o, func() (err error) { answer, err = j.crew.Ask(o.Rank, o); return err })
	if err != nil {
		return nil, err // after a stall, the answer may still arrive
	}
	return answer, nil
}

// read copies the bytes of a view from a rank, in this process or another.
func (j *Job) read(r *rank, v ir.View, out []byte) error {
	if r.work != nil {
		return r.one(func(d vm.Device) error { return d.Read(v, out) })
	}
	data, err := j.ask(Order{What: OrderRead, Rank: r.index, View: v})
	if err == nil && len(data) != len(out) {
		err = fmt.Errorf("internal: asked for %d bytes, received %d", len(out), len(data))
	}
	copy(out, data)
	return err
}

func (j *Job) write(r *rank, v ir.View, in []byte) error {
	if r.work != nil {
		return r.one(func(d vm.Device) error { return d.Write(v, in) })
	}
	_, err := j.ask(Order{What: OrderWrite, Rank: r.index, View: v, Data: in})
	return err
}

func (j *Job) peaks(r *rank) (peaks [ir.NumArenas]ir.Bytes, err error) {
	if r.work != nil {
		err = r.one(func(d vm.Device) error {
			for a := range peaks {
				peaks[a] = d.Peak(ir.Arena(a))
			}
			return nil
		})
		return peaks, err
	}
	data, err := j.ask(Order{What: OrderPeaks, Rank: r.index})
	if err == nil && len(data) == 8*len(peaks) {
		for a := range peaks {
			peaks[a] = ir.Bytes(binary.LittleEndian.Uint64(data[8*a:]))
		}
	}
	return peaks, err
}
