package lang

import (
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var shipped = os.DirFS("../internal/shipped")

// base reads a file from disk, but for base.sppo it returns exampleBase.
func base(name string) ([]byte, error) {
	if filepath.Base(name) == "base.sppo" {
		return []byte(exampleBase), nil
	}
	return os.ReadFile(name)
}

func load(t *testing.T, text string, set ...string) *Spec {
	t.Helper()
	s, err := Parse("test.sppo", []byte(text), Options{ReadFile: base, Shipped: shipped, Set: set})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func loadError(t *testing.T, text string, set ...string) Diagnostics {
	t.Helper()
	_, err := Parse("test.sppo", []byte(text), Options{ReadFile: base, Shipped: shipped, Set: set})
	var ds Diagnostics
	if !errors.As(err, &ds) {
		t.Fatalf("no diagnostics: %v", err)
	}
	return ds
}

func glob(t testing.TB, patterns ...string) []string {
	t.Helper()
	var files []string
	for _, pattern := range patterns {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: nothing found: %v", pattern, err)
		}
		files = append(files, found...)
	}
	return files
}

func TestExamplesLoad(t *testing.T) {
	files := glob(t, "../examples/*.sppo", "../examples/paper/gpt-*-*.sppo")
	if len(files) < 18 {
		t.Fatalf("found %d examples only", len(files))
	}
	for _, file := range files {
		if _, err := Load(file, Options{Shipped: shipped}); err != nil {
			t.Errorf("%s:\n%v", file, err)
		}
	}
}

func TestExamplesAreFormatted(t *testing.T) {
	for _, file := range glob(t, "../examples/*.sppo", "../examples/*/*.sppo") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Format(file, text)
		if err != nil {
			t.Error(err)
		} else if diff := cmp.Diff(string(text), string(got)); diff != "" {
			t.Errorf("%s is not in the standard style (-is +should be):\n%s", file, diff)
		}
	}
}

// TestShippedClusters loads each cluster by itself and checks that it sets every key without a default.
func TestShippedClusters(t *testing.T) {
	for name, gpus := range map[string]int{"local": 4, "a100-80g": 8, "h100": 8, "h200": 8, "b200": 8} {
		s := load(t, "import \"base.sppo\"\nimport \"clusters/"+name+".sppo\"\ncluster c = "+name+"\n")
		if s.Cluster.Name != "c" || s.Cluster.GPUs() != gpus {
			t.Errorf("%s: %+v", name, s.Cluster)
		}
		for _, k := range KeysOf(blockCluster) {
			if k.Required() && !s.Written(k.Path()) {
				t.Errorf("%s lacks %s", name, k.Name)
			}
		}
	}
}

func TestPaperTestbed(t *testing.T) {
	s, err := Load("../examples/paper/gpt-7b-1m.sppo", Options{Shipped: shipped})
	if err != nil {
		t.Fatal(err)
	}
	c := s.Cluster
	if c.GPUs() != 32 || c.PeakBF16 != 312e12 || c.D2HBandwidth != 32e9 || c.H2DBandwidth != 32e9 {
		t.Errorf("%+v", c)
	}
	near := func(what string, got, want float64) {
		if got < want*0.999 || got > want*1.001 {
			t.Errorf("%s is %g, not %g", what, got, want)
		}
	}
	near("bus rate in a node", c.NVLinkBandwidth*c.CollectiveEfficiency, 230e9)
	near("bus rate across nodes", c.NodeNetworkBandwidth*c.CollectiveEfficiency, 80e9)
	if s.Train.Sequence != 1024*1024 || s.Schedule.Subsequences.Count != 160 || s.Model.FFN != 4*4096 {
		t.Errorf("%+v", s)
	}
}

func TestAccepted(t *testing.T) {
	for _, file := range glob(t, "testdata/accepted/*.sppo") {
		s, err := Load(file, Options{ReadFile: base})
		if err != nil {
			t.Error(err)
			continue
		}
		got, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		golden(t, strings.TrimSuffix(file, ".sppo")+".want", string(got)+"\n")
	}
}

