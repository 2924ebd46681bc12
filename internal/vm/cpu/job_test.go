package cpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
)

// builder builds an ir.Code by hand.
type builder struct{ code ir.Code }

// buffer places a new buffer after the last in its arena.
func (b *builder) buffer(name string, arena ir.Arena, t ir.DType, shape ...int64) ir.View {
	v := ir.View{Buffer: uint32(len(b.code.Buffers)), DType: t}
	copy(v.Shape[:], shape)
	start := (b.code.Arenas[arena] + 63) &^ 63
	b.code.Buffers = append(b.code.Buffers, ir.Buffer{Name: name, Arena: arena, Offset: start, Size: v.Bytes()})
	b.code.Arenas[arena] = start + v.Bytes()
	return v
}

func (b *builder) put(section ir.Section, op ir.Op, stream ir.Stream, args []ir.View, attrs ...ir.Attr) {
	for len(args) < len(ir.Ops[op].Operands) && ir.Ops[op].Operands[len(args)].Optional {
		args = append(args, ir.Absent())
	}
	b.code.Sections[section] = append(b.code.Sections[section], ir.Instr{Op: op, Stream: stream, Args: args, Attrs: attrs})
}

// event makes one stream wait for all work that has been issued to another so far.
func (b *builder) event(section ir.Section, from, to ir.Stream) {
	event := ir.Int(int64(b.code.Events[section]))
	b.code.Events[section]++
	b.put(section, ir.Record, from, nil, event)
	b.put(section, ir.Wait, to, nil, event)
}

func reshape(v ir.View, shape ...int64) ir.View {
	v.Shape = [ir.MaxDims]int64{}
	copy(v.Shape[:], shape)
	return v
}

const (
	bigramVocab    = 7
	bigramSequence = 32
	bigramBatch    = 4
)

