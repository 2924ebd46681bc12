package e2e

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/train/world"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/vmtest"
	"sppo.dev/ir"
)

// TestWorlds checks that a job whose ranks are in several processes gives the same bits as the job in one
// process, with collectives and messages of every kind between processes. The processes are simulated by worlds
// inside this one, which communicate only over connections.
func TestWorlds(t *testing.T) {
	for _, c := range []struct {
		Case
		processes int
	}{
		{Case{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", Tied: true, PP: 2, VirtualStages: 2, SP: 2, N: 1, Batch: 4, Strategy: "dualpipe-v"}, 4},
		{Case{Family: "llama", KVHeads: 2, Positions: "rope", DType: "f32", PP: 4, SP: 2, N: 8, Offload: "full", Mux: "on", Batch: 1}, 4},
		{Case{Family: "gpt", KVHeads: 2, Positions: "rope", DType: "f32", PP: 2, SP: 2, SPMode: "ring", DP: 2, Zero: "2", N: 2, Batch: 4, Strategy: "seq1f1b"}, 8},
		{Case{Family: "llama", KVHeads: 1, Positions: "rope", DType: "bf16", SP: 4, SPMode: "ulysses", DP: 2, Zero: "3", N: 3, Offload: "full", Batch: 2, Order: "layer"}, 4},
	} {
		c.PP, c.DP, c.Microbatch, c.Steps, c.Layers, c.Vocab = max(1, c.PP), max(1, c.DP), 1, 2, 8, tinyVocab
		c.Offload, c.Partition, c.Sequence = orElse(c.Offload, "none"), "flops", 24*c.N*c.SP
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			_, p := mustCompile(t, c.Case)
			checkSame(t, fmt.Sprintf("in %d processes", c.processes), runWorld(t, p, c.processes), run(t, c.Case))
		})
	}
}

// party is one process's part of a job.
type party struct {
	world *world.World
	job   *train.Job
	err   error
}

// openWorld opens a program in several worlds, each with its own tokens. The first world gives the orders,
// which the others follow until the job ends; wait returns once the others have finished.
func openWorld(t *testing.T, p *ir.Program, processes int, tokens func(process int) vm.Tokens) (all []*party, wait func()) {
	t.Helper()
	all, wait = openParties(t, p, processes, func(process int, o *train.Options) func() vm.Device {
		o.Tokens = tokens(process)
		if _, ok := o.Tokens.(hanging); ok {
			o.Stall.After = time.Second
		}
		return func() vm.Device { return cpu.New(nil) }
	})
	if all[0].err != nil {
		t.Fatal(all[0].err)
	}
	return all, wait
}

// openParties is openWorld with any options and devices for each process. Opening may fail.
func openParties(t *testing.T, p *ir.Program, processes int, change func(process int, o *train.Options) func() vm.Device) (all []*party, wait func()) {
	t.Helper()
	place := vmtest.FreePlace(t)
	var done sync.WaitGroup
	opened := make(chan struct{})
	for i := range processes {
		x := &party{}
		all = append(all, x)
		done.Go(func() {
			x.err = x.open(t, p, world.Options{Process: i, Processes: processes, Ranks: len(p.Ranks), Rendezvous: place, Timeout: time.Minute, Local: -1, Wires: true}, change)
			switch {
			case i == 0:
				close(opened)
			case x.err == nil:
				x.err = x.job.Follow()
				x.err = x.world.Close(errors.Join(x.err, x.job.Close()))
			}
		})
	}
	<-opened
	return all, done.Wait
}

func (x *party) open(t *testing.T, p *ir.Program, o world.Options, change func(process int, o *train.Options) func() vm.Device) (err error) {
	if x.world, err = world.Join(t.Context(), o); err != nil {
		return err
	}
	local := vm.NewWired(x.world)
	x.world.OnFailure(local.Abort)
	options := train.Options{Transport: local, Crew: x.world}
	device := change(o.Process, &options)
	x.job, err = train.Open(p, func(int) (vm.Device, error) { return device(), nil }, options)
	return err
}