func TestOverrides(t *testing.T) {
	text := "import \"base.sppo\"\n\nlet n = 8\n\ncluster c = four(ranks = 4)\n\nschedule s {\n  sp = 2\n}\n"
	s := load(t, text, "schedule.sp=1", "schedule.sp = 4", "train.optimizer.lr=0.5", "cluster.d2h_bandwidth=1GB/s",
		"schedule.offload=[1, 0]", "schedule.subsequences=n/4", `train.data=text("here.txt")`)
	if s.Schedule.SP != 4 || s.Train.Optimizer.LR != 0.5 || s.Cluster.D2HBandwidth != 1e9 || s.Schedule.Subsequences.Count != 2 {
		t.Errorf("%+v", s)
	}
	if s.Train.MinLR != 0.05 {
		t.Errorf("min_lr is %g: it does not follow the overridden lr", s.Train.MinLR)
	}
	if got := s.Train.Data.Files; !reflect.DeepEqual(got, []string{"here.txt"}) {
		t.Errorf("files are %q", got)
	}
	if at := s.At("schedule.sp"); at != (Pos{"--set", 1, 15, 14}) {
		t.Errorf("schedule.sp is at %+v", at)
	}
}

// TestOverrideOfParameter checks that values computed from a parameter follow an override of the key with the
// same name.
func TestOverrideOfParameter(t *testing.T) {
	text := "import \"base.sppo\"\ncluster t(nodes = 1) {\n" + strings.SplitN(exampleBase, "ranks = 4) {\n", 2)[1]
	text = strings.Replace(text, "  nodes         = 1\n  gpus_per_node = ranks", "  nodes = nodes\n  gpus_per_node = 2 * nodes", 1)
	text = text[:strings.Index(text, "train {")]
	s := load(t, text, "cluster.nodes=3")
	if s.Cluster.Nodes != 3 || s.Cluster.GPUsPerNode != 6 {
		t.Errorf("%+v", s.Cluster)
	}
}

func TestOverrideErrors(t *testing.T) {
	text := "import \"base.sppo\"\n"
	for _, c := range []struct{ flag, code, words string }{
		{"schedule.sp=3", "indivisible", "sp = 2 or 4"},
		{"schedule.sp=", "syntax", "expected a value"},
		{"schedule.sp", "syntax", "expected"},
		{"", "syntax", ""},
		{"sp=4", "unknown-key", "`schedule.sp`"},
		{"schedule.spp=4", "unknown-key", "`schedule.sp`"},
		{"train.sequence=4GiB", "wrong-dimension", "a plain number"},
		{"train.optimizer.lr=-1", "out-of-range", "above 0"},
		{"schedule.mux=offf", "unknown-name", "`off`"},
		{"let schedule.sp=4", "unknown-key", ""},
	} {
		ds := loadError(t, text, c.flag)
		d := ds[0]
		if len(ds) != 1 || string(d.Code) != c.code || !strings.Contains(d.Message+d.Hint, c.words) || d.Pos.File != "--set" || d.Source != c.flag {
			t.Errorf("--set %q:\n%v", c.flag, ds)
		}
	}
}

