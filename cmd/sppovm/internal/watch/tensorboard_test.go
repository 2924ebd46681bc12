package watch

import (
	"encoding/json"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// curve maps steps to the values of a tag.
type curve map[int]float64

// written writes the events of a run that reaches step 4, resumes from step 2 and ends after step 5. It returns
// the curves that a reader should find.
func written(t *testing.T, dir string) map[string]curve {
	t.Helper()
	want := map[string]curve{}
	put := func(tag string, step int, v float64) {
		if want[tag] == nil {
			want[tag] = curve{}
		}
		want[tag][step] = float64(float32(v))
	}
	split := &Split{0.5, 0.25, 0.125, 0.125}
	part := func(first, last int, predicted *Prediction) {
		b, err := NewTensorBoard(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		observe := func(r Record) {
			if err := b.Observe(r); err != nil {
				t.Fatal(err)
			}
		}
		observe(&Run{Name: "job", First: first, Steps: last, Predicted: predicted})
		if predicted != nil {
			put("predicted/step_s", 0, 0.5)
			for _, p := range split.Parts() {
				put("predicted/"+p.Key, 0, p.Share)
			}
		}
		for step := first + 1; step <= last; step++ {
			loss := 5 - 0.1*float64(step) + float64(first) // different losses in the second part
			observe(&Step{Step: step, Loss: Number(loss), TokensPerSecond: 1e6, Seconds: 0.25, GradNorm: 3, LR: Number(1e-4 * float64(step)), Split: split, GradNorms: map[string]Number{"layer.10": 2, "layer.9": 1}, Skipped: step == 1})
			if step == 1 {
				put("train/skipped", step, 1)
			}
			put("loss/train", step, loss)
			put("speed/tokens_per_s", step, 1e6)
			put("speed/step_s", step, 0.25)
			put("train/grad_norm", step, 3)
			put("train/lr", step, 1e-4*float64(step))
			put("grad_norm/layer.9", step, 1)
			put("grad_norm/layer.10", step, 2)
			for _, p := range split.Parts() {
				put("time/"+p.Key, step, p.Share)
			}
		}
		observe(&Validation{Step: last, Loss: 4, ByPosition: []Bucket{{0, 0, 6, 1}, {1, 1, 5, 1}}})
		put("loss/validation", last, 4)
		put("loss_by_position/0-0", last, 6)
		put("loss_by_position/1-1", last, 5)
		observe(&Note{Note: "a remark"})
		observe(&Done{Steps: last})
	}
	part(0, 4, &Prediction{Seconds: 0.5, Split: split})
	time.Sleep(10 * time.Millisecond)
	part(2, 5, nil)
	for _, tag := range []string{"loss/validation", "loss_by_position/0-0", "loss_by_position/1-1"} {
		delete(want[tag], 4) // the resumed run validates only after step 5
	}
	return want
}

// An event is framed with correct checksums, and a resumed run writes a second file.
func TestFrames(t *testing.T) {
	// The frame of a 3-byte event, with the checksums that tensorboard's masked_crc32c computes.
	if got := frame([]byte("abc")); !slices.Equal(got, []byte{3, 0, 0, 0, 0, 0, 0, 0, 0xb0, 0x99, 0x49, 0x0e, 'a', 'b', 'c', 0x6e, 0x57, 0xf1, 0x21}) {
		t.Errorf("% x", got)
	}
	dir := t.TempDir()
	written(t, dir)
	files, err := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
	if err != nil || len(files) != 2 {
		t.Fatalf("%v: %v", files, err)
	}
}

// TensorBoard's own reader finds the expected curves. For a resumed run, the steps after the checkpoint come
// from the second file.
func TestTensorBoardReads(t *testing.T) {
	const script = `
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
a = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
a.Reload()
print(json.dumps({tag: {e.step: e.value for e in a.Scalars(tag)} for tag in a.Tags()["scalars"]}))
`
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		python = "python3"
	}
	if err := exec.Command(python, "-c", "import tensorboard").Run(); err != nil {
		t.Skipf("%s has no module tensorboard; SPPO_PYTHON may name a Python that has: %v", python, err)
	}
	dir := t.TempDir()
	want := written(t, dir)
	c := exec.Command(python, "-c", script, dir)
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]curve
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(got))); diff != "" {
		t.Error(diff)
	}
	near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) <= 1e-12*math.Abs(a) })
	if diff := cmp.Diff(want, got, near); diff != "" {
		t.Error(diff)
	}
}
