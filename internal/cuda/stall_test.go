package cuda

import (
	"errors"
	"regexp"
	"sync"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// lateTokens makes one rank wait for its tokens until they are released.
type lateTokens struct {
	tokens
	let chan struct{}
}

func (l lateTokens) Tokens(s ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if sequence == 6 { // only rank 3 reads it: see the function meeting
		<-l.let
	}
	return l.tokens.Tokens(s, round, sequence, position, out, stride)
}

// letGo releases the tokens when the step is aborted.
type letGo struct {
	*Machine
	let func()
}

func (l letGo) Abort(err error) {
	l.Machine.Abort(err)
	l.let()
}

// The report of a stalled step says what each rank executes or waits for, as far as the host knows.
func TestStall(t *testing.T) {
	fake := useFake(t)
	for _, nccl := range []bool{false, true} {
		fake.reset(ranks, 1<<30, 0)
		m := fake.open(t, Options{OwnProducts: true, NCCL: nccl})
		let := make(chan struct{})
		job, err := train.Open(meeting(), func(rank int) (vm.Device, error) { return m.New(rank), nil },
			train.Options{Transport: letGo{m, sync.OnceFunc(func() { close(let) })}, Tokens: lateTokens{let: let}, Stall: train.Stall{After: 1500 * time.Millisecond}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = job.Step(t.Context())
		want := `^step 1 has stalled: no rank has made progress for \S+\n  rank 0 waits (for|in) .*\n  rank 1 waits .*\n  rank 2 waits .*\n  rank 3 executes load_tokens `
		if stalled := (*train.StallError)(nil); !errors.As(err, &stalled) || !regexp.MustCompile(want).MatchString(err.Error()) {
			t.Errorf("NCCL %t: %v, want %s", nccl, err, want)
		}
		if err := job.Close(); err != nil || job.Stuck() {
			t.Errorf("NCCL %t: stuck %t, closing: %v", nccl, job.Stuck(), err)
		}
	}
}
