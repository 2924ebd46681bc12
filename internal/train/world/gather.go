package world

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// arrival is a process that has connected to process 0.
type arrival struct {
	conn     *conn
	hello    *hello
	admitted chan struct{} // closed when all have arrived
}

// news is an event at the rendezvous.
type news struct {
	*arrival        // nil if a stranger has been turned away
	what     string // newsArrived, newsAlive, newsGone, or a description of the stranger
}

const (
	newsArrived = "arrived"
	newsAlive   = "alive" // the process has answered a ping
	newsGone    = "gone"
)

// gathering is process 0's list of processes while it waits for all of them to connect.
type gathering struct {
	w        *World
	present  []*arrival
	again    []*arrival // processes whose number another process holds, while that one is pinged
	news     chan news
	pinged   map[*arrival]bool // pinged since the last arrival; true until the answer comes
	silent   chan *arrival     // processes that did not answer in time
	rejected int
	problem  error
	enough   <-chan time.Time // fires after a problem, once the others have had time to connect and learn of it
	stranger string           // the end of the error if the job does not form: the last stranger turned away
	told     map[string]bool
	over     chan struct{} // closed when all have arrived, or the wait is over
}

// host runs in process 0. It waits for all other processes and welcomes them.
func (w *World) host(ctx context.Context, wires net.Listener) error {
	_, port, err := net.SplitHostPort(w.options.Rendezvous)
	if err != nil {
		return err
	}
	l, err := listen(ctx, net.JoinHostPort(w.listenHost(), port))
	if err != nil {
		return fmt.Errorf("process 0 cannot listen at %s, to which the others connect: %w", w.options.Rendezvous, cmp.Or(errors.Unwrap(err), err))
	}
	defer l.Close()
	n := w.options.Processes
	g := &gathering{w: w, present: make([]*arrival, n), again: make([]*arrival, n), news: make(chan news), pinged: map[*arrival]bool{}, silent: make(chan *arrival), told: map[string]bool{}, over: make(chan struct{})}
	defer close(g.over)
	g.present[0] = &arrival{hello: w.hello(wires)}
	go g.accept(l)
	if err := g.await(ctx); err != nil {
		for _, a := range append(g.present[1:], g.again...) {
			if a != nil {
				refuse(a.conn, err.Error())
			}
		}
		return err
	}
	return w.welcome(g.present)
}

// await fills the list of present processes, or returns an error that explains why it cannot. Strangers and
// processes of other jobs are turned away and do not affect the job. If a process that knows the job's secret is
// rejected, the others get a moment to connect and learn why.
func (g *gathering) await(ctx context.Context) error {
	remind := time.After(patience)
	for g.rejected == 0 || g.missing() > g.rejected {
		if g.rejected == 0 && g.missing() == 0 && g.callRoll() {
			return nil
		}
		select {
		case n := <-g.news:
			g.hear(n)
		case a := <-g.silent:
			if g.pinged[a] {
				g.leave(a, "does not answer")
			}
		case <-remind:
			o := &g.w.options
			g.w.tell(fmt.Sprintf("waiting for %s of %d at %s%s", g.absent(), o.Processes, o.Rendezvous, unresolved(o.Rendezvous)))
		case <-g.enough:
			return g.problem
		case <-ctx.Done():
			return cmp.Or(g.problem, g.gaveUp(ctx))
		}
	}
	return g.problem
}

func (g *gathering) missing() (n int) {
	for _, a := range g.present {
		if a == nil {
			n++
		}
	}
	return n
}

// callRoll reports whether all processes have answered a ping since the last arrival. It pings those that have not
// been pinged since then.
func (g *gathering) callRoll() bool {
	waiting := false
	for _, a := range g.present[1:] {
		if _, asked := g.pinged[a]; !asked {
			g.ping(a)
		}
		waiting = waiting || g.pinged[a]
	}
	return !waiting
}

// ping asks a process whether it is still running.
func (g *gathering) ping(a *arrival) {
	g.pinged[a] = true
	send(a.conn, message{Kind: kindPing})
	time.AfterFunc(farewell, func() {
		select {
		case g.silent <- a:
		case <-g.over:
		}
	})
}

func (g *gathering) hear(n news) {
	switch a := n.arrival; {
	case a == nil:
		g.turnAway(n.what, "; "+n.what+", did")
	case n.what == newsArrived:
		g.arrive(a)
	case n.what == newsGone:
		g.leave(a, "is gone")
	case g.present[a.hello.Process] == a:
		g.pinged[a] = false
		if other := g.again[a.hello.Process]; other != nil {
			g.again[a.hello.Process] = nil
			g.reject(other, fmt.Errorf("process %d connected twice, from %s and from %s", a.hello.Process, a.hello.Host, other.hello.Host))
		}
	}
}

