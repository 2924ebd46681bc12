package main

import (
	"bytes"
	"encoding/json"
	"math"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train/probe"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// smallest is a scale at which everything is measured quickly.
var smallest = probe.Scale{
	DType: ir.F32, Inner: 32, Rows: []int64{8, 32}, Tokens: []int64{4, 16}, Prefix: 16, Heads: probe.Heads{Heads: 2, KVHeads: 1, Dim: 8}, Bytes: 64 << 10, Cols: 64,
}

// The cluster file that probe writes is in the standard style, and a spec that imports it has the measured
// figures.
func TestProbedFileIsACluster(t *testing.T) {
	t.Chdir(t.TempDir())
	f := probeFlags{run: runFlags{device: "cpu", blas: "go", json: true}, out: "here.sppo", name: "here", ranks: 2, scale: smallest, rounds: 2}
	var stdout, stderr bytes.Buffer
	if err := f.measure(&cli.Env{Context: t.Context(), Stdout: &stdout, Stderr: &stderr}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("here.sppo")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := lang.Format("here.sppo", text); err != nil || string(again) != string(text) {
		t.Errorf("formatted again (%v):\n%s\nit was\n%s", err, again, text)
	}
	for _, line := range strings.Split(string(text), "\n") { // every figure has its origin
		key, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(line, " = ") && !strings.Contains(line, "#") && !slices.Contains([]string{"nodes", "gpus_per_node", "device_memory", "host_memory"}, key) {
			t.Errorf("without a source: %s", line)
		}
	}
	spec := "import \"here.sppo\"\nmodel m { layers = 2 hidden = 64 heads = 2 vocab = 64 family = gpt dtype = bf16 }\ncluster it = here()\n" +
		"train { sequence = 64 batch = 1 data = random() }\nschedule s { sp = 1 pp = 2 dp = 1 }\n"
	parsed, err := lang.Parse("spec.sppo", []byte(spec), lang.Options{Shipped: shipped.Files})
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	lines := strings.Split(strings.TrimSpace(stdout.String()), "\n")
	var last probedLine
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || !last.Done {
		t.Fatalf("%v: %s", err, lines[len(lines)-1])
	}
	sameFigures(t, ir.Machine(parsed.Cluster), last.Machine)
	rounds := regexp.MustCompile(`(?m)^measurement 1 of (\d+): \S.* on \d+ ranks?$`).FindStringSubmatch(stderr.String())
	if want := strconv.Itoa(2 * (len(lines) - 1)); rounds == nil || rounds[1] != want { // each in two rounds
		t.Errorf("no progress of %s measurements:\n%s", want, stderr.String())
	}
	if len(lines) < 20 || !strings.Contains(stderr.String(), "matmul f32 [8,32] x [32,32] on 2 ranks: ") {
		t.Errorf("%d measurements were told:\n%s", len(lines), stderr.String())
	}
}

// sameFigures compares all numbers of two machines to the precision of the file.
func sameFigures(t *testing.T, got, want ir.Machine) {
	t.Helper()
	near := func(field string, a, b float64) {
		if math.Abs(a-b) > 1e-3*math.Abs(b) {
			t.Errorf("%s: the spec has %g, measured was %g", field, a, b)
		}
	}
	g, w := reflect.ValueOf(got), reflect.ValueOf(want)
	for i := range g.NumField() {
		field := g.Type().Field(i).Name
		switch x := w.Field(i).Interface().(type) {
		case float64:
			near(field, g.Field(i).Float(), x)
		case int64:
			near(field, float64(g.Field(i).Int()), float64(x))
		case []ir.CurvePoint:
			points := g.Field(i).Interface().([]ir.CurvePoint)
			if len(points) != len(x) {
				t.Fatalf("%s: %v, measured was %v", field, points, x)
			}
			for j := range x {
				near(field, points[j][0], x[j][0])
				near(field, points[j][1], x[j][1])
			}
		}
	}
}

// A GPU is matched with the shipped cluster of that GPU, but not with that of another variant.
func TestSheets(t *testing.T) {
	for card, want := range map[string]string{
		"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100-80g", "NVIDIA B200": "b200",
		"NVIDIA A800-SXM4-80GB": "a800", "NVIDIA H20": "h20", "NVIDIA GH200 480GB": "gh200", "NVIDIA GB200": "gb200", "NVIDIA L40S": "l40s",
		"NVIDIA H100 PCIe": "", "NVIDIA H100 NVL": "", "NVIDIA L40": "", "NVIDIA GB300": "",
	} {
		c := sheetOf(card)
		switch {
		case c == nil && want != "":
			t.Errorf("%s: no cluster, want %s", card, want)
		case c != nil && (c.Name != want || c.PeakBF16 < 1e14):
			t.Errorf("%s: %s with %g, want %q", card, c.Name, c.PeakBF16, want)
		}
	}
}
