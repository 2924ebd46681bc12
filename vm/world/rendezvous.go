package world

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// hello is how a process introduces itself to process 0.
type hello struct {
	Magic              string
	Job                string
	Process, Processes int
	Terms              []Term
	Host               string
	Local              int
	Port               string // where its wires listen
}

// welcome is process 0's message when all have arrived.
type welcome struct {
	Key     string
	Members []Member
}

const magic = "sppo rendezvous 1"

// introduction is the time in which a new connection must introduce itself.
const introduction = 10 * time.Second

// Join connects the processes: process 0 listens, the others connect. It returns when all are connected, or
// with the reason why not.
func Join(ctx context.Context, o Options) (*World, error) {
	w := newWorld(o)
	wires, err := w.listen(ctx)
	if err != nil {
		return nil, err
	}
	if wires != nil {
		defer wires.Close()
	}
	if err := w.meet(ctx, wires); err != nil {
		return nil, err
	}
	for process, c := range w.conns {
		if c != nil {
			w.gone.Add(1)
			go w.serve(process, c)
		}
	}
	if wires == nil {
		return w, nil
	}
	if err := w.joinWires(ctx, wires); err != nil {
		w.Close(err)
		return nil, w.Cause()
	}
	return w, nil
}

// meet opens the connections of the control plane.
func (w *World) meet(ctx context.Context, wires net.Listener) error {
	limited, cancel := context.WithTimeout(ctx, w.options.Timeout)
	defer cancel()
	if w.Leads() {
		return w.host(limited, wires)
	}
	return w.come(limited, ctx, wires)
}

// listen opens a port for wires, on the loopback interface if the rendezvous is there.
func (w *World) listen(ctx context.Context) (net.Listener, error) {
	if !w.options.Wires {
		return nil, nil
	}
	return listen(ctx, net.JoinHostPort(w.listenHost(), "0"))
}

func listen(ctx context.Context, address string) (net.Listener, error) {
	return (&net.ListenConfig{}).Listen(ctx, "tcp", address)
}

// listenHost returns the address to listen on: all interfaces, or loopback.
func (w *World) listenHost() string {
	host, _, err := net.SplitHostPort(w.options.Rendezvous)
	if ip := net.ParseIP(host); err == nil && (host == "localhost" || ip != nil && ip.IsLoopback()) {
		return host
	}
	return ""
}

func portOf(l net.Listener) string {
	if l == nil {
		return ""
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		panic("internal: " + err.Error())
	}
	return port
}

// hello returns this process's introduction.
func (w *World) hello(wires net.Listener) *hello {
	host, err := os.Hostname()
	if err != nil {
		host = "an unnamed host"
	}
	o := &w.options
	return &hello{Magic: magic, Job: o.Job, Process: o.Process, Processes: o.Processes, Terms: o.Terms, Host: host, Local: o.Local, Port: portOf(wires)}
}

// arrival is a process that has connected.
type arrival struct {
	conn  *conn
	hello *hello
}

// host waits in process 0 for all others, and welcomes them.
func (w *World) host(ctx context.Context, wires net.Listener) error {
	_, port, err := net.SplitHostPort(w.options.Rendezvous)
	if err != nil {
		return err
	}
	l, err := listen(ctx, net.JoinHostPort(w.listenHost(), port))
	if err != nil {
		return fmt.Errorf("process 0 cannot listen at %s, where the others connect: %w", w.options.Rendezvous, cmp.Or(errors.Unwrap(err), err))
	}
	arrivals := make(chan arrival)
	defer l.Close()
	go accept(ctx, l, arrivals)
	present := make([]arrival, w.options.Processes)
	present[0].hello = w.hello(wires)
	err = w.await(ctx, arrivals, present)
	for _, a := range present[1:] {
		if err != nil && a.conn != nil {
			refuse(a.conn, err.Error())
		}
	}
	if err != nil {
		return err
	}
	return w.welcome(present)
}