// arrive puts a process on the list if it belongs to this job and its number is free.
func (g *gathering) arrive(a *arrival) {
	o, h := &g.w.options, a.hello
	if h.Job != o.Job {
		refuse(a.conn, fmt.Sprintf("%s is the rendezvous of a job other than %q: use another address for one of them", o.Rendezvous, h.Job))
		stranger := fmt.Sprintf("process %d of job %q from %s, which is not job %q", h.Process, h.Job, h.Host, o.Job)
		g.turnAway(stranger, "; "+stranger+", did")
		return
	}
	if err := g.w.differs(h, g.present[0].hello); err != nil {
		g.reject(a, err)
		return
	}
	if holder := g.present[h.Process]; holder != nil {
		if before := g.again[h.Process]; before != nil {
			before.conn.Close() // the process will try again
		}
		g.again[h.Process] = a
		g.ping(holder)
		return
	}
	clear(g.pinged)
	g.present[h.Process] = a
	send(a.conn, message{Kind: kindSeated})
	go g.attend(a)
}

// leave frees the number of a process that has died or does not answer. A process that waits for the number
// gets it.
func (g *gathering) leave(a *arrival, why string) {
	process := a.hello.Process
	if g.present[process] != a {
		return
	}
	a.conn.Close()
	delete(g.pinged, a)
	g.present[process] = nil
	g.w.tell(fmt.Sprintf("process %d on %s %s; it may connect again", process, a.hello.Host, why))
	if next := g.again[process]; next != nil {
		g.again[process] = nil
		g.arrive(next)
	}
}

// reject turns away a process that cannot take part. If it has proved that it knows the secret, it belongs to the
// job, which cannot form without it and ends. Without a secret, anyone can send such an introduction, and the job goes
// on waiting.
func (g *gathering) reject(a *arrival, why error) {
	refuse(a.conn, why.Error())
	if g.w.options.Secret == "" {
		g.turnAway("a process: "+why.Error(), "; one was turned away: "+why.Error())
		return
	}
	g.rejected++
	g.problem, g.enough = cmp.Or(g.problem, why), time.After(farewell)
}

// turnAway reports that a stranger has been turned away, unless the same report has been made before. If the job does
// not form, its error ends with the given words about the last stranger.
func (g *gathering) turnAway(stranger, end string) {
	g.stranger = end
	if !g.told[stranger] && len(g.told) < mostStrangers {
		g.told[stranger] = true
		g.w.tell("turned away " + stranger)
	}
}

// mostStrangers is the maximum number of different strangers that are reported.
const mostStrangers = 100

// attend reads the messages of a process on the list. Until all processes have arrived, it passes answers to pings
// and the end of the connection to await; then it handles the messages of the job.
func (g *gathering) attend(a *arrival) {
	process := a.hello.Process
	for {
		m, data, err := a.conn.read(longestText, anyLength)
		if !a.isAdmitted() {
			what := newsAlive
			if err != nil {
				what = newsGone
			}
			if g.hand(news{a, what}) {
				if err != nil {
					return
				}
				continue
			}
			if !a.isAdmitted() {
				return // the job has not started
			}
		}
		if !g.w.handle(process, m, data, err) {
			return
		}
	}
}

func (a *arrival) isAdmitted() bool {
	select {
	case <-a.admitted:
		return true
	default:
		return false
	}
}

// hand passes an event to await and reports whether the list was still open.
func (g *gathering) hand(n news) bool {
	select {
	case g.news <- n:
		return true
	case <-g.over:
		return false
	}
}

// accept accepts connections and serves each on its own goroutine, so that none delays the others.
func (g *gathering) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			go g.greet(newConn(c))
		case errors.Is(err, net.ErrClosed):
			return // all have arrived, or the wait is over
		default:
			time.Sleep(100 * time.Millisecond) // after an error such as too many open files
		}
	}
}

// greet reads the introduction of a new connection. Peers that do not speak the protocol, or do not know the
// secret, learn nothing.
func (g *gathering) greet(c *conn) {
	h, stranger := g.hearHello(c)
	switch {
	case h != nil && g.hand(news{&arrival{c, h, make(chan struct{})}, newsArrived}):
		return
	case h == nil:
		g.hand(news{what: stranger})
	}
	c.Close()
}

