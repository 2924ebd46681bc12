package probe

import "context"

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

// measure takes all that were listed, and says each as soon as it stands.
func (t *turns) measure(ctx context.Context, b *Bench) error {
	took := make([][]float64, len(t.timings))
	rounds := max(b.Rounds, 1)
	for round := range rounds {
		for i := range t.timings {
			seconds, err := b.measure(ctx, &t.timings[i], (runs+rounds-1)/rounds)
			if err != nil {
				return err
			}
			took[i] = append(took[i], seconds...)
			if round == rounds-1 {
				t.timings[i].settle(took[i])
				b.say(t.timings[i])
			}
		}
		if b.Between != nil {
			b.Between()
		}
	}
	return nil
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
