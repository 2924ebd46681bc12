package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/data/corpus"
)

// evalOf runs eval --json and returns its output.
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

// The loss of one window equals the loss of a training step on that window; the loss of several windows is the mean
// of their losses.
func TestEvalIsTheLossOfSteps(t *testing.T) {
	inBase(t)
	text := []byte(strings.Repeat("to be, or not to be: that is the question. ", 9))[:5*64+1+10]
	if err := os.WriteFile("all.txt", text, 0o644); err != nil {
		t.Fatal(err)
	}
	const common = "train.batch=1 schedule.dp=1 train.holdout=0 "
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--steps", "0", "--save", "start.ckpt"}, sets(common)...)...)
	args := append([]string{"eval", "tiny.sppo", "--resume", "start.ckpt", "-q"}, sets(common)...)
	if _, notes := sppovm(t, t.Context(), args...); strings.Contains(notes, "holdout") {
		t.Errorf("eval says that the settings of the run differ:\n%s", notes)
	}
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
	var first []float32
	for _, how := range []string{
		"", `train.data=tokens("all.bin",type=uint16,shuffle=on)`, "schedule.sp=1 schedule.pp=2 schedule.dp=2 train.batch=2",
		"schedule.sp=1 schedule.pp=1 schedule.dp=4 train.batch=4", "train.holdout=0.1 train.eval_batch=3",
		"schedule.sp=4 schedule.pp=1 schedule.sp_mode=ring schedule.align=8", "schedule.sp=1 schedule.pp=2 train.batch=3 schedule.microbatch=3",
		"schedule.sp=2 schedule.pp=1 schedule.sp_mode=ulysses schedule.dp=2 train.batch=4 schedule.microbatch=2 schedule.subsequences=1",
	} {
		args := append([]string{"tiny.sppo", "--resume", "start.ckpt", "--token-losses", "losses.bin"}, sets(common+`train.data=text("all.txt") `+how)...)
		e := evalOf(t, args...)
		each := tokenLosses(t, "losses.bin")
		if first == nil {
			first = each
		}
		compareTokens(t, how, each, first)
		checkBuckets(t, how, e, each)
		if e.Windows != 5 || e.Left != 10 || e.Tokens != 320 || math.Abs(float64(e.Loss)-sum/5) > 2e-6 {
			t.Errorf("%s: %+v, and steps have the mean %.7f", how, e, sum/5)
		}
		if p := math.Exp(float64(e.Loss)); math.Abs(float64(e.Perplexity)/p-1) > 1e-9 {
			t.Errorf("perplexity %v of a loss of %v", e.Perplexity, e.Loss)
		}
	}
}

func tokenLosses(t *testing.T, file string) (list []float32) {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil || len(raw)%4 != 0 {
		t.Fatalf("%d bytes: %v", len(raw), err)
	}
	for i := 0; i < len(raw); i += 4 {
		list = append(list, math.Float32frombits(binary.LittleEndian.Uint32(raw[i:])))
	}
	return list
}

// compareTokens compares the loss of each token with its loss under another division of the job.
func compareTokens(t *testing.T, how string, got, want []float32) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d losses, want %d", how, len(got), len(want))
	}
	for i := range want {
		if !(math.Abs(float64(got[i]-want[i])) <= 2e-5) {
			t.Fatalf("%s: the loss of token %d is %v, want %v", how, i, got[i], want[i])
		}
	}
}

// checkBuckets checks the mean loss and the buckets against those computed from the losses of the tokens, in 5
// windows of 64 tokens.
func checkBuckets(t *testing.T, how string, e evaluation, each []float32) {
	t.Helper()
	ends, at := []int64{1, 2, 4, 8, 16, 32, 64}, int64(0)
	if len(e.Positions) != len(ends) || len(each) != 320 {
		t.Fatalf("%s: %d losses, buckets %+v", how, len(each), e.Positions)
	}
	all := 0.0
	for i, end := range ends {
		sum := 0.0
		for window := range int64(5) {
			for p := at; p < end; p++ {
				sum += float64(each[window*64+p])
			}
		}
		n := 5 * (end - at)
		if b := e.Positions[i]; b.First != at || b.Last != end-1 || b.Tokens != n || math.Abs(float64(b.Loss)-sum/float64(n)) > 1e-9 {
			t.Errorf("%s: bucket %+v, want positions %d to %d, %d tokens, loss %v", how, b, at, end-1, n, sum/float64(n))
		}
		all, at = all+sum, end
	}
	if math.Abs(float64(e.Loss)-all/320) > 1e-9 {
		t.Errorf("%s: the loss is %v, that of all tokens %v", how, e.Loss, all/320)
	}
}

