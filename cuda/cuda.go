// Package cuda is the device that runs programs on NVIDIA GPUs.
//
// The map:
//
//	cuda.go       Machine: the libraries, the GPUs, what ranks of one process share
//	device.go     Device: one rank; arenas, streams, events, issue and join
//	bind.go       from an instruction to prepared driver calls
//	waits.go      which wait of a kernel was given up
//	launch.go     from a kernel's row in the table to launches; images and where they are kept
//	trial.go      kernels for one architecture, tried before they are trusted
//	tuned.go      what was found to be the fastest, kept from run to run
//	arena.go      pinned host memory on the GPU's NUMA node
//	local.go      how ranks of one process meet: copies between their memories, sums in the order of the ranks
//	collect.go    how they meet by NCCL
//	graph.go      sections that are captured once and replayed
//	spans.go      when instructions ran
//	ranges.go     what a profiler is told
//	report.go     what was found, what is missing and how to get it
//
// Everything about an instruction is fixed when a program is loaded: addresses, streams, events, launch shapes. Issuing
// one is a driver call or two with arguments that lie ready, and allocates nothing.
//
// Kernels are those of package kernels; this package knows none of them. It does not know why an instruction is there.
package cuda

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"sppo.dev/cuda/cublas"
	"sppo.dev/cuda/driver"
	"sppo.dev/cuda/kernels"
	"sppo.dev/cuda/nvtx"
	"sppo.dev/ir"
	"sppo.dev/vm"
)

// Options of a machine.
type Options struct {
	GPUs        []int  // which of the GPUs to use, in this order; nil: all
	NCCL        bool   // ranks meet by NCCL, each on a GPU of its own, instead of by copies
	Sync        bool   // wait behind every instruction, so that an error is that of the instruction it names; slow
	OwnProducts bool   // multiply by our own kernels even where cuBLASLt is installed
	Portable    bool   // take no kernels that are for one architecture alone
	ThreadsCopy bool   // on Hopper have threads bring the tiles of attention, not the copy engine
	Tune        bool   // time the algorithms that cuBLASLt proposes, and take the fastest; else its first, which is always the same
	Check       bool   // bound each wait of a kernel by time, so that one without end becomes an error
	Graphs      bool   // capture each section once and replay it; for programs of one rank
	CacheDir    string // where compiled kernels are kept; empty: the user's cache
	World       *World // nil: all ranks are in this process
}

// World is what there is to know of other processes that ranks are in. With some, ranks meet by NCCL.
type World struct {
	First, End  int // the ranks of this process: from the first to before the end
	FirstOnHost int // how many ranks processes before this one have on its host
	// Share gives all processes a value that one makes: that one has the function, the others have nil.
	Share func(name string, create func() ([]byte, error)) ([]byte, error)
}

// here tells whether a rank is in this process.
func (w *World) here(rank int) bool { return w == nil || w.First <= rank && rank < w.End }

// Machine is what the ranks of one process share. It is their vm.Transport, too: abort reaches all of them.
type Machine struct {
	options Options
	api     *driver.API
	gpus    []*gpu
	code    codeSource
	meeting *meetings
	trials  *trial
	engines *once[string, bool] // by card and width of a head: whether the copy engine brings tiles
	tried   attentionShape      // by which kernels for one architecture are tried
	timed   attentionShape      // by which the two ways are compared
	trying  bool                // this is one of the two of a trial
	piece   int64               // how much host memory is pinned at once
	collect *collective         // nil without NCCL
	blas    *cublas.API         // nil: our own kernels multiply

	profiler *nvtx.Profiler // nil: none listens
	notes    *notes
}

// gpu is one card.
type gpu struct {
	index  int
	device driver.Device
	name   string
	bus    string
	major  int
	minor  int
	sms    int
	total  int64

	choices *cublas.Choices // of all cards of this name
	tuned   *tuned          // nil: nothing is kept
}

// Arch is the architecture of a card as compilers call it: 90 for Hopper.
func (g *gpu) arch() int { return 10*g.major + g.minor }

// Open finds the driver, the GPUs and the compiler of kernels. What is missing is said in one error.
func Open(options Options) (*Machine, error) {
	options.Check = options.Check || os.Getenv(CheckVariable) == "1"
	code := &compiler{folder: options.CacheDir, carried: os.Getenv(KernelsVariable), check: options.Check}
	m, err := open(options, code)
	missing := code.open()
	if code.carried != "" {
		missing = nil // what is not carried says so when it is compiled
	}
	if err := errors.Join(err, missing); err != nil {
		return nil, fmt.Errorf("the cuda device cannot run here: %w", err)
	}
	return m, nil
}

