package e2e

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/vmtest/naive"
	"sppo.dev/ir"
)

// drawnCorpus is a folder of tokens in documents of random lengths, with a mask.
type drawnCorpus struct {
	dir       string
	tokens    []int32
	documents []int  // lengths of the documents
	mask      []byte // nil: none
}

// drawCorpus writes a corpus of at least the given number of tokens, whose IDs are below vocab. Documents may
// have a single token or be longer than a sequence. With byToken, each document ends with token 0.
func drawCorpus(t *testing.T, r *rand.Rand, vocab, sequence, least int, byToken, masked bool) *drawnCorpus {
	t.Helper()
	c := &drawnCorpus{dir: t.TempDir()}
	var bin, idx []byte
	for len(c.tokens) < least {
		n := 1 + r.IntN(pick(r, 3, sequence/3, sequence, 2*sequence))
		c.documents = append(c.documents, n)
		idx = binary.LittleEndian.AppendUint64(idx, uint64(n))
		for i := range n {
			id := 1 + r.IntN(vocab-1)
			if byToken && i == n-1 {
				id = 0
			}
			c.tokens = append(c.tokens, int32(id))
			bin = binary.LittleEndian.AppendUint16(bin, uint16(id))
			c.mask = append(c.mask, byte(min(1, r.IntN(4))))
		}
	}
	m := corpus.Manifest{Type: "uint16", Tokens: int64(len(c.tokens)), Documents: int64(len(c.documents)), Highest: int64(vocab - 1), EOS: -1, Masks: masked,
		Shards: []corpus.Shard{{Name: "a", Tokens: int64(len(c.tokens)), Documents: int64(len(c.documents)), Highest: int64(vocab - 1)}}}
	files := map[string][]byte{"a.bin": bin, "a.idx": idx}
	if masked {
		files["a.mask"] = c.mask
	} else {
		c.mask = nil
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(c.dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Write(c.dir); err != nil {
		t.Fatal(err)
	}
	return c
}

// attends names the traits that affect how attention visits keys.
var attends = []string{"sp_mode = ring", "sp_mode = ulysses", "mux = left", "mux = right", "keep = []", "keep = [k]", "recompute = full",
	"order = layer", "microbatches of several sequences", "layers of several windows", "a bf16 model"}

// TestDocuments trains random models with random schedules on sequences of several documents. Each draw must
// have the properties that TestRandomSpecs checks, and its plain program must agree with training on each
// document separately. Document boundaries are anywhere: inside subsequences, between them, next to each other.
func TestDocuments(t *testing.T) {
	wanted := traits
	if os.Getenv("SPPO_LONG") == "" { // only traits that change attention itself
		wanted = slices.DeleteFunc(slices.Clone(traits), func(x trait) bool { return !slices.Contains(attends, x.name) })
		if len(wanted) != len(attends) {
			t.Errorf("%d traits of %d exist", len(wanted), len(attends))
		}
	}
	for i, trait := range wanted {
		t.Run(trait.name, func(t *testing.T) {
			t.Parallel()
			checkDocuments(t, rand.New(rand.NewPCG(11, uint64(i))), trait)
		})
	}
}

func checkDocuments(t *testing.T, r *rand.Rand, wanted trait) {
	t.Helper()
	for range 20000 {
		d := drawSpec(r)
		spec, err := parse(d.text)
		if err != nil {
			continue
		}
		byToken, masked := r.IntN(2) == 0, r.IntN(2) == 0
		options := fmt.Sprintf("documents = %s, pack = %s, masks = %s, shuffle = %s", "index", pick(r, "cut", "whole"),
			map[bool]string{true: "on", false: "off"}[masked], pick(r, "on", "off"))
		if byToken {
			options = strings.Replace(options, "documents = index", "documents = 0", 1)
		}
		if wanted.asked != nil && !wanted.asked(d) {
			continue
		}
		c := drawCorpus(t, r, spec.Model.Vocab, int(spec.Train.Sequence), 12*int(spec.Train.Sequence), byToken, masked)
		d.text = strings.Replace(d.text, "data = random()", fmt.Sprintf("holdout = 0.3\n  data = tokens(%q, %s)", c.dir, options), 1)
		if !d.compile(t) || wanted.planned != nil && !wanted.planned(d) {
			continue
		}
		each := eachDocument(t, d.inF32())
		if each.trainsNothing() { // if only first labels count and only keys have adapters, say
			continue
		}
		if each.moved > tolerances["f32"].global/2 { // no program that computes with f32 can be held to the tolerance
			continue
		}
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("%s\n%s", strings.Join(d.drawn(), "\n"), d.text)
			}
		})
		bound := memory.FootprintOf(d.plan)
		for s, peak := range d.plan.Memory.DevicePeakBytes {
			if peak > bound.Device[s].Bytes {
				t.Errorf("stage %d has %d bytes, and the bound is %d", s, peak, bound.Device[s].Bytes)
			}
		}
		got := d.run(t, d.drawn())
		same := d.run(t, append(d.neutral(), d.divided()...))
		plain := d.run(t, d.plain())
		if !t.Failed() {
			checkSame(t, "E1 and E2: against one stage without offload", got, same)
			// With bf16, rounding may change choices of experts. The norm after linear attention leaves only the sign of a document's first
			// results: that of a product, which rounding may change, too. With f32, it hardly ever does.
			if d.model.routesAlike() && !(d.model.DType == "bf16" && d.linear()) {
				checkClose(t, d.model, "E3: against the plain program", got, plain)
			} else {
				exact := d.inF32()
				checkClose(t, exact.model, "E3: against the plain program, with f32", exact.run(t, exact.drawn()), exact.run(t, exact.plain()))
			}
			// Dropout depends on the position of a token in the sequence, and the losses of routers are means over sequences.
			if m := &spec.Model; m.AdapterDropout == 0 && m.RouterZLoss == 0 && m.RouterAuxLoss == 0 {
				checkEachDocument(t, d, plain, each)
			}
		}
		return
	}
	t.Errorf("no draw with %s can be scheduled", wanted.name)
}