// bigram trains a table that predicts the next token from the current one. Each of two ranks holds half of the
// table's rows (the last row of rank 1 is padding), and the ranks add their logits. Each rank computes the whole
// loss. The logits travel to the host and back.
func bigram(t ir.DType) *ir.Program {
	b := &builder{}
	const rows, tokens = (bigramVocab + 1) / 2, bigramSequence * bigramBatch
	view := func(name string, t ir.DType, shape ...int64) ir.View { return b.buffer(name, ir.Device, t, shape...) }
	weight, master := view("weight", t, rows, bigramVocab), ir.View{}
	grad := view("grad", ir.F32, rows, bigramVocab)
	m, v := view("m", ir.F32, rows, bigramVocab), view("v", ir.F32, rows, bigramVocab)
	stepView, norm := view("step", ir.F32, 3), view("norm", ir.F32, 2)
	loss, square, squares := view("loss", ir.F32, 1), view("square", ir.F32, 1), view("squares", ir.F32, 2)
	input, labels := view("input", ir.I32, tokens), view("labels", ir.I32, tokens)
	logits, stats := view("logits", t, tokens, bigramVocab), view("stats", ir.F32, tokens, 3)
	host := b.buffer("host", ir.Host, ir.U8, int64(logits.Bytes()))
	flat := reshape(logits, int64(logits.Bytes()))
	flat.DType = ir.U8
	masterOrWeight, rounded := weight, ir.Absent()
	if t == ir.BF16 {
		master = view("master", ir.F32, rows, bigramVocab)
		masterOrWeight, rounded = master, weight
	}
	first := ir.ConstRef(0)

	for _, w := range []ir.View{weight, masterOrWeight} {
		b.put(ir.SectionInit, ir.InitNormal, ir.Compute, []ir.View{w}, ir.Int(0), first, ir.Int(0), ir.Float(0.5), ir.Int(0))
	}
	for _, zero := range []ir.View{m, v} {
		b.put(ir.SectionInit, ir.Fill, ir.Compute, []ir.View{zero}, ir.Float(0))
	}
	forward := func(s ir.Section) {
		for i, view := range []ir.View{input, labels} {
			b.put(s, ir.LoadTokens, ir.Compute, []ir.View{view}, ir.Int(0), ir.Int(0), ir.Int(int64(i)), ir.Int(bigramBatch), ir.Int(0), ir.Int(0))
		}
		b.put(s, ir.Fill, ir.Compute, []ir.View{loss}, ir.Float(0))
		b.put(s, ir.Embed, ir.Compute, []ir.View{logits, input, weight}, first, ir.Float(0))
		b.event(s, ir.Compute, ir.Coll)
		b.put(s, ir.AllReduce, ir.Coll, []ir.View{logits}, ir.Int(0))
		b.event(s, ir.Coll, ir.D2H)
		b.put(s, ir.CopyD2H, ir.D2H, []ir.View{host, flat})
		b.event(s, ir.D2H, ir.Compute)
		b.put(s, ir.Fill, ir.Compute, []ir.View{flat}, ir.Float(255))
		b.event(s, ir.Compute, ir.H2D)
		b.put(s, ir.CopyH2D, ir.H2D, []ir.View{flat, host})
		b.event(s, ir.H2D, ir.Compute)
		b.put(s, ir.CrossEntropyStats, ir.Compute, []ir.View{stats, logits, labels}, ir.Int(0), ir.Int(bigramVocab), ir.Float(0))
		b.put(s, ir.CrossEntropy, ir.Compute, []ir.View{loss, ir.Absent(), reshape(stats, 1, tokens, 3)}, ir.Float(1.0/tokens))
	}
	forward(ir.SectionEval)
	s := ir.SectionStep
	forward(s)
	b.put(s, ir.CrossEntropyGrad, ir.Compute, []ir.View{logits, logits, reshape(stats, 1, tokens, 3), labels},
		ir.Float(1.0/tokens), ir.Int(0), ir.Int(bigramVocab), ir.Float(0))
	b.put(s, ir.EmbedGrad, ir.Compute, []ir.View{grad, input, logits}, first, ir.Int(0), ir.Float(0))
	b.put(s, ir.SumSq, ir.Compute, []ir.View{square, grad}, ir.Float(1))
	b.event(s, ir.Compute, ir.Coll)
	b.put(s, ir.AllGather, ir.Coll, []ir.View{squares, square}, ir.Int(0))
	b.event(s, ir.Coll, ir.Compute)
	b.put(s, ir.GradNorm, ir.Compute, []ir.View{norm, squares, ir.Absent()}, ir.Float(0.2))
	b.put(s, ir.AdamW, ir.Compute, []ir.View{masterOrWeight, m, v, rounded, grad, stepView, norm},
		ir.Float(0.9), ir.Float(0.95), ir.Float(1e-8), ir.Float(0.01))

	state := func(role ir.Role, v ir.View) ir.State { return ir.State{Role: role, View: v, Row0: first} }
	b.code.States = []ir.State{state(ir.RoleWeight, weight), state(ir.RoleMoment1, m), state(ir.RoleMoment2, v), state(ir.RoleGrad, grad)}
	if t == ir.BF16 {
		b.code.States = append(b.code.States, state(ir.RoleMaster, master))
	}
	b.code.Results = []ir.Result{{Name: ir.ResultLoss, View: loss}, {Name: ir.ResultEvalLoss, View: loss},
		{Name: ir.ResultGradNorm, View: norm}, {Name: ir.ResultStep, View: stepView}}
	group := [][]int32{{0, 1}}
	return &ir.Program{
		Name: "bigram", Codes: []ir.Code{b.code}, Lines: []string{"bigram.sppo:1: model"},
		Consts: []string{"first"}, Groups: []string{"sp"},
		Tensors: []ir.Tensor{{Name: "table", Shape: [2]int64{bigramVocab, bigramVocab}}},
		Ranks:   []ir.Rank{{Consts: []int64{0}, Groups: group}, {Consts: []int64{rows}, Groups: group, SP: 1}},
		Run: ir.Run{Sequence: bigramSequence, Batch: bigramBatch, EvalSequences: bigramBatch, EvalBatch: 2 * bigramBatch, Steps: 60,
			Seed: 3, Vocab: bigramVocab, LR: 0.1, MinLR: 0.01, Warmup: 5, LRSchedule: "cosine", Beta1: 0.9, Beta2: 0.95},
	}
}

// cyclic is text in which each token is the previous one plus 3, modulo the size of the vocabulary.
type cyclic struct{}

