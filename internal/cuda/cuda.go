// Package cuda is the device that runs programs on NVIDIA GPUs.
//
//	cuda.go       Machine: libraries, GPUs, state shared by the ranks of a process
//	device.go     Device: one rank; arenas, streams, events, issue and join
//	bind.go       from an instruction to prepared driver calls
//	waits.go      reports kernel waits that gave up
//	launch.go     from a kernel's table entry to launches; images and their cache
//	trial.go      tries architecture-specific kernels before use
//	difference.go where two results differ
//	tuned.go      cached results of tuning
//	arena.go      pinned host memory on the GPU's NUMA node
//	local.go      communication between ranks of one process: copies and sums in rank order
//	collect.go    communication by NCCL
//	communicators.go
//	              calls that share a communicator
//	graph.go      captures sections once and replays them
//	spans.go      times of instructions
//	ranges.go     ranges for a profiler
//	report.go     libraries and GPUs found, and how to get missing ones
//
// Everything about an instruction is fixed when a program is loaded: addresses, streams, events, launch shapes.
// Issuing an instruction takes one or two driver calls with prepared arguments and allocates nothing.
//
// Package kernels contains the kernels and defines their launches. This package does not depend on what an
// instruction computes.
package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sppo.dev/internal/cuda/cublas"
	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/cuda/nvtx"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// Options configures a machine. Open also sets Sync, Portable and Check if their environment variables are 1, and
// PortableHeads if that of Portable lists head dimensions.
type Options struct {
	GPUs        []int // GPUs to use, in this order; nil: all
	NCCL        bool  // connect ranks through NCCL, with one GPU per rank, instead of by copies
	Sync        bool  // wait after every instruction, so that an error names the right one; slow
	OwnProducts bool  // use our own kernels for products even if cuBLASLt is installed
	Portable    bool  // disable kernels written for one architecture
	// PortableHeads are head dimensions for which attention does not use kernels written for one architecture.
	PortableHeads []int64
	ThreadsCopy   bool   // on Hopper, let threads rather than the copy engine load the tiles of attention
	Tune          bool   // time the algorithms that cuBLASLt proposes, and use the fastest; otherwise the first, which is always the same
	Check         bool   // limit how long a kernel waits, so that an endless wait becomes an error
	Graphs        bool   // capture each section once and replay it; for programs of one rank
	CacheDir      string // for compiled kernels and results of tuning; empty: the user's cache
	World         *World // nil: all ranks are in this process
}

// World describes the part of the job that this process runs. If there are other processes, ranks communicate
// through NCCL.
type World struct {
	First, End  int // the ranks of this process: [First, End)
	FirstOnHost int // number of ranks in earlier processes on this host
	// Share distributes a value that one process creates. That process passes the function that creates it; the
	// others pass nil.
	Share func(name string, create func() ([]byte, error)) ([]byte, error)
}

// here reports whether a rank is in this process.
func (w *World) here(rank int) bool { return w == nil || w.First <= rank && rank < w.End }

// Machine is shared by the ranks of one process. It is also their vm.Transport; its Abort stops all of them.
type Machine struct {
	options Options
	api     *driver.API
	gpus    []*gpu
	code    codeSource
	meeting *meetings
	trials  *trial
	engines *once[string, bool] // by card and head width: whether the copy engine loads tiles
	tried   attentionShape      // shape for trials of kernels for one architecture
	timed   attentionShape      // shape for comparing the two ways to load tiles
	trying  bool                // this machine runs a trial or tests kernels: it trusts all of them
	only    ir.Op               // if not 0, the operation that uses kernels for one architecture on this machine
	piece   int64               // bytes of host memory pinned per call
	collect *collective         // nil without NCCL
	blas    *cublas.API         // nil: our own kernels compute products

	profiler *nvtx.Profiler // nil: no profiler is attached
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

	choices *cublas.Choices // shared by all cards of this name
	tuned   *tuned          // nil: not cached
}

// arch returns the architecture of a card as compilers name it: 90 for Hopper.
func (g *gpu) arch() int { return 10*g.major + g.minor }