// inF32 returns the same draw with an f32 model, whose gradients are not rounded, and all memory.
func (d *drawn) inF32() *drawn {
	twin := *d
	twin.model.DType, twin.room = "f32", ""
	twin.text = strings.NewReplacer("dtype = bf16", "dtype = f32", "  grad_reduce = bf16\n", "").Replace(d.text)
	return &twin
}

// checkEachDocument compares the first step of the plain program with the independent implementation on each
// document separately, weighted by the number of labels that count. Deep models amplify the rounding of bf16,
// so the gradients of bf16 models are compared in f32.
func checkEachDocument(t *testing.T, d *drawn, plain *Result, each *reference) {
	t.Helper()
	if d.model.DType == "bf16" {
		exact := d.inF32().run(t, d.plain())
		checkEachDocument(t, d.inF32(), exact, each)
		checkRelative(t, "loss of step 1, against f32", plain.Losses[0], exact.Losses[0], tolerances["bf16"].loss)
		return
	}
	tol := tolerances[d.model.DType] // the tolerance of E3: random models round more than those of TestPlainEqualsNaive
	checkRelative(t, "loss of step 1, each document by itself", plain.Losses[0], each.loss, tol.loss)
	checkGradients(t, d.model, "step 1, each document by itself", plain.Grads, each.grads, each.names, tol)
}

// reference holds the mean loss over the labels of step 1, and the gradients of that loss, computed by the
// independent implementation.
type reference struct {
	loss  float64
	grads map[string][]float64
	names []string // of tensors with gradients
	moved float64  // with linear attention: by how much the gradient changes, relative to its norm, if weights change by half a unit in the last place of f32
}