// hearHello returns the introduction of a process, or the reason for turning the peer away.
func (g *gathering) hearHello(c *conn) (h *hello, stranger string) {
	from, _, _ := net.SplitHostPort(c.RemoteAddr().String())
	foreign := "a connection from " + from + ", which is not from an sppovm process"
	_ = c.SetDeadline(time.Now().Add(introduction))
	m, _, err := c.read(shortText, 0)
	if err != nil || m.Greeting == nil || m.Greeting.Magic != magic {
		return nil, foreign
	}
	mine := greeting{Magic: magic, Nonce: rand.Text()}
	theirs := m.Greeting.Nonce
	mine.Proof = g.w.proof("process 0", theirs, mine.Nonce, nil)
	if err := c.write(message{Kind: kindGreeting, Greeting: &mine}, nil); err != nil {
		return nil, foreign
	}
	m, _, err = c.read(shortText, 0)
	switch {
	case err != nil || m.Greeting == nil || m.Hello == nil:
		return nil, foreign
	case g.w.options.Secret != "" && !hmac.Equal(m.Greeting.Proof, g.w.proof("process", theirs, mine.Nonce, m.Hello)):
		refuse(c, "process 0 has a secret that this process does not know: give all processes the same "+SecretVariable)
		return nil, "a process from " + from + " that does not know the secret of the job"
	}
	_ = c.SetDeadline(time.Time{})
	return m.Hello, ""
}

// send writes a short message to a process that may be gone or may not be reading. It ignores errors: the reader
// of the connection notices a lost process.
func send(c *conn, m message) {
	_ = c.SetWriteDeadline(time.Now().Add(farewell))
	_ = c.write(m, nil)
	_ = c.SetWriteDeadline(time.Time{})
}

func refuse(c *conn, why string) {
	send(c, message{Kind: kindRefused, Text: why})
	c.Close()
}

// gaveUp returns an error that names the missing processes and, after a timeout, the last stranger that was
// turned away.
func (g *gathering) gaveUp(ctx context.Context) error {
	o := &g.w.options
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("stopped while waiting for %s at %s", g.absent(), o.Rendezvous)
	}
	return fmt.Errorf("%s of %d did not connect to %s within %s%s%s", g.absent(), o.Processes, o.Rendezvous, o.Timeout, g.stranger, unresolved(o.Rendezvous))
}

// unresolved returns a clause that names the host of an address if no such host is known here, and "" otherwise.
// Process 0 listens without resolving the name by which the others look for it.
func unresolved(address string) string {
	host, _, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_, err = net.DefaultResolver.LookupHost(ctx, host)
	if dns := (*net.DNSError)(nil); errors.As(err, &dns) && dns.IsNotFound {
		return fmt.Sprintf("; the name %s cannot be resolved on this host", host)
	}
	return ""
}

func (w *World) tell(what string) {
	if w.options.Tell != nil {
		w.options.Tell(what)
	}
}

// absent names the missing processes, for example "processes 1, 2 and 3".
func (g *gathering) absent() string {
	var list []string
	for process, a := range g.present {
		if a == nil {
			list = append(list, fmt.Sprint(process))
		}
	}
	if len(list) == 1 {
		return "process " + list[0]
	}
	last := len(list) - 1
	return "processes " + strings.Join(list[:last], ", ") + " and " + list[last]
}

// differs returns the reason why a process of this job cannot take part, or nil.
func (w *World) differs(h, mine *hello) error {
	switch {
	case h.Processes != mine.Processes:
		return fmt.Errorf("process %d on %s is one of %d processes, but process 0 is one of %d", h.Process, h.Host, h.Processes, mine.Processes)
	case h.Process == 0:
		return fmt.Errorf("process 0 was started twice, on %s and on %s", mine.Host, h.Host)
	case h.Process < 0 || h.Process >= h.Processes:
		return fmt.Errorf("there is no process %d of %d, but one connected from %s", h.Process, h.Processes, h.Host)
	}
	for i, term := range w.options.Terms {
		if i >= len(h.Terms) || h.Terms[i] != term {
			theirs := "none"
			if i < len(h.Terms) {
				theirs = h.Terms[i].Value
			}
			return fmt.Errorf("process %d on %s has a different %s from process 0 on %s: %s instead of %s",
				h.Process, h.Host, term.Name, mine.Host, theirs, term.Value)
		}
	}
	return nil
}

// welcome sends all processes the list of addresses.
func (w *World) welcome(present []*arrival) error {
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
			// A loopback address means our own host, for which processes on other hosts need another address.
			if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
				m.Address = net.JoinHostPort(host, a.hello.Port)
			}
		}
		w.Members = append(w.Members, m)
	}
	for _, a := range present[1:] {
		w.gone.Add(1)
		close(a.admitted)
		_ = a.conn.write(message{Kind: kindWelcome, Welcome: &welcome{w.key, w.Members}}, nil) // the goroutine that reads from the process notices if the process is lost
	}
	return nil
}
