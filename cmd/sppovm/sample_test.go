package main

import (
	"os"
	"strings"
	"testing"
)

// TestSampleWritesWhatItLearned checks that a model trained on one repeated sentence continues the sentence,
// and that at a high temperature the seed determines the text.
func TestSampleWritesWhatItLearned(t *testing.T) {
	inBase(t)
	const sentence = "the cat sat on the mat; "
	if err := os.WriteFile("words.txt", []byte(strings.Repeat(sentence, 40)), 0o644); err != nil {
		t.Fatal(err)
	}
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--save", "tiny.ckpt"},
		sets("train.steps=200 train.optimizer.lr=1e-2 train.batch=4 train.eval_every=0 schedule.sp=1 schedule.pp=1 schedule.subsequences=1 train.lr_schedule=linear")...)...)
	const written = 30
	want := strings.Repeat(sentence, 3)[len("the cat"):][:written]
	base := []string{"sample", "--resume", "tiny.ckpt", "--max-tokens", "30", "-q"}
	prompt := append(base, "--prompt", "the cat")
	for _, how := range [][]string{{"--temperature", "0"}, {"--top-k", "1", "--seed", "9"}, {"--top-p", "1e-6"}, {"--temperature", "0", "--threads", "1"}} {
		if out, _ := sppovm(t, t.Context(), append(prompt, how...)...); out != want+"\n" {
			t.Errorf("%v: %q, not %q", how, out, want)
		}
	}
	if err := os.WriteFile("prompt.txt", []byte("the cat sat on the mat; the cat"), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, _ := sppovm(t, t.Context(), append(base, "--prompt-file", "prompt.txt", "--temperature", "0")...); out != want+"\n" {
		t.Errorf("from a file: %q, not %q", out, want)
	}
	hot := func(seed string) string {
		out, _ := sppovm(t, t.Context(), append(prompt, "--temperature", "100", "--seed", seed)...)
		return out
	}
	first, again, other := hot("1"), hot("1"), hot("2")
	if first != again || first == other {
		t.Error("text does not follow from the seed")
	}
}
