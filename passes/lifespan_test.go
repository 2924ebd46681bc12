package passes

import (
	"math"
	"slices"
	"testing"
)

func names(p *Plan, t UnitType) []string {
	var out []string
	for _, u := range p.Units {
		if u.Block == layerBlock && u.Type == t {
			out = append(out, u.Name)
		}
	}
	return out
}

func TestUnitsOfGPT(t *testing.T) {
	p := planOf(t, "tiny.sppo")
	if got := names(p, Type0); !slices.Equal(got, []string{"k", "v"}) {
		t.Errorf("type 0: %v", got)
	}
	want := []string{"ln1.in", "ln1.out", "q", "attn.out", "ln2.in", "ln2.out", "fc1.out", "gelu.out"}
	if got := names(p, Type1); !slices.Equal(got, want) {
		t.Errorf("type 1: %v, want %v", got, want)
	}
	for _, u := range p.Units {
		saved := u.Type != Type2
		if saved != (u.FirstBackward != "") || u.Written == "" || u.LastForward == "" {
			t.Errorf("%+v: a unit is written and read in forward, and read in backward unless transient", u)
		}
	}
}

func TestUnitsOfLlama(t *testing.T) {
	p := planOf(t, "llama-docs.sppo")
	for _, want := range []string{"ln1.in", "q", "attn.out", "gate", "up"} {
		if !slices.Contains(names(p, Type1), want) {
			t.Errorf("type 1 lacks %s: %v", want, names(p, Type1))
		}
	}
	if got := names(p, Type0); !slices.Equal(got, []string{"k", "v"}) {
		t.Errorf("type 0: %v", got)
	}
}

// TestBytesOfThePaper: a GPT layer saves 32 bytes for every token and hidden feature, besides statistics.
func TestBytesOfThePaper(t *testing.T) {
	p := planOf(t, "paper/gpt-7b-1m.sppo")
	sum := 0.0
	for _, u := range p.Units {
		if u.Block == layerBlock && u.Type != Type2 {
			sum += u.BytesPerToken
		}
	}
	got := sum * float64(p.Parallel.SP) / float64(p.Model.Hidden)
	if math.Abs(got-32) > 0.1 {
		t.Errorf("%.3f bytes for every token and feature, want 32", got)
	}
}
