package world

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// greeting is the first message in both directions of a connection. If the job has a secret, each side proves
// that it knows the secret before it learns more about the other.
type greeting struct {
	Magic string
	Nonce string
	Proof []byte `json:",omitempty"`
}

// hello introduces a process to process 0.
type hello struct {
	Job                string
	Process, Processes int
	Terms              []Term
	Host               string
	Local              int
	Port               string // port on which its wires listen
}

// welcome is the message that process 0 sends when all processes have arrived.
type welcome struct {
	Key     string
	Members []Member
}

const magic = "sppo rendezvous 3"

// introduction is the time limit for a newly connected peer to introduce itself.
const introduction = 10 * time.Second

// Join connects the processes: process 0 listens, the others connect. It returns when all are connected, or
// with an error that explains why they are not.
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
	if !w.Leads() {
		w.gone.Add(1)
		go w.serve(0, w.conns[0])
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
	return &hello{Job: o.Job, Process: o.Process, Processes: o.Processes, Terms: o.Terms, Host: host, Local: o.Local, Port: portOf(wires)}
}

// patience is how long a process waits before it reports what it waits for.
const patience = 5 * time.Second

// come connects to process 0. It retries until process 0 listens and all other processes have connected.
// Process 0 may be restarted in the meantime.
func (w *World) come(limited, ctx context.Context, wires net.Listener) error {
	h := w.hello(wires)
	var last error
	remind := time.Now().Add(patience)
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		c, err := w.seat(limited, h)
		if err == nil {
			err = w.listenTo(ctx, c)
			pause = 50 * time.Millisecond
		}
		if refused := (*refusal)(nil); err == nil || errors.As(err, &refused) {
			return err
		}
		if limited.Err() == nil {
			last = err // after a timeout, the earlier error is more informative
			if !time.Now().Before(remind) {
				remind = time.Now().Add(time.Minute)
				w.tell(fmt.Sprintf("process %d waits for process 0 at %s: %v", w.options.Process, w.options.Rendezvous, err))
			}
		}
		select {
		case <-limited.Done():
			if ctx.Err() != nil {
				return fmt.Errorf("stopped while waiting for process 0 at %s", w.options.Rendezvous)
			}
			return fmt.Errorf("process 0 was not found at %s within %s: %w", w.options.Rendezvous, w.options.Timeout, cmp.Or(last, err))
		case <-time.After(pause):
		}
	}
}

// refusal is a rejection by process 0.
type refusal struct{ why string }

func (r *refusal) Error() string { return r.why }

// seat introduces this process and returns once process 0 has put it on its list.
func (w *World) seat(ctx context.Context, h *hello) (*conn, error) {
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", w.options.Rendezvous)
	if err != nil {
		return nil, err
	}
	c := newConn(raw)
	release := context.AfterFunc(ctx, func() { c.Close() })
	m, err := w.introduce(c, h)
	switch {
	case err == nil && m.Kind == kindSeated && release():
		return c, nil
	case err == nil && m.Kind == kindRefused:
		err = &refusal{m.Text}
	case !errors.Is(err, errSecret):
		if damaged := (*damage)(nil); err == nil || errors.As(err, &damaged) {
			err = errForeign
		}
		err = fmt.Errorf("its reply is not that of process 0 of a job: %w", err)
	}
	release()
	c.Close()
	return nil, err
}

// introduce exchanges greetings, sends the introduction and returns the answer to it.
func (w *World) introduce(c *conn, h *hello) (answer message, err error) {
	mine := greeting{Magic: magic, Nonce: rand.Text()}
	if err := c.write(message{Kind: kindGreeting, Greeting: &mine}, nil); err != nil {
		return answer, err
	}
	m, _, err := c.read(shortText, 0)
	switch {
	case err != nil:
		return answer, err
	case m.Kind == kindRefused:
		return m, nil
	case m.Greeting == nil || m.Greeting.Magic != magic:
		return answer, errForeign
	case w.options.Secret != "" && !hmac.Equal(m.Greeting.Proof, w.proof("process 0", mine.Nonce, m.Greeting.Nonce, nil)):
		return answer, errSecret
	}
	mine.Proof = w.proof("process", mine.Nonce, m.Greeting.Nonce, h)
	if err := c.write(message{Kind: kindHello, Greeting: &mine, Hello: h}, nil); err != nil {
		return answer, err
	}
	answer, _, err = c.read(longestText, 0)
	return answer, err
}

var errSecret = errors.New("it does not know the secret that this process has in " + SecretVariable)

// proof returns a value that proves that a process knows the secret of the job, without revealing the secret.
// It returns nil if there is no secret.
func (w *World) proof(role, theirs, ours string, h *hello) []byte {
	if w.options.Secret == "" {
		return nil
	}
	text, err := json.Marshal([]any{role, theirs, ours, h})
	if err != nil {
		panic("internal: " + err.Error())
	}
	mac := hmac.New(sha256.New, []byte(w.options.Secret))
	mac.Write(text)
	return mac.Sum(nil)
}

// listenTo waits until process 0 reports that all processes are connected, or why they cannot be.
func (w *World) listenTo(ctx context.Context, c *conn) error {
	defer context.AfterFunc(ctx, func() { c.Close() })()
	for {
		m, _, err := c.read(longestText, 0)
		switch {
		case err != nil:
			c.Close()
			return fmt.Errorf("it was lost before all processes had connected: %s", broke(err))
		case m.Kind == kindPing:
			_ = c.write(message{Kind: kindPong}, nil) // if the answer is lost, so is the connection
		case m.Kind == kindWelcome && m.Welcome != nil:
			w.conns, w.key, w.Members = []*conn{c}, m.Welcome.Key, m.Welcome.Members
			return w.reachable()
		default:
			c.Close()
			return &refusal{m.Text}
		}
	}
}

// reachable adds a host to the addresses that lack one. These addresses are on the host of process 0, which is at
// the other end of our connection.
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
