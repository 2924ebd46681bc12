package sim

import (
	"slices"

	"sppo.dev/internal/cost"
	"sppo.dev/ir"
)

// Span is the time from the beginning to the end of an instruction. A message or collective begins when the
// last of its ranks arrives, a wait when its stream reaches it.
type Span struct{ Begin, End ir.Seconds }

// Timeline is the record of a section, in virtual time or as measured on a device.
type Timeline struct {
	Measured     string // the device; empty: simulated
	Section      ir.Section
	Round        int64
	Makespan     ir.Seconds
	Instructions int64   // number of instructions of all ranks
	Class        []int32 // by rank of the job: index into Ranks
	Ranks        []Rank  // one entry for each set of ranks that do the same work at the same times

	program *ir.Program
	peak    float64 // FLOP/s of a device for the section's matmuls
}

// Rank holds the times of one rank, or of several ranks that did the same work.
type Rank struct {
	Index int        // the first such rank
	Count int        // number of such ranks
	End   ir.Seconds // end of its last stream
	Busy  [ir.NumStreams]ir.Seconds
	// Waits is the time for which the compute stream waited for work in progress on each of the other streams,
	// directly or through another stream.
	Waits [ir.NumStreams]ir.Seconds
	// Idle is the rest of the time up to the makespan: nothing was in progress on this rank, and other ranks
	// determined when it continued.
	Idle  ir.Seconds
	Spans []Span                 // by pc; nil unless requested
	Peaks [ir.NumArenas]ir.Bytes // end of the highest byte that an instruction of the section touches

	Pipeline Pipeline // pipeline of one such rank, up to its own last task
}

// Pipeline is the time that ranks spend on the pipeline: from the start of a section until the last of their
// tasks ends. It excludes the optimizer and later work. A section without tasks counts in full.
type Pipeline struct {
	Ranks   int
	End     ir.Seconds // end of the last task
	Busy    ir.Seconds // total time that compute streams work or wait for collectives in progress
	Exposed ir.Seconds // total time that they wait for copies to or from the host
}

// Add joins the pipeline times of two sets of ranks.
func (p Pipeline) Add(q Pipeline) Pipeline {
	return Pipeline{p.Ranks + q.Ranks, max(p.End, q.End), p.Busy + q.Busy, p.Exposed + q.Exposed}
}

// Idle returns the total time during which ranks have nothing to run. Exposed copies are not part of it.
func (p Pipeline) Idle() ir.Seconds {
	return max(0, p.End*ir.Seconds(p.Ranks)-p.Busy-p.Exposed)
}

// BubbleRatio returns idle time divided by busy time: (PP-1)/N for the plain sequence pipeline.
func (p Pipeline) BubbleRatio() float64 {
	if p.Busy == 0 {
		return 0
	}
	return float64(p.Idle() / p.Busy)
}

// IdleShare returns idle time divided by the total time of the pipeline.
func (p Pipeline) IdleShare() float64 {
	if p.End == 0 {
		return 0
	}
	return float64(p.Idle() / (p.End * ir.Seconds(p.Ranks)))
}

// Split divides the time of a section, summed over all ranks, into the compute stream's work, its waits, and
// the bubble. It includes the optimizer, so its bubble is not that of the Pipeline.
type Split struct {
	Ranks         int
	End           ir.Seconds // end of the section
	Compute       ir.Seconds // time that the compute stream works
	Copies        ir.Seconds // time that it waits for copies in progress to or from the host
	Communication ir.Seconds // time that it waits for collectives or messages in progress
}

// Add joins the times of two sets of ranks.
func (s Split) Add(q Split) Split {
	return Split{s.Ranks + q.Ranks, max(s.End, q.End), s.Compute + q.Compute, s.Copies + q.Copies, s.Communication + q.Communication}
}

// Bubble returns the remaining time, during which nothing was in progress on a rank and other ranks determined
// when it continued.
func (s Split) Bubble() ir.Seconds {
	return max(0, s.End*ir.Seconds(s.Ranks)-s.Compute-s.Copies-s.Communication)
}

// Split returns the split of all ranks.
func (t *Timeline) Split() (all Split) {
	for i := range t.Ranks {
		r, count := &t.Ranks[i], ir.Seconds(t.Ranks[i].Count)
		all = all.Add(Split{t.Ranks[i].Count, t.Makespan, r.Busy[ir.Compute] * count, r.Transfers() * count, (r.Waits[ir.Coll] + r.Waits[ir.Params] + r.Messages()) * count})
	}
	return all
}