// Open finds the driver, the GPUs and the compiler of kernels. One error names everything that is missing.
func Open(options Options) (*Machine, error) {
	for variable, option := range map[string]*bool{SyncVariable: &options.Sync, PortableVariable: &options.Portable, CheckVariable: &options.Check} {
		*option = *option || os.Getenv(variable) == "1"
	}
	if err := options.portableHeads(os.Getenv(PortableVariable)); err != nil {
		return nil, err
	}
	code := &compiler{folder: options.CacheDir, carried: os.Getenv(KernelsVariable), check: options.Check}
	m, err := open(options, code)
	missing := code.open()
	if code.carried != "" {
		missing = nil // a missing kernel is reported when it is needed
	}
	if err := errors.Join(err, missing); err != nil {
		return nil, fmt.Errorf("the cuda device cannot run here: %w", err)
	}
	return m, nil
}

// portableHeads adds the head dimensions that the value of PortableVariable lists, as in "64,96".
func (o *Options) portableHeads(value string) error {
	if value == "" || value == "0" || value == "1" {
		return nil
	}
	for text := range strings.SplitSeq(value, ",") {
		dim, err := strconv.ParseInt(text, 10, 64)
		if err != nil || dim < 2 {
			return fmt.Errorf("%s=%s is neither 1 nor a list of head dimensions such as 64,96", PortableVariable, value)
		}
		o.PortableHeads = append(o.PortableHeads, dim)
	}
	return nil
}

// settings returns environment variables that the driver reads when it starts. The user's values take precedence.
func (o *Options) settings() map[string]string {
	// Our kernels are loaded with the program, because cuModuleGetFunction loads them. Library kernels
	// would be loaded at their first launch, and the driver may then wait for everything that is running:
	// with NCCL this means waiting for a peer, perhaps forever.
	loading := "LAZY"
	if o.NCCL {
		loading = "EAGER"
	}
	return map[string]string{
		"CUDA_MODULE_LOADING": loading,
		// A rank has more streams than a GPU's usual eight queues. Streams that share a queue would delay
		// each other while they wait.
		"CUDA_DEVICE_MAX_CONNECTIONS": "32",
	}
}

// open opens everything except the compiler.
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
		m.blas, _ = cublas.Open() // without it our own kernels compute products; Report says so
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
			return nil, fmt.Errorf("there is no GPU %d; the driver finds %d", i, len(all))
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

// card describes a GPU for kernels.
func (m *Machine) card(g *gpu) kernels.Card {
	hopper := g.arch() == 90 && !m.options.Portable && m.code.knowsHopper()
	return kernels.Card{Hopper: hopper, CopyEngine: hopper && m.api.TensorMaps() && !m.options.ThreadsCopy}
}

// gpuOf returns the GPU of a rank of this process: the ranks on a host are assigned to its GPUs cyclically. If
// each process sees only its own GPUs, one for each of its ranks, each rank still gets a separate GPU.
func (m *Machine) gpuOf(rank int) *gpu {
	if w := m.options.World; w != nil {
		rank += w.FirstOnHost - w.First
	}
	return m.gpus[rank%len(m.gpus)]
}

// Check reports a program that needs more memory than the GPUs have, before anything is allocated.
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
		return fmt.Errorf("%d ranks on %d GPUs: NCCL needs one GPU per rank", ranks, len(m.gpus))
	}
	buffers, err := m.buffers(p)
	if err != nil {
		return err
	}
	for _, g := range m.gpus {
		if need := device[g]; int64(need) > g.total {
			return fmt.Errorf("GPU %d (%s) has %s, but its ranks need %s (and %s of pinned host memory in total)",
				g.index, g.name, ir.Bytes(g.total), need, host)
		}
	}
	short := func(g *gpu) ir.Bytes { return buffers[g] - (ir.Bytes(g.total) - device[g]) }
	g := slices.MaxFunc(m.gpus, func(a, b *gpu) int { return cmp.Compare(short(a), short(b)) })
	if short(g) > 0 { // not an error, because the need is an estimate
		m.notes.add("GPU %d has %s in addition to what the program needs, but NCCL's buffers may need an estimated %s; "+
			"NCCL_MAX_CTAS and NCCL_BUFFSIZE limit them", g.index, ir.Bytes(g.total)-device[g], buffers[g])
	}
	if free := vm.ReadFreeMemory(); host > free.Bytes() { // not an error: virtual machines may gain memory
		m.notes.add("the program pins %s of host memory, but %s", host, free)
	}
	return nil
}

