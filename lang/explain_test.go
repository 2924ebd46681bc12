package lang

import (
	"strings"
	"testing"
)

func TestExplain(t *testing.T) {
	var b strings.Builder
	for _, word := range []string{"", "model", "schedule.offload", "optimizer", "train.optimizer", "adamw", "train.data", "train.optimizer.betas", "cluster.matmul_efficiency", "indivisible"} {
		text, err := Explain(word)
		if err != nil {
			t.Fatal(err)
		}
		b.WriteString("==== " + word + "\n" + text)
	}
	golden(t, "testdata/explain.want", b.String())
	for _, k := range Keys {
		if text, err := Explain(k.Path()); err != nil || !strings.HasPrefix(text, k.Path()+"\n") {
			t.Errorf("%s: %v\n%s", k.Path(), err, text)
		}
	}
	for word, near := range map[string]string{"ofload": "schedule.offload", "schedule.ofload": "schedule.offload", "modl": "model", "length-sum": "lengths-sum"} {
		if _, err := Explain(word); err == nil || !strings.Contains(err.Error(), near) {
			t.Errorf("%s: %v", word, err)
		}
	}
	if _, err := Explain("quite unknown"); err == nil {
		t.Error("an unknown word is explained")
	}
}

func TestNearest(t *testing.T) {
	words := []string{"offload", "order", "mux", "off", "k"}
	for word, want := range map[string]string{"ofload": "offload", "offlaod": "offload", "oder": "order", "mx": "mux", "kv": "k", "b": "", "zebra": "", "": ""} {
		if got := nearest(word, words); got != want {
			t.Errorf("%q is nearest to %q, not %q", word, got, want)
		}
	}
}

func TestShowNumber(t *testing.T) {
	for _, c := range []struct {
		x    float64
		d    dim
		want string
	}{
		{8, dimCount, "8"}, {1 << 20, dimCount, "1M"}, {1000, dimCount, "1000"}, {0.5, dimCount, "0.5"}, {-3, dimCount, "-3"},
		{80 << 30, dimBytes, "80GiB"}, {2e12, dimBytes, "2TB"}, {32e9, dimRate, "32GB/s"}, {312e12, dimCompute, "312TFLOPS"},
		{5e-6, dimDuration, "5us"}, {0, dimRate, "0"},
	} {
		if got := showNumber(c.x, c.d); got != c.want {
			t.Errorf("%g in %s is shown as %s, not %s", c.x, c.d, got, c.want)
		}
	}
}

// The hint for a number out of range names the bound that it exceeds.
func TestRangeHint(t *testing.T) {
	for num, want := range map[float64]string{0: "it must be above 0", 1e30: "it must be at most 1e+21"} {
		var got string
		positive(dimCount).number.fit("lr", value{num: num}, func(d *Diagnostic) { got = d.Hint })
		if got != want {
			t.Errorf("%g: %q, want %q", num, got, want)
		}
	}
}

// Explain describes every term of the glossary and every value of a key, and lists all terms.
func TestWordsAreExplained(t *testing.T) {
	all, err := Explain("")
	if err != nil {
		t.Fatal(err)
	}
	for _, term := range Terms {
		if text, err := Explain(term.Name); err != nil || !strings.Contains(text, term.Name) || !strings.Contains(all, term.Name) {
			t.Errorf("%s: %v\n%s", term.Name, err, text)
		}
		if FindKey(term.Name) != nil || findBlock(term.Name) != nil {
			t.Errorf("%s is a key or a block and needs no other explanation", term.Name)
		}
	}
	for _, k := range Keys {
		for _, v := range k.values() {
			if text, err := Explain(v); err != nil || text == "" {
				t.Errorf("%s, a value of %s: %v", v, k.Path(), err)
			}
		}
	}
	for word, part := range map[string]string{"MFU": "utilization", "ulysses": "all-to-all", "carry": "may lag", "rank": "One GPU of a job", "text": "one token per byte"} {
		if text, err := Explain(word); err != nil || !strings.Contains(text, part) {
			t.Errorf("%s: %v\n%s", word, err, text)
		}
	}
}

// The hint for a unit written in the wrong letter case names the unit as it should be written.
func TestUnitsInOtherLetters(t *testing.T) {
	for word, want := range map[string]string{"k": "K", "m": "M", "kib": "KiB", "GIB": "GiB"} {
		if got := (&evaluator{}).unitHint(word); got != "did you mean `"+want+"`?" {
			t.Errorf("%s: %s", word, got)
		}
	}
}