func TestPositions(t *testing.T) {
	s := load(t, "import \"base.sppo\"\n\ncluster c = four(ranks = 2)\n\ntrain {\n  sequence = 1K\n  data = text(\"a\", \"b\")\n}\n\n"+
		"schedule s {\n  subsequences = [512, 512]\n}\n")
	for key, want := range map[string]string{
		"cluster.gpus_per_node":    "test.sppo:3:26", // the value given to the parameter
		"train.data[1]":            "test.sppo:7:20",
		"train.optimizer.lr":       "test.sppo:5:1",
		"schedule.subsequences[1]": "test.sppo:11:24",
		"schedule.sp":              "test.sppo:10:1",
		"model.heads":              "base.sppo:5:12",
		"nothing":                  "",
	} {
		if got := s.At(key); got.String() != want {
			t.Errorf("%s is at %s, not %s", key, got, want)
		}
	}
	if at := s.At("model.heads"); at.Offset != strings.Index(exampleBase, "= 8\n")+2 {
		t.Errorf("model.heads is at offset %d", at.Offset)
	}
	if !s.Written("train.data") || s.Written("schedule.sp") || s.Written("train.optimizer.lr") {
		t.Error("Written is wrong")
	}
	d := s.Diagnose("schedule.subsequences[1]", Conflict, "%d is too long", 512).WithHint("leave it out")
	want := "test.sppo:11:24: error: 512 is too long [conflict]\n      subsequences = [512, 512]\n                           ^^^\n    hint: leave it out"
	if d.Error() != want {
		t.Errorf("got\n%s\nwant\n%s", d, want)
	}
	bare := (&Spec{}).Diagnose("schedule.sp", Conflict, "no")
	if bare.Error() != "error: schedule.sp: no [conflict]" {
		t.Errorf("without a source: %s", bare)
	}
}

// TestImportOrder checks that files on disk take precedence over shipped ones.
func TestImportOrder(t *testing.T) {
	files := map[string]string{
		"dir/a.sppo":              "import \"sub/b.sppo\"\nimport \"base.sppo\"\nimport \"clusters/local.sppo\"\ncluster c = local\n",
		"dir/sub/b.sppo":          "import \"../base.sppo\"\n",
		"dir/base.sppo":           exampleBase,
		"dir/clusters/local.sppo": strings.Replace(exampleBase[strings.Index(exampleBase, "cluster"):strings.Index(exampleBase, "train {")], "four", "local", 1),
	}
	s, err := Load("dir/a.sppo", Options{Shipped: shipped, ReadFile: readFrom(files)})
	if err != nil {
		t.Fatal(err)
	}
	if at := s.At("cluster.nodes"); at.File != "dir/clusters/local.sppo" {
		t.Errorf("cluster.nodes is at %s", at)
	}
	delete(files, "dir/clusters/local.sppo")
	if s, err = Load("dir/a.sppo", Options{Shipped: shipped, ReadFile: readFrom(files)}); err != nil {
		t.Fatal(err)
	}
	if at := s.At("cluster.nodes"); at.File != "shipped:clusters/local.sppo" {
		t.Errorf("cluster.nodes is at %s", at)
	}
}

func TestTableOfKeys(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range Keys {
		if seen[k.Path()] {
			t.Errorf("%s stands twice in the table", k.Path())
		}
		seen[k.Path()] = true
		if findBlock(k.Block) == nil || k.Doc == "" || k.Example == "" || k.set == nil || (k.Derived == "") != (k.derive == nil) {
			t.Errorf("%s is incomplete", k.Path())
		}
		set := []string{k.Path() + "=" + k.Example}
		if call := takerOf(k); call != nil {
			value := call.name
			if call.texts {
				value += `("base.sppo")`
			}
			set = append(set, k.Block+"="+value)
		}
		_, err := Parse("test.sppo", []byte("import \"base.sppo\"\n"), Options{ReadFile: base, Set: set})
		var ds Diagnostics
		errors.As(err, &ds)
		for _, d := range ds { // an example need not fit the rest of the spec, but must be a valid value of its key
			switch d.Code {
			case Indivisible, TooManyRanks, TooFewLayers, BadAlign, LengthOfList, Conflict:
			default:
				t.Errorf("the example of %s: %v", k.Path(), d)
			}
		}
		if k.Default != "" {
			k.valueOf(k.Default) // panics if the default is not valid
		}
	}
}

// takerOf returns a call that a key is an argument of, or nil.
func takerOf(k *Key) *callType {
	if of := FindKey(k.Block); of != nil {
		for i := range of.takes.calls {
			if c := &of.takes.calls[i]; c.block == k.Block && c.has(k.Name) {
				return c
			}
		}
	}
	return nil
}

