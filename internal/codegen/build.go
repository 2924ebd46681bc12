// Package codegen turns a plan into a program: lower.go expands tasks into instructions, place.go assigns
// addresses to buffers, sync.go inserts the events, and build.go combines the code of each stage with the
// constants of each rank.
//
// The package does not depend on devices, and makes no decisions of its own: all of them are in the plan.
package codegen

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Build compiles a plan. It also fills plan.Memory with the exact peaks.
func Build(plan *plan.Plan) (*ir.Program, error) {
	return build(plan, true, nil)
}

// BuildTimed is like Build, and also measures its passes.
func BuildTimed(plan *plan.Plan, times *passes.Times) (*ir.Program, error) {
	return build(plan, true, times)
}

// Measure fills plan.Memory without inserting events, which is enough for a report. For a long step, it places the
// shorter step that stands for it.
func Measure(plan *plan.Plan) error { return MeasureTimed(plan, nil) }

// MeasureTimed is like Measure, and also measures its passes.
func MeasureTimed(plan *plan.Plan, times *passes.Times) error {
	if short := strategy.Short(plan); short != nil {
		err := MeasureTimed(short, times)
		Adopt(plan, short)
		return err
	}
	_, err := build(plan, false, times)
	return err
}

// MeasureFit is like Measure, but for a plan that might not fit in memory. It returns the shortfall, or nil if
// the plan fits. If the bytes that are live at once already exceed the capacity of an arena, no placement can
// fit, so MeasureFit places nothing and does not change p.Memory.
func MeasureFit(p *plan.Plan) (*plan.Shortfall, error) {
	if short := strategy.Short(p); short != nil {
		shortfall, err := MeasureFit(short)
		Adopt(p, short)
		return shortfall, err
	}
	if err := passes.Verify(p); err != nil {
		return nil, err
	}
	l := newLayout(p)
	stages, least := make([]*lowering, p.Parallel.PP), p.Memory
	least.DevicePeakBytes, least.HostPeakBytes = make([]ir.Bytes, len(stages)), make([]ir.Bytes, len(stages))
	each(len(stages), func(i int) {
		stages[i] = l.lower(i)
		most := stages[i].buffers.mostLive()
		least.DevicePeakBytes[i], least.HostPeakBytes[i] = most[ir.Device], most[ir.Host]
	})
	if shortfall := least.Shortfall(); shortfall != nil {
		return shortfall, nil
	}
	codes, peaks := make([]ir.Code, len(stages)), make([][ir.NumArenas]ir.Peak, len(stages))
	each(len(stages), func(i int) {
		s := stages[i]
		peaks[i] = s.code.Peaks(s.place())
		codes[i] = s.code
	})
	fillMemory(p, codes, peaks)
	return p.Memory.Shortfall(), nil
}

// Adopt gives the plan of a long step the memory of the shorter step that stands for it, if that is placed.
func Adopt(p, short *plan.Plan) {
	if short.Memory.Placed {
		p.Memory = short.Memory
		p.Memory.Microbatches = short.Parallel.Microbatches
	}
}

func build(plan *plan.Plan, events bool, times *passes.Times) (*ir.Program, error) {
	if err := passes.Verify(plan); err != nil {
		return nil, err
	}
	l := newLayout(plan)
	codes := make([]ir.Code, plan.Parallel.PP)
	peaks := make([][ir.NumArenas]ir.Peak, len(codes))
	each(len(codes), func(i int) {
		end := times.Time("lower")
		s := l.lower(i)
		end()
		end = times.Time("place")
		peaks[i] = s.code.Peaks(s.place())
		end()
		if events {
			end = times.Time("sync")
			s.synchronise()
			end()
		}
		codes[i] = s.code
	})
	fillMemory(plan, codes, peaks)
	if !events {
		return nil, nil
	}
	program := l.program(codes)
	return program, ir.VerifyHeader(program) // an edited plan may have invalid figures for its run and machine
}

