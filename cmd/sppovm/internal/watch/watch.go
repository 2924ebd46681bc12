// Package watch reports the progress of a run to other programs. A run passes each Record to its observers.
//
//	watch.go        records, and the observer that writes them as JSON lines
//	compare.go      compares the times of steps with the prediction
//	tensorboard.go  event files for TensorBoard
//	prometheus.go   metrics for Prometheus
//	read.go         reads JSON lines back
//	report.go       a page about a run, with charts from chart.go
package watch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// Record is an event of a run: *Run, *Step, *Validation, *Note or *Done. Its JSON keys are a stable interface.
type Record interface{ record() }

func (*Run) record()        {}
func (*Step) record()       {}
func (*Validation) record() {}
func (*Note) record()       {}
func (*Done) record()       {}

// Run records the start of a run, or its continuation from a checkpoint.
type Run struct {
	Name         string      `json:"run"`
	Version      string      `json:"version"`
	Time         time.Time   `json:"time"`
	Device       string      `json:"device"`
	Machine      string      `json:"machine"` // machine that the program was compiled for
	Ranks        int         `json:"ranks"`
	DP           int         `json:"dp"`
	PP           int         `json:"pp"`
	SP           int         `json:"sp"`
	Parameters   int64       `json:"parameters"`
	Sequence     int64       `json:"sequence"`
	Batch        int         `json:"batch"`
	Steps        int         `json:"steps"` // number of the last step
	First        int         `json:"first"` // steps done before this start
	DeviceMemory Memory      `json:"device_memory"`
	HostMemory   Memory      `json:"host_memory"`
	Predicted    *Prediction `json:"predicted,omitempty"`
}

// Memory describes the memory of the fullest rank, in bytes.
type Memory struct {
	Peak     ir.Bytes `json:"peak"`
	Capacity ir.Bytes `json:"capacity"` // 0: unknown
}

// Step is a completed step.
type Step struct {
	Step            int               `json:"step"`
	Loss            Number            `json:"loss"`
	TokensPerSecond Number            `json:"tokens_per_s"`
	Seconds         Number            `json:"step_s"`
	GradNorm        Number            `json:"grad_norm"` // before clipping
	LR              Number            `json:"lr"`
	Skipped         bool              `json:"skipped,omitempty"`     // weights and optimizer state are unchanged
	Split           *Split            `json:"split,omitempty"`       // absent if not measured
	GradNorms       map[string]Number `json:"grad_norms,omitempty"`  // by layer; absent if not requested
	ExpertLoad      map[string]Number `json:"expert_load,omitempty"` // by layer with experts: the largest load of an expert, divided by the mean
}

// LoadsOf returns, by layer, the largest load of an expert, divided by the mean: 1 if all experts process equally many tokens.
func LoadsOf(load [][]float64) map[string]Number {
	of := map[string]Number{}
	for layer, experts := range load {
		total := 0.0
		for _, n := range experts {
			total += n
		}
		if total > 0 {
			of[fmt.Sprintf("layer.%d", layer)] = Number(slices.Max(experts) * float64(len(experts)) / total)
		}
	}
	return of
}

// Split divides the time that all ranks spend on a step into shares that add up to 1. internal/vm/sim defines the parts.
type Split struct {
	Compute       float64 `json:"compute"`
	Copies        float64 `json:"exposed_copies"`
	Communication float64 `json:"exposed_communication"`
	Bubble        float64 `json:"bubble"`
}

// SplitOf converts a split in seconds into shares.
func SplitOf(s sim.Split) *Split {
	all := s.End * ir.Seconds(s.Ranks)
	if all <= 0 {
		return nil
	}
	return &Split{float64(s.Compute / all), float64(s.Copies / all), float64(s.Communication / all), float64(s.Bubble() / all)}
}

// Part is a share with its name.
type Part struct {
	Key, Name string
	Share     float64
}