// Several processes give the same losses as one process, bit for bit.
func TestEvalInProcesses(t *testing.T) {
	inBase(t)
	text := strings.Repeat("to be, or not to be: that is the question. ", 9)
	if err := os.WriteFile("all.txt", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	set := sets(`train.batch=2 schedule.dp=2 schedule.sp=1 train.holdout=0 train.data=text("all.txt")`)
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--steps", "0", "--save", "start.ckpt"}, set...)...)
	args := append([]string{"tiny.sppo", "--resume", "start.ckpt", "-q", "--json"}, set...)
	want := evalOf(t, append(args, "--token-losses", "one.bin")...)
	all := launchCommand(t, "eval", 2, inWorld(t, 2, append(args, "--token-losses", "many.bin")...))
	var printed [2][]byte
	for i := range all {
		var err error
		if printed[i], err = io.ReadAll(all[i].out); err != nil {
			t.Fatal(err)
		}
	}
	end(t, all)
	for i, p := range all {
		if p.code != cli.Done {
			t.Fatalf("process %d: exit %d\n%s", i, p.code, p.errs.String())
		}
	}
	var got evaluation
	if err := json.Unmarshal(printed[0], &got); err != nil || got.Loss != want.Loss || got.Windows != want.Windows {
		t.Errorf("%+v, one process has %+v: %v", got, want, err)
	}
	if one, many := tokenLosses(t, "one.bin"), tokenLosses(t, "many.bin"); !slices.Equal(one, many) {
		t.Error("several processes have other losses than one")
	}
	if len(printed[1]) > 0 {
		t.Errorf("process 1 prints %q", printed[1])
	}
}

// A file of losses appears completely or not at all.
func TestEvalLeavesNoPartOfAFile(t *testing.T) {
	inBase(t)
	if err := os.WriteFile("all.txt", []byte(strings.Repeat("to be, or not to be: that is the question. ", 30)), 0o644); err != nil {
		t.Fatal(err)
	}
	set := sets(`train.holdout=0 train.data=text("all.txt")`)
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--steps", "0", "--save", "start.ckpt"}, set...)...)
	before, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stop := &stopper{cancel: cancel}
	args := append([]string{"eval", "tiny.sppo", "--resume", "start.ckpt", "--token-losses", "losses.bin"}, set...)
	if code := app.Main(&cli.Env{Context: ctx, Stdout: io.Discard, Stderr: stop}, args); code == cli.Done {
		t.Error("a stopped evaluation succeeds")
	}
	after, err := os.ReadDir(".")
	if err != nil || len(after) != len(before) {
		t.Errorf("%v are there, %v were: %v", after, before, err)
	}
}

// stopper receives the messages of an evaluation and stops it at the first progress message.
type stopper struct{ cancel func() }

func (s *stopper) Write(text []byte) (int, error) {
	if strings.Contains(string(text), "windows  loss") {
		s.cancel()
	}
	return len(text), nil
}

// The splits train and validation are the parts of the data that a run uses for training and for validation.
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

// writeDocuments writes a folder of bytes as tokens, with an index of documents that each end with a full stop, and with
// a mask that excludes spaces. It returns the number of documents.
func writeDocuments(t *testing.T, dir, text string) (documents int64) {
	t.Helper()
	var bin, idx, mask []byte
	length := uint64(0)
	for i, b := range []byte(text) {
		bin = append(bin, b, 0)
		mask = append(mask, map[bool]byte{true: 0, false: 1}[b == ' '])
		if length++; b == '.' || i == len(text)-1 {
			idx = binary.LittleEndian.AppendUint64(idx, length)
			length, documents = 0, documents+1
		}
	}
	m := corpus.Manifest{Type: "uint16", Tokens: int64(len(text)), Documents: documents, Highest: 255, EOS: -1, Masks: true,
		Shards: []corpus.Shard{{Name: "a", Tokens: int64(len(text)), Documents: documents, Highest: 255}}}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"a.bin": bin, "a.idx": idx, "a.mask": mask} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Write(dir); err != nil {
		t.Fatal(err)
	}
	return documents
}

// With documents or masks, the loss of each window is that of a training step on the same sequence, and the mean is over
// the labels that count. The losses of the others are NaN.
func TestEvalOfDocuments(t *testing.T) {
	inBase(t)
	text := strings.Repeat("to be, or not to be: that is the question. aye.", 9)[:5*64+9]
	writeDocuments(t, "all", text)
	const common = "train.batch=1 schedule.dp=1 train.holdout=0 train.optimizer=adamw(lr=1e-30) "
	sppovm(t, t.Context(), append([]string{"run", "tiny.sppo", "-q", "--steps", "0", "--save", "start.ckpt"}, sets(common)...)...)
	for _, options := range []string{
		"documents=index,masks=ignore", "documents=46,masks=on", "documents=off,masks=on", "documents=index,masks=on,pack=whole", "documents=index,masks=ignore,pack=whole",
	} {
		args := append([]string{"tiny.sppo", "--resume", "start.ckpt"}, sets(common+`train.data=tokens("all",shuffle=off,`+options+")")...)
		e := evalOf(t, append(args, "--token-losses", "losses.bin")...)
		out, _ := sppovm(t, t.Context(), append([]string{"run", "--json", "-q", "--steps", fmt.Sprint(e.Windows)}, args...)...)
		steps, each := losses(t, out), tokenLosses(t, "losses.bin")
		if e.Windows < 5 || len(each) != 64*int(e.Windows) || len(steps) != int(e.Windows) {
			t.Fatalf("%s: %d windows, %d losses, %d steps", options, e.Windows, len(each), len(steps))
		}
		all, counted := 0.0, int64(0)
		for w, want := range steps {
			sum, n := 0.0, 0
			for _, x := range each[64*w:][:64] {
				if x == x {
					sum, n = sum+float64(x), n+1
				}
			}
			if n == 0 || n == 64 || math.Abs(sum/float64(n)-want) > 2e-6 {
				t.Errorf("%s: window %d has loss %.7f of %d labels, and a step has %.7f", options, w, sum/float64(n), n, want)
			}
			all, counted = all+sum, counted+int64(n)
		}
		if e.Tokens != counted || math.Abs(float64(e.Loss)-all/float64(counted)) > 2e-6 {
			t.Errorf("%s: %+v, want %d labels with loss %.7f", options, e, counted, all/float64(counted))
		}
		half := evalOf(t, append(args, "--split", "validation", "--set", "train.holdout=0.5", "--set", "train.eval_batch=1")...)
		if half.Windows < 2 || half.Windows > 4 || half.Tokens >= counted || half.Tokens == 0 {
			t.Errorf("%s: half has %d windows and %d labels", options, half.Windows, half.Tokens)
		}
	}
}