// Tokens implements vm.Tokens.
func (cyclic) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	for i := 0; i < len(out); i += stride {
		out[i] = int32((3*(position+int64(i/stride)) + sequence + round) % bigramVocab)
	}
	return nil
}

func open(t *testing.T, p *ir.Program, tokens vm.Tokens) *train.Job {
	t.Helper()
	pool := simd.NewPool(2)
	t.Cleanup(pool.Close)
	job, err := train.Open(p, func(int) (vm.Device, error) { return New(pool), nil }, train.Options{Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := job.Close(); err != nil {
			t.Error(err)
		}
	})
	return job
}

// start opens a job and initialises it.
func start(t *testing.T, p *ir.Program) *train.Job {
	t.Helper()
	job := open(t, p, cyclic{})
	if err := job.Init(context.Background()); err != nil {
		t.Fatal(err)
	}
	return job
}

// steps runs n steps and returns their losses.
func steps(t *testing.T, job *train.Job, n int) (losses []float64) {
	t.Helper()
	for range n {
		r, err := job.Step(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		losses = append(losses, r.Loss)
	}
	return losses
}

func bothTypes(t *testing.T, f func(t *testing.T, dtype ir.DType)) {
	for _, dtype := range []ir.DType{ir.F32, ir.BF16} {
		t.Run(dtype.String(), func(t *testing.T) { f(t, dtype) })
	}
}

func TestJobTrains(t *testing.T) {
	bothTypes(t, func(t *testing.T, dtype ir.DType) {
		job := start(t, bigram(dtype))
		r, err := job.Step(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if r.Step != 1 || r.Loss < 1.5 || r.Loss > 3 || r.GradNorm < 0.1 || math.Abs(r.LR-0.02) > 1e-12 || r.TokensPerSecond <= 0 {
			t.Errorf("first step: %+v", r)
		}
		last := steps(t, job, 59)[58]
		if last > 0.1 || job.Steps() != 60 {
			t.Errorf("loss %v after %d steps", last, job.Steps())
		}
		eval, err := job.Eval(context.Background())
		if err != nil || eval > 0.1 || eval == last {
			t.Errorf("validation loss %v, %v", eval, err)
		}
		for rank, p := range []int{0, 1} {
			if got := job.Peaks(p); got != bigram(dtype).Codes[0].Arenas {
				t.Errorf("rank %d touched %v, the program declares %v", rank, got, bigram(dtype).Codes[0].Arenas)
			}
		}
	})
}

func TestTensorsAreGatheredAndSet(t *testing.T) {
	bothTypes(t, func(t *testing.T, dtype ir.DType) {
		job := start(t, bigram(dtype))
		want := make([]float32, bigramVocab*bigramVocab)
		vm.InitialValues(3, "table").Normals(0, want, 0.5)
		got, shape, err := job.Tensor("table", ir.RoleMaster)
		if err != nil || shape != [2]int64{bigramVocab, bigramVocab} || !slices.Equal(got, want) {
			t.Fatalf("initial values %v of shape %v, want %v (%v)", got, shape, want, err)
		}
		for i := range want {
			want[i] = float32(i) / 8
		}
		if err := job.SetTensor("table", ir.RoleMaster, want); err != nil {
			t.Fatal(err)
		}
		for _, role := range []ir.Role{ir.RoleMaster, ir.RoleWeight} { // multiples of 1/8 below 8 are exact in bf16
			if got, _, err := job.Tensor("table", role); err != nil || !slices.Equal(got, want) {
				t.Errorf("%s is %v, want %v (%v)", role, got, want, err)
			}
		}
		if _, _, err := job.Tensor("tabel", ir.RoleWeight); err == nil {
			t.Error("a tensor that does not exist has values")
		}
		if err := job.SetTensor("table", ir.RoleWeight, want[1:]); err == nil {
			t.Error("a tensor takes too few values")
		}
	})
}

func TestCheckpointResumesBitwise(t *testing.T) {
	bothTypes(t, func(t *testing.T, dtype ir.DType) {
		path := filepath.Join(t.TempDir(), "checkpoint")
		job := start(t, bigram(dtype))
		steps(t, job, 7)
		if err := job.Save(path); err != nil {
			t.Fatal(err)
		}
		want := steps(t, job, 10)
		resumed := open(t, bigram(dtype), cyclic{})
		if err := resumed.Restore(t.Context(), path); err != nil {
			t.Fatal(err)
		}
		if got := steps(t, resumed, 10); !slices.Equal(got, want) {
			t.Errorf("resumed losses %v, want %v", got, want)
		}
		a, _, _ := job.Tensor("table", ir.RoleMaster)
		b, _, _ := resumed.Tensor("table", ir.RoleMaster)
		if !slices.Equal(a, b) {
			t.Error("weights differ after resuming")
		}
		if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
			t.Errorf("saving leaves %v", left)
		}
	})
}

// oldCheckpoint is a file of format 2: a bigram in f32 after 7 steps.
const oldCheckpoint = "testdata/checkpoints/format2"

// A checkpoint in the single-file format 2 can be resumed. Its values were computed with AVX-512; other
// instruction sets round the last bits differently.
func TestSingleFileResumes(t *testing.T) {
	job := start(t, bigram(ir.F32))
	steps(t, job, 7)
	want := steps(t, job, 3)
	resumed := start(t, bigram(ir.F32))
	if err := resumed.Restore(t.Context(), oldCheckpoint); err != nil {
		t.Fatal(err)
	}
	near := func(a, b float64) bool { return math.Abs(a-b) <= 1e-6*b }
	if got := steps(t, resumed, 3); !slices.EqualFunc(got, want, near) {
		t.Errorf("resumed losses %v, want %v", got, want)
	}
}

func TestBadFilesAreRefused(t *testing.T) {
	dir := t.TempDir()
	good, err := os.ReadFile(oldCheckpoint)
	if err != nil {
		t.Fatal(err)
	}
	flipped := slices.Clone(good)
	flipped[len(flipped)-20] ^= 1
	for name, c := range map[string]struct {
		bytes []byte
		want  string
	}{
		"foreign": {[]byte("#!/bin/sh\necho this is something else\n"), "not a checkpoint"},
		"empty":   {nil, "not a checkpoint"},
		"header":  {good[:40], "truncated"},
		"short":   {good[:len(good)-1], "truncated"},
		"long":    {append(slices.Clone(good), 0), "damaged"},
		"flipped": {flipped, "checksum"},
		"first":   {append([]byte("sppo checkpoint1"), good[16:]...), "has format 1, which does not name its model"},
	} {
		bad := filepath.Join(dir, name)
		if err := os.WriteFile(bad, c.bytes, 0o666); err != nil {
			t.Fatal(err)
		}
		err := start(t, bigram(ir.F32)).Restore(t.Context(), bad)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if err := start(t, bigram(ir.F32)).Restore(t.Context(), "/dev/zero"); err == nil || !strings.Contains(err.Error(), "it is a device, not a regular file") {
		t.Errorf("a device: %v", err)
	}
}

func TestForeignCheckpointsAreRefused(t *testing.T) {
	dir := t.TempDir()
	path, named := filepath.Join(dir, "plain"), filepath.Join(dir, "named")
	job := start(t, bigram(ir.F32))
	if err := job.Save(path); err != nil {
		t.Fatal(err)
	}
	otherSeed, otherShape, otherType := bigram(ir.F32), bigram(ir.F32), bigram(ir.BF16)
	otherSeed.Run.Seed = 4
	otherShape.Tensors[0].Shape = [2]int64{6, 7}
	ofModel, otherModel := bigram(ir.F32), bigram(ir.F32)
	ofModel.Model = ir.Model{Name: "m", Family: "llama", Heads: 4, NormEps: 1e-5}
	otherModel.Model = ir.Model{Name: "n", Family: "llama", Heads: 2, NormEps: 1e-5}
	if err := start(t, ofModel).Save(named); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path    string
		program *ir.Program
		want    string
	}{
		"seed":  {path, otherSeed, "was made with seed 3, but this program runs with 4"},
		"shape": {path, otherShape, "has weight of table [7 7], but this program has weight of table [6 7]"},
		"model": {named, otherModel, `is of a different model: it has heads = 4, but this program has heads = 2`},
		"which": {named, bigram(ir.F32), `is of model "m", but this program does not name its model`},
		"any":   {path, ofModel, `does not name its model, but this program is of model "m"`},
		"type":  {path, otherType, "has weight of table [7 7], but this program has master of table [7 7]"},
	} {
		err := start(t, c.program).Restore(t.Context(), c.path)
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.path) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if err := job.Restore(t.Context(), filepath.Join(dir, "nowhere")); err == nil {
		t.Error("a missing checkpoint is restored")
	}
	if err := job.Restore(t.Context(), dir); err == nil || !strings.Contains(err.Error(), "contains no checkpoints") {
		t.Errorf("a folder without checkpoints: %v", err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if err := job.Save(file); err == nil || !strings.Contains(err.Error(), "is a file, but checkpoints are written to a folder") {
		t.Errorf("a checkpoint over a file: %v", err)
	}
}

// A checkpoint that is written while training continues holds the state at the step when writing began. A run
// that resumes from it has bitwise the same losses.
func TestSavingBesideTraining(t *testing.T) {
	bothTypes(t, func(t *testing.T, dtype ir.DType) {
		dir := t.TempDir()
		job := start(t, bigram(dtype))
		saver, err := job.NewSaver(dir, 2, false)
		if err != nil {
			t.Fatal(err)
		}
		var losses []float64
		var saved *train.Saved
		for done := 0; done < 3; {
			losses = append(losses, steps(t, job, 1)...)
			now, err := saver.Poll(false)
			if err != nil {
				t.Fatal(err)
			}
			if now != nil {
				saved, done = now, done+1
			}
			if !saver.Busy() && done < 3 {
				if err := saver.Begin(t.Context(), false); err != nil {
					t.Fatal(err)
				}
			}
		}
		losses = append(losses, steps(t, job, 5)...)
		if err := saver.Retire(); err != nil {
			t.Fatal(err)
		}
		if err := saver.Close(); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
			t.Errorf("the folder has %v, want two checkpoints: %v", left, err)
		}
		resumed := start(t, bigram(dtype))
		if err := resumed.Restore(t.Context(), saved.Path); err != nil {
			t.Fatal(err)
		}
		if got, want := steps(t, resumed, len(losses)-saved.Step), losses[saved.Step:]; !slices.Equal(got, want) {
			t.Errorf("resumed from step %d: losses %v, want %v", saved.Step, got, want)
		}
	})
}

// faulty fails in the third step, when a rank reads sequence 2 from position 1 on. In the program that unequal
// returns, only rank 1 does so.
type faulty struct {
	cyclic
	panics bool
}

// Tokens implements vm.Tokens.
func (f faulty) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if round == 3 && position == 1 && sequence == 2 {
		if f.panics {
			panic("of the source")
		}
		return errors.New("the disk is gone")
	}
	return f.cyclic.Tokens(section, round, sequence, position, out, stride)
}

// unequal returns a program in which only rank 1 reads sequence 2 from position 1 on.
func unequal() *ir.Program {
	p := bigram(ir.F32)
	other := p.Codes[0]
	other.Sections[ir.SectionStep] = slices.Clone(other.Sections[ir.SectionStep])
	other.Sections[ir.SectionStep][1].Attrs = []ir.Attr{ir.Int(0), ir.Int(5), ir.Int(1), ir.Int(bigramBatch), ir.Int(0), ir.Int(0)}
	p.Codes = append(p.Codes, other)
	p.Ranks[0].Code = 1
	return p
}

// TestFailureEndsTheJob makes one rank fail while the other waits for it.
func TestFailureEndsTheJob(t *testing.T) {
	for _, panics := range []bool{false, true} {
		job := open(t, unequal(), faulty{panics: panics})
		if err := job.Init(context.Background()); err != nil {
			t.Fatal(err)
		}
		steps(t, job, 2)
		_, err := job.Step(context.Background())
		want := []string{"rank 1: section step, pc 1 (load_tokens), from bigram.sppo:1: model: the disk is gone"}
		if panics {
			want = []string{"rank 1: section step, pc 1 (load_tokens)", "internal: of the source"}
		}
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("the error is %v, want %q", err, w)
			}
		}
		if _, err := job.Step(context.Background()); err == nil || !strings.Contains(err.Error(), "the job has failed") {
			t.Errorf("after a failure, a step says %v", err)
		}
	}
}

