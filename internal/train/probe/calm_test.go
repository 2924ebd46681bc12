package probe_test

import (
	"slices"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
)

// Which samples are used depends only on their pulses. Calm uses the third with the fastest pulses, and any others
// whose pulses are as fast as the slowest of these.
func TestCalm(t *testing.T) {
	sample := func(seconds float64, pulse time.Duration) probe.Sample {
		return probe.Sample{Seconds: seconds, Pulse: pulse}
	}
	for _, c := range []struct {
		samples []probe.Sample
		want    []float64
	}{
		{nil, nil},
		{[]probe.Sample{sample(3, 9)}, []float64{3}},
		{[]probe.Sample{sample(9, 1), sample(1, 5), sample(2, 4), sample(5, 2), sample(1, 9), sample(1, 8)}, []float64{5, 9}},
		{[]probe.Sample{sample(9, 1), sample(1, 5), sample(2, 4), sample(5, 1), sample(7, 1), sample(1, 8)}, []float64{5, 7, 9}},
		{[]probe.Sample{sample(3, 0), sample(1, 0), sample(2, 0)}, []float64{1, 2, 3}}, // no pulse
	} {
		if got := probe.Calm(c.samples); !slices.Equal(got, c.want) {
			t.Errorf("of %v %v count, not %v", c.samples, got, c.want)
		}
	}
}

// A used sample counts as disturbed if its pulse is slower than the fastest pulse of all by more than the
// margin.
func TestDisturbed(t *testing.T) {
	b := &probe.Bench{Pulse: func() time.Duration { return 100 }}
	step := func() (train.StepResult, error) { return train.StepResult{Seconds: 1}, nil }
	if _, err := b.Sample(step); err != nil {
		t.Fatal(err)
	}
	calm, slow := probe.Sample{Seconds: 1, Pulse: 109}, probe.Sample{Seconds: 1, Pulse: 112}
	for _, c := range []struct {
		samples [][]probe.Sample
		want    float64
	}{
		{nil, 0},
		{[][]probe.Sample{{calm, slow, slow}}, 0}, // only a third is used: the calm sample
		{[][]probe.Sample{{slow, slow, slow}}, 1},
		{[][]probe.Sample{{calm, slow, slow}, {slow}, {calm, calm}}, 0.25},
	} {
		if got := b.Disturbed(c.samples...); got != c.want {
			t.Errorf("of %v %g is disturbed, want %g", c.samples, got, c.want)
		}
	}
}

// Sample waits for a calm computer, but in total no longer than it measures.
func TestSampleWaits(t *testing.T) {
	pulses := []time.Duration{10, 10, 10, 30, 30, 10, 40}
	taken := 0
	b := &probe.Bench{Pulse: func() time.Duration {
		taken++
		return pulses[min(taken, len(pulses))-1]
	}}
	step := func() (train.StepResult, error) {
		time.Sleep(20 * time.Millisecond)
		return train.StepResult{Seconds: 1}, nil
	}
	for i, want := range []probe.Sample{{Seconds: 1, Pulse: 10}, {Seconds: 1, Pulse: 30}, {Seconds: 1, Pulse: 40}} {
		if got, err := b.Sample(step); got != want || err != nil {
			t.Errorf("sample %d is %v, %v; want %v", i, got, err, want)
		}
	}
	if taken != len(pulses) {
		t.Errorf("%d pulses were taken, not %d: the third sample waits for one as fast as the first", taken, len(pulses))
	}
	start := time.Now() // from now on no pulse is fast
	for range 3 {
		if _, err := b.Sample(step); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("three samples took %v: the wait has no end", took)
	}
}
