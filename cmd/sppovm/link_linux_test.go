package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// asLink names the environment variable that makes the test binary act as the link between two network
// namespaces. The variable's value gives the faults of the link.
const asLink = "SPPOVM_TEST_AS_LINK"

func init() {
	if text := os.Getenv(asLink); text != "" {
		if err := runLink(text); err != nil {
			fmt.Fprintln(os.Stderr, "link:", err)
		}
		os.Exit(1)
	}
}

// faults are the faults of a link in each direction. Packets that arrive while the queue is full are dropped,
// as in routers.
type faults struct {
	delay time.Duration
	rate  int     // bytes per second; 0: no limit
	loss  float64 // share of packets that are lost
	down  time.Duration
	up    time.Duration // cycle of down and up times once the file "cut" exists; up 0: permanently down
}

func (f faults) String() string {
	return fmt.Sprintf("%d %d %g %d %d", f.delay, f.rate, f.loss, f.down, f.up)
}

// tun opens a network interface whose packets this process reads and writes. It avoids package os, which would
// poll the file: an interface that is not up yet would look like a file that failed.
func tun(name string) (file int, err error) {
	if file, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return 0, err
	}
	var request struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(request.name[:], name)
	request.flags = unix.IFF_TUN | unix.IFF_NO_PI
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(file), unix.TUNSETIFF, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return 0, errno
	}
	return file, nil
}

func runLink(text string) error {
	var f faults
	if _, err := fmt.Sscan(text, &f.delay, &f.rate, &f.loss, &f.down, &f.up); err != nil {
		return err
	}
	a, err := tun("va")
	if err != nil {
		return err
	}
	b, err := tun("vb")
	if err != nil {
		return err
	}
	fmt.Println("ready")
	var both sync.WaitGroup
	both.Go(func() { f.carry(a, b, 1) })
	both.Go(func() { f.carry(b, a, 2) })
	both.Wait()
	return nil
}

// carry forwards packets in one direction.
func (f faults) carry(from, to int, seed uint64) {
	type packet struct {
		data []byte
		due  time.Time
	}
	queue := make(chan packet, 100)
	go func() {
		for p := range queue {
			time.Sleep(time.Until(p.due))
			unix.Write(to, p.data) // fails while the interface is not up
		}
	}()
	rng := rand.New(rand.NewPCG(seed, seed))
	var free, cut time.Time
	for {
		data := make([]byte, 1<<16)
		n, err := unix.Read(from, data)
		if err != nil {
			time.Sleep(time.Millisecond) // the interface is not up yet
			continue
		}
		now := time.Now()
		if info, err := os.Stat("cut"); err == nil && cut.IsZero() {
			cut = info.ModTime()
		}
		if !cut.IsZero() && f.down > 0 && (f.up == 0 || now.Sub(cut)%(f.down+f.up) < f.down) || rng.Float64() < f.loss {
			continue
		}
		if f.rate > 0 {
			if free.Before(now) {
				free = now
			}
			free = free.Add(time.Duration(n) * time.Second / time.Duration(f.rate))
			now = free
		}
		select {
		case queue <- packet{data[:n], now.Add(f.delay)}:
		default:
		}
	}
}

// overLink runs a job of two processes in two network namespaces. After two steps, it creates the file "cut",
// which starts the outages of the link between them.
const overLink = `
ip link set lo up
mount -t tmpfs tmpfs /run && mkdir -p /run/netns
ip netns add b || exit 77
mkfifo ready
"$1" >ready &
link=$!
read line <ready || exit 77
ip link set vb netns b
ip addr add 10.9.0.1/24 dev va; ip link set va up
ip netns exec b ip addr add 10.9.0.2/24 dev vb; ip netns exec b ip link set vb up; ip netns exec b ip link set lo up
unset SPPOVM_TEST_AS_LINK
job="run tiny.sppo --set train.steps=$2 --json -q --processes 2 --rendezvous 10.9.0.1:29555 --job cut"
("$1" $job --process 0 >0.out 2>0.err; echo "exit $? after $(( $(date +%s) - $(cat cut 2>/dev/null || date +%s) )) s" >>0.err) &
first=$!
(ip netns exec b "$1" $job --process 1 >1.out 2>1.err; echo "exit $? after $(( $(date +%s) - $(cat cut 2>/dev/null || date +%s) )) s" >>1.err) &
second=$!
until [ "$(wc -l <0.out)" -gt 3 ] || grep -q ^exit 0.err 1.err; do sleep 0.05; done
date +%s >cut.new
mv cut.new cut
wait $first $second
kill $link
cat 0.err 1.err
`

// runOverLink runs overLink with a link that has the given faults. It returns the losses, and the messages of
// the processes.
func runOverLink(t *testing.T, f faults, steps int) (out []float64, text string) {
	t.Helper()
	if err := exec.Command("unshare", "-rnm", "ip", "tuntap", "add", "dev", "x", "mode", "tun").Run(); err != nil {
		t.Skip("needs unshare, ip and /dev/net/tun, and leave to make network namespaces")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "unshare", "-rnm", "--kill-child", "-pf", "sh", "-c", overLink, "sh", self, fmt.Sprint(steps))
	c.Env = append(os.Environ(), asCommand+"=1", asLink+"="+f.String())
	var said bytes.Buffer
	c.Stdout, c.Stderr = &said, &said
	if err := c.Run(); err != nil {
		t.Fatalf("%v\n%s", err, said.String())
	}
	lines, err := os.ReadFile("0.out")
	if err != nil {
		t.Fatal(err)
	}
	if whole := complete(string(lines)); whole != "" {
		out = losses(t, whole)
	}
	return out, said.String()
}

// Over slow or lossy links, and over links that are down for seconds at a time, a job computes the same losses as
// in a single process.
func TestBadLinks(t *testing.T) {
	const steps = 6
	for name, f := range map[string]faults{
		"lossy":   {delay: 2 * time.Millisecond, loss: 0.03},
		"slow":    {delay: 20 * time.Millisecond, rate: 1 << 20},
		"outages": {down: 6 * time.Second, up: time.Second},
	} {
		if name != "lossy" && os.Getenv("SPPO_LONG") == "" {
			continue // these cases mostly wait
		}
		t.Run(name, func(t *testing.T) {
			inBase(t)
			want := losses(t, complete(alone(t, "tiny.sppo", "--set", fmt.Sprint("train.steps=", steps), "--json", "-q")))
			got, text := runOverLink(t, f, steps)
			if !slices.Equal(got, want) || strings.Count(text, "exit 0 after ") != 2 {
				t.Errorf("losses %v, want %v\n%s", got, want, text)
			}
			t.Logf("%s", text)
		})
	}
}

// If a link silently drops every packet, both sides end within 30 seconds and report a timeout.
func TestBlackHole(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("SPPO_LONG is not set: this takes half a minute")
	}
	inBase(t)
	_, text := runOverLink(t, faults{down: time.Hour}, 100_000_000)
	endedByTimeout(t, text)
}