func runWorld(t *testing.T, p *ir.Program, processes int) *Result {
	t.Helper()
	all, wait := openWorld(t, p, processes, func(int) vm.Tokens { return nil })
	lead := all[0]
	result := trained(t, p, lead.job, func() {})
	lead.err = lead.world.Close(lead.job.Close())
	wait()
	for i, x := range all {
		if x.err != nil {
			t.Errorf("process %d: %v", i, x.err)
		}
	}
	return result
}

// lost provides tokens, but fails to read those of the second step.
type lost struct{ data vm.Tokens }

var errLost = errors.New("the data went away")

func (l lost) Tokens(s ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if s == ir.SectionStep && round == 2 {
		return errLost
	}
	return l.data.Tokens(s, round, sequence, position, out, stride)
}

// A rank that fails in the middle of a step ends the job in every process. All processes report which rank
// failed, and at which instruction.
func TestWorldFails(t *testing.T) {
	c := Case{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 2, SP: 2, DP: 2, N: 3, Offload: "full", Batch: 2, Microbatch: 1,
		Steps: 3, Layers: 4, Sequence: 48, Vocab: tinyVocab, Partition: "flops"}
	_, p := mustCompile(t, c)
	for _, failing := range []int{0, 2} {
		all, wait := openWorld(t, p, 4, func(process int) vm.Tokens {
			data, err := train.OpenData(&p.Run, "")
			if err != nil {
				t.Error(err)
			}
			if process == failing {
				return lost{data}
			}
			return data
		})
		lead := all[0]
		err := lead.job.Init(t.Context())
		for err == nil {
			_, err = lead.job.Step(t.Context())
		}
		lead.err = lead.world.Close(errors.Join(err, lead.job.Close()))
		wait()
		if lead.job.Steps() != 1 {
			t.Errorf("%d steps were done", lead.job.Steps())
		}
		for i, x := range all {
			own := fmt.Sprintf(`rank (%d|%d): section step, pc 0 \(load_tokens\), from .*: %s$`, 2*failing, 2*failing+1, errLost)
			want := "^" + own
			if i != failing {
				want = fmt.Sprintf(`^process %d \(ranks %d to %d, on .*\) failed: %s`, failing, 2*failing, 2*failing+1, own)
			}
			if text := fmt.Sprint(x.err); !regexp.MustCompile(want).MatchString(text) {
				t.Errorf("process %d: %s, want %s", i, text, want)
			}
		}
	}
}

// hanging provides tokens, except that one process waits forever for those of the second step.
type hanging struct {
	data  vm.Tokens
	never bool
}

func (h hanging) Tokens(s ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if h.never && s == ir.SectionStep && round == 2 {
		select {}
	}
	return h.data.Tokens(s, round, sequence, position, out, stride)
}

// A rank that hangs stalls the job. Process 0 learns from the others what each rank waits for, and all
// processes end, including the one whose rank hangs.
func TestWorldStalls(t *testing.T) {
	c := Case{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 2, SP: 2, DP: 2, N: 3, Offload: "full", Batch: 2, Microbatch: 1,
		Steps: 3, Layers: 4, Sequence: 48, Vocab: tinyVocab, Partition: "flops"}
	_, p := mustCompile(t, c)
	const stuck = 2
	all, wait := openWorld(t, p, 4, func(process int) vm.Tokens {
		data, err := train.OpenData(&p.Run, "")
		if err != nil {
			t.Error(err)
		}
		return hanging{data, process == stuck}
	})
	lead := all[0]
	err := lead.job.Init(t.Context())
	for err == nil {
		_, err = lead.job.Step(t.Context())
	}
	lead.err = lead.world.Close(errors.Join(err, lead.job.Close()))
	wait()
	want := `^step 2 has stalled: no rank has made progress for \S+`
	for rank := range p.Ranks {
		text := "(waits for|waits in|has nothing left)"
		if rank/2 == stuck {
			text = `executes load_tokens \(compute, pc 0, forward`
		}
		want += fmt.Sprintf(`\n  rank %d %s[^\n]*`, rank, text)
	}
	for i, x := range all {
		if i > 0 {
			want = `^process 0 \(ranks 0 to 1, on .*\) failed: step 2 has stalled: no rank has made progress for \S+$`
		}
		if text := fmt.Sprint(x.err); !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("process %d: %s, want %s", i, text, want)
		}
		if x.job.Stuck() != (i == stuck) {
			t.Errorf("process %d: stuck is %t", i, x.job.Stuck())
		}
	}
}

