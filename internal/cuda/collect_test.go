package cuda

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/ir"
)

func TestNCCLMeetingsAreThoseOfTheCPU(t *testing.T) {
	fake := useFake(t)
	p := meeting()
	want, err := runSteps(p, 2, func(int) vm.Device { return cpu.New(nil) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	all := natives
	defer func() { natives = all }()
	for _, natives = range []map[ir.Op]native{all, nil} { // without NCCL's collectives, messages replace them
		fake.reset(ranks, 1<<30, 200)
		m := fake.open(t, Options{OwnProducts: true, NCCL: true})
		if err := m.Check(p); err != nil {
			t.Fatal(err)
		}
		within(t, func() {
			got, err := runSteps(p, 2, m.New, m)
			if err != nil {
				t.Error(err)
				return
			}
			for step := range want {
				for rank := range want[step] {
					if !bytes.Equal(got[step][rank], want[step][rank]) {
						t.Errorf("%d functions, step %d: the memory of rank %d is not the cpu's", len(natives), step+1, rank)
					}
				}
			}
		})
		if n, c := fake.live(), fake.comms(); n != 0 || c != 0 {
			t.Errorf("%d functions: %d things and %d communicators were not given back", len(natives), n, c)
		}
	}
}

// lostTokens is a data set that fails on one rank only.
type lostTokens struct{ tokens }

var errLost = errors.New("the data set went away")

func (l lostTokens) Tokens(s ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if sequence == 6 { // only rank 3 asks for this sequence, see meeting
		return errLost
	}
	return l.tokens.Tokens(s, round, sequence, position, out, stride)
}

// One rank fails before the others have communicated with it. NCCL never reports this to them, but an abort
// does.
func TestNCCLAbort(t *testing.T) {
	fake := useFake(t)
	p := meeting()
	for _, nccl := range []bool{false, true} {
		fake.reset(ranks, 1<<30, 0)
		m := fake.open(t, Options{OwnProducts: true, NCCL: nccl})
		within(t, func() {
			got := make([][]byte, ranks)
			open := func(rank int) (vm.Device, error) { return &filled{Device: m.New(rank), got: &got}, nil }
			job, err := train.Open(p, open, train.Options{Transport: m, Tokens: lostTokens{}})
			if err != nil {
				t.Error(err)
				return
			}
			_, err = job.Step(t.Context())
			if !errors.Is(err, errLost) || !strings.HasPrefix(err.Error(), "rank 3: section step, pc 0 (load_tokens)") {
				t.Errorf("NCCL %t: %v", nccl, err)
			}
			if err := job.Close(); err != nil {
				t.Errorf("closing: %v", err)
			}
		})
		if n, c := fake.live(), fake.comms(); n != 0 || c != 0 {
			t.Errorf("NCCL %t: %d things and %d communicators were not given back", nccl, n, c)
		}
	}
}

// An asynchronous error of NCCL causes one clear error and no hang, whether an early or a late poll reports it.
func TestNCCLAsynchronousError(t *testing.T) {
	fake := useFake(t)
	p := meeting()
	for _, poll := range []int64{1, 2, 5, 10, 20, 40, 60} {
		fake.reset(ranks, 1<<30, 100)
		fake.failPoll(poll)
		m := fake.open(t, Options{OwnProducts: true, NCCL: true})
		within(t, func() {
			_, err := runSteps(p, 1, m.New, m)
			if err == nil || strings.Count(err.Error(), "ncclCommGetAsyncError: remote process exited") != 1 {
				t.Errorf("poll %d: %v", poll, err)
			}
		})
		if n, c := fake.live(), fake.comms(); n != 0 || c != 0 {
			t.Errorf("poll %d: %d things and %d communicators were not given back", poll, n, c)
		}
	}
}