// TestClusterKeysMatchFields checks that the keys of a cluster are the JSON names of its fields except Name, in
// the same order.
func TestClusterKeysMatchFields(t *testing.T) {
	var fields, keys []string
	typ := reflect.TypeFor[Cluster]()
	for i := range typ.NumField() {
		if name, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ","); name != "name" {
			fields = append(fields, name)
		}
	}
	for _, k := range KeysOf(blockCluster) {
		keys = append(keys, k.Name)
	}
	if diff := cmp.Diff(fields, keys); diff != "" {
		t.Errorf("-fields +keys\n%s", diff)
	}
}

func TestRendering(t *testing.T) {
	long := "let a = " + strings.Repeat("1 + ", 100) + "é * b" + strings.Repeat(" + 1", 100)
	for _, c := range []struct{ text, want string }{
		{"\tlet a\t= b", "test.sppo:1:10: error: unknown name `b` [unknown-name]\n    \tlet a\t= b\n    \t     \t  ^"},
		{"let a = \"%d\" \"\x01\"", "expected a block, found `\"\x01\"` [syntax]\n    let a = \"%d\" \"?\"\n                 ^^^"},
		{long, "...1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + é * b + 1"},
	} {
		ds := loadError(t, c.text)
		if !strings.Contains(ds.Error(), c.want) {
			t.Errorf("%q:\n%v", c.text, ds)
		}
		for _, l := range strings.Split(ds.Error(), "\n") {
			if len(l) > 200 {
				t.Errorf("a line of %d bytes", len(l))
			}
		}
	}
	many := loadError(t, strings.Repeat("let a = b\n", 1000))
	if len(many) != maxDiagnostics {
		t.Errorf("%d diagnostics", len(many))
	}
}

// If a missing base block is a shipped one, the hint names the file to import. Otherwise, it lists the blocks.
func TestShippedHint(t *testing.T) {
	for text, want := range map[string]string{
		"cluster c = a100-80g(nodes = 4)\n": `import "clusters/a100-80g.sppo"`,
		"schedule s = megatron(sp = 8)\n":   `import "baselines/megatron.sppo"`,
		"cluster c = a100(nodes = 4)\n":     "the clusters are `a100-80g`, `a800`, `b200`",
	} {
		_, err := Parse("hint.sppo", []byte(text), Options{Shipped: shipped})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, without %s", text, err, want)
		}
	}
}

