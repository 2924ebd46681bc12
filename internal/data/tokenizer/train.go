package tokenizer

import (
	"bytes"
	"container/heap"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// trainingSplit is the expression that a trained tokenizer uses to split text. It is taken from Llama-3. Words
// keep the space before them, and numbers are cut into groups of at most three digits.
const trainingSplit = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// EndOfText is the token of a trained tokenizer that ends a document.
const EndOfText = "<|endoftext|>"

// Trainer counts the words of a text. Train builds a byte-level BPE from the counts. A Trainer is not safe for
// concurrent use.
type Trainer struct {
	tok   *Tokenizer
	enc   encoder
	words map[string]int64
}

// NewTrainer returns an empty trainer.
func NewTrainer() *Trainer {
	vocab, merges := baseVocab(), [][2]string{}
	data, err := trainedFile(vocab, merges)
	if err == nil {
		var tok *Tokenizer
		if tok, err = Read(data); err == nil {
			return &Trainer{tok: tok, words: map[string]int64{}}
		}
	}
	panic("internal: the tokenizer of bytes: " + err.Error())
}

// Add counts the words of a text. The end-of-document token is not counted.
func (t *Trainer) Add(text string) error {
	if err := t.tok.pieces(&t.enc, validUTF8(text)); err != nil {
		return err
	}
	for _, p := range t.enc.pieces {
		if p.done {
			continue
		}
		if n, ok := t.words[p.text]; ok {
			t.words[p.text] = n + 1
		} else {
			t.words[string([]byte(p.text))] = 1
		}
	}
	return nil
}

// Cut is like the method of tokenizers: the words of a text are those of the parts on both sides of a cut.
func (t *Trainer) Cut(text []byte) int { return t.tok.Cut(text) }

// Join adds the counts of another trainer.
func (t *Trainer) Join(other *Trainer) {
	for word, n := range other.words {
		t.words[word] += n
	}
}

// Words returns the number of distinct words.
func (t *Trainer) Words() int { return len(t.words) }

// baseVocab returns the end-of-document token, followed by the bytes in the order of their characters.
func baseVocab() []string {
	out := []string{EndOfText}
	chars := slices.Clone(byteChars[:])
	slices.Sort(chars)
	for _, r := range chars {
		out = append(out, string(r))
	}
	return out
}

// word is a word divided into tokens, with its number of occurrences.
type word struct {
	ids   []uint32
	count int64
}

// pairCount is an entry of the queue: a pair, and the count of the pair when the entry was added.
type pairCount struct {
	pair  uint64
	count int64
}

// pairQueue orders pairs by decreasing count; ties go to lower IDs.
type pairQueue []pairCount

func (q pairQueue) Len() int { return len(q) }
func (q pairQueue) Less(i, j int) bool {
	return q[i].count > q[j].count || q[i].count == q[j].count && q[i].pair < q[j].pair
}
func (q pairQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *pairQueue) Push(x any)   { *q = append(*q, x.(pairCount)) }
func (q *pairQueue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// training is the state between two merges.
type training struct {
	words  []word
	counts map[uint64]int64
	where  map[uint64]map[int32]bool // words that contain or contained the pair
	queue  pairQueue
}

// Train merges the most frequent adjacent pair until the vocabulary has `size` tokens or no pair occurs twice,
// and returns a tokenizer.json. The result depends only on the words, not on their order. progress receives the
// number of tokens so far; it may be nil.
func (t *Trainer) Train(size int, progress func(tokens int)) ([]byte, error) {
	vocab := baseVocab()
	if size < len(vocab) {
		return nil, fmt.Errorf("a vocabulary of %d is too small: the bytes and the end of a document need %d tokens", size, len(vocab))
	}
	if size > maxID {
		return nil, fmt.Errorf("a vocabulary of %d is too large: the limit is %d", size, maxID)
	}
	if len(t.words) == 0 {
		return nil, errors.New("there is no text to train on")
	}
	s := t.start()
	known := make(map[string]bool, size)
	for _, name := range vocab {
		known[name] = true
	}
	merges := [][2]string{}
	for len(vocab) < size {
		best, ok := s.best()
		if !ok {
			break
		}
		a, b := uint32(best>>32), uint32(best)
		name := vocab[a] + vocab[b]
		if known[name] { // another pair gives the same text, and names must be unique
			delete(s.counts, best)
			continue
		}
		known[name] = true
		merges = append(merges, [2]string{vocab[a], vocab[b]})
		vocab = append(vocab, name)
		s.merge(best, uint32(len(vocab)-1))
		if progress != nil {
			progress(len(vocab))
		}
	}
	return trainedFile(vocab, merges)
}

// start splits words into bytes and counts pairs.
func (t *Trainer) start() *training {
	s := &training{counts: map[uint64]int64{}, where: map[uint64]map[int32]bool{}}
	texts := make([]string, 0, len(t.words))
	for text := range t.words {
		texts = append(texts, text)
	}
	slices.Sort(texts)
	m := t.tok.model.(*bpe)
	for i, text := range texts {
		w := word{count: t.words[text]}
		for j := range len(text) {
			w.ids = append(w.ids, uint32(m.bytes[text[j]]))
		}
		s.words = append(s.words, w)
		s.tally(int32(i), 1)
	}
	for p, n := range s.counts {
		s.queue = append(s.queue, pairCount{p, n})
	}
	heap.Init(&s.queue)
	return s
}

// tally adds the pairs of a word to the counts, or subtracts them if sign is -1.
func (s *training) tally(i int32, sign int64) {
	w := &s.words[i]
	for j := 1; j < len(w.ids); j++ {
		p := pair(w.ids[j-1], w.ids[j])
		s.counts[p] += sign * w.count
		if sign > 0 {
			if s.where[p] == nil {
				s.where[p] = map[int32]bool{}
			}
			s.where[p][i] = true
		}
	}
}

// best removes the most frequent pair from the queue. Entries whose count has changed are requeued with the
// current count.
func (s *training) best() (uint64, bool) {
	for len(s.queue) > 0 {
		top := s.queue[0]
		now := s.counts[top.pair]
		switch {
		case now == top.count && now >= 2:
			heap.Pop(&s.queue)
			return top.pair, true
		case now >= 2:
			s.queue[0].count = now
			heap.Fix(&s.queue, 0)
		default:
			heap.Pop(&s.queue)
		}
	}
	return 0, false
}

// merge replaces a pair with one token in all words.
func (s *training) merge(p uint64, id uint32) {
	a, b := uint32(p>>32), uint32(p)
	fresh := map[uint64]bool{}
	for i := range s.where[p] {
		w := &s.words[i]
		s.tally(i, -1)
		out := w.ids[:0]
		for j := 0; j < len(w.ids); j++ {
			if j+1 < len(w.ids) && w.ids[j] == a && w.ids[j+1] == b {
				out = append(out, id)
				j++
			} else {
				out = append(out, w.ids[j])
			}
		}
		w.ids = out
		s.tally(i, 1)
		for j := 1; j < len(out); j++ {
			if out[j-1] == id || out[j] == id {
				fresh[pair(out[j-1], out[j])] = true
			}
		}
	}
	delete(s.where, p)
	for q := range fresh {
		heap.Push(&s.queue, pairCount{q, s.counts[q]})
	}
}

// trainedFile returns the tokenizer.json of a vocabulary and its merges.
func trainedFile(vocab []string, merges [][2]string) ([]byte, error) {
	type object = map[string]any
	ids := make(map[string]int, len(vocab))
	for i, name := range vocab {
		ids[name] = i
	}
	byteLevel := object{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	err := enc.Encode(object{
		"version": "1.0", "truncation": nil, "padding": nil, "normalizer": nil,
		"added_tokens": []object{{"id": 0, "content": EndOfText, "single_word": false, "lstrip": false, "rstrip": false,
			"normalized": false, "special": true}},
		"pre_tokenizer": object{"type": "Sequence", "pretokenizers": []object{
			{"type": "Split", "pattern": object{"Regex": trainingSplit}, "behavior": "Isolated", "invert": false}, byteLevel}},
		"post_processor": byteLevel,
		"decoder":        byteLevel,
		"model": object{"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": ids, "merges": merges},
	})
	return out.Bytes(), err
}