// each calls do(i) for every stage i, in parallel on all processors.
func each(stages int, do func(i int)) {
	var wg sync.WaitGroup
	var panicked any // the first panic of a goroutine; it is raised again below, where callers can recover it
	var once sync.Once
	limit := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i := range stages {
		wg.Add(1)
		limit <- struct{}{}
		go func() {
			defer func() {
				if r := recover(); r != nil {
					once.Do(func() { panicked = fmt.Sprintf("%v\n\n%s", r, debug.Stack()) })
				}
				<-limit
				wg.Done()
			}()
			do(i)
		}()
	}
	wg.Wait()
	if panicked != nil {
		panic(panicked)
	}
}

// fillMemory fills plan.Memory with the peaks after placement, what each consists of, and whether they fit.
func fillMemory(plan *plan.Plan, codes []ir.Code, peaks [][ir.NumArenas]ir.Peak) {
	m := &plan.Memory
	m.Placed, m.Fits, m.Microbatches = true, true, 0
	m.DevicePeakBytes, m.HostPeakBytes, m.Device, m.Host = nil, nil, nil, nil
	for i := range codes {
		device, host := codes[i].Arenas[ir.Device], codes[i].Arenas[ir.Host]
		m.DevicePeakBytes = append(m.DevicePeakBytes, device)
		m.HostPeakBytes = append(m.HostPeakBytes, host)
		m.Device, m.Host = append(m.Device, peaks[i][ir.Device]), append(m.Host, peaks[i][ir.Host])
		m.Fits = m.Fits && device <= m.DeviceCapacityBytes && host <= m.HostCapacityBytes
	}
}

// place gives buffers their offsets: persistent buffers at the bottom of their arena, and the buffers of each
// section above them. Sections run one after another, so they share the bytes above the persistent buffers.
// place returns the lifetimes of the buffers.
func (s *lowering) place() (lives []ir.Life) {
	base := s.buffers.placePersistent()
	extents := base
	for _, p := range s.buffers.parts {
		for arena := range ir.NumArenas {
			extents[arena] = max(extents[arena], s.placePart(p, arena, base[arena]))
		}
	}
	s.code.Buffers = make([]ir.Buffer, len(s.buffers.list))
	for i, b := range s.buffers.list {
		s.code.Buffers[i] = ir.Buffer{Name: b.name, Arena: b.arena, Offset: b.offset, Size: b.size}
	}
	s.code.Arenas = extents
	lives = s.buffers.lives()
	s.buffers = buffers{}
	return lives
}

func (s *lowering) placePart(p part, arena ir.Arena, base ir.Bytes) ir.Bytes {
	all := s.buffers.list
	lives, which := s.buffers.livesOf(p, arena)
	if len(lives) == 0 {
		return base
	}
	m := &s.plan.Memory
	capacity := [ir.NumArenas]ir.Bytes{ir.Device: m.DeviceCapacityBytes, ir.Host: m.HostCapacityBytes}
	offsets, extent := placeLives(lives, base, capacity[arena], s.plan.Parallel.PP)
	for k, i := range which {
		all[i].offset = offsets[k]
	}
	for i := p.first; i < p.end; i++ {
		if b := &all[i]; b.over > 0 {
			b.offset = all[b.over-1].offset
		}
	}
	return extent
}

// mostLive returns a lower bound on the size of each arena: the maximum number of bytes that are live at once,
// without padding after the highest buffer.
func (all *buffers) mostLive() (most [ir.NumArenas]ir.Bytes) {
	base := all.placePersistent()
	most = base
	for _, p := range all.parts {
		for arena := range ir.NumArenas {
			if lives, _ := all.livesOf(p, arena); len(lives) > 0 {
				most[arena] = max(most[arena], aligned(base[arena])+newCalendar(lives).peak()-(placeAlign-1))
			}
		}
	}
	return most
}

// lives returns the lifetimes that placement used.
func (all *buffers) lives() []ir.Life {
	lives := make([]ir.Life, len(all.list))
	for section, p := range all.parts {
		for i := p.first; i < p.end; i++ {
			b := &all.list[i]
			lives[i] = ir.Life{Section: ir.Section(section), First: int(b.start), End: int(b.end), Whole: b.persistent}
		}
	}
	return lives
}

