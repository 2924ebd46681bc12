package tokenizer

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// naiveTrain is like Train, but recounts all pairs for every merge.
func naiveTrain(words map[string]int64, m *bpe, size int) [][2]string {
	vocab := baseVocab()
	known := map[string]bool{}
	for _, v := range vocab {
		known[v] = true
	}
	split := map[string][]uint32{}
	for w := range words {
		for i := range len(w) {
			split[w] = append(split[w], uint32(m.bytes[w[i]]))
		}
	}
	var merges [][2]string
	for len(vocab) < size {
		counts := map[uint64]int64{}
		for w, ids := range split {
			for i := 1; i < len(ids); i++ {
				counts[pair(ids[i-1], ids[i])] += words[w]
			}
		}
		var best uint64
		most := int64(1)
		for p, n := range counts {
			if !known[vocab[p>>32]+vocab[uint32(p)]] && (n > most || n == most && most > 1 && p < best) {
				best, most = p, n
			}
		}
		if most < 2 {
			break
		}
		a, b := uint32(best>>32), uint32(best)
		merges = append(merges, [2]string{vocab[a], vocab[b]})
		vocab = append(vocab, vocab[a]+vocab[b])
		known[vocab[len(vocab)-1]] = true
		for w, ids := range split {
			var out []uint32
			for i := 0; i < len(ids); i++ {
				if i+1 < len(ids) && ids[i] == a && ids[i+1] == b {
					out = append(out, uint32(len(vocab)-1))
					i++
				} else {
					out = append(out, ids[i])
				}
			}
			split[w] = out
		}
	}
	return merges
}

func TestTrainAgreesWithRecounting(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 40 {
		tr := NewTrainer()
		letters := "abc é"[:2+r.IntN(5)]
		for range 1 + r.IntN(60) {
			var b strings.Builder
			for range r.IntN(14) {
				b.WriteByte(letters[r.IntN(len(letters))])
			}
			if err := tr.Add(b.String()); err != nil {
				t.Fatal(err)
			}
		}
		size := 257 + r.IntN(40)
		if tr.Words() == 0 {
			continue
		}
		data, err := tr.Train(size, nil)
		if err != nil {
			t.Fatal(err)
		}
		var f struct{ Model struct{ Merges [][2]string } }
		if err := json.Unmarshal(data, &f); err != nil {
			t.Fatal(err)
		}
		want := naiveTrain(tr.words, tr.tok.model.(*bpe), size)
		if diff := cmp.Diff(want, append([][2]string(nil), f.Model.Merges...)); diff != "" {
			t.Fatal(diff)
		}
	}
}
