package train

import (
	"cmp"
	"slices"
	"sync"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/ir"
)

// Sequences of several documents take unequal time, because attention stays inside documents. Replicas that wait for each other
// take as long as the slowest. A step therefore has the sequences of its batch in an order in which each replica has about
// the same work. The order depends only on the sequences, so every number of replicas trains on the same sequences at the same
// places of the batch.

// orders holds the order of the latest step.
type orders struct {
	sync.Mutex
	round int64
	order []int64
}

// place returns which of the sequences of a step is at a place of its batch.
func (d *tokenData) place(round, place int64) (int64, error) {
	if !d.run.DataOptions.Packs() || d.run.Batch == 1 {
		return place, nil
	}
	d.orders.Lock()
	defer d.orders.Unlock()
	if d.orders.order == nil || d.orders.round != round {
		pairs := make([]int64, d.run.Batch)
		for i := range pairs {
			var err error
			if pairs[i], err = d.corpus.Training(d.first(round) + int64(i)).Pairs(0); err != nil {
				return 0, err
			}
		}
		d.orders.round, d.orders.order = round, balanced(pairs)
	}
	return d.orders.order[place], nil
}

// first returns the number of the first sequence of a step.
func (d *tokenData) first(round int64) int64 { return (round - 1) * int64(d.run.Batch) }

// balanced returns an order of sequences, given the work that each takes. It divides them into as many groups of about equal work
// as the smallest prime factor of their number says, and orders each group in the same way. Of sequences of about equal work, each
// group gets one, at about the same place. So replicas whose number is a product of the first prime factors, such as a power of
// two, have about the same work in the whole step, and in each microbatch.
func balanced(work []int64) []int64 {
	order := make([]int64, len(work))
	for i := range order {
		order[i] = int64(i)
	}
	slices.SortStableFunc(order, func(a, b int64) int { return cmp.Compare(work[b], work[a]) })
	return dealt(order, work)
}

// dealt orders sequences that are sorted by work, the longest first.
func dealt(sorted, work []int64) []int64 {
	if len(sorted) == 1 {
		return sorted
	}
	n := 2
	for len(sorted)%n != 0 {
		n++
	}
	type group struct {
		sequences []int64
		work      int64
	}
	groups := make([]group, n)
	for turn := range slices.Chunk(sorted, n) {
		slices.SortStableFunc(groups, func(a, b group) int { return cmp.Compare(a.work, b.work) })
		for i, s := range turn { // the longest to the group with the least work
			groups[i].sequences, groups[i].work = append(groups[i].sequences, s), groups[i].work+work[s]
		}
	}
	var out []int64
	for _, g := range groups {
		out = append(out, dealt(g.sequences, work)...)
	}
	return out
}

// DocumentWork is the work of attention within documents, divided by that in the same sequences without document boundaries.
type DocumentWork struct {
	Share     float64 // of all replicas together
	Slowest   float64 // if every replica took as long as the one with the most work
	Sequences int     // number of sequences examined, from the first
}

// shareTokens limits the number of tokens that MeasureDocuments examines, except that it examines at least one step.
const shareTokens = 16 << 20

// MeasureDocuments measures the first steps of a run. The argument windows holds the attention window of each layer, 0 for a
// layer without one. Replicas wait for each other after each has processed a number of sequences.
func MeasureDocuments(run *ir.Run, dir string, windows []int64, replicas, together int) (work DocumentWork, err error) {
	data, err := newTokenData(run, dir)
	if err != nil {
		return work, err
	}
	defer data.corpus.Close()
	const most = 64
	steps := max(1, int(min(most, shareTokens/run.Sequence))/run.Batch)
	work.Sequences = steps * run.Batch
	var seen, slowest, all float64
	each := run.Batch / replicas // sequences of a replica
	for step := range steps {
		pairs := make([]float64, run.Batch)
		for i := range pairs {
			s, err := data.sequence(ir.SectionStep, int64(step)+1, int64(i))
			if err != nil {
				return work, err
			}
			if pairs[i], err = pairsOf(s, windows); err != nil {
				return work, err
			}
			seen += pairs[i]
		}
		for first := 0; first < each; first += together {
			longest := 0.0
			for r := range replicas {
				longest = max(longest, sumOf(pairs[r*each+first:][:together]))
			}
			slowest += longest * float64(replicas)
		}
	}
	for _, w := range windows {
		n := run.Sequence
		if w == 0 || w > n {
			w = n
		}
		all += float64(work.Sequences) * (float64(w)*float64(w+1)/2 + float64(n-w)*float64(w))
	}
	work.Share, work.Slowest = seen/all, slowest/all
	return work, nil
}

// pairsOf returns the number of query-key pairs of a sequence in all layers.
func pairsOf(s corpus.Sequence, windows []int64) (sum float64, err error) {
	known := map[int64]int64{}
	for _, w := range windows {
		if _, ok := known[w]; !ok {
			if known[w], err = s.Pairs(w); err != nil {
				return 0, err
			}
		}
		sum += float64(known[w])
	}
	return sum, nil
}

func sumOf(list []float64) (sum float64) {
	for _, x := range list {
		sum += x
	}
	return sum
}