// An override can select another cluster or schedule: one of the spec, or a shipped one, with arguments and further overrides.
func TestSelectedBlocks(t *testing.T) {
	text := exampleBase + "cluster other = four(ranks = 3)\n"
	for _, c := range []struct {
		set         []string
		name        string
		nodes, gpus int
		schedule    string
	}{
		{[]string{"cluster=other"}, "other", 1, 3, ""},
		{[]string{"cluster=a100-80g"}, "a100-80g", 1, 8, ""},
		{[]string{"cluster=a100-80g(nodes = 5)", "cluster.gpus_per_node=7"}, "a100-80g", 5, 7, ""},
		{[]string{"cluster=other", "cluster.nodes=2", "cluster=a100-80g"}, "a100-80g", 2, 8, ""},
		{[]string{"cluster=other", "schedule=megatron(pp = 2)"}, "other", 1, 3, "megatron"},
	} {
		spec, err := Parse("job.sppo", []byte(text), Options{Shipped: shipped, Set: c.set})
		if err != nil {
			t.Errorf("%q: %v", c.set, err)
			continue
		}
		got := &spec.Cluster
		if got.Name != c.name || got.Nodes != c.nodes || got.GPUsPerNode != c.gpus || spec.source.names[blockSchedule] != c.schedule {
			t.Errorf("%q: cluster %s of %d nodes of %d, schedule %s", c.set, got.Name, got.Nodes, got.GPUsPerNode, spec.source.names[blockSchedule])
		}
	}
	for set, want := range map[string]string{
		"cluster=h300":               "there is no cluster `h300` [unknown-name]",
		"cluster=other2":             "did you mean `other`?",
		"cluster=FOUR":               "did you mean `four`?",
		"cluster=2":                  "needs the name of another cluster",
		"cluster=other(gpus = 3)":    "has no such parameter",
		"model=llama":                "unknown key `model`",
		"cluster=a100-80g(nodes = 5": "is never closed",
	} {
		_, err := Parse("job.sppo", []byte(text), Options{Shipped: shipped, Set: []string{set}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, without %q", set, err, want)
		}
	}
	_, err := Parse("job.sppo", []byte(text), Options{Shipped: shipped, Set: []string{"cluster=v100"}})
	if err == nil || !strings.Contains(err.Error(), "the clusters are `a100-80g`, `a800`, `b200`, `four`, `gb200`, `gh200`, `h100`, `h20`, `h200`, `l40s`, `local`, `other`") {
		t.Errorf("%v does not list the clusters", err)
	}
}

// The factor applied to Gemma's embeddings is rounded to the data type of the stored weights.
func TestRootOfHidden(t *testing.T) {
	for dtype, want := range map[string]float64{"f32": math.Sqrt(5376), "bf16": 73.5} {
		s := load(t, exampleBase, "model.family=gemma3", "model.hidden=5376", "model.heads=32", "model.dtype="+dtype)
		if s.Model.EmbedScale != want {
			t.Errorf("%s: %v, want %v", dtype, s.Model.EmbedScale, want)
		}
	}
}

func TestParameterDefaults(t *testing.T) {
	for call, want := range map[string]int64{
		"h100()":                  2e12,
		"h100(gpus_per_node = 2)": 5e11,
		"h100(gpus_per_node = 2, host_memory = 7GB)": 7e9,
	} {
		s, err := Load("dir/a.sppo", Options{Shipped: shipped, Set: []string{"cluster=" + call, "model.dtype=bf16"}, ReadFile: readFrom(map[string]string{"dir/a.sppo": exampleBase})})
		if err != nil {
			t.Fatal(err)
		}
		if got := int64(float64(s.Cluster.HostMemory)/0.95 + 0.5); got != want {
			t.Errorf("%s has %d bytes of host memory, want %d", call, got, want)
		}
	}
}

// TestNotSpec checks that a file in another format causes one error, which names the format and shows none of its bytes.
func TestNotSpec(t *testing.T) {
	for text, want := range map[string]string{
		"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR": "a PNG image", "\x7fELF\x02\x01\x01": "an executable", "  {\"model_type\": \"llama\"}": "JSON", "[1, 2]\n": "JSON",
		"sppb\r\n\x1a\n\x01": "a program", "\xff\xfem\x00": "UTF-16 text", "model m {\x00}": "a binary file", "<svg xmlns=\"x\">": "an SVG image",
	} {
		_, err := Parse("pic.sppo", []byte(text), Options{})
		var ds Diagnostics
		if !errors.As(err, &ds) || len(ds) != 1 || ds[0].Message != "this is "+want+", not a spec" || ds[0].Source != "" {
			t.Errorf("%q: %v, want that it is %s", text, err, want)
		}
	}
	_, err := Parse("job.sppo", []byte("{ model }"), Options{})
	if err == nil || strings.Contains(err.Error(), "not a spec") {
		t.Errorf("a spec with a syntax error is no other format: %v", err)
	}
}

// TestValueHints checks the hints for values that are written in another way.
func TestValueHints(t *testing.T) {
	for set, hint := range map[string]string{
		`model.heads="four"`: "write the number in digits and without quotes", "cluster.nodes=two": "it takes a whole number, in digits", `model.dtype="bf16"`: "write bf16 without quotes",
		"model.dtype=bfloat16": "the name here is `bf16`", "model.dtype=fp16": "it may be `f32` or `bf16`", "schedule.sp=four": "it takes a whole number, or `auto`",
	} {
		if _, err := Parse("test.sppo", []byte(exampleBase), Options{Set: []string{set}}); err == nil || strings.Count(err.Error(), "error:") != 1 || !strings.Contains(err.Error(), "hint: "+hint) {
			t.Errorf("%s: %v, want the hint %q", set, err, hint)
		}
	}
}
