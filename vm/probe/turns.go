package probe

import (
	"context"
	"errors"

	"sppo.dev/vm"
)

// turns are the measurements that figures ask for, first to be listed, then to be answered. They take turns in several
// rounds: a computer whose speed changes by the second is then measured at the same speeds by all.
type turns struct {
	timings []Timing
	index   map[turn]int
}

// turn is an item by its name, on so many ranks.
type turn struct {
	item  string
	ranks int
}

func newTurns() *turns { return &turns{index: map[turn]int{}} }

// ask lists a measurement. What it returns is not one.
func (t *turns) ask(item Item, ranks int) Timing {
	key := turn{item.Name, ranks}
	if _, ok := t.index[key]; !ok {
		t.index[key] = len(t.timings)
		t.timings = append(t.timings, Timing{Item: item, Ranks: ranks})
	}
	return Timing{Item: item, Ranks: ranks, Seconds: 1}
}

// answer is a measurement that was listed.
func (t *turns) answer(item Item, ranks int) Timing {
	return t.timings[t.index[turn{item.Name, ranks}]]
}

// measure takes all that were listed, and says each as soon as it stands. Programs that take turns stay open.
func (t *turns) measure(ctx context.Context, b *Bench) (took [][]Sample, err error) {
	took = make([][]Sample, len(t.timings))
	jobs := make([]*vm.Job, len(t.timings))
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
			if round == 0 {
				if jobs[i], err = b.start(ctx, x); err != nil {
					return nil, err
				}
			}
			if round > 0 {
				if err := x.warm(ctx, jobs[i]); err != nil {
					return nil, err
				}
			}
			samples, err := x.run(ctx, b, jobs[i], (runs+rounds-1)/rounds)
			if err != nil {
				return nil, err
			}
			took[i] = append(took[i], samples...)
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

// warm runs the item's program without measuring it. Others have had their turns since it last ran, for seconds, and in a virtual
// machine memory that rests as long is slow to write at first. Training never lets it rest.
func (t *Timing) warm(ctx context.Context, job *vm.Job) error {
	_, err := job.Step(ctx)
	return t.failed(err)
}

// settle takes the median of calm runs, as what is predicted from it is compared with the median of calm steps.
func (t *Timing) settle(samples []Sample) {
	calm := Calm(samples)
	middle := median(calm)
	t.Seconds, t.Spread = middle/float64(t.Copies), over(calm[len(calm)-1]-calm[0], middle)
}