// settings are variables that the driver reads when it starts. What the user has set stays.
func (o *Options) settings() map[string]string {
	// Our kernels are loaded when a program is, since cuModuleGetFunction loads. Those of libraries are loaded when they are first
	// launched, and the driver may then wait for all that runs: with NCCL for a peer, perhaps for ever.
	loading := "LAZY"
	if o.NCCL {
		loading = "EAGER"
	}
	return map[string]string{
		"CUDA_MODULE_LOADING": loading,
		// A rank has more streams than the eight queues to a GPU that there are as a rule: in one queue, who waits holds up others.
		"CUDA_DEVICE_MAX_CONNECTIONS": "32",
	}
}

// open opens all but the compiler.
func open(options Options, code codeSource) (*Machine, error) {
	for name, value := range options.settings() {
		if _, told := os.LookupEnv(name); !told {
			if err := os.Setenv(name, value); err != nil {
				return nil, err
			}
		}
	}
	api, err := driver.Open()
	if err != nil {
		return nil, noDriver(err)
	}
	m := &Machine{options: options, api: api, meeting: newMeetings(), code: code, trials: &trial{}, engines: &once[string, bool]{}, tried: triedShape, timed: timedShape, piece: pinBytes, notes: &notes{}}
	all, err := findGPUs(api)
	if err != nil {
		return nil, err
	}
	if m.gpus, err = choose(all, options.GPUs); err != nil {
		return nil, err
	}
	if options.NCCL {
		if m.collect, err = newCollective(options.World); err != nil {
			return nil, err
		}
	}
	if m.profiler, err = nvtx.Open(); err != nil {
		return nil, err
	}
	if !options.OwnProducts {
		m.blas, _ = cublas.Open() // without it our own kernels multiply; Report says so
	}
	return m, m.remember()
}

func choose(all []*gpu, wanted []int) ([]*gpu, error) {
	if len(all) == 0 {
		return nil, errors.New("the driver finds no GPU")
	}
	if wanted == nil {
		return all, nil
	}
	var out []*gpu
	for _, i := range wanted {
		if i < 0 || i >= len(all) {
			return nil, fmt.Errorf("there is no GPU %d, the driver finds %d", i, len(all))
		}
		out = append(out, all[i])
	}
	return out, nil
}

func findGPUs(api *driver.API) ([]*gpu, error) {
	devices, err := api.Devices()
	if err != nil {
		return nil, err
	}
	var out []*gpu
	choices := map[string]*cublas.Choices{}
	for i, d := range devices {
		g := &gpu{index: i, device: d}
		var errs [6]error
		g.name, errs[0] = api.Name(d)
		g.bus, errs[1] = api.PCIBus(d)
		g.major, errs[2] = api.Attribute(driver.AttrCapabilityMajor, d)
		g.minor, errs[3] = api.Attribute(driver.AttrCapabilityMinor, d)
		g.sms, errs[4] = api.Attribute(driver.AttrMultiprocessors, d)
		g.total, errs[5] = api.TotalMem(d)
		if err := errors.Join(errs[:]...); err != nil {
			return nil, fmt.Errorf("GPU %d: %w", i, err)
		}
		if choices[g.name] == nil {
			choices[g.name] = &cublas.Choices{}
		}
		g.choices = choices[g.name]
		out = append(out, g)
	}
	return out, nil
}

// card is what kernels on a GPU may count on.
func (m *Machine) card(g *gpu) kernels.Card {
	hopper := g.arch() == 90 && !m.options.Portable && m.code.knowsHopper()
	return kernels.Card{Hopper: hopper, CopyEngine: hopper && m.api.TensorMaps() && !m.options.ThreadsCopy}
}

// gpuOf says where a rank of this process runs: the ranks of a host are dealt to its GPUs in turn. Where each process sees
// GPUs of its own, as many as it has ranks, that is one each, too.
func (m *Machine) gpuOf(rank int) *gpu {
	if w := m.options.World; w != nil {
		rank += w.FirstOnHost - w.First
	}
	return m.gpus[rank%len(m.gpus)]
}

