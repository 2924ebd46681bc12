package world

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"sppo.dev/internal/vm/vmtest"
)

// strangers returns what other programs may send to a port.
func strangers() map[string][]byte {
	framed := func(text string, size uint64) []byte {
		head := framed([]byte(text), nil)
		binary.LittleEndian.PutUint64(head[4:], size)
		return append(sealed(head[:headBytes-4]), text...)
	}
	greet := framed(`{"Kind":"greeting","Greeting":{"Magic":"`+magic+`","Nonce":"x"}}`, 0)
	noise := make([]byte, 1<<16)
	rng := rand.NewChaCha8([32]byte{seed})
	rng.Read(noise)
	return map[string][]byte{
		"silent":     nil,
		"HTTP":       []byte("GET / HTTP/1.1\r\nHost: stranger\r\n\r\n"),
		"TLS":        append([]byte{0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3}, noise[:500]...),
		"zeros":      make([]byte, 64<<20),
		"noise":      noise,
		"half":       greet[:20],
		"greets":     greet,
		"long":       sealed(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64([]byte{0, 0, 0, 1}, 0), 0)),
		"changed":    append(bytes.Clone(greet[:40]), noise[:40]...),
		"data":       framed(`{"Kind":"hello"}`, 1<<60),
		"no hello":   append(bytes.Clone(greet), framed(`{"Kind":"hello"}`, 0)...),
		"wrong type": framed(`{"Kind":{"a":[]}}`, 0),
		"other job":  append(bytes.Clone(greet), framed(`{"Kind":"hello","Greeting":{},"Hello":{"Job":"none","Process":-7}}`, 0)...),
	}
}

// Strangers of all kinds, many at a time, are turned away. They do not delay any process or end the job, and
// they learn nothing about it.
func TestStrangers(t *testing.T) {
	place := vmtest.FreePlace(t)
	const each = 30 // connections of each kind except zeros; the silent ones stay open for a second
	var mu sync.Mutex
	learned, reached := map[string]string{}, 0
	var all sync.WaitGroup
	for name, text := range strangers() {
		for range each {
			all.Go(func() {
				var c net.Conn
				var err error
				for range 500 {
					if c, err = net.Dial("tcp", place); err == nil {
						break
					}
					time.Sleep(10 * time.Millisecond)
				}
				if err != nil {
					return
				}
				defer c.Close()
				go c.Write(text)
				c.SetReadDeadline(time.Now().Add(time.Second))
				answer, _ := io.ReadAll(c) // the connection may be reset
				mu.Lock()
				defer mu.Unlock()
				reached++
				learned[name] += string(answer)
			})
			if name == "zeros" {
				break
			}
		}
	}
	began := time.Now()
	worlds, errs := joined(t, 2, 2, func(o *Options) {
		o.Job, o.Terms = "the job", []Term{{"program", "the program"}}
		if o.Rendezvous = place; o.Process == 1 {
			time.Sleep(600 * time.Millisecond)
		}
	})
	if took := time.Since(began); took > introduction/2 {
		t.Errorf("it took %s", took)
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(closeAll(t, worlds, nil)...); err != nil {
		t.Error(err)
	}
	if reached < each*len(strangers())/2 {
		t.Errorf("%d strangers have reached the place", reached)
	}
	for name, text := range learned {
		if strings.Contains(text, "the job") || strings.Contains(text, "the program") || strings.Contains(text, worlds[0].key) {
			t.Errorf("%s learns %q", name, text)
		}
	}
}

// Only processes that know the secret of a job take part. Others are turned away, which does not end the job.
func TestSecret(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		of    [3]string
		wants [3]string
	}{
		{"shared", [3]string{"s", "s", "s"}, [3]string{}},
		{"one has another", [3]string{"s", "s", "t"}, [3]string{"process 2 of 3 did not connect to", "process 2 of 3 did not connect to", "it does not know the secret that this process has in SPPO_JOB_SECRET"}},
		{"one has none", [3]string{"s", "s", ""}, [3]string{"; a process from 127.0.0.1 that does not know the secret of the job, did", "process 2 of 3 did not connect to", "process 0 has a secret that this process does not know"}},
		{"process 0 has none", [3]string{"", "s", ""}, [3]string{"process 1 of 3 did not connect to", "it does not know the secret that this process has in SPPO_JOB_SECRET", "process 1 of 3 did not connect to"}},
	} {
		worlds, errs := joined(t, 3, 3, func(o *Options) {
			o.Secret = c.of[o.Process]
			if c.wants[0] != "" {
				o.Timeout = 500 * time.Millisecond
			}
		})
		for i, err := range errs {
			if (c.wants[i] == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.wants[i]) {
				t.Errorf("%s: process %d: %v, want %q", c.name, i, err, c.wants[i])
			}
		}
		if c.wants[0] == "" {
			if err := errors.Join(closeAll(t, worlds, nil)...); err != nil {
				t.Error(err)
			}
		}
	}
}