// placePersistent places the persistent buffers at the bottom of their arenas, and returns where they end.
func (all *buffers) placePersistent() (ends [ir.NumArenas]ir.Bytes) {
	for i := range all.list {
		if b := &all.list[i]; b.persistent {
			b.offset = aligned(ends[b.arena])
			ends[b.arena] = b.offset + b.size
		}
	}
	return ends
}

// part is the range of buffers that a section created.
type part struct{ first, end int }

// livesOf returns the lifetimes of the buffers that a section places in an arena, and the indices of these
// buffers. If a buffer takes over the bytes of another, the two share one lifetime.
func (all *buffers) livesOf(p part, arena ir.Arena) (lives []life, which []int) {
	for i := p.end - 1; i >= p.first; i-- {
		if b := &all.list[i]; b.over > 0 {
			all.list[b.over-1].end = max(all.list[b.over-1].end, b.end)
		}
	}
	for i := p.first; i < p.end; i++ {
		if b := &all.list[i]; !b.persistent && b.arena == arena && b.over == 0 {
			lives = append(lives, life{start: b.start, end: b.end, size: b.size})
			which = append(which, i)
		}
	}
	return lives, which
}

func (s *lowering) synchronise() {
	for section := range ir.NumSections {
		s.code.Sections[section], s.code.Events[section] = synchronise(s.code.Sections[section], s.code.Buffers, passIndex("sync"))
	}
}

// describeUpdate adds the numbers of the update to the header.
func (l *layout) describeUpdate(run *ir.Run) {
	o := &l.plan.Train.Optimizer
	run.Optimizer, run.Momentum, run.Eps, run.WeightDecay, run.MaxNorm = o.Kind, o.Momentum, o.Eps, o.WeightDecay, l.plan.Train.GradClip
	run.BiasRate = l.plan.Train.BiasRate
	m := &l.plan.Model
	run.RouterAuxLoss, run.AuxLoss, run.RouterZLoss = m.RouterAuxLoss, m.AuxLoss, m.RouterZLoss
	if reduce := l.plan.Train.GradReduce; reduce != ir.F32.String() {
		run.GradReduce = reduce
	}
	for _, group := range lang.TensorGroups {
		if o.NoDecay.Has(group) {
			run.NoDecay = append(run.NoDecay, group)
		}
	}
	l.plan.Graph().EachTensor(func(name string, p *graph.Param) {
		if p.Frozen && !l.model.Balances(p, name, l.plan.Train.BiasRate) {
			run.Frozen = append(run.Frozen, name)
		}
	})
}

// program combines the code of each stage with the constants of each rank.
func (l *layout) program(codes []ir.Code) *ir.Program {
	plan, t := l.plan, &l.plan.Train
	p := &ir.Program{
		Name: plan.Name, Model: ir.Model(plan.Model), Machine: ir.Machine(plan.Cluster), FlopsModel: plan.Throughput.ModelFlops,
		Lines: l.tables.lines.texts, Passes: passes.Names(), Consts: l.tables.consts, Groups: l.model.Groups(), Tensors: l.tables.tensors, Codes: codes,
		Run: ir.Run{
			Sequence: t.Sequence, Batch: t.Batch, EvalSequences: l.evalSequences(), EvalEvery: t.EvalEvery,
			Steps: t.Steps, Seed: t.Seed, Vocab: plan.Model.Vocab, LR: t.Optimizer.LR, MinLR: t.MinLR, Warmup: t.Warmup,
			Spikes: t.Guard.Spikes, MaxSkipped: t.Guard.Stop, LRSchedule: t.LRSchedule, DecaySteps: t.DecaySteps, DecayType: t.DecayType, Beta1: t.Optimizer.Beta1, Beta2: t.Optimizer.Beta2,
			DataKind: t.Data.Kind, DataFiles: t.Data.Files, Holdout: t.Holdout,
			DataOptions: t.Data.Options,
			Rotations:   plan.Graph().Rotations,
			Sums:        plan.Sums(),
		},
	}
	l.describeUpdate(&p.Run)
	if t.Validates() {
		p.Run.EvalBatch = t.EvalBatch
	}
	for r := range plan.Parallel.Ranks() {
		p.Ranks = append(p.Ranks, l.newRank(r))
	}
	return p
}