func (w *world) timeline() *Timeline {
	t := &Timeline{Section: w.section, Round: w.ranks[0].round, Class: w.classes, Ranks: make([]Rank, len(w.ranks)), program: w.program, peak: w.prices.peak()}
	for i, r := range w.ranks {
		x := &t.Ranks[i]
		x.Index, x.Spans, x.End, x.Peaks = r.index, r.spans, ir.Seconds(r.finish()), r.binding.peaks
		for s := range r.clocks {
			x.Busy[s], x.Waits[s] = ir.Seconds(r.clocks[s].busy), ir.Seconds(r.waits[s])
		}
		t.Makespan = max(t.Makespan, x.End)
	}
	for _, c := range w.classes {
		t.Ranks[c].Count++
		t.Instructions += int64(len(w.ranks[c].binding.steps))
	}
	tasks := slices.ContainsFunc(w.ranks, func(r *rank) bool { return r.binding.tasks > 0 })
	for i, r := range w.ranks {
		t.Ranks[i].Idle = ir.Seconds(r.idle) + t.Makespan - ir.Seconds(r.clocks[ir.Compute].now)
		t.Ranks[i].Pipeline = r.pipeline
		if !tasks {
			t.Ranks[i].Pipeline = r.books()
			t.Ranks[i].Pipeline.End = t.Makespan
		}
	}
	return t
}

// Rank returns the record of rank r of the job.
func (t *Timeline) Rank(r int) *Rank { return &t.Ranks[t.Class[r]] }

// Transfers returns the time for which the compute stream waited for copies between host and device.
func (r *Rank) Transfers() ir.Seconds { return r.Waits[ir.D2H] + r.Waits[ir.H2D] }

// Messages returns the time for which the compute stream waited for messages in progress.
func (r *Rank) Messages() ir.Seconds {
	return r.Waits[ir.SendNext] + r.Waits[ir.RecvPrev] + r.Waits[ir.SendPrev] + r.Waits[ir.RecvNext] + r.Waits[ir.Mux] + r.Waits[ir.MuxIn]
}

// Pipeline returns the pipeline times of all ranks.
func (t *Timeline) Pipeline() (all Pipeline) {
	for i := range t.Ranks {
		p, count := t.Ranks[i].Pipeline, ir.Seconds(t.Ranks[i].Count)
		all = all.Add(Pipeline{t.Ranks[i].Count, p.End, p.Busy * count, p.Exposed * count})
	}
	return all
}

// BubbleRatio returns the bubble ratio of the pipeline.
func (t *Timeline) BubbleRatio() float64 { return t.Pipeline().BubbleRatio() }

// Exposed returns the longest time that any rank waits for copies.
func (t *Timeline) Exposed() (longest ir.Seconds) {
	for i := range t.Ranks {
		longest = max(longest, t.Ranks[i].Transfers())
	}
	return longest
}

// Busiest returns the stream that is busy for the largest share of the makespan, and the first rank on which
// this is the case.
func (t *Timeline) Busiest() (rank int, stream ir.Stream, share float64) {
	for i := range t.Ranks {
		for s, busy := range t.Ranks[i].Busy {
			if part := float64(busy / t.Makespan); part > share {
				rank, stream, share = t.Ranks[i].Index, ir.Stream(s), part
			}
		}
	}
	return rank, stream, share
}

// TGS returns tokens per second per device, if the section is a step.
func (t *Timeline) TGS() float64 {
	if t.Makespan == 0 {
		return 0
	}
	run := &t.program.Run
	return float64(run.Sequence) * float64(run.Batch) / t.deviceSeconds()
}

// MFU returns the share of the devices' peak that the model's FLOPs take, if the section is a step.
func (t *Timeline) MFU() float64 {
	if t.Makespan == 0 || t.peak == 0 {
		return 0
	}
	return t.program.FlopsModel / (float64(t.Makespan) * cost.Devices(t.program.Machine, len(t.Class)) * t.peak)
}

func (t *Timeline) deviceSeconds() float64 { return float64(t.Makespan) * float64(len(t.Class)) }