// await fills the list of present processes, or returns why it cannot. Processes of other jobs are turned
// away without effect. If one of this job is rejected, the others have a moment to connect and learn why.
func (w *World) await(ctx context.Context, arrivals <-chan arrival, present []arrival) (problem error) {
	remind, stranger := time.After(5*time.Second), ""
	var enough <-chan time.Time
	for missing := len(present) - 1; missing > 0; {
		select {
		case a := <-arrivals:
			if a.hello.Job != w.options.Job {
				refuse(a.conn, fmt.Sprintf("%s is the rendezvous of job %q, not %q: use another address for one of them", w.options.Rendezvous, w.options.Job, a.hello.Job))
				stranger = fmt.Sprintf("process %d of job %q from %s, which is not job %q", a.hello.Process, a.hello.Job, a.hello.Host, w.options.Job)
				w.tell("turned away " + stranger)
				continue
			}
			missing--
			if err := w.differs(a.hello, present); err != nil {
				refuse(a.conn, err.Error())
				problem, enough = cmp.Or(problem, err), time.After(farewell)
				continue
			}
			present[a.hello.Process] = a
			_ = a.conn.write(message{Kind: kindSeated}, nil) // if it is gone, its absence shows later
		case <-remind:
			w.tell(fmt.Sprintf("waiting for %s of %d at %s", missingOf(present), w.options.Processes, w.options.Rendezvous))
		case <-enough:
			return problem
		case <-ctx.Done():
			return cmp.Or(problem, w.gaveUp(ctx, missingOf(present), stranger))
		}
	}
	return problem
}

func (w *World) tell(what string) {
	if w.options.Tell != nil {
		w.options.Tell(what)
	}
}

// gaveUp returns the error that names the missing processes, and any rejected one.
func (w *World) gaveUp(ctx context.Context, missing, stranger string) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("stopped while waiting for %s at %s", missing, w.options.Rendezvous)
	}
	instead := ""
	if stranger != "" {
		instead = "; " + stranger + ", did"
	}
	return fmt.Errorf("%s of %d did not connect to %s within %s%s", missing, w.options.Processes, w.options.Rendezvous, w.options.Timeout, instead)
}

// missingOf lists processes: "processes 1, 2 and 3".
func missingOf(present []arrival) string {
	var list []string
	for process, a := range present {
		if a.hello == nil {
			list = append(list, fmt.Sprint(process))
		}
	}
	if len(list) == 1 {
		return "process " + list[0]
	}
	last := len(list) - 1
	return "processes " + strings.Join(list[:last], ", ") + " and " + list[last]
}

// differs returns why a process of this job cannot take part, or nil.
func (w *World) differs(h *hello, present []arrival) error {
	switch mine := present[0].hello; {
	case h.Processes != mine.Processes:
		return fmt.Errorf("process %d on %s is one of %d processes, but process 0 is one of %d", h.Process, h.Host, h.Processes, mine.Processes)
	case h.Process <= 0 || h.Process >= h.Processes:
		return fmt.Errorf("there is no process %d of %d, but one connected from %s", h.Process, h.Processes, h.Host)
	case present[h.Process].hello != nil:
		return fmt.Errorf("process %d connected twice, from %s and from %s", h.Process, present[h.Process].hello.Host, h.Host)
	}
	for i, term := range w.options.Terms {
		if i >= len(h.Terms) || h.Terms[i] != term {
			theirs := "none"
			if i < len(h.Terms) {
				theirs = h.Terms[i].Value
			}
			return fmt.Errorf("process %d on %s has another %s than process 0 on %s: %s instead of %s",
				h.Process, h.Host, term.Name, present[0].hello.Host, theirs, term.Value)
		}
	}
	return nil
}

// accept accepts connections and their introductions. Peers that do not speak the protocol are ignored.
func accept(ctx context.Context, l net.Listener, arrivals chan<- arrival) {
	for {
		c, err := l.Accept()
		if err != nil {
			return // closed: all have arrived, or the wait is over
		}
		go func() {
			conn := newConn(c)
			_ = conn.SetReadDeadline(time.Now().Add(introduction))
			m, _, err := conn.read(0)
			if err != nil || m.Hello == nil || m.Hello.Magic != magic {
				conn.Close()
				return
			}
			_ = conn.SetReadDeadline(time.Time{})
			select {
			case arrivals <- arrival{conn, m.Hello}:
			case <-ctx.Done():
				conn.Close()
			}
		}()
	}
}

