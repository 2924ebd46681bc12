package cli

import (
	"maps"
	"slices"

	"sppo.dev"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// mostSimulated is the largest number of ranks for which the figures of a report are simulated. With more
// ranks, building the program only for these figures takes too long, so the report keeps the estimates.
const mostSimulated = 1 << 15

// simulates reports whether Simulate simulates a step.
func (j *Job) simulates() bool {
	return !j.Plan.Time.Simulated && j.Plan.Parallel.Ranks() <= mostSimulated
}

// Simulate replaces the plan's estimate of time with the simulated time of its program. For a long step without a
// program, it simulates the shorter step that stands for it.
func (j *Job) Simulate() error {
	if !j.simulates() {
		return nil
	}
	program := j.Program
	if program == nil {
		of := j.Plan
		if j.short = strategy.Short(of); j.short != nil {
			of = j.short
		}
		var err error
		if program, err = codegen.BuildTimed(of, j.Times); err != nil {
			return Wrong(err)
		}
	}
	end := j.Times.Time("simulate")
	t, err := sim.Run(program, ir.SectionStep, sim.Options{Spans: true})
	end()
	if err != nil { // only the compiler's own programs get here
		return &sppo.BugError{Err: err}
	}
	reportTime(j.Plan, program, t)
	j.Plan.Time.CriticalPath = CriticalPath(program, t)
	if j.short != nil {
		if err := j.extrapolate(); err != nil {
			return err
		}
	}
	if j.Plan.Memory.Checkpoint, err = CheckpointCopy(program); err != nil {
		return &sppo.BugError{Err: err}
	}
	j.Program, j.Timeline = program, t
	return j.estimateDocuments()
}

// estimateDocuments sets the plan's Documents if sequences hold several documents. It simulates the step again
// with the time of attention multiplied by the share of query-key pairs that lie within one document, on the
// replica that has the most of them. If the data cannot be read, Documents holds the reason.
func (j *Job) estimateDocuments() error {
	run, par := &j.Program.Run, &j.Plan.Parallel
	var windows []int64 // of the layers with attention
	for layer := range j.Plan.Model.Layers {
		if j.Plan.Model.FormOf(layer).Attends() {
			windows = append(windows, j.Plan.Model.WindowOf(layer))
		}
	}
	if !run.DataOptions.Packs() || len(windows) == 0 {
		return nil
	}
	together := run.Batch / par.DP
	if par.Zero >= plan.ZeroGradients { // replicas exchange gradients or weights in each microbatch
		together = par.Microbatch
	}
	work, err := train.MeasureDocuments(run, "", windows, par.DP, together)
	if err != nil {
		j.Plan.Documents = &plan.Documents{Problem: err.Error()}
		return nil
	}
	d := &plan.Documents{Share: work.Share, Sequences: work.Sequences}
	equal, err := j.withAttention(work.Share)
	if err != nil {
		return err
	}
	if d.StepS = equal; work.Slowest > work.Share {
		if d.StepS, err = j.withAttention(work.Slowest); err != nil {
			return err
		}
	}
	d.UnequalS, j.Plan.Documents = d.StepS-equal, d
	return nil
}

// withAttention returns the simulated time of a step with the time of attention multiplied by a share.
func (j *Job) withAttention(share float64) (ir.Seconds, error) {
	program := *j.Program
	for _, curve := range []*[]ir.CurvePoint{&program.Machine.AttentionEfficiency, &program.Machine.AttentionGradEff} {
		*curve = slices.Clone(*curve)
		if len(*curve) == 0 {
			*curve = []ir.CurvePoint{{1, 1}}
		}
		for i := range *curve {
			(*curve)[i][1] /= share
		}
	}
	t, err := sim.Run(&program, ir.SectionStep, sim.Options{})
	if err != nil {
		return 0, &sppo.BugError{Err: err}
	}
	return t.Makespan, nil
}

// Peaks returns the contents of each code's arenas at their peaks. The buffers' lifetimes are those that
// placement used or, for a program read from a file, those implied by its instructions.
func (j *Job) Peaks() [][ir.NumArenas]ir.Peak {
	peaks := make([][ir.NumArenas]ir.Peak, len(j.Program.Codes))
	for i := range peaks {
		if j.Plan != nil && len(j.Plan.Memory.Device) == len(peaks) {
			peaks[i] = [ir.NumArenas]ir.Peak{ir.Device: j.Plan.Memory.Device[i], ir.Host: j.Plan.Memory.Host[i]}
		} else {
			peaks[i] = j.Program.Codes[i].Peaks(nil)
		}
	}
	return peaks
}

// reportTime writes the figures of a simulated step into the plan, except its critical path.
func reportTime(p *plan.Plan, program *ir.Program, t *sim.Timeline) {
	pipeline := t.Pipeline()
	p.Time = plan.Time{
		StepS: t.Makespan, EstimateS: p.Time.EstimateS, Simulated: true, OptimizerS: t.Makespan - pipeline.End,
		BubbleRatio: pipeline.BubbleRatio(), IdleShare: pipeline.IdleShare(), ExposedTransferS: t.Exposed(),
		BusyS: make([]ir.Seconds, p.Parallel.PP),
	}
	ranks := make([]ir.Seconds, p.Parallel.PP)
	for r := range program.Ranks {
		stage := program.Ranks[r].PP
		p.Time.BusyS[stage] += t.Rank(r).Pipeline.Busy
		ranks[stage]++
	}
	for stage := range ranks {
		p.Time.BusyS[stage] /= ranks[stage]
	}
	p.Throughput.TGS, p.Throughput.MFU = t.TGS(), t.MFU()
}

// extrapolate turns the figures of a short step into those of the long step for which it stands. It simulates a step with one
// microbatch less: each further microbatch of the long step adds as much as the last one of these two.
func (j *Job) extrapolate() error {
	less := strategy.OneLess(j.short)
	program, err := codegen.BuildTimed(less, j.Times)
	if err != nil {
		return Wrong(err)
	}
	timeline, err := sim.Run(program, ir.SectionStep, sim.Options{})
	if err != nil {
		return &sppo.BugError{Err: err}
	}
	reportTime(less, program, timeline)
	p, t, few := j.Plan, &j.Plan.Time, j.short.Parallel.Microbatches
	more := ir.Seconds(p.Parallel.Microbatches - few)
	further := func(of func(*plan.Time) ir.Seconds) ir.Seconds { return of(t) + more*(of(t)-of(&less.Time)) }
	idle, busy := further(idleTime), further(busyTime)
	stepS, exposed := further(func(t *plan.Time) ir.Seconds { return t.StepS }), further(func(t *plan.Time) ir.Seconds { return t.ExposedTransferS })
	for stage := range t.BusyS {
		t.BusyS[stage] = further(func(t *plan.Time) ir.Seconds { return t.BusyS[stage] })
	}
	longer := stepS / t.StepS
	for i := range t.CriticalPath {
		t.CriticalPath[i].Seconds *= longer
	}
	faster := float64(p.Parallel.Microbatches) / float64(few) / float64(longer)
	p.Throughput.TGS, p.Throughput.MFU = p.Throughput.TGS*faster, p.Throughput.MFU*faster
	t.Microbatches, t.StepS, t.ExposedTransferS = few, stepS, exposed
	t.IdleShare, t.BubbleRatio = float64(idle/(stepS-t.OptimizerS)), float64(idle/busy)
	return nil
}

// idleTime and busyTime return the mean time for which a stage is idle, and busy, during a step's pipeline.
func idleTime(t *plan.Time) ir.Seconds {
	return ir.Seconds(t.IdleShare) * (t.StepS - t.OptimizerS)
}

func busyTime(t *plan.Time) ir.Seconds {
	if t.BubbleRatio == 0 {
		return t.StepS - t.OptimizerS
	}
	return idleTime(t) / ir.Seconds(t.BubbleRatio)
}

// CriticalPath sums the time on the critical path by kind of work and stage.
func CriticalPath(program *ir.Program, t *sim.Timeline) (out []plan.CriticalPart) {
	causes := t.Causes()
	var sums [sim.NumSorts]map[int]ir.Seconds
	for _, s := range causes.Path() {
		sort, stage := causes.SortOf(s), -1
		if s.Site != sim.Nowhere {
			stage = int(program.Ranks[s.Rank].PP)
		}
		if sums[sort] == nil {
			sums[sort] = map[int]ir.Seconds{}
		}
		sums[sort][stage] += s.End - s.Begin
	}
	for sort := range sums {
		for _, stage := range slices.Sorted(maps.Keys(sums[sort])) {
			out = append(out, plan.CriticalPart{Work: sim.Sort(sort).String(), Stage: stage, Seconds: sums[sort][stage]})
		}
	}
	return out
}