func TestCancelledStepDoesNotStart(t *testing.T) {
	job := start(t, bigram(ir.F32))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := job.Step(ctx); !errors.Is(err, context.Canceled) || job.Steps() != 0 {
		t.Errorf("%v after %d steps", err, job.Steps())
	}
	steps(t, job, 1) // the job still works
}

func TestTraceShowsTheProgramsOrder(t *testing.T) {
	p := bigram(ir.F32)
	var traces [2]*vm.Trace
	job, err := train.Open(p, func(rank int) (vm.Device, error) {
		traces[rank] = vm.NewTrace(New(nil))
		return traces[rank], nil
	}, train.Options{Tokens: cyclic{}})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	if err := job.Init(context.Background()); err != nil {
		t.Fatal(err)
	}
	steps(t, job, 2)
	for rank, trace := range traces {
		if len(trace.Timelines) != 3 || trace.Timelines[2].Round != 2 {
			t.Fatalf("rank %d has %d timelines", rank, len(trace.Timelines))
		}
		line := trace.Timelines[2]
		for stream := range ir.NumStreams {
			var want, got []int32
			for pc := range p.Codes[0].Sections[ir.SectionStep] {
				if p.Codes[0].Sections[ir.SectionStep][pc].Stream == stream {
					want = append(want, int32(pc))
				}
			}
			end := time.Duration(0)
			for _, span := range line.Streams[stream] {
				got = append(got, span.PC)
				if span.Begin < end || span.End < span.Begin {
					t.Errorf("rank %d, %s: instruction %d runs from %v to %v, the one before ended at %v", rank, stream, span.PC, span.Begin, span.End, end)
				}
				end = span.End
			}
			if !slices.Equal(got, want) {
				t.Errorf("rank %d, %s: executed %v, the program says %v", rank, stream, got, want)
			}
		}
	}
}

