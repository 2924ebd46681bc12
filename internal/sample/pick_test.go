package sample

import (
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/tokenizer"
)

// kept computes the tokens that a choice allows, with their probabilities, directly from the definition. TopK
// keeps a token if fewer than TopK tokens are more probable. Of the tokens that TopK keeps, TopP keeps a token if
// the more probable ones together have less than the share TopP of the probability of all of them.
func kept(c Choice, logits []float32) map[int32]float64 {
	shares, left := make([]float64, len(logits)), map[int32]float64{}
	for t, x := range logits {
		shares[t] = math.Exp(float64(x) / c.Temperature)
	}
	better := func(t int) (n int, sum float64) {
		for u := range shares {
			if shares[u] > shares[t] {
				n, sum = n+1, sum+shares[u]
			}
		}
		return n, sum
	}
	all := 0.0
	for t := range shares {
		if n, _ := better(t); c.TopK == 0 || n < c.TopK {
			left[int32(t)] = shares[t]
			all += shares[t]
		}
	}
	sum := 0.0
	for t := range left {
		if _, before := better(int(t)); before >= c.TopP*all {
			delete(left, t)
			continue
		}
		sum += left[t]
	}
	for t := range left {
		left[t] /= sum
	}
	return left
}

// TestPick checks that tokens are drawn as often as their probabilities require, to within five standard
// deviations, and that no others are drawn.
func TestPick(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, c := range []Choice{
		{Temperature: 1, TopP: 1}, {Temperature: 0.5, TopP: 1}, {Temperature: 2, TopK: 3, TopP: 1}, {Temperature: 1, TopP: 0.6},
		{Temperature: 1.5, TopK: 6, TopP: 0.8}, {Temperature: 1, TopK: 1, TopP: 1}, {Temperature: 1, TopK: 99, TopP: 1e-9},
	} {
		logits := make([]float32, 11)
		for i := range logits {
			logits[i] = float32(r.NormFloat64() * 2)
		}
		const draws = 20000
		counts := map[int32]float64{}
		for i := range draws {
			counts[c.Pick(logits, i)]++
		}
		want := kept(c, logits)
		for token, p := range want {
			if off := math.Abs(counts[token] - p*draws); off > 5*math.Sqrt(draws*p*(1-p))+1e-6*draws {
				t.Errorf("%+v: token %d was drawn %g of %d times, its probability is %.4f", c, token, counts[token], draws, p)
			}
			delete(counts, token)
		}
		if len(counts) > 0 {
			t.Errorf("%+v: %v were drawn, allowed are %v", c, counts, want)
		}
		greedy := Choice{Temperature: 0, TopK: 3, TopP: 0.5}
		if token := greedy.Pick(logits, 3); logits[token] != slices.Max(logits) {
			t.Errorf("temperature 0 draws token %d of %v", token, logits)
		}
	}
	one, other := Choice{Temperature: 1, TopP: 1, Seed: 1}, Choice{Temperature: 1, TopP: 1, Seed: 2}
	flat, differ := make([]float32, 1000), 0
	for i := range 50 {
		first, again := one.Pick(flat, i), one.Pick(flat, i)
		if first != other.Pick(flat, i) {
			differ++
		}
		if first != again {
			t.Error("one seed draws two tokens")
		}
	}
	if differ < 45 {
		t.Errorf("two seeds differ in %d of 50 tokens", differ)
	}
}

func TestChoiceCheck(t *testing.T) {
	for _, c := range []Choice{{Temperature: -1, TopP: 1}, {Temperature: math.NaN(), TopP: 1}, {Temperature: math.Inf(1), TopP: 1},
		{TopK: -1, TopP: 1}, {TopP: 0}, {TopP: 1.1}, {TopP: math.NaN()}} {
		if c.Check() == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
	if err := (&Choice{TopP: 1}).Check(); err != nil {
		t.Error(err)
	}
}

// texts are strings that tokenizers treat differently at the boundaries of tokens.
var texts = []string{
	"The quick brown fox", " leading and trailing ", "naïve café – “quoted” …", "日本語のテキスト、混ぜて English", "👩‍👩‍👧 emoji 🏳️‍🌈 and 한국어",
	"tabs\tand\nlines\r\n\n  indented", "1234567 3.14159 0x1f", "\x00\x01 control \x7f", "don't we'll I'VE",
}

// TestTextComesInPieces checks that the results of Decode, token by token, followed by Rest, add up to the text
// of all tokens together, and that no piece ends within a character.
func TestTextComesInPieces(t *testing.T) {
	files, err := filepath.Glob("../data/tokenizer/testdata/reference/*")
	if err != nil {
		t.Fatal(err)
	}
	var readers []func() Text
	for _, file := range files {
		if ext := filepath.Ext(file); ext == ".json" || ext == ".model" {
			tok, err := tokenizer.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			readers = append(readers, func() Text { return &Tokens{Tokenizer: tok} })
		}
	}
	if len(readers) < 8 {
		t.Fatalf("%d tokenizers", len(readers))
	}
	readers = append(readers, func() Text { return &Bytes{} })
	for _, open := range readers {
		for _, text := range texts {
			reader := open()
			tokens, err := reader.Encode(text)
			if err != nil {
				t.Fatal(err)
			}
			var got strings.Builder
			for _, token := range tokens {
				piece := reader.Decode(token)
				if strings.HasSuffix(piece, "\ufffd") {
					t.Errorf("%q: a piece %q ends within a character", text, piece)
				}
				got.WriteString(piece)
			}
			got.WriteString(reader.Rest())
			want := text
			if with, ok := reader.(*Tokens); ok {
				want = with.text(ids(tokens))
			}
			if got.String() != want {
				t.Errorf("%s: %q came as %q", fmt.Sprintf("%T", reader), want, got.String())
			}
		}
	}
}

func ids(tokens []int32) (list []uint32) {
	for _, token := range tokens {
		list = append(list, uint32(token))
	}
	return list
}

// Bytes that are not UTF-8 become U+FFFD, immediately if no later byte can complete them.
func TestBrokenBytes(t *testing.T) {
	var b Bytes
	got := ""
	for _, token := range []int32{'a', 0xff, 0xe6, 0x97, 'b', 0xe6} {
		got += b.Decode(token) + "|"
	}
	if got += b.Rest(); got != "a|\ufffd|||\ufffdb||\ufffd" {
		t.Errorf("%q", got)
	}
}
