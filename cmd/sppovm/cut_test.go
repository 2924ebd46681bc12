package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// cutLink runs a job of two processes in two network namespaces and cuts the link between them. It prints what
// each process reported, its exit code, and how many seconds after the cut the process ended.
const cutLink = `
ip link set lo up
mount -t tmpfs tmpfs /run && mkdir -p /run/netns
ip netns add b && ip link add va type veth peer name vb && ip link set vb netns b || exit 77
ip addr add 10.9.0.1/24 dev va; ip link set va up
ip netns exec b ip addr add 10.9.0.2/24 dev vb; ip netns exec b ip link set vb up; ip netns exec b ip link set lo up
job="run tiny.sppo --set train.steps=100000000 --json -q --processes 2 --rendezvous 10.9.0.1:29555 --job cut"
("$1" $job --process 0 >0.out 2>0.err; echo "exit $? after $(( $(date +%s) - $(cat cut) )) s" >>0.err) &
(ip netns exec b "$1" $job --process 1 >1.out 2>1.err; echo "exit $? after $(( $(date +%s) - $(cat cut) )) s" >>1.err) &
until [ "$(wc -l <0.out)" -gt 3 ]; do sleep 0.1; done
date +%s >cut
ip link set va down
wait
cat 0.err 1.err
`

// If the link between two hosts is cut, both sides end within 30 seconds and report a timeout.
func TestCutLink(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("SPPO_LONG is not set: this takes half a minute")
	}
	if err := exec.Command("unshare", "-rnm", "ip", "link").Run(); err != nil {
		t.Skip("needs unshare and ip, and leave to make network namespaces")
	}
	inBase(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("timeout", "120", "unshare", "-rnm", "sh", "-c", cutLink, "sh", self)
	c.Env = append(os.Environ(), asCommand+"=1")
	text, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	endedByTimeout(t, string(text))
}

// endedByTimeout checks that both processes report a timeout and end within 30 seconds of the cut.
func endedByTimeout(t *testing.T, text string) {
	t.Helper()
	ends := 0
	for line := range strings.Lines(text) {
		var seconds int
		if n, _ := fmt.Sscanf(line, "exit 1 after %d s", &seconds); n == 1 && seconds <= 30 {
			ends++
		}
	}
	if ends != 2 || strings.Count(text, " was lost: timeout: its host has not answered for 20s\n") != 2 {
		t.Errorf("%s", text)
	}
}