// Parts lists the shares.
func (s *Split) Parts() []Part {
	return []Part{
		{"compute", "compute", s.Compute}, {"exposed_copies", "exposed copies", s.Copies},
		{"exposed_communication", "exposed communication", s.Communication}, {"bubble", "bubble", s.Bubble},
	}
}

// Validation is a completed validation.
type Validation struct {
	Step       int      `json:"step"`
	Loss       Number   `json:"eval_loss"`
	ByPosition []Bucket `json:"loss_by_position,omitempty"`
}

// Bucket is the mean loss of the tokens at positions First to Last of their sequences.
type Bucket struct {
	First  int64  `json:"first"`
	Last   int64  `json:"last"`
	Loss   Number `json:"loss"`
	Tokens int64  `json:"tokens"`
}

// BucketsOf groups the losses into buckets, for sequences of the given length.
func BucketsOf(losses *train.PositionLosses, sequence int64) []Bucket {
	var out []Bucket
	for _, b := range losses.Buckets() {
		out = append(out, Bucket{b.First, min(b.End, sequence) - 1, Number(b.Loss), b.Tokens})
	}
	return out
}

// Note is a remark about the run: a checkpoint, a warning, a stop.
type Note struct {
	Note string    `json:"note"`
	Step int       `json:"step"` // steps done before the remark
	Time time.Time `json:"time"`
}

// Done is the end of a run.
type Done struct {
	Done        bool     `json:"done"`
	Steps       int      `json:"steps"`
	FinalLoss   Number   `json:"final_loss"`
	DevicePeak  ir.Bytes `json:"device_peak_bytes"`
	HostPeak    ir.Bytes `json:"host_peak_bytes"`
	BubbleRatio Number   `json:"bubble_ratio"`
}

// Number is a number that is null in JSON if JSON cannot represent it; null is read as NaN.
type Number float64

// MarshalJSON implements json.Marshaler.
func (v Number) MarshalJSON() ([]byte, error) {
	if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(v))
}

// UnmarshalJSON implements json.Unmarshaler.
func (v *Number) UnmarshalJSON(text []byte) error {
	if string(text) == "null" {
		*v = Number(math.NaN())
		return nil
	}
	return json.Unmarshal(text, (*float64)(v))
}

// Finite reports whether the number is finite.
func (v Number) Finite() bool { return !math.IsNaN(float64(v)) && !math.IsInf(float64(v), 0) }

// Observer receives the records of a run in order, from one goroutine.
type Observer interface {
	Observe(Record) error
	Close() error
}

// Lines writes records as JSON, one per line.
type Lines struct {
	W       io.Writer
	Results bool // write only Step, Validation and Done
}

// Observe implements Observer.
func (l *Lines) Observe(r Record) error {
	switch r.(type) {
	case *Run, *Note:
		if l.Results {
			return nil
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(l.W, "%s\n", text)
	return err
}

// Close implements Observer.
func (l *Lines) Close() error {
	if c, ok := l.W.(io.Closer); ok && !l.Results {
		return c.Close()
	}
	return nil
}

// Observers is a list of named observers. An observer that fails is dropped, because a full disk must not end a
// training run.
type Observers struct {
	list []named
	Fail func(name string, err error) // reports an observer that was dropped
}

type named struct {
	name string
	Observer
}

// Add adds an observer.
func (o *Observers) Add(name string, observer Observer) {
	o.list = append(o.list, named{name, observer})
}

// Observe passes a record to all observers, and drops those that fail.
func (o *Observers) Observe(r Record) {
	var left []named
	var failed []func()
	for _, n := range o.list {
		if err := n.Observe(r); err != nil {
			failed = append(failed, func() { o.Fail(n.name, errors.Join(err, n.Close())) })
			continue
		}
		left = append(left, n)
	}
	o.list = left
	for _, f := range failed {
		f()
	}
}

// Close closes all observers.
func (o *Observers) Close() error {
	var errs []error
	for _, n := range o.list {
		if err := n.Observer.Close(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", n.name, err))
		}
	}
	o.list = nil
	return errors.Join(errs...)
}
