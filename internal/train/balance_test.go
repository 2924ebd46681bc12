package train

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"sppo.dev/ir"
)

// unequalRun returns a run on documents whose lengths vary widely. Token 0 ends a document.
func unequalRun(t *testing.T, sequence int64, batch int) *ir.Run {
	t.Helper()
	r, name := rand.New(rand.NewPCG(7, 7)), filepath.Join(t.TempDir(), "flat.bin")
	var tokens []byte
	for len(tokens) < 400*int(sequence) {
		for range int(math.Exp(7 * r.Float64())) {
			tokens = binary.LittleEndian.AppendUint16(tokens, uint16(1+r.IntN(99)))
		}
		tokens = append(tokens, 0, 0)
	}
	if err := os.WriteFile(name, tokens, 0o644); err != nil {
		t.Fatal(err)
	}
	return &ir.Run{DataKind: "tokens", DataFiles: []string{name}, DataOptions: &ir.DataOptions{Documents: "0", Shuffle: true}, Sequence: sequence, Batch: batch, Seed: 3, Vocab: 100}
}

// TestOrderOfSequences checks that a step has the sequences of its batch, each once, in an order that is the same after steps in
// any order; and that without documents, they are in order.
func TestOrderOfSequences(t *testing.T) {
	const sequence, batch = 256, 12
	run := unequalRun(t, sequence, batch)
	data, err := newTokenData(run, "")
	if err != nil {
		t.Fatal(err)
	}
	plain := *run
	plain.DataOptions = &ir.DataOptions{Shuffle: true}
	ordered, err := newTokenData(&plain, "")
	if err != nil {
		t.Fatal(err)
	}
	read := func(d *tokenData, round int64) (list [][]int32) {
		for i := range int64(batch) {
			out := make([]int32, sequence+1)
			if err := d.Tokens(ir.SectionStep, round, i, 0, out, 1); err != nil {
				t.Fatal(err)
			}
			list = append(list, out)
		}
		return list
	}
	first, moved := read(data, 1), 0
	for _, round := range []int64{5, 2} {
		got, want := read(data, round), read(ordered, round)
		for i := range got {
			if !slices.Equal(got[i], want[i]) {
				moved++
			}
		}
		slices.SortFunc(got, slices.Compare)
		slices.SortFunc(want, slices.Compare)
		if !slices.EqualFunc(got, want, slices.Equal) {
			t.Errorf("step %d has other sequences", round)
		}
	}
	if moved == 0 {
		t.Error("the sequences are in order")
	}
	if again := read(data, 1); !slices.EqualFunc(first, again, slices.Equal) {
		t.Error("step 1 has another order after step 2")
	}
}

// TestBalance checks that replicas have more equal work than with the sequences in order, for every number of replicas that is a
// power of two: in a step, in which the slowest has at most the work of one sequence more than the mean; and if they wait for each
// other in each microbatch.
func TestBalance(t *testing.T) {
	const batch, draws = 32, 50
	r := rand.New(rand.NewPCG(1, 1))
	type waiting struct{ replicas, together int }
	sums := map[waiting][2]float64{}
	for range draws {
		work, all := make([]int64, batch), int64(0)
		for i := range work {
			work[i] = int64(1000 * math.Exp(1.5*r.NormFloat64()))
			all += work[i]
		}
		order, inOrder := balanced(work), make([]int64, batch)
		for i, s := range slices.Sorted(slices.Values(order)) {
			if inOrder[i] = s; s != int64(i) {
				t.Fatalf("%v is no permutation", order)
			}
		}
		for replicas := 2; replicas < batch; replicas *= 2 {
			for _, together := range []int{1, batch / replicas} {
				w := waiting{replicas, together}
				after := longest(work, order, replicas, together)
				sums[w] = [2]float64{sums[w][0] + float64(longest(work, inOrder, replicas, together)), sums[w][1] + float64(after)}
				if limit := all/int64(replicas) + slices.Max(work); together > 1 && after > limit {
					t.Errorf("%d replicas: the slowest has %d, more than the mean and the longest sequence, %d", replicas, after, limit)
				}
			}
		}
	}
	for w, sum := range sums {
		if sum[1] > 0.97*sum[0] {
			t.Errorf("%d replicas that wait after %d sequences: %v, and with sequences in order %v", w.replicas, w.together, sum[1], sum[0])
		}
	}
}

// longest adds up the work of the slowest replica over all waits of a step.
func longest(work, order []int64, replicas, together int) (sum int64) {
	each := len(order) / replicas
	for first := 0; first < each; first += together {
		most := int64(0)
		for d := range replicas {
			n := int64(0)
			for _, s := range order[d*each+first:][:together] {
				n += work[s]
			}
			most = max(most, n)
		}
		sum += most
	}
	return sum
}

// TestMeasureDocuments compares shares with those counted from the positions of tokens.
func TestMeasureDocuments(t *testing.T) {
	const sequence, batch, replicas = 256, 12, 4
	run, windows := unequalRun(t, sequence, batch), []int64{0, 40, 0}
	data, err := newTokenData(run, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, together := range []int{1, 3} {
		work, err := MeasureDocuments(run, "", windows, replicas, together)
		if err != nil {
			t.Fatal(err)
		}
		if work.Sequences != 60 {
			t.Errorf("%d sequences", work.Sequences)
		}
		var seen, slowest, all float64
		for step := range int64(work.Sequences / batch) {
			waits := make([]float64, batch/replicas/together)
			for i := range waits {
				for d := range replicas {
					sum := 0.0
					for k := range together {
						s := pairsByPosition(t, data, step+1, int64(d*batch/replicas+i*together+k), windows)
						sum, all = sum+s[0], all+s[1]
					}
					seen, waits[i] = seen+sum, max(waits[i], sum)
				}
				slowest += waits[i] * replicas
			}
		}
		if math.Abs(work.Share-seen/all) > 1e-12 || math.Abs(work.Slowest-slowest/all) > 1e-12 || work.Slowest <= work.Share {
			t.Errorf("%+v, want shares %v and %v", work, seen/all, slowest/all)
		}
	}
}

// pairsByPosition counts the query-key pairs of a sequence, within documents and without them.
func pairsByPosition(t *testing.T, data *tokenData, step, sequence int64, windows []int64) (sums [2]float64) {
	t.Helper()
	positions := make([]int32, data.run.Sequence)
	if err := data.Marks(ir.AsPositions, ir.SectionStep, step, sequence, 0, positions, 1); err != nil {
		t.Fatal(err)
	}
	for _, w := range windows {
		if w == 0 {
			w = data.run.Sequence
		}
		for i, p := range positions {
			sums[0] += float64(min(int64(p)+1, w))
			sums[1] += float64(min(int64(i)+1, w))
		}
	}
	return sums
}