// TestBadProgramsAreRefused checks that Open returns an error that says what is wrong with a program.
func TestBadProgramsAreRefused(t *testing.T) {
	step := func(p *ir.Program) []ir.Instr { return p.Codes[0].Sections[ir.SectionStep] }
	for want, spoil := range map[string]func(p *ir.Program){
		"pc 3 (embed), from bigram.sppo:1: model: y: [128000 7] of f32 does not fit": func(p *ir.Program) { step(p)[3].Args[0].Shape[0] *= 1000 },
		"tokens is f32, not i32": func(p *ir.Program) { step(p)[0].Args[0].DType = ir.F32 },
		"y: [4611686018427387905 4] of f32 does not fit": func(p *ir.Program) {
			step(p)[3].Args[0].Shape = [ir.MaxDims]int64{1<<62 + 1, 4}
		},
		"y: bytes 9223372036854775804 to 9223372036854775807": func(p *ir.Program) { step(p)[3].Args[0].Offset = 1<<63 - 4 },
		"state 0 of table":            func(p *ir.Program) { p.Codes[0].States[0].View.Shape[0] = 1 << 62 },
		"-1 events":                   func(p *ir.Program) { p.Codes[0].Events[ir.SectionStep] = -1 },
		"x is missing":                func(p *ir.Program) { step(p)[9].Args[1] = ir.Absent() },
		"x: f32 at address 1858":      func(p *ir.Program) { step(p)[6].Args[0].Offset, step(p)[6].Args[0].Shape[0] = 2, 3 },
		"is not in the group":         func(p *ir.Program) { p.Ranks[1].Groups = [][]int32{{0}} },
		"event 6 was not recorded":    func(p *ir.Program) { step(p)[5].Attrs[0] = ir.Int(6) },
		"event 0 is recorded twice":   func(p *ir.Program) { step(p)[7].Attrs[0] = ir.Int(0) },
		"1 operands and 1 attributes": func(p *ir.Program) { step(p)[2].Op = ir.AllGather },
		"invalid instruction": func(p *ir.Program) {
			in := &step(p)[3]
			in.Op, in.Args, in.Attrs = ir.Rope, []ir.View{in.Args[0], in.Args[0], ir.Absent()}, make([]ir.Attr, len(ir.Ops[ir.Rope].Attrs))
		},
		"opcode 200":                        func(p *ir.Program) { step(p)[2].Op = 200 },
		"constant 3 does not exist":         func(p *ir.Program) { step(p)[3].Attrs[0] = ir.ConstRef(3) },
		"no code 4":                         func(p *ir.Program) { p.Ranks[0].Code = 4 },
		"has no ranks":                      func(p *ir.Program) { p.Ranks = nil },
		"0 constants and 1 groups, but the": func(p *ir.Program) { p.Ranks[1].Consts = nil },
	} {
		p := bigram(ir.F32)
		spoil(p)
		job, err := train.Open(p, func(int) (vm.Device, error) { return New(nil), nil }, train.Options{Tokens: cyclic{}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if err == nil {
			job.Close()
		}
	}
}

// TestEventsOrderStreams runs random programs of copies whose conflicts are all ordered by events, and compares
// the results with those of sequential execution. If an event failed to order its streams, the race detector would
// report it.
func TestEventsOrderStreams(t *testing.T) {
	const seed = 19
	for round := range 20 {
		rng := rand.New(rand.NewPCG(seed, uint64(round)))
		p, want := randomCopies(rng, 300)
		job := open(t, p, nil)
		for range 3 {
			if err := job.Init(context.Background()); err != nil {
				t.Fatal(err)
			}
			steps(t, job, 1)
			if got, _, err := job.Tensor("all", ir.RoleWeight); err != nil || !slices.Equal(got, want) {
				t.Fatalf("round %d: %v, want %v (seed %d, %v)", round, got, want, seed, err)
			}
		}
	}
}

const randomBuffers = 12

// randomCopies returns a program of copies and fills on several streams, and the final contents of its buffers.
func randomCopies(rng *rand.Rand, n int) (*ir.Program, []float32) {
	const width = 50
	b := &builder{}
	all := b.buffer("all", ir.Device, ir.F32, randomBuffers, width)
	place := func(i int) ir.View {
		v := reshape(all, width)
		v.Offset = ir.Bytes(i * width * 4)
		return v
	}
	b.put(ir.SectionInit, ir.Fill, ir.Compute, []ir.View{all}, ir.Float(0))
	var (
		values  [randomBuffers]float32
		last    [randomBuffers]ir.Stream          // the stream of the last write
		written [randomBuffers]bool               //
		readers [randomBuffers]map[ir.Stream]bool // the streams that have read it since
	)
	streams := []ir.Stream{ir.Compute, ir.Mux, ir.D2H, ir.H2D} // the device accepts copies on all of them
	for i := range n {
		stream, to, from := streams[rng.IntN(len(streams))], rng.IntN(randomBuffers), rng.IntN(randomBuffers)
		for _, at := range []int{to, from} {
			if written[at] && last[at] != stream {
				b.event(ir.SectionStep, last[at], stream)
			}
		}
		for _, reader := range streams {
			if readers[to][reader] && reader != stream {
				b.event(ir.SectionStep, reader, stream)
			}
		}
		if to == from || rng.IntN(3) == 0 {
			values[to] = float32(i)
			b.put(ir.SectionStep, ir.Fill, stream, []ir.View{place(to)}, ir.Float(float64(i)))
		} else {
			values[to] = values[from]
			b.put(ir.SectionStep, ir.CopyD2D, stream, []ir.View{place(to), place(from)})
			if readers[from] == nil {
				readers[from] = map[ir.Stream]bool{}
			}
			readers[from][stream] = true
		}
		last[to], written[to], readers[to] = stream, true, nil
	}
	b.code.States = []ir.State{{View: all}}
	var want []float32
	for _, v := range values {
		want = append(want, slices.Repeat([]float32{v}, width)...)
	}
	return &ir.Program{
		Name: fmt.Sprint("copies ", n), Codes: []ir.Code{b.code}, Ranks: []ir.Rank{{}}, Lines: []string{""},
		Tensors: []ir.Tensor{{Name: "all", Shape: [2]int64{randomBuffers, width}}},
	}, want
}
