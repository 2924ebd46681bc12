package probe

import (
	"slices"
	"time"

	"sppo.dev/internal/train"
)

// Other programs disturb measurements. A virtual machine loses a third of a core's speed while another virtual
// machine uses the core's other hyperthread. This lasts from a tenth of a second to minutes. The measurement
// itself cannot be used to detect this, because slow measurements must not be dropped for being slow. Instead, a
// pulse that is independent of the measured work is timed before and after each measurement, and only measurements
// with fast pulses are used.

// Sample is a measurement with the slower of the pulses before and after it.
type Sample struct {
	Seconds float64
	Pulse   time.Duration
}

// Sample measures a step of a job. It first waits until the computer is calm, but the total waiting
// time is at most the time spent on samples, so that at most half of the time is lost on a computer
// that is never calm.
func (b *Bench) Sample(step func() (train.StepResult, error)) (Sample, error) {
	start := time.Now()
	before := b.pulse()
	for !b.isCalm(before) && b.waited+time.Since(start) < b.sampled {
		before = b.pulse()
	}
	began := time.Now()
	r, err := step()
	b.waited += began.Sub(start)
	b.sampled += time.Since(began)
	return Sample{r.Seconds, max(before, b.pulse())}, err
}

// calmMargin is the longest pulse of a calm computer, as a percentage of the fastest pulse.
const calmMargin = 110

func (b *Bench) pulse() time.Duration {
	if b.Pulse == nil {
		return 0
	}
	p := b.Pulse()
	if b.fastest == 0 || p < b.fastest {
		b.fastest = p
	}
	return p
}

// calmShare is the inverse of the fraction of the measurements that are used.
const calmShare = 3

// Calm selects the third of the measurements that have the fastest pulses, or all measurements if there are no
// pulses. It returns their durations in seconds, in ascending order.
func Calm(samples []Sample) (seconds []float64) {
	for _, s := range calmest(samples) {
		seconds = append(seconds, s.Seconds)
	}
	slices.Sort(seconds)
	return seconds
}

func calmest(samples []Sample) []Sample {
	if len(samples) == 0 {
		return nil
	}
	var pulses []time.Duration
	for _, s := range samples {
		pulses = append(pulses, s.Pulse)
	}
	slices.Sort(pulses)
	limit := pulses[(len(pulses)-1)/calmShare]
	return slices.DeleteFunc(slices.Clone(samples), func(s Sample) bool { return s.Pulse > limit })
}

// Disturbed returns the fraction of the used samples that had a slow pulse, because the computer
// was not calm for long enough.
func (b *Bench) Disturbed(samples ...[]Sample) float64 {
	slow, all := 0, 0
	for _, x := range samples {
		for _, s := range calmest(x) {
			all++
			if !b.isCalm(s.Pulse) {
				slow++
			}
		}
	}
	return float64(slow) / float64(max(all, 1))
}

func (b *Bench) isCalm(pulse time.Duration) bool { return pulse <= b.fastest*calmMargin/100 }
