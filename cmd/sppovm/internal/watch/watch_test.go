package watch

import (
	"bytes"
	"errors"
	"io"
	"math"
	"net/http"
	"strings"
	"testing"

	"sppo.dev/internal/vm/sim"
)

func TestSplitOf(t *testing.T) {
	s := SplitOf(sim.Split{Ranks: 2, End: 10, Compute: 10, Copies: 4, Communication: 1})
	if *s != (Split{0.5, 0.2, 0.05, 0.25}) {
		t.Errorf("%+v", s)
	}
	if s := SplitOf(sim.Split{}); s != nil {
		t.Errorf("of nothing: %+v", s)
	}
}

// Compare warns once, after ten steps, if and only if the steps deviate from the prediction.
func TestCompare(t *testing.T) {
	predicted := &Prediction{Seconds: 1, Split: &Split{0.7, 0.1, 0.1, 0.1}, Comparable: true}
	for _, c := range []struct {
		name      string
		predicted *Prediction
		seconds   float64
		split     *Split
		want      string
	}{
		{"as predicted", predicted, 1.2, &Split{0.65, 0.15, 0.05, 0.15}, ""},
		{"slow", predicted, 1.3, nil, "warning: a step takes 1.30 s, but the prediction is 1.00 s;"},
		{"fast", predicted, 0.7, nil, "warning: a step takes 700 ms, but the prediction is 1.00 s;"},
		{"copies", predicted, 1, &Split{0.5, 0.3, 0.1, 0.1}, "warning: compute is 50% of the time, but the prediction is 70%; exposed copies is 30% of the time, but the prediction is 10%;"},
		{"another machine", &Prediction{Seconds: 1, Split: predicted.Split}, 9, nil, ""},
		{"nothing predicted", nil, 9, nil, ""},
	} {
		compare, got := Compare{Predicted: c.predicted}, ""
		for i := range 3 * compareSteps {
			text := compare.Add(&Step{Seconds: Number(c.seconds), Split: c.split})
			if text != "" && (got != "" || i != compareSteps-1) {
				t.Errorf("%s: step %d says %q", c.name, i, text)
			}
			got += text
		}
		if got != c.want && (c.want == "" || !strings.HasPrefix(got, c.want)) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

// full is a writer that fails on the third write and all later ones.
type full struct{ writes int }

func (f *full) Write(b []byte) (int, error) {
	if f.writes++; f.writes > 2 {
		return 0, errors.New("no space left")
	}
	return len(b), nil
}

// An observer that fails is dropped and reported once; the others continue.
func TestFailingObserver(t *testing.T) {
	var good bytes.Buffer
	var failed []string
	o := Observers{Fail: func(name string, err error) { failed = append(failed, name+": "+err.Error()) }}
	o.Add("full", &Lines{W: &full{}})
	o.Add("good", &Lines{W: &good})
	for step := range 5 {
		o.Observe(&Step{Step: step})
	}
	if len(failed) != 1 || failed[0] != "full: no space left" || strings.Count(good.String(), "\n") != 5 {
		t.Errorf("%q, and the other has\n%s", failed, good.String())
	}
}

func TestPrometheus(t *testing.T) {
	p, err := NewPrometheus(0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if !strings.HasPrefix(p.URL(), "http://127.0.0.1:") {
		t.Errorf("it listens at %s", p.URL())
	}
	for _, r := range []Record{
		&Run{Name: "jo\"b\n", Device: "cpu", Machine: "here", First: 3, Steps: 9, DeviceMemory: Memory{Peak: 4096}, Predicted: &Prediction{Seconds: 0.5, Split: &Split{Compute: 1}}},
		&Step{Step: 4, Loss: 5.5, TokensPerSecond: 2000, Seconds: 0.25, LR: 1e-4, Split: &Split{0.5, 0.25, 0.125, 0.125}, GradNorms: map[string]Number{"layer.0": 2}},
		&Step{Step: 5, Loss: Number(math.NaN()), TokensPerSecond: 2000, Seconds: 0.25, Skipped: true},
		&Validation{Step: 5, Loss: 5.25, ByPosition: []Bucket{{1, 1, 7, 1}}},
	} {
		if err := p.Observe(r); err != nil {
			t.Fatal(err)
		}
	}
	answer, err := http.Get(p.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`sppo_run_info{device="cpu",machine="here",run="jo\"b\n",version=""} 1`, "sppo_step 5", "sppo_last_step 9", `sppo_loss{data="train"} NaN`,
		`sppo_loss{data="validation"} 5.25`, "sppo_tokens_total 1000", "sppo_step_seconds_count 2", "sppo_skipped_steps_total 1", `sppo_step_time_share{part="exposed_copies"} 0.25`,
		`sppo_predicted_step_time_share{part="compute"} 1`, "sppo_predicted_step_seconds 0.5", `sppo_memory_peak_bytes{memory="device"} 4096`,
		`sppo_layer_gradient_norm{layer="layer.0"} 2`, `sppo_position_loss{positions="1-1"} 7`,
	} {
		if !strings.Contains(string(text), want+"\n") {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

func TestLayers(t *testing.T) {
	for tensor, want := range map[string]string{"layer.3.wq": "layer.3", "layer.12.ln1.gamma": "layer.12", "embed": "embed", "ln_f.gamma": "ln_f"} {
		if got := LayerOf(tensor); got != want {
			t.Errorf("%s is of %s, want %s", tensor, got, want)
		}
	}
	got := strings.Join(layers(map[string]Number{"layer.10": 1, "head": 1, "layer.9": 1, "embed": 1, "ln_f": 1}), " ")
	if got != "embed layer.9 layer.10 head ln_f" {
		t.Error(got)
	}
}
