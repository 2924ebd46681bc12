package probe

import (
	"context"
	"errors"

	"sppo/vm"
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
func (t *turns) measure(ctx context.Context, b *Bench) (err error) {
	took, jobs := make([][]float64, len(t.timings)), make([]*vm.Job, len(t.timings))
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
					return err
				}
			}
			seconds, err := x.run(ctx, jobs[i], (runs+rounds-1)/rounds)
			if err != nil {
				return err
			}
			took[i] = append(took[i], seconds...)
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
	return err
}

// accident is how many times the median a run may take and count.
const accident = 2

// settle takes the mean of runs: a step is a sum of many instructions, in which all that holds them up counts, and means add up.
func (t *Timing) settle(took []float64) {
	middle, sum, n := median(took), 0.0, 0.0
	for _, x := range took {
		if x <= accident*middle {
			sum, n = sum+x, n+1
		}
	}
	t.Seconds, t.Spread = sum/n/float64(t.Copies), over(took[len(took)-1]-took[0], middle)
}
