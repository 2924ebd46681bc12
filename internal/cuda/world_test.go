package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/vmtest"
)

// asProcess is the environment variable that makes the test binary run as one of several processes of a job.
// Its value is the folder of the stand-ins.
const asProcess = "SPPO_CUDA_TEST_PROCESS"

// Further environment variables and settings of the job's processes.
const (
	processVariable = "SPPO_CUDA_TEST_INDEX"
	placeVariable   = "SPPO_CUDA_TEST_PLACE"
	failVariable    = "SPPO_CUDA_TEST_FAIL"
	jobProcesses    = 2
	jobSteps        = 2
)

// beProcess runs this process's part of the meeting program, and writes the memory of its ranks after each step
// to the working folder.
func beProcess() int {
	index, err := strconv.Atoi(os.Getenv(processVariable))
	if err == nil {
		err = runProcess(index)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runProcess(index int) (err error) {
	fake, why := buildFake()
	if fake == nil {
		return errors.New(why)
	}
	w, err := world.Join(context.Background(), world.Options{Process: index, Processes: jobProcesses, Ranks: ranks, Rendezvous: os.Getenv(placeVariable),
		Timeout: time.Minute, Local: -1})
	if err != nil {
		return err
	}
	defer func() { err = w.Close(err) }()
	fake.reset(ranks, 1<<30, 100)
	first, end := w.Ranks()
	local, _ := w.Local()
	m, err := open(Options{OwnProducts: true, NCCL: true, World: &World{First: first, End: end, FirstOnHost: local * (end - first), Share: w.Share}}, fixedCode(fake.stubs))
	if err != nil {
		return err
	}
	p := meeting()
	if err := m.Check(p); err != nil {
		return err
	}
	w.OnFailure(m.Abort)
	got := make([][]byte, ranks)
	device := func(rank int) (vm.Device, error) { return &filled{Device: m.New(rank), got: &got}, nil }
	o := train.Options{Transport: &aborting{m, w}, Tokens: tokens{}, Crew: w, Reply: func(question string) ([]byte, error) { return nil, keepMemory(question, got[first:end], first) }}
	if os.Getenv(failVariable) != "" {
		o.Tokens = lostTokens{}
	}
	job, err := train.Open(p, device, o)
	if err != nil {
		return err
	}
	if w.Leads() {
		err = lead(job, got[first:end])
	} else {
		err = job.Follow()
	}
	if err = errors.Join(err, job.Close()); err == nil && fake.live()+fake.comms() != 0 {
		err = fmt.Errorf("%d things and %d communicators were not given back", fake.live(), fake.comms())
	}
	return err
}

func lead(job *train.Job, mine [][]byte) error {
	for step := range jobSteps {
		if _, err := job.Step(context.Background()); err != nil {
			return err
		}
		if _, err := job.Others(fmt.Sprint(step)); err != nil {
			return err
		}
		if err := keepMemory(fmt.Sprint(step), mine, 0); err != nil {
			return err
		}
	}
	return nil
}

func keepMemory(step string, got [][]byte, first int) error {
	for i := range got {
		if err := os.WriteFile(memoryFile(step, first+i), got[i], 0o600); err != nil {
			return err
		}
	}
	return nil
}

func memoryFile(step string, rank int) string { return fmt.Sprintf("memory.%s.%d", step, rank) }

// aborting passes an abort on to the other processes.
type aborting struct {
	*Machine
	world *world.World
}

func (a *aborting) Abort(reason error) {
	a.Machine.Abort(reason)
	a.world.Failed(reason)
}

// processes runs the job in several processes, with the given working folder.
func processes(t *testing.T, folder string, variables ...string) (errs []error, texts []string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	place := vmtest.FreePlace(t)
	var all []*exec.Cmd
	outs := make([]bytes.Buffer, jobProcesses)
	for i := range jobProcesses {
		c := exec.Command(self)
		c.Dir, c.Stderr = folder, &outs[i]
		c.Env = append(append(os.Environ(), asProcess+"="+fakeFolder, processVariable+"="+strconv.Itoa(i), placeVariable+"="+place), variables...)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Process.Kill() })
		all = append(all, c)
	}
	within(t, func() {
		for _, c := range all {
			errs = append(errs, c.Wait())
		}
	})
	for i := range outs {
		texts = append(texts, outs[i].String())
	}
	return errs, texts
}

// Ranks of two processes communicate through NCCL and exchange NCCL's IDs over the rendezvous. After each step,
// their memory equals that of a run on the CPU in one process.
func TestNCCLOfSeveralProcesses(t *testing.T) {
	useFake(t)
	want, err := runSteps(meeting(), jobSteps, func(int) vm.Device { return cpu.New(nil) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	errs, texts := processes(t, folder)
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%v\n%s", err, texts)
	}
	for step := range want {
		for rank := range want[step] {
			got, err := os.ReadFile(filepath.Join(folder, memoryFile(fmt.Sprint(step), rank)))
			if err != nil || !bytes.Equal(got, want[step][rank]) {
				t.Errorf("step %d: the memory of rank %d is not the cpu's (%v)", step+1, rank, err)
			}
		}
	}
	left, err := filepath.Glob(filepath.Join(fakeFolder, "team *"))
	if err != nil {
		t.Fatal(err)
	}
	for _, team := range left {
		if !strings.HasPrefix(filepath.Base(team), fmt.Sprintf("team %d ", os.Getpid())) { // other tests abort their teams
			t.Errorf("nobody has left %s", team)
		}
	}
}

// A rank that fails aborts the communicators of all processes, and the error of each process names that rank.
func TestNCCLAbortOfSeveralProcesses(t *testing.T) {
	useFake(t)
	errs, texts := processes(t, t.TempDir(), failVariable+"=1")
	for i, err := range errs {
		want := map[int]string{0: "process 1 (ranks 2 to 3, on ", 1: "rank 3: section step, pc 0 (load_tokens)"}[i]
		if err == nil || !strings.HasPrefix(texts[i], want) || !strings.Contains(texts[i], "rank 3: section step, pc 0 (load_tokens)") || !strings.HasSuffix(texts[i], errLost.Error()+"\n") {
			t.Errorf("process %d: %v\n%s", i, err, texts[i])
		}
	}
}

// A process uses the GPUs that correspond to its index on the host, or the GPUs that only it can see.
func TestGPUsOfSeveralProcesses(t *testing.T) {
	gpus := func(n int) (out []*gpu) {
		for i := range n {
			out = append(out, &gpu{index: i})
		}
		return out
	}
	for _, c := range []struct {
		world   World
		visible int
		want    []int // GPU of each rank of the process
	}{
		{World{First: 0, End: 2}, 4, []int{0, 1}},
		{World{First: 2, End: 4, FirstOnHost: 2}, 4, []int{2, 3}},
		{World{First: 4, End: 6}, 4, []int{0, 1}}, // the first process on the second host
		{World{First: 6, End: 8, FirstOnHost: 2}, 4, []int{2, 3}},
		{World{First: 6, End: 8, FirstOnHost: 2}, 2, []int{0, 1}},
		{World{First: 3, End: 4, FirstOnHost: 3}, 1, []int{0}},
	} {
		m := &Machine{gpus: gpus(c.visible), options: Options{World: &c.world}}
		for i, want := range c.want {
			if got := m.gpuOf(c.world.First + i).index; got != want {
				t.Errorf("%+v, %d GPUs: rank %d is on GPU %d, not %d", c.world, c.visible, c.world.First+i, got, want)
			}
		}
	}
}