// impostors returns introductions that no process of a job of the given size sends, by anyone who knows the job's name.
func impostors(processes int) map[string]hello {
	terms := []Term{{"program", "one"}}
	return map[string]hello{
		"more processes":    {Process: 1, Processes: processes + 1, Terms: terms},
		"no processes":      {Process: 1, Processes: 0, Terms: terms},
		"process 0":         {Process: 0, Processes: processes, Terms: terms},
		"a negative number": {Process: -1, Processes: processes, Terms: terms},
		"too large":         {Process: processes, Processes: processes, Terms: terms},
		"another program":   {Process: 1, Processes: processes, Terms: []Term{{"program", "two"}}},
		"no terms":          {Process: 1, Processes: processes},
		"another term":      {Process: 1, Processes: processes, Terms: []Term{{"device", "one"}}},
	}
}

// Without a secret, an introduction that contradicts process 0 is answered, and the job forms without its sender. The
// same holds with a secret for a sender that does not know it.
func TestImpostors(t *testing.T) {
	t.Parallel()
	for _, secret := range []string{"", "s"} {
		place := vmtest.FreePlace(t)
		var rogues sync.WaitGroup
		answered := make(chan struct{})
		for name, h := range impostors(2) {
			rogues.Go(func() {
				w := newWorld(Options{Process: 1, Processes: 2, Ranks: 2, Rendezvous: place})
				h.Job, h.Host = "test", "nowhere"
				for range 500 {
					_, err := w.seat(t.Context(), &h)
					if refused := (*refusal)(nil); errors.As(err, &refused) {
						return
					} else if err == nil {
						t.Errorf("%s is seated", name)
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
				t.Errorf("%s gets no answer", name)
			})
		}
		go func() { rogues.Wait(); close(answered) }()
		var told []string
		var mu sync.Mutex
		worlds, errs := joined(t, 2, 2, func(o *Options) {
			o.Rendezvous, o.Secret = place, secret
			o.Tell = func(what string) { mu.Lock(); told = append(told, what); mu.Unlock() }
			if o.Process == 1 {
				<-answered
			}
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("secret %q: %v", secret, err)
		}
		if err := errors.Join(closeAll(t, worlds, nil)...); err != nil {
			t.Error(err)
		}
		want := map[string]string{"": "turned away a process: process 1 on nowhere has a different program", "s": "that does not know the secret of the job"}[secret]
		if text := strings.Join(told, "\n"); !strings.Contains(text, want) {
			t.Errorf("secret %q: it says %q", secret, text)
		}
	}
}

// A process that waits for process 0 says so, with the reason, long before its time is up.
func TestWaitingIsReported(t *testing.T) {
	t.Parallel()
	told := make(chan string, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	place := vmtest.FreePlace(t)
	done := make(chan error, 1)
	go func() {
		_, err := Join(ctx, Options{Process: 1, Processes: 2, Ranks: 2, Rendezvous: place, Timeout: time.Hour, Tell: func(what string) { told <- what }})
		done <- err
	}()
	select {
	case what := <-told:
		if !strings.HasPrefix(what, "process 1 waits for process 0 at "+place+": ") || !strings.Contains(what, "connection refused") {
			t.Errorf("it says %q", what)
		}
	case <-time.After(4 * patience):
		t.Error("it says nothing")
	}
	cancel()
	<-done
}

// A proof that an eavesdropper has recorded is useless in another connection: it depends on the role, both
// nonces, the introduction and the secret.
func TestSecretIsNotRepeated(t *testing.T) {
	t.Parallel()
	w := newWorld(Options{Processes: 2, Ranks: 2, Secret: "s"})
	h := w.hello(nil)
	proofs := map[string]bool{}
	for _, p := range [][]byte{w.proof("process", "a", "b", h), w.proof("process", "a", "c", h), w.proof("process", "c", "b", h), w.proof("process 0", "a", "b", nil),
		w.proof("process", "a", "b", &hello{}), w.proof("process", "a,b", "", h), newWorld(Options{Processes: 2, Ranks: 2, Secret: "t"}).proof("process", "a", "b", h)} {
		if len(p) != 32 || proofs[string(p)] {
			t.Errorf("the proof %x is short, or another's", p)
		}
		proofs[string(p)] = true
	}
}

// early connects as a process of a job would, and dies or falls silent once it is on the list.
func early(t *testing.T, place string, process int, dies bool) {
	t.Helper()
	w := newWorld(Options{Process: process, Processes: 3, Ranks: 3, Rendezvous: place, Job: "test", Terms: []Term{{"program", "one"}}})
	for range 500 {
		c, err := w.seat(t.Context(), w.hello(nil))
		if err == nil {
			t.Cleanup(func() { c.Close() })
			if dies {
				c.Close()
			}
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("it got no place")
}

// A process that died or fell silent before all had connected may connect again.
func TestComeAgain(t *testing.T) {
	t.Parallel()
	for _, dies := range []bool{true, false} {
		place := vmtest.FreePlace(t)
		there := make(chan struct{})
		var told []string
		var mu sync.Mutex
		go func() { early(t, place, 1, dies); close(there) }()
		worlds, errs := joined(t, 3, 3, func(o *Options) {
			o.Tell = func(what string) { mu.Lock(); told = append(told, what); mu.Unlock() }
			if o.Rendezvous = place; o.Process > 0 {
				<-there
			}
		})
		if err := errors.Join(errs...); err != nil {
			t.Fatalf("dies %t: %v", dies, err)
		}
		if err := errors.Join(closeAll(t, worlds, nil)...); err != nil {
			t.Error(err)
		}
		want := map[bool]string{true: " is gone; it may connect again", false: " does not answer; it may connect again"}[dies]
		if text := strings.Join(told, "\n"); !strings.Contains(text, want) {
			t.Errorf("dies %t: it says %q", dies, text)
		}
	}
}

// If process 0 dies before all have connected, the others wait until it is started again.
func TestFirstComesAgain(t *testing.T) {
	t.Parallel()
	place := vmtest.FreePlace(t)
	l, err := net.Listen("tcp", place)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // puts one process on its list, as process 0 does, and dies
		raw, err := l.Accept()
		if err != nil {
			return
		}
		c := newConn(raw)
		g := &gathering{w: newWorld(Options{Processes: 2, Ranks: 2}), over: make(chan struct{})}
		if h, _ := g.hearHello(c); h == nil {
			t.Error("it has not introduced itself")
		}
		send(c, message{Kind: kindSeated})
		time.Sleep(50 * time.Millisecond)
		c.Close()
		l.Close()
	}()
	worlds, errs := joined(t, 2, 2, func(o *Options) {
		if o.Rendezvous = place; o.Process == 0 {
			time.Sleep(300 * time.Millisecond)
		}
	})
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(closeAll(t, worlds, nil)...); err != nil {
		t.Error(err)
	}
}

// FuzzHello passes arbitrary bytes to the reader of introductions.
func FuzzHello(f *testing.F) {
	for _, text := range strangers() {
		if len(text) < 1<<17 {
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c := &conn{in: newReader(bytes.NewReader(text))}
		m, data, err := c.read(shortText, 0)
		if len(data) > 0 {
			t.Error("it has data")
		}
		if err == nil {
			if _, err := json.Marshal(m); err != nil {
				t.Error(err)
			}
		}
	})
}

// Process 0 listens without looking up the host of the rendezvous. If nobody comes, it says that there is no such host.
func TestUnresolvedHost(t *testing.T) {
	const host = "no-such-host.invalid"
	if _, err := net.DefaultResolver.LookupHost(t.Context(), host); !errors.As(err, new(*net.DNSError)) || !err.(*net.DNSError).IsNotFound {
		t.Skipf("SKIPPED: looking up %s did not fail as expected: %v", host, err)
	}
	_, err := Join(t.Context(), Options{Processes: 2, Ranks: 2, Rendezvous: host + ":0", Timeout: 100 * time.Millisecond})
	if want := "within 100ms; the name " + host + " cannot be resolved on this host"; err == nil || !strings.HasSuffix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// OnHost finds the ranks of all processes on the host of a process.
func TestOnHost(t *testing.T) {
	w := newWorld(Options{Process: 1, Processes: 3, Ranks: 6})
	w.Members = []Member{{Host: "a"}, {Host: "b"}, {Host: "b", Local: 1}}
	for rank, want := range []bool{false, false, true, true, true, true} {
		if w.OnHost(rank) != want {
			t.Errorf("rank %d: %t", rank, !want)
		}
	}
}
