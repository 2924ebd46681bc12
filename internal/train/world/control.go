package world

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"sppo.dev/internal/train"
)

// control holds the state shared by a process's connections and its job.
type control struct {
	answers  []chan []byte    // in process 0: by process
	orders   chan train.Order // in the other processes
	stop     chan struct{}    // closed when a user asks to stop
	stopOnce *sync.Once
}

func newControl(processes int) control {
	c := control{orders: make(chan train.Order, 1), stop: make(chan struct{}), stopOnce: &sync.Once{}}
	for range processes {
		c.answers = append(c.answers, make(chan []byte, 1))
	}
	return c
}

// serve handles the messages of a process until its connection ends.
func (w *World) serve(process int, c *conn) {
	for {
		m, data, err := c.read(longestText, anyLength)
		if !w.handle(process, m, data, err) {
			return
		}
	}
}

// handle processes a message from a process, or the end of its connection, and reports whether more messages
// may follow.
func (w *World) handle(process int, m message, data []byte, err error) bool {
	if damaged := (*damage)(nil); errors.As(err, &damaged) {
		w.Failed(w.received(process, err))
		w.gone.Done()
		return false
	}
	if err != nil {
		w.lost(process, err)
		w.gone.Done()
		return false
	}
	w.receive(process, m, data)
	return true
}

func (w *World) receive(process int, m message, data []byte) {
	switch m.Kind {
	case kindOrder:
		m.Order.Data = data
		w.control.orders <- *m.Order
	case kindAnswer:
		w.control.answers[process] <- data
	case kindStop:
		w.control.stopOnce.Do(func() { close(w.control.stop) })
	case kindFailed:
		w.fail(fmt.Errorf("%s failed: %s", w.name(process), m.Text))
	case kindAbort:
		w.fail(errors.New(m.Text))
	case kindEnd:
		w.end()
	case kindInspect:
		go w.inspected(process, m.Text) // in a goroutine, because writing must not block reading from this connection
	case kindState:
		w.stated(m.Text, data)
	case kindPut, kindValue:
		w.board.put(m.Text, data)
	case kindGet:
		w.board.get(m.Text, func(value []byte) {
			_ = w.conns[process].write(message{Kind: kindValue, Text: m.Text}, value) // the goroutine that reads from the process notices if the process is lost
		})
	}
}

// Order implements train.Crew.
func (w *World) Order(o train.Order) error {
	for process := 1; process < w.options.Processes; process++ {
		if err := w.order(process, o); err != nil {
			return err
		}
	}
	return nil
}

func (w *World) order(process int, o train.Order) error {
	data := o.Data
	o.Data = nil
	if err := w.conns[process].write(message{Kind: kindOrder, Order: &o}, data); err != nil {
		w.lost(process, err)
	}
	return w.Cause()
}

// Answers implements train.Crew.
func (w *World) Answers() (all [][]byte, err error) {
	for process := 1; process < w.options.Processes; process++ {
		data, err := w.answer(process)
		if err != nil {
			return nil, err
		}
		all = append(all, data)
	}
	return all, nil
}

func (w *World) answer(process int) ([]byte, error) {
	select {
	case data := <-w.control.answers[process]:
		return data, nil
	case <-w.failed:
		return nil, w.Cause()
	}
}

// Ask implements train.Crew.
func (w *World) Ask(rank int, o train.Order) ([]byte, error) {
	process := w.processOf(rank)
	if err := w.order(process, o); err != nil {
		return nil, err
	}
	return w.answer(process)
}

// Next implements train.Crew.
func (w *World) Next() (train.Order, error) {
	select {
	case o := <-w.control.orders:
		return o, nil
	case <-w.failed:
		return train.Order{}, w.Cause()
	case <-w.ending:
		return train.Order{}, io.EOF
	}
}

// Answer implements train.Crew.
func (w *World) Answer(data []byte) error {
	if err := w.conns[0].write(message{Kind: kindAnswer}, data); err != nil {
		w.lost(0, err)
	}
	return w.Cause()
}

// Stop asks process 0 to stop the job.
func (w *World) Stop() {
	if w.Leads() {
		w.receive(0, message{Kind: kindStop}, nil)
		return
	}
	_ = w.conns[0].write(message{Kind: kindStop}, nil) // if the message cannot be sent, process 0 is lost, which stops the job anyway
}

// Stopped is closed in process 0 when a user asks the job to stop.
func (w *World) Stopped() <-chan struct{} { return w.control.stop }

// Share returns, in every process, a value that one of them creates. That process passes the function that
// creates it; the others pass nil.
func (w *World) Share(name string, create func() ([]byte, error)) ([]byte, error) {
	if create != nil {
		value, err := create()
		if err != nil {
			return nil, err
		}
		if w.Leads() {
			w.board.put(name, value)
		} else if err := w.conns[0].write(message{Kind: kindPut, Text: name}, value); err != nil {
			w.lost(0, err)
		}
		return value, nil
	}
	came := make(chan []byte, 1)
	w.board.get(name, func(value []byte) { came <- value })
	if !w.Leads() {
		if err := w.conns[0].write(message{Kind: kindGet, Text: name}, nil); err != nil {
			w.lost(0, err)
		}
	}
	select {
	case value := <-came:
		return value, nil
	case <-w.failed:
		return nil, w.aborted()
	}
}

// board holds values by name, and the callbacks that wait for them.
type board struct {
	mu      sync.Mutex
	values  map[string][]byte
	waiting map[string][]func(value []byte)
}

func (b *board) put(name string, value []byte) {
	b.mu.Lock()
	if b.values == nil {
		b.values = map[string][]byte{}
	}
	b.values[name] = value
	waiting := b.waiting[name]
	delete(b.waiting, name)
	b.mu.Unlock()
	for _, f := range waiting {
		f(value)
	}
}

// get calls a function with the named value once the value is available.
func (b *board) get(name string, f func(value []byte)) {
	b.mu.Lock()
	value, ok := b.values[name]
	if !ok {
		if b.waiting == nil {
			b.waiting = map[string][]func([]byte){}
		}
		b.waiting[name] = append(b.waiting[name], f)
	}
	b.mu.Unlock()
	if ok {
		f(value)
	}
}
