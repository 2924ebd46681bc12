package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"sppo.dev/internal/cuda"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/ir"
)

// Tests whose names begin with TestGPU need a GPU. `make gpu-check` runs them from a binary that needs no Go
// installation.

// computer is what a job runs on: a function that creates its devices, and the transport between them.
type computer func() (device func(rank int) vm.Device, transport vm.Transport, err error)

// onGPU returns a computer with GPUs, or skips the test if there are none.
func onGPU(t *testing.T, options cuda.Options) computer {
	t.Helper()
	m, err := cuda.Open(options)
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	return func() (func(rank int) vm.Device, vm.Transport, error) {
		again, err := m.Again()
		return again.New, again, err
	}
}

// runOn returns the result of a case on a computer, and checks E5.
func runOn(t *testing.T, c Case, on computer) *Result {
	t.Helper()
	plan, p := mustCompile(t, c)
	device, transport, err := on()
	if err != nil {
		t.Fatal(err)
	}
	traces := make([]*vm.Trace, len(p.Ranks))
	job, err := train.Open(p, func(rank int) (vm.Device, error) {
		traces[rank] = vm.NewTrace(device(rank))
		return traces[rank], nil
	}, train.Options{Transport: transport})
	if err != nil {
		t.Fatalf("%v: opening: %v", c, err)
	}
	r := trained(t, p, job, func() { checkOrder(t, c, p, traces) })
	checkPeaks(t, c, plan, p, job)
	if err := job.Close(); err != nil {
		t.Errorf("%v: closing: %v", c, err)
	}
	return r
}

// checkOn checks a case on a computer for E1, E2 and E5, and for E3 against the plain program on the CPU. If
// bits is false, it leaves out E1 and E2: the device then chooses algorithms for products by the addresses of
// operands, which differ between schedules.
func checkOn(t *testing.T, c Case, on computer, bits bool) {
	t.Helper()
	got := runOn(t, c, on)
	if bits {
		checkSame(t, "E1 and E2: against one stage without offload", got, runOn(t, c.unpiped(), on))
	}
	checkClose(t, c, "E3: against the plain program on the cpu", got, run(t, c.plain()))
}

// resumeOn checks E6 on a computer: a new job continues from a checkpoint that was saved halfway through a run.
func resumeOn(t *testing.T, c Case, on computer) {
	t.Helper()
	whole := runOn(t, c, on)
	_, p := mustCompile(t, c)
	path := filepath.Join(t.TempDir(), "checkpoint")
	open := func() *train.Job {
		device, transport, err := on()
		if err != nil {
			t.Fatal(err)
		}
		job, err := train.Open(p, func(rank int) (vm.Device, error) { return device(rank), nil }, train.Options{Transport: transport})
		if err != nil {
			t.Fatal(err)
		}
		if err := job.Init(t.Context()); err != nil {
			t.Fatal(err)
		}
		return job
	}
	first := open()
	doSteps(t, first, p.Run.Steps/2)
	if err := first.Save(path); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := open()
	if err := second.Restore(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	for second.Steps() < p.Run.Steps {
		step := doSteps(t, second, 1)
		if want := whole.Losses[step.Step-1]; !sameBits(step.Loss, want) {
			t.Errorf("E6: step %d has loss %v, not %v", step.Step, step.Loss, want)
		}
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
}

// resumed lists the cases for E6.
var resumed = []Case{
	{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 2, SP: 2, DP: 1, N: 3, Offload: "0.5"},
	{Family: "llama", KVHeads: 2, Positions: "rope", DType: "bf16", PP: 2, SP: 1, DP: 2, N: 2, Offload: "full"},
}

func forResumed(t *testing.T, f func(t *testing.T, c Case)) {
	for _, c := range resumed {
		c.Partition, c.Batch, c.Microbatch, c.Steps, c.Layers, c.Sequence, c.Vocab = "flops", 4, 2, 6, 2, 48, tinyVocab
		t.Run(c.String(), func(t *testing.T) { f(t, c) })
	}
}

// TestGPUSchedulesAreEqual checks E1, E2, E3 and E5 for every pair of settings, with all ranks on the available
// GPUs.
func TestGPUSchedulesAreEqual(t *testing.T) {
	for _, by := range []struct {
		name    string
		options cuda.Options
	}{{"own products", cuda.Options{OwnProducts: true}}, {"cuBLASLt", cuda.Options{}}} {
		on := onGPU(t, by.options)
		rows, _, _ := cover()
		for _, r := range rows {
			c := r.toCase()
			t.Run(by.name+" "+c.String(), func(t *testing.T) { checkOn(t, c, on, by.options.OwnProducts) })
		}
	}
}

// TestGPUResume checks E6 on GPUs.
func TestGPUResume(t *testing.T) {
	on := onGPU(t, cuda.Options{OwnProducts: true})
	forResumed(t, func(t *testing.T, c Case) { resumeOn(t, c, on) })
}

// The tests for GPUs also run on the CPU, to test the tests themselves.
func TestOnAnyComputer(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	on := func() (func(rank int) vm.Device, vm.Transport, error) {
		return func(int) vm.Device { return &faulty{Device: cpu.New(nil), mistake: os.Getenv(plantedVariable)} }, nil, nil
	}
	forResumed(t, func(t *testing.T, c Case) {
		checkOn(t, c, on, true)
		resumeOn(t, c, on)
	})
}

// faulty is a device with an error that a test plants, or none.
type faulty struct {
	vm.Device
	mistake string
	code    *ir.Code
	section ir.Section
	round   int64
}

// plantedVariable names the mistake of the devices of TestOnAnyComputer: one of plantedErrors.
const plantedVariable = "SPPO_PLANTED"

// plantedErrors describes the mistakes, with the start of the report.
var plantedErrors = []struct{ mistake, name, want string }{
	{"copies", "stale pinned memory: from the second step on, copies to the host have no effect", "E1 and E2"},
	{"writes", "restored states are not written to the device", "E6"},
}

func (f *faulty) Load(p *ir.Program, rank int, env *vm.Env) error {
	f.code = &p.Codes[p.Ranks[rank].Code]
	return f.Device.Load(p, rank, env)
}

func (f *faulty) Begin(section ir.Section, round int64) error {
	f.section, f.round = section, round
	return f.Device.Begin(section, round)
}

func (f *faulty) Copy(pc int) {
	if f.mistake != "copies" || f.round < 2 || f.code.Sections[f.section][pc].Stream != ir.D2H {
		f.Device.Copy(pc)
	}
}

func (f *faulty) Write(v ir.View, in []byte) error {
	if f.mistake == "writes" && len(in) > 64 { // not the numbers of a step
		return nil
	}
	return f.Device.Write(v, in)
}

// TestPlantedSchedules plants errors in the device, and requires that the comparisons of schedules and of checkpoints report
// them. It logs rows of the table of make gpu-planted.
func TestPlantedSchedules(t *testing.T) {
	if !numbers {
		t.Skip("too slow under the race detector")
	}
	for _, planted := range plantedErrors {
		cmd := exec.Command(os.Args[0], "-test.run", "^TestOnAnyComputer$")
		cmd.Env = append(os.Environ(), plantedVariable+"="+planted.mistake)
		out, err := cmd.CombinedOutput()
		report := regexp.MustCompile(`(?m)^ +\w+_test\.go:\d+: (` + planted.want + `.*)$`).FindStringSubmatch(string(out))
		if err == nil || report == nil {
			t.Errorf("%s: %v\n%s", planted.name, err, out)
			continue
		}
		t.Logf("PLANTED| schedules | %s | %s |", planted.name, report[1])
	}
}