// frozen is a device with one method that never returns once its field `now` is set.
type frozen struct {
	vm.Device
	method string
	now    *atomic.Bool
}

func (f *frozen) hang(method string) {
	if f.method == method && f.now.Load() {
		select {}
	}
}

func (f *frozen) Load(p *ir.Program, rank int, env *vm.Env) error {
	f.hang("Load")
	return f.Device.Load(p, rank, env)
}

func (f *frozen) Read(v ir.View, out []byte) error {
	f.hang("Read")
	return f.Device.Read(v, out)
}

func (f *frozen) Write(v ir.View, in []byte) error {
	f.hang("Write")
	return f.Device.Write(v, in)
}

func (f *frozen) Close() error {
	f.hang("Close")
	return f.Device.Close()
}

// A process that hangs outside steps stalls the job, too: while it loads the program, saves or loads a
// checkpoint, or closes the job. All processes end, and process 0 reports which process did not finish.
func TestWorldStallsOutsideSteps(t *testing.T) {
	c := Case{Family: "gpt", KVHeads: 4, Positions: "learned", DType: "f32", PP: 2, SP: 2, DP: 1, N: 3, Offload: "full", Batch: 2, Microbatch: 1,
		Steps: 3, Layers: 4, Sequence: 48, Vocab: tinyVocab, Partition: "flops"}
	_, p := mustCompile(t, c)
	for _, x := range []struct {
		method, what string
		act          func(j *train.Job, dir string) error
	}{
		{"Load", "loading the program", nil},
		{"Read", `saving the checkpoint to \S+`, func(j *train.Job, dir string) error { return j.Save(dir) }},
		{"Write", `loading the checkpoint \S+`, func(j *train.Job, dir string) error { return j.Restore(t.Context(), dir) }},
		{"Close", "the end of the run", func(*train.Job, string) error { return nil }},
	} {
		for _, stuck := range []int{0, 1} {
			t.Run(fmt.Sprintf("%s of process %d", x.method, stuck), func(t *testing.T) {
				t.Parallel()
				var now atomic.Bool
				now.Store(x.method == "Load")
				all, wait := openParties(t, p, 2, func(process int, o *train.Options) func() vm.Device {
					o.Stall.After = time.Second
					return func() vm.Device {
						device := vm.Device(cpu.New(nil))
						if process == stuck {
							device = &frozen{device, x.method, &now}
						}
						return device
					}
				})
				lead := all[0]
				if x.method != "Load" {
					dir := t.TempDir()
					err := errors.Join(lead.job.Init(t.Context()), lead.job.Save(filepath.Join(dir, "good")))
					if err != nil {
						t.Fatal(err)
					}
					now.Store(true)
					to := "good"
					if x.method == "Read" {
						to = "bad"
					}
					lead.err = errors.Join(x.act(lead.job, filepath.Join(dir, to)), lead.job.Close())
				}
				lead.err = lead.world.Close(lead.err)
				wait()
				want := x.what + ` has stalled: no rank has made progress for \S+`
				for i, party := range all {
					text, full := fmt.Sprint(party.err), `^process 0 \(.*\) failed: (checkpoint \S+: )?`+want+`$`
					if i == 0 {
						full = want + `\n  (this process|process 1 \(.*\)) has not done its part$`
					}
					if !regexp.MustCompile(full).MatchString(text) {
						t.Errorf("process %d: %s, want %s", i, text, full)
					}
				}
			})
		}
	}
}
