package probe

import (
	"context"
	"errors"

	"sppo.dev/internal/train"
)

// turns holds the measurements that the function figures needs: ask lists them, measure takes them, and answer
// returns them. Each of several rounds takes every measurement, so that changes in the computer's speed affect
// all of them equally.
type turns struct {
	timings []Timing
	index   map[turn]int
}

// turn identifies a measurement: the name of its item and the number of ranks that run it.
type turn struct {
	item  string
	ranks int
}

func newTurns() *turns { return &turns{index: map[turn]int{}} }

// ask adds a measurement to the list and returns a placeholder for its result.
func (t *turns) ask(item Item, ranks int) Timing {
	key := turn{item.Name, ranks}
	if _, ok := t.index[key]; !ok {
		t.index[key] = len(t.timings)
		t.timings = append(t.timings, Timing{Item: item, Ranks: ranks})
	}
	return Timing{Item: item, Ranks: ranks, Seconds: 1}
}

// answer returns a listed measurement.
func (t *turns) answer(item Item, ranks int) Timing {
	return t.timings[t.index[turn{item.Name, ranks}]]
}

// measure takes all listed measurements, and reports each as soon as it is final. Programs stay
// open between rounds. An item that alone takes longer than the span is measured in only as many rounds as there are runs,
// because otherwise a few such items would take most of the time.
func (t *turns) measure(ctx context.Context, b *Bench) (took [][]Sample, err error) {
	took = make([][]Sample, len(t.timings))
	jobs := make([]*train.Job, len(t.timings))
	shut := func(i int) {
		if jobs[i] != nil {
			err, jobs[i] = errors.Join(err, jobs[i].Close()), nil
		}
	}
	defer func() {
		for i := range jobs {
			shut(i)
		}
	}()
	rounds := max(b.Rounds, 1)
	for round := range rounds {
		for i := range t.timings {
			x := &t.timings[i]
			if x.Copies != 1 || round%max(rounds/runs, 1) == 0 {
				if b.Begin != nil {
					b.Begin(x.Item, x.Ranks, round*len(t.timings)+i+1, rounds*len(t.timings))
				}
				if round == 0 {
					jobs[i], err = b.start(ctx, x)
				} else {
					_, err = x.warm(ctx, jobs[i])
				}
				if err != nil {
					return nil, err
				}
				samples, err := x.run(ctx, b, jobs[i], (runs+rounds-1)/rounds)
				if err != nil {
					return nil, err
				}
				took[i] = append(took[i], samples...)
			}
			if round == rounds-1 {
				x.settle(took[i])
				b.say(*x)
				shut(i)
			}
		}
		if b.Between != nil {
			b.Between()
		}
	}
	return took, err
}

// warm runs the item's program, and returns the duration of the step, which is not a measurement. In a virtual machine, memory that has been unused for some
// seconds, here during other measurements, is slow to write at first. Training does not have such pauses.
func (t *Timing) warm(ctx context.Context, job *train.Job) (seconds float64, err error) {
	r, err := job.Step(ctx)
	return r.Seconds, t.failed(err)
}

// settle sets the result to the median of calm runs, because predictions are compared with the median of calm
// steps.
func (t *Timing) settle(samples []Sample) {
	calm := Calm(samples)
	middle := median(calm)
	t.Seconds, t.Spread = middle/float64(t.Copies), over(calm[len(calm)-1]-calm[0], middle)
}
