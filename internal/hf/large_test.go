package hf_test

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"testing"
	"time"

	"sppo.dev/internal/data/safetensors"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// sink is a device without memory. It counts written bytes and records the maximum heap size.
type sink struct {
	vm.Device
	written ir.Bytes
	heap    uint64
}

func (s *sink) Load(*ir.Program, int, *vm.Env) error { return nil }
func (s *sink) Begin(ir.Section, int64) error        { return nil }
func (s *sink) Launch(int)                           {}
func (s *sink) Copy(int)                             {}
func (s *sink) Comm(int)                             {}
func (s *sink) Record(int)                           {}
func (s *sink) Wait(int)                             {}
func (s *sink) Join() error                          { return nil }
func (s *sink) Close() error                         { return nil }

func (s *sink) Write(v ir.View, in []byte) error {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	s.heap = max(s.heap, m.HeapInuse)
	s.written += ir.Bytes(len(in))
	return nil
}

// oneOf is a crew that has a single rank in this process. Its other processes do not exist, and orders to them
// never fail.
type oneOf int

func (c oneOf) Here(rank int) bool                   { return rank == int(c) }
func (c oneOf) Wire(int, int, string) vm.Wire        { return nil }
func (c oneOf) Failed(error)                         {}
func (c oneOf) Leads() bool                          { return true }
func (c oneOf) Order(train.Order) error              { return nil }
func (c oneOf) Answers() ([][]byte, error)           { return nil, nil }
func (c oneOf) Ask(int, train.Order) ([]byte, error) { return nil, nil }
func (c oneOf) Next() (train.Order, error)           { return train.Order{}, io.EOF }
func (c oneOf) Answer([]byte) error                  { return nil }
func (c oneOf) Cause() error                         { return nil }
func (c oneOf) Down() <-chan struct{}                { return nil }
func (c oneOf) OnInspect(func() []byte)              {}

func (c oneOf) Inspect(time.Duration) []train.Inspection { return nil }

// hole creates a file of tensors that contain only zeros. The file is sparse, so it takes no disk space.
func hole(t *testing.T, path string, tensors []safetensors.Info) {
	t.Helper()
	header, at := map[string]any{}, int64(0)
	for _, x := range tensors {
		header[x.Name] = map[string]any{"dtype": x.DType, "shape": x.Shape, "data_offsets": []int64{at, at + x.Bytes()}}
		at += x.Bytes()
	}
	text, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	size := make([]byte, 8)
	for i := range size {
		size[i] = byte(len(text) >> (8 * i))
	}
	if err := os.WriteFile(path, append(size, text...), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, int64(len(size)+len(text))+at); err != nil {
		t.Fatal(err)
	}
}

// Loading and exporting need memory for bands of tensors, not for whole tensors. With SPPO_LONG, the model is
// Llama-3-8B, which has 16 GB of weights; otherwise it is a model with a hundred megabytes.
func TestLargeModelsTakeLittleMemory(t *testing.T) {
	hidden, layers, ffn, vocab := int64(1024), 2, int64(4096), int64(16000)
	if os.Getenv("SPPO_LONG") != "" {
		hidden, layers, ffn, vocab = 4096, 32, 14336, 128256
	}
	defer debug.SetGCPercent(debug.SetGCPercent(100)) // regardless of the setting for other tests
	dir := configFolder(t, small(t, members{
		"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": ffn, "vocab_size": vocab, "num_attention_heads": 32,
		"num_key_value_heads": 8, "head_dim": nil,
	}))
	list := []safetensors.Info{{Name: "model.embed_tokens.weight", DType: "BF16", Shape: []int64{vocab, hidden}}, {Name: "lm_head.weight", DType: "BF16", Shape: []int64{vocab, hidden}}, {Name: "model.norm.weight", DType: "BF16", Shape: []int64{hidden}}}
	for i := range layers {
		for name, shape := range map[string][]int64{
			"input_layernorm": {hidden}, "post_attention_layernorm": {hidden},
			"self_attn.q_proj": {hidden, hidden}, "self_attn.k_proj": {hidden / 4, hidden}, "self_attn.v_proj": {hidden / 4, hidden}, "self_attn.o_proj": {hidden, hidden},
			"mlp.gate_proj": {ffn, hidden}, "mlp.up_proj": {ffn, hidden}, "mlp.down_proj": {hidden, ffn},
		} {
			list = append(list, safetensors.Info{Name: fmt.Sprintf("model.layers.%d.%s.weight", i, name), DType: "BF16", Shape: shape})
		}
	}
	hole(t, filepath.Join(dir, safetensors.SingleFile), list)
	const ranks, limit = 8, 1 << 30
	program := compile(t, dir, ranks, expected{Losses: make([]float64, 1024)}, "schedule.sp=8", "schedule.pp=1", "schedule.subsequences=2",
		"schedule.sp_mode=megatron", "cluster.device_memory=64GiB", "schedule.align=8")
	model, weights := openFolder(t, dir, program.Tensors)
	device := &sink{}
	job, err := train.Open(program, func(int) (vm.Device, error) { return device, nil }, train.Options{
		Weights: weights, Tokens: expected{}, Crew: oneOf(3),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	began := time.Now()
	if err := job.Load(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if least := ir.Bytes(6 * parameters(program) / ranks); device.written < least {
		t.Errorf("%s were loaded; weights and masters of one rank of %d are %s", device.written, ranks, least)
	}
	t.Logf("loaded %s of %s in %s, heap at most %s", device.written, ir.Bytes(2*parameters(program)), time.Since(began).Round(time.Millisecond), ir.Bytes(device.heap))
	began = time.Now()
	watched := &watch{from: constant(0)}
	e := hf.Export{Values: watched, Tensors: program.Tensors, From: model}
	if err := e.Write(t.Context(), filepath.Join(t.TempDir(), "out")); err != nil {
		t.Fatal(err)
	}
	t.Logf("exported in %s, heap at most %s", time.Since(began).Round(time.Millisecond), ir.Bytes(watched.heap))
	if device.heap > limit || watched.heap > limit {
		t.Errorf("heap of %s while loading and %s while exporting, more than %s", ir.Bytes(device.heap), ir.Bytes(watched.heap), ir.Bytes(limit))
	}
}

// watch records the maximum heap size while values are read.
type watch struct {
	from hf.Values
	heap uint64
}

func (w *watch) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	w.heap = max(w.heap, m.HeapInuse)
	return w.from.Read(tensor, row, col, rows, cols, out)
}