// newRank returns the constants and groups of rank r = (d*PP + i)*SP + k.
func (l *layout) newRank(r int) ir.Rank {
	pp, sp := l.plan.Parallel.PP, l.plan.Parallel.SP
	k, i, d := r%sp, r/sp%pp, r/sp/pp
	out := ir.Rank{Code: int32(i), DP: int32(d), PP: int32(i), SP: int32(k)}
	for _, name := range l.tables.consts {
		out.Consts = append(out.Consts, l.constValue(name, d, i, k))
	}
	at := func(d, i, k int) int32 { return int32((d*pp+i)*sp + k) }
	groups := make([][]int32, len(l.model.Groups()))
	for g := range groups {
		for _, j := range l.model.Members(g, k) {
			groups[g] = append(groups[g], at(d, i, j))
		}
	}
	for j := range l.plan.Parallel.DP {
		groups[graph.GroupDP] = append(groups[graph.GroupDP], at(j, i, k))
	}
	for j := range pp {
		groups[graph.GroupPP] = append(groups[graph.GroupPP], at(d, j, k))
	}
	if first, last := l.plan.Home(0), l.plan.Home(len(l.stages)-1); first != last && (i == first || i == last) {
		groups[graph.GroupTied] = []int32{at(d, first, k), at(d, last, k)}
	}
	out.Groups = groups
	return out
}

func (l *layout) constValue(name string, d, i, k int) int64 {
	par := l.plan.Parallel
	switch name {
	case constPrev: // the stages of a replica form a ring
		return int64((d*par.PP+(i+par.PP-1)%par.PP)*par.SP + k)
	case constNext:
		return int64((d*par.PP+(i+1)%par.PP)*par.SP + k)
	case graph.ConstReplica:
		return int64(d * par.Microbatches * par.Microbatch)
	case graph.ConstEvalFirst:
		return int64(d * par.Microbatch)
	}
	if place, ok := l.tables.slices[name]; ok {
		return l.sliceRow(place, d, i, k)
	}
	if strings.HasPrefix(name, constFirst) {
		return l.firstReplica(name, d, i, k)
	}
	var number int
	if n, err := fmt.Sscanf(name, constPosRow+".%d", &number); err == nil && n == 1 {
		return l.tables.ranges[number].firstOf(l.model, k)
	}
	if n, err := fmt.Sscanf(name, constRank+".%d", &number); err == nil && n == 1 {
		return int64((d*par.PP+number)*par.SP + k)
	}
	return l.model.SPConst(name, k)
}

func passIndex(name string) uint8 {
	i := slices.Index(passes.Names(), name)
	if i < 0 {
		panic("internal: no pass " + name)
	}
	return uint8(i)
}

// lineTable maps keys of the spec to indices into Program.Lines.
type lineTable struct {
	texts []string
	index map[string]uint16
}

func newLineTable(p *plan.Plan) *lineTable {
	t := &lineTable{index: map[string]uint16{}}
	keys := []string{"model", "model.layers", "model.vocab", "schedule.pp", "schedule.sp", "schedule.offload", "train.optimizer"}
	if p.Mux.Left || p.Mux.Right {
		keys = append(keys, "schedule.mux")
	}
	if p.Parallel.Zero >= plan.ZeroGradients || p.Parallel.Zero > 0 && p.Parallel.DP > 1 {
		keys = append(keys, "schedule.zero")
	}
	if p.Parallel.OptimizerOffload == plan.OffloadHost {
		keys = append(keys, "schedule.optimizer_offload")
	}
	if p.Streams() {
		keys = append(keys, "schedule.keep")
	}
	if p.Parallel.Order == plan.OrderLayer {
		keys = append(keys, "schedule.order")
	}
	if p.Offload.Caches == plan.KVRecomputed {
		keys = append(keys, "schedule.recompute")
	}
	for _, key := range keys {
		text, ok := p.Lines[key]
		if !ok {
			text = p.Spec + ": " + key
		}
		t.index[key] = uint16(len(t.texts))
		t.texts = append(t.texts, text)
	}
	return t
}

func (t *lineTable) of(key string) uint16 {
	i, ok := t.index[key]
	if !ok {
		panic("internal: no spec line for " + key)
	}
	return i
}
