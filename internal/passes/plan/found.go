package plan

import (
	"fmt"
	"strings"

	"sppo.dev/ir"
)

// Alternative is a slower candidate that would also fit. Its memory is an upper bound.
type Alternative struct {
	Set             []string   `json:"set"` // differences from the plan, such as "schedule.pp=8"
	StepS           ir.Seconds `json:"step_s"`
	DevicePeakBytes ir.Bytes   `json:"device_peak_bytes"` // of the fullest stage
	HostPeakBytes   ir.Bytes   `json:"host_peak_bytes"`
}

// Search describes a search for the open values of a schedule.
type Search struct {
	Candidates int        `json:"candidates"`        // complete or not
	Planned    int        `json:"planned"`           // of the candidates: those whose time and memory were computed
	StepS      ir.Seconds `json:"step_s"`            // estimated time of the chosen plan; times of other candidates compare with it
	Within     float64    `json:"within"`            // an upper bound on how much longer the chosen plan takes than the best one, relative to the best one
	Limited    bool       `json:"limited"`           // the search stopped at its limit before it had considered all candidates
	Stopped    bool       `json:"stopped,omitempty"` // the user stopped the search

	Faster  *Rejection `json:"faster,omitempty"`   // a value with which another search found a faster plan; StepS is its estimate
	AllGPUs *Rejection `json:"all_gpus,omitempty"` // the best plan found on all GPUs, if the chosen plan leaves some idle; if the requested numbers of ranks prevent one, only a value that names them
}

// Rejection is a value that solve rejected for one dimension, with the reason.
type Rejection struct {
	Key       string     `json:"key"`
	Value     string     `json:"value"`
	Planned   int        `json:"planned"`             // number of candidates with this value whose time and memory were computed
	StepS     ir.Seconds `json:"step_s,omitempty"`    // the shortest time of those that fit; 0: none does
	BoundS    ir.Seconds `json:"bound_s,omitempty"`   // a lower bound on the time of the other candidates; 0: there are none
	Shortfall *Shortfall `json:"shortfall,omitempty"` // the smallest shortfall of the candidates that do not fit
}

// Untried returns the rejected value that is most worth pinning if the search has not proved its plan the best, or nil: no
// plan with it was found to fit, and its lower bound is among the lowest. Of these, the values that determine the structure
// of the schedule come first.
func (p *Plan) Untried() *Rejection {
	const near = 1.05
	lowest := p.Search.StepS
	open := func(r *Rejection) bool { return r.StepS == 0 && r.BoundS > 0 && r.BoundS < p.Search.StepS }
	for i := range p.Rejected {
		if r := &p.Rejected[i]; open(r) {
			lowest = min(lowest, r.BoundS)
		}
	}
	for i := range p.Rejected {
		if r := &p.Rejected[i]; open(r) && r.BoundS <= near*lowest {
			return r
		}
	}
	return nil
}

// Shortfall returns the largest shortfall of a placed plan, or nil if it fits.
func (m Memory) Shortfall() (worst *Shortfall) {
	for _, s := range m.Shortfalls() {
		if worst == nil || s.Bytes > worst.Bytes {
			worst = &s
		}
	}
	return worst
}

// Shortfalls returns the largest shortfall of a placed plan in each arena in which it does not fit.
func (m Memory) Shortfalls() (out []Shortfall) {
	for _, arena := range []struct {
		name     string
		peaks    []ir.Bytes
		capacity ir.Bytes
	}{{"device", m.DevicePeakBytes, m.DeviceCapacityBytes}, {"host", m.HostPeakBytes, m.HostCapacityBytes}} {
		worst := Shortfall{Arena: arena.name}
		for s, peak := range arena.peaks {
			if over := peak - arena.capacity; over > worst.Bytes {
				worst.Stage, worst.Bytes = s, over
			}
		}
		if worst.Bytes > 0 {
			out = append(out, worst)
		}
	}
	return out
}

// Excess names, for each kind of memory that is too small, the stage with the highest peak. It returns "" if the plan
// fits.
func (m Memory) Excess() string {
	var out []string
	for _, s := range m.Shortfalls() {
		capacity := m.DeviceCapacityBytes
		if s.Arena == "host" {
			capacity = m.HostCapacityBytes
		}
		peak, has := capacity+s.Bytes, capacity.String()
		if has == peak.String() {
			has = fmt.Sprintf("%s less", s.Bytes)
		}
		out = append(out, fmt.Sprintf("a rank of stage %d needs %s of %s memory but has %s", s.Stage, peak, s.Arena, has))
	}
	return strings.Join(out, "; ")
}

// Missing returns the bytes of the shortfall, or 0 if there is none.
func (r *Rejection) Missing() ir.Bytes {
	if r.Shortfall == nil {
		return 0
	}
	return r.Shortfall.Bytes
}

// InWords returns the best time found with a rejected value and the number of plans that were tried. If none was tried or
// none fits, it returns a lower bound on the time or the shortfall. A value that might still be faster than the plan, whose
// step takes the given time, is marked as not tried.
func (r *Rejection) InWords(step ir.Seconds) string {
	switch {
	case r.StepS > 0:
		return fmt.Sprintf("%s, best of %d", r.StepS, r.Planned)
	case r.BoundS >= step:
		return fmt.Sprintf("at least %s", r.BoundS)
	case r.BoundS > 0 && r.Planned == 0:
		return fmt.Sprintf("not tried, at least %s", r.BoundS)
	case r.BoundS > 0:
		return fmt.Sprintf("none of %d tried fits, others at least %s", r.Planned, r.BoundS)
	case r.Shortfall != nil:
		return r.Shortfall.String()
	}
	return "not possible"
}

// Shortfall is a memory shortfall.
type Shortfall struct {
	Stage int      `json:"stage"`
	Arena string   `json:"arena"` // device or host
	Bytes ir.Bytes `json:"bytes"` // missing on one rank
}

// String names the stage, the bytes and the arena.
func (l Shortfall) String() string {
	return fmt.Sprintf("stage %d needs %s more %s memory per rank", l.Stage, l.Bytes, l.Arena)
}
