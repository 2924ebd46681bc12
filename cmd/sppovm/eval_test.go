package main

import (
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"
)

// evalOf runs eval and returns what it prints with --json.
func evalOf(t *testing.T, args ...string) evaluation {
	t.Helper()
	out, _ := sppovm(t, t.Context(), append([]string{"eval"}, append(args, "--json", "-q")...)...)
	var e evaluation
	if err := json.Unmarshal([]byte(out), &e); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return e
}

func sets(words string) (args []string) {
	for _, s := range strings.Fields(words) {
		args = append(args, "--set", s)
	}
	return args
}

// Over one window the loss is that of a training step on it, and over many the mean of those of each.
func TestEvalIsTheLossOfSteps(t *testing.T) {
	inBase(t)
	text := []byte(strings.Repeat("to be, or not to be: that is the question. ", 9))[:5*64+1+10]
	if err := os.WriteFile("all.txt", text, 0o644); err != nil {
		t.Fatal(err)
	}
	const common = "train.batch=1 schedule.dp=1 train.holdout=0 "
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--steps", "0", "--save", "start.ckpt"}, sets(common)...)...)
	sum := 0.0
	for window := range 5 {
		if err := os.WriteFile("one.txt", text[64*window:64*(window+1)+1], 0o644); err != nil {
			t.Fatal(err)
		}
		args := append([]string{"tiny.sppo", "--resume", "start.ckpt"}, sets(common+`train.data=text("one.txt")`)...)
		out, _ := sppovm(t, t.Context(), append([]string{"run", "--json", "-q", "--steps", "1"}, args...)...)
		step := losses(t, out)[0]
		one := evalOf(t, args...)
		if one.Windows != 1 || one.Left != 0 || math.Abs(float64(one.Loss)-step) > 2e-6 {
			t.Errorf("window %d: %+v, and a step has the loss %.7f", window, one, step)
		}
		sum += step
	}
	var flat []byte
	for _, b := range text {
		flat = append(flat, b, 0)
	}
	if err := os.WriteFile("all.bin", flat, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, how := range []string{
		"", `train.data=tokens("all.bin",type=uint16,shuffle=on)`, "schedule.sp=1 schedule.pp=2 schedule.dp=2 train.batch=2",
		"schedule.sp=1 schedule.pp=1 schedule.dp=4 train.batch=4", "train.holdout=0.1 train.eval_batch=3",
		"schedule.sp=4 schedule.pp=1 schedule.sp_mode=ring schedule.align=8",
	} {
		args := append([]string{"tiny.sppo", "--resume", "start.ckpt"}, sets(common+`train.data=text("all.txt") `+how)...)
		e := evalOf(t, args...)
		if e.Windows != 5 || e.Left != 10 || e.Tokens != 320 || math.Abs(float64(e.Loss)-sum/5) > 2e-6 {
			t.Errorf("%s: %+v, and steps have the mean %.7f", how, e, sum/5)
		}
		if p := math.Exp(float64(e.Loss)); math.Abs(float64(e.Perplexity)/p-1) > 1e-9 {
			t.Errorf("perplexity %v of a loss of %v", e.Perplexity, e.Loss)
		}
	}
}

// The splits are the parts that a run trains on and validates on.
func TestEvalOfSplits(t *testing.T) {
	inBase(t)
	text := []byte(strings.Repeat("abcdefgh", 8*64/8))
	if err := os.WriteFile("all.txt", text, 0o644); err != nil {
		t.Fatal(err)
	}
	set := sets(`train.holdout=0.25 train.eval_batch=1 train.data=text("all.txt")`)
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--steps", "0", "--save", "start.ckpt"}, set...)...)
	for split, want := range map[string][2]int64{"all": {7, 63}, "train": {5, 63}, "validation": {1, 63}} {
		e := evalOf(t, append([]string{"tiny.sppo", "--resume", "start.ckpt", "--split", split}, set...)...)
		if e.Windows != want[0] || e.Left != want[1] || e.Split != split {
			t.Errorf("%+v, want %d windows and %d tokens left", e, want[0], want[1])
		}
	}
}
