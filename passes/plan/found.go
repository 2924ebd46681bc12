package plan

import (
	"fmt"
	"math"

	"sppo.dev/ir"
)

// Alternative is a slower candidate that would also fit. Its memory is an upper bound.
type Alternative struct {
	Set             []string   `json:"set"` // differences from the plan, such as "schedule.pp=8"
	StepS           ir.Seconds `json:"step_s"`
	DevicePeakBytes ir.Bytes   `json:"device_peak_bytes"` // of the fullest stage
	HostPeakBytes   ir.Bytes   `json:"host_peak_bytes"`
}

// Rejection is a value that solve rejected for one dimension, with the reason.
type Rejection struct {
	Key       string     `json:"key"`
	Value     string     `json:"value"`
	StepS     ir.Seconds `json:"step_s,omitempty"`    // the shortest time of all candidates that may fit, or a lower bound on it; 0: none can fit
	Bound     bool       `json:"bound,omitempty"`     // StepS is a lower bound
	Shortfall *Shortfall `json:"shortfall,omitempty"` // the smallest shortfall of the candidates that do not fit
}

// Shortfall returns the largest shortfall of a placed plan, or nil if it fits.
func (m Memory) Shortfall() *Shortfall {
	var worst *Shortfall
	for _, arena := range []struct {
		name     string
		peaks    []ir.Bytes
		capacity ir.Bytes
	}{{"device", m.DevicePeakBytes, m.DeviceCapacityBytes}, {"host", m.HostPeakBytes, m.HostCapacityBytes}} {
		for s, peak := range arena.peaks {
			if over := peak - arena.capacity; over > 0 && (worst == nil || over > worst.Bytes) {
				worst = &Shortfall{s, arena.name, over}
			}
		}
	}
	return worst
}

// Missing returns the bytes of the shortfall, or 0 if there is none.
func (r *Rejection) Missing() ir.Bytes {
	if r.Shortfall == nil {
		return 0
	}
	return r.Shortfall.Bytes
}

// Slower returns how many percent longer a step with the rejected value takes than a step of the plan, rounded
// to tenths; a negative result means that it is faster. If Bound is set, it takes at least that much longer, or
// is at most that much faster.
func (r *Rejection) Slower(step ir.Seconds) float64 {
	return math.Round(1000*float64(r.StepS/step-1)) / 10
}

// Than describes how a rejected value compares with the plan, whose step takes the given time, or the shortfall
// if the value does not fit.
func (r *Rejection) Than(step ir.Seconds) string {
	switch {
	case r.StepS <= 0 && r.Shortfall != nil:
		return r.Shortfall.String()
	case r.StepS <= 0:
		return "not possible"
	case step <= 0: // the plan is not complete
		return r.StepS.String()
	}
	switch slower := r.Slower(step); {
	case slower > 0 && r.Bound:
		return fmt.Sprintf("at least %.1f%%", slower)
	case slower > 0:
		return fmt.Sprintf("%.1f%%", slower)
	case slower < 0 && r.Bound:
		return fmt.Sprintf("at most %.1f%% faster", -slower)
	case slower < 0:
		return fmt.Sprintf("%.1f%% faster", -slower)
	case r.Bound:
		return "no faster"
	}
	return "as fast"
}

// Shortfall is a memory shortfall.
type Shortfall struct {
	Stage int      `json:"stage"`
	Arena string   `json:"arena"` // device or host
	Bytes ir.Bytes `json:"bytes"` // missing on one rank
}

// String names the stage, the bytes and the arena.
func (l Shortfall) String() string {
	return fmt.Sprintf("stage %d needs %s more %s memory", l.Stage, l.Bytes, l.Arena)
}