// trainsNothing reports whether all gradients are 0.
func (x *reference) trainsNothing() bool {
	return !slices.ContainsFunc(x.names, func(name string) bool {
		return slices.ContainsFunc(x.grads[name], func(v float64) bool { return v != 0 })
	})
}

// eachDocument computes step 1 of a draw's plain program with the independent implementation, on each document
// separately.
func eachDocument(t *testing.T, d *drawn) *reference {
	t.Helper()
	p, model, weights := d.firstStep(t)
	x := &reference{names: slices.DeleteFunc(naive.Names(model), func(name string) bool { return !holds(p, name, ir.RoleGrad) })}
	if x.loss, x.grads = overDocuments(t, p, weights); !d.linear() {
		return x
	}
	r, rounded := rand.New(rand.NewPCG(12, 0)), map[string][]float32{}
	for _, values := range weights {
		for i := range values {
			values[i] *= 1 + (2*r.Float64()-1)*0x1p-24
		}
	}
	_, other := overDocuments(t, p, weights)
	for _, name := range x.names {
		for _, v := range other[name] {
			rounded[name] = append(rounded[name], float32(v))
		}
	}
	x.moved = offBy(&Result{Grads: rounded}, x.grads)
	return x
}

// overDocuments returns the mean loss over the labels of step 1, and the gradients of that loss. It tells
// documents apart by the positions that the program would load; the tests of package corpus check those
// positions.
func overDocuments(t *testing.T, p *ir.Program, weights naive.Tensors) (float64, naive.Tensors) {
	t.Helper()
	data, err := train.OpenData(&p.Run, "")
	if err != nil {
		t.Fatal(err)
	}
	marked, n := data.(vm.Documents), int(p.Run.Sequence)
	loss, labels, sums := 0.0, 0, naive.Tensors{}
	for name, values := range weights {
		sums[name] = make([]float64, len(values))
	}
	for s := range int64(p.Run.Batch) {
		tokens, positions, targets := make([]int32, n+1), make([]int32, n+1), make([]int32, n+1)
		if err := data.Tokens(ir.SectionStep, 1, s, 0, tokens, 1); err != nil {
			t.Fatal(err)
		}
		for as, out := range map[int][]int32{ir.AsPositions: positions, ir.AsLabels: targets} {
			if err := marked.Marks(as, ir.SectionStep, 1, s, 0, out, 1); err != nil {
				t.Fatal(err)
			}
		}
		for first := 0; first < n; {
			end := first + 1
			for end <= n && positions[end] == positions[end-1]+1 {
				end++
			}
			l, counted, grads := oneDocument(t, p, weights, tokens[first:end], targets[first:end])
			loss, labels = loss+l, labels+counted
			for name, g := range grads {
				for i := range g {
					sums[name][i] += g[i]
				}
			}
			first = end
		}
	}
	if counted, err := marked.Labels(ir.SectionStep, 1); err != nil || counted != int64(labels) {
		t.Errorf("%d labels count, and the data says %d (%v)", labels, counted, err)
	}
	for _, g := range sums {
		for i := range g {
			g[i] /= float64(labels)
		}
	}
	return loss / float64(labels), sums
}

// oneDocument returns the sum of the losses of a document's labels, the number of labels, and the gradients.
func oneDocument(t *testing.T, p *ir.Program, weights naive.Tensors, tokens, targets []int32) (float64, int, naive.Tensors) {
	t.Helper()
	if len(tokens) < 2 {
		return 0, 0, nil
	}
	model, err := json.Marshal(p.Model)
	if err != nil {
		t.Fatal(err)
	}
	cfg, own := naive.ConfigOf(model, len(tokens)-1), naive.Tensors{}
	for name, values := range weights {
		if own[name] = values; name == "pos" {
			own[name] = values[:cfg.Sequence*cfg.Hidden]
		}
	}
	return naive.MaskedLossAndGrads(cfg, own, tokens, targets[1:])
}