func refuse(c *conn, why string) {
	_ = c.write(message{Kind: kindRefused, Text: why}, nil)
	c.Close()
}

// welcome sends all processes the list of addresses.
func (w *World) welcome(present []arrival) error {
	w.key = rand.Text()
	w.conns = make([]*conn, len(present))
	here := map[string]int{}
	for process, a := range present {
		m := Member{Host: a.hello.Host, Local: a.hello.Local, Address: ":" + a.hello.Port}
		if m.Local < 0 {
			m.Local = here[m.Host]
		}
		here[m.Host]++
		if a.conn != nil {
			w.conns[process] = a.conn
			host, _, err := net.SplitHostPort(a.conn.RemoteAddr().String())
			if err != nil {
				return err
			}
			if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() { // otherwise it is on our host, which others know by another name
				m.Address = net.JoinHostPort(host, a.hello.Port)
			}
		}
		w.Members = append(w.Members, m)
	}
	for _, c := range w.conns[1:] {
		if err := c.write(message{Kind: kindWelcome, Welcome: &welcome{w.key, w.Members}}, nil); err != nil {
			return err
		}
	}
	return nil
}

// come connects to process 0, repeatedly until it listens. An accepted process waits as long as process 0
// does.
func (w *World) come(limited, ctx context.Context, wires net.Listener) error {
	h := w.hello(wires)
	var last error
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		c, err := w.seat(limited, h)
		if err == nil {
			return w.listenTo(ctx, c)
		}
		if refused := (*refusal)(nil); errors.As(err, &refused) {
			return err
		}
		if limited.Err() == nil {
			last = err // after a timeout the earlier error says more
		}
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return w.stopped()
			}
			return fmt.Errorf("process 0 was not found at %s within %s: %w", w.options.Rendezvous, w.options.Timeout, cmp.Or(last, err))
		case <-time.After(pause):
		}
	}
}

func (w *World) stopped() error {
	return fmt.Errorf("stopped while waiting for process 0 at %s", w.options.Rendezvous)
}

// refusal is a rejection by process 0.
type refusal struct{ why string }

func (r *refusal) Error() string { return r.why }

// seat introduces this process, and returns once process 0 has it on its list.
func (w *World) seat(ctx context.Context, h *hello) (*conn, error) {
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", w.options.Rendezvous)
	if err != nil {
		return nil, err
	}
	c := newConn(raw)
	release := context.AfterFunc(ctx, func() { c.Close() })
	err = c.write(message{Kind: kindHello, Hello: h}, nil)
	var m message
	if err == nil {
		m, _, err = c.read(0)
	}
	switch {
	case err == nil && m.Kind == kindSeated && release():
		return c, nil
	case err == nil && m.Kind == kindRefused:
		err = &refusal{m.Text}
	default:
		err = fmt.Errorf("its answer is not that of process 0 of a job: %w", cmp.Or(err, errForeign))
	}
	release()
	c.Close()
	return nil, err
}

// listenTo waits until process 0 reports that all are there, or that they will not be.
func (w *World) listenTo(ctx context.Context, c *conn) error {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	m, _, err := c.read(0)
	switch {
	case ctx.Err() != nil:
		return w.stopped()
	case err != nil:
		return fmt.Errorf("process 0 at %s was lost before all processes had connected: its connection closed", w.options.Rendezvous)
	case m.Kind != kindWelcome || m.Welcome == nil:
		return &refusal{m.Text}
	}
	w.conns, w.key, w.Members = []*conn{c}, m.Welcome.Key, m.Welcome.Members
	return w.reachable()
}

// reachable completes addresses on the host of process 0, which is the address we connected to.
func (w *World) reachable() error {
	host, _, err := net.SplitHostPort(w.conns[0].RemoteAddr().String())
	if err != nil {
		return err
	}
	for i := range w.Members {
		if address := &w.Members[i].Address; strings.HasPrefix(*address, ":") {
			*address = net.JoinHostPort(host, (*address)[1:])
		}
	}
	return nil
}