// buffers estimates the memory that NCCL takes on each GPU. It returns an error for a program with too many
// communicators.
func (m *Machine) buffers(p *ir.Program) (map[*gpu]ir.Bytes, error) {
	out := map[*gpu]ir.Bytes{}
	if m.collect == nil {
		return out, nil
	}
	layout, err := m.collect.layout(p)
	for r := range p.Ranks {
		if err == nil && m.options.World.here(r) {
			out[m.gpuOf(r)] += layout.buffers(r)
		}
	}
	return out, err
}

// notes are remarks for the user. Ranks add to them concurrently.
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

// Notes returns the remarks made by Check and while programs were loaded: GPUs that may be short of
// memory, and products for which cuBLASLt has no algorithm. Each line occurs once.
func (m *Machine) Notes() []string {
	m.notes.mu.Lock()
	defer m.notes.mu.Unlock()
	return slices.Clone(m.notes.lines)
}

// New returns the device of a rank. All calls to it must come from one goroutine.
func (m *Machine) New(rank int) vm.Device { return &Device{machine: m, gpu: m.gpuOf(rank)} }

// Again returns the same machine for another job. Ranks of different jobs do not communicate.
func (m *Machine) Again() (*Machine, error) {
	again := *m
	again.meeting = newMeetings()
	var err error
	if m.collect != nil {
		again.collect, err = newCollective(m.options.World)
	}
	return &again, err
}

// Card describes a GPU.
type Card struct {
	Name            string
	Arch            int // as compilers name it: 90 for Hopper
	Multiprocessors int
	Memory          int64 // bytes
}

// Cards returns the GPUs that ranks are assigned to, in the order of assignment.
func (m *Machine) Cards() (out []Card) {
	for _, g := range m.gpus {
		out = append(out, Card{g.name, g.arch(), g.sms, g.total})
	}
	return out
}

// Describe names the cards.
func (m *Machine) Describe() string {
	text := m.gpus[0].name
	if len(m.gpus) > 1 {
		text = fmt.Sprintf("%d GPUs, %s", len(m.gpus), text)
	}
	return text
}

// Kind returns the same text for machines whose results agree bit for bit on the same number of cards.
func (m *Machine) Kind() string {
	kind := m.gpus[0].name
	if m.blas == nil {
		kind += ", own products"
	}
	if len(m.options.PortableHeads) > 0 {
		kind += fmt.Sprint(", portable for heads of ", m.options.PortableHeads)
	}
	for _, option := range []struct {
		on   bool
		name string
	}{{m.collect != nil, "NCCL"}, {m.options.Tune, "tuned"}, {m.options.Portable, "portable"}, {m.options.ThreadsCopy, "threads copy"}} {
		if option.on {
			kind += ", " + option.name
		}
	}
	return kind
}

// Abort implements vm.Transport.
func (m *Machine) Abort(reason error) {
	m.meeting.abort(reason)
	if m.collect != nil {
		m.collect.abort(reason)
	}
}

// Link implements vm.Transport. Messages in device memory do not use it.
func (m *Machine) Link(int, int, vm.Channel) vm.Link { return noLink{} }

// Collective implements vm.Transport.
func (m *Machine) Collective(int, []int32, *ir.Instr, []byte, []byte) (func() error, error) {
	return nil, errNotHost
}

var errNotHost = errors.New("ranks on GPUs do not communicate through host memory")

type noLink struct{}

func (noLink) Send([]byte) error { return errNotHost }
func (noLink) Recv([]byte) error { return errNotHost }

// once computes the value of each key on first use and remembers it.
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
