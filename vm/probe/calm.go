package probe

import (
	"slices"
	"time"

	"sppo.dev/vm"
)

// What others do on a computer is not its figure: a virtual machine loses a third of a core's speed as soon as somebody else runs
// on the other half of that core, for a tenth of a second or for minutes. Which measurements that has happened to cannot be seen in
// themselves, since slow ones would be left out because they are slow. So a pulse, which has nothing to do with what is measured, is
// taken before and after each, and those count beside which it was fast.

// Sample is a measurement, and the slower of the pulses before and after it.
type Sample struct {
	Seconds float64
	Pulse   time.Duration
}

// Sample takes the time of a step of a job. It waits until the computer is calm, but not for longer in all than samples have taken:
// on one that never is, half of the time is spent in vain, not all of it.
func (b *Bench) Sample(step func() (vm.StepResult, error)) (Sample, error) {
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

// calmMargin is how much of the fastest pulse one may take on a calm computer, in percent.
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

// calmShare is the share of measurements that counts.
const calmShare = 3

// Calm are the seconds of the third of measurements with the fastest pulses, rising: of all, where there is no pulse.
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

// Disturbed is the share of what counts of these samples that somebody else's work has slowed down, by its pulse: the computer was
// not calm for long enough to do without.
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