// Check says before anything is allocated whether a program's memory is there, with the figures of both sides.
func (m *Machine) Check(p *ir.Program) error {
	device, host, ranks := map[*gpu]ir.Bytes{}, ir.Bytes(0), 0
	for r := range p.Ranks {
		if !m.options.World.here(r) {
			continue
		}
		ranks++
		arenas := p.Codes[p.Ranks[r].Code].Arenas
		device[m.gpuOf(r)] += arenas[ir.Device]
		host += arenas[ir.Host]
	}
	if m.collect != nil && ranks > len(m.gpus) {
		return fmt.Errorf("%d ranks on %d GPUs: NCCL takes a GPU for each rank", ranks, len(m.gpus))
	}
	for _, g := range m.gpus {
		if need := device[g]; int64(need) > g.total {
			return fmt.Errorf("GPU %d (%s) has %s, the ranks on it need %s (and %s of pinned host memory in all)",
				g.index, g.name, ir.Bytes(g.total), need, host)
		}
	}
	if there := hostMemory(); there > 0 && int64(host) > there { // no error: memory of virtual machines may grow as it is used
		m.notes.add("the host reports %s of free memory and the program pins %s", ir.Bytes(there), host)
	}
	return nil
}

// notes are facts for the user that stop nothing. Ranks add to them at the same time.
type notes struct {
	mu    sync.Mutex
	lines []string
}

func (n *notes) add(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if line := fmt.Sprintf(format, args...); !slices.Contains(n.lines, line) {
		n.lines = append(n.lines, line)
	}
}

// Notes returns what Check and loading found out that stops nothing: memory that may be short, products that no algorithm of cuBLASLt
// serves. Each line is there once.
func (m *Machine) Notes() []string {
	m.notes.mu.Lock()
	defer m.notes.mu.Unlock()
	return slices.Clone(m.notes.lines)
}

// New makes the device of a rank. All calls must come from one goroutine.
func (m *Machine) New(rank int) vm.Device { return &Device{machine: m, gpu: m.gpuOf(rank)} }

// Again is the same machine for another job: ranks of one meet no ranks of another.
func (m *Machine) Again() (*Machine, error) {
	again := *m
	again.meeting = newMeetings()
	var err error
	if m.collect != nil {
		again.collect, err = newCollective(m.options.World)
	}
	return &again, err
}

// Card is what is known of a GPU.
type Card struct {
	Name            string
	Arch            int // as compilers call it: 90 for Hopper
	Multiprocessors int
	Memory          int64 // bytes
}

// Cards are those that ranks are dealt to, in that order.
func (m *Machine) Cards() (out []Card) {
	for _, g := range m.gpus {
		out = append(out, Card{g.name, g.arch(), g.sms, g.total})
	}
	return out
}

// Describe names the cards, for people.
func (m *Machine) Describe() string {
	text := m.gpus[0].name
	if len(m.gpus) > 1 {
		text = fmt.Sprintf("%d GPUs, %s", len(m.gpus), text)
	}
	return text
}

// Abort implements vm.Transport.
func (m *Machine) Abort(reason error) {
	m.meeting.abort(reason)
	if m.collect != nil {
		m.collect.abort(reason)
	}
}

// Link implements vm.Transport: device memory does not travel by it.
func (m *Machine) Link(int, int, vm.Channel) vm.Link { return noLink{} }

// Team implements vm.Transport.
func (m *Machine) Team(int, []int32, ir.Stream) (vm.Team, error) { return nil, errNotHost }

var errNotHost = errors.New("ranks on GPUs do not meet in host memory")

type noLink struct{}

func (noLink) Send([]byte) error { return errNotHost }
func (noLink) Recv([]byte) error { return errNotHost }

// once remembers what the first to ask got, for all who ask later.
type once[K comparable, V any] struct {
	mu   sync.Mutex
	done map[K]*entry[V]
}

type entry[V any] struct {
	once  sync.Once
	value V
	err   error
}

func (o *once[K, V]) get(key K, get func() (V, error)) (V, error) {
	o.mu.Lock()
	if o.done == nil {
		o.done = map[K]*entry[V]{}
	}
	e := o.done[key]
	if e == nil {
		e = &entry[V]{}
		o.done[key] = e
	}
	o.mu.Unlock()
	e.once.Do(func() { e.value, e.err = get() })
	return e.value, e.err
}
