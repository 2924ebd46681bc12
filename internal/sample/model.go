// Package sample generates text with a model, token by token, on the CPU. It is meant for a quick look at what
// a model has learned.
//
//	model.go    a model with a cache of K and V of the tokens so far
//	walk.go     from the dataflow of the model to instructions for a few tokens
//	pick.go     the choice of a token from the logits
//	text.go     prompts to tokens, tokens to text
//
// There is no second implementation of the model. The instructions are those that package graph derives for
// training, for subsequences of one token or of a chunk of the prompt, and the kernels are those of the cpu
// device. A new model trait needs no change here.
package sample

import (
	"fmt"
	"math"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Weights provides the values of a model's tensors, as vm.Weights does.
type Weights interface {
	// Read copies rows by cols values of a tensor, starting at (row, col), to the slice out, row by row.
	Read(tensor string, row, col, rows, cols int64, out []float32) error
}

// chunkTokens is the number of tokens of a prompt that are processed at a time.
const chunkTokens = 256

// Model is a model with the sequence of tokens that it has processed. It must be used by one goroutine at a time.
type Model struct {
	graph  *graph.Model
	device *cpu.Device
	code   *ir.Code
	places map[placeKey]uint32 // buffers of values
	tokens []int32             // of the sequence so far
	most   int64               // tokens for which there is memory
	seen   int64               // tokens whose K and V have been computed
	cap    float32             // softcap of the logits; 0: none
	err    error
}

// Size holds the sequence length that a model was trained for and the sequence length for which it has memory.
type Size struct {
	// Sequence is the length of the sequences that the model is trained on, in tokens. The frequencies of
	// longrope and the number of learned positions depend on it.
	Sequence int64
	Tokens   int64 // maximum length of a sequence here, at most Sequence
	// Fits is called with the memory needed before it is allocated, and may refuse it; may be nil.
	Fits func(need ir.Bytes) error
}

// Open allocates a model on the CPU and reads its weights. Kernels share the threads of the pool.
func Open(m lang.Model, size Size, weights Weights, pool *simd.Pool) (*Model, error) {
	if size.Tokens < 1 || size.Tokens > size.Sequence {
		return nil, fmt.Errorf("internal: %d tokens of a sequence of %d", size.Tokens, size.Sequence)
	}
	m.AdapterDropout = 0 // only for training
	s := &Model{
		graph: graph.New(m, graph.Split{SP: 1}, size.Sequence), code: &ir.Code{Name: "sample"}, places: map[placeKey]uint32{}, most: size.Tokens,
	}
	for _, n := range s.graph.Head.Forward {
		if n.Op == ir.CrossEntropyStats {
			in := graph.BlockInstr(s.graph.Head, &n, s.size(0, 1))
			s.cap = float32(in.Attr("softcap").Float(nil))
		}
	}
	s.allocate()
	if size.Fits != nil {
		if err := size.Fits(s.Bytes()); err != nil {
			return nil, err
		}
	}
	s.device = cpu.New(pool)
	program := &ir.Program{
		Name: m.Name, Run: ir.Run{Sequence: size.Sequence, Vocab: m.Vocab, Rotations: s.graph.Rotations}, Codes: []ir.Code{*s.code},
		Ranks: []ir.Rank{{}},
	}
	err := s.device.Load(program, 0, &vm.Env{Transport: vm.NewLocal(), Tokens: history{s}})
	if err == nil {
		err = s.load(weights)
	}
	if err != nil {
		s.device.Close()
		return nil, err
	}
	return s, nil
}

// Tensors lists the weights that a model reads for sequences of the given number of tokens.
func Tensors(m lang.Model, sequence int64) []ir.Tensor {
	return graph.New(m, graph.Split{SP: 1}, sequence).Tensors()
}

// Bytes returns the memory for weights, for K and V, and for the values of a chunk of the prompt.
func (s *Model) Bytes() ir.Bytes { return s.code.Arenas[ir.Device] }

// Close frees the memory.
func (s *Model) Close() error { return s.device.Close() }

// Tokens returns the tokens of the sequence so far.
func (s *Model) Tokens() []int32 { return s.tokens }

// Left returns the number of tokens for which there is still memory.
func (s *Model) Left() int64 { return s.most - s.seen }

// Feed appends tokens to the sequence and returns the logits of the token after them, which the next call
// overwrites. It accepts at most Left tokens. After an error the model must not be used.
func (s *Model) Feed(tokens []int32) (logits []float32, err error) {
	if s.err != nil {
		return nil, s.err
	}
	if n := int64(len(tokens)); n == 0 || n > s.Left() {
		return nil, fmt.Errorf("internal: %d tokens where 1 to %d have room", n, s.Left())
	}
	for _, t := range tokens {
		if t < 0 || int(t) >= s.graph.Vocab {
			return nil, fmt.Errorf("token %d is outside the vocabulary of %d", t, s.graph.Vocab)
		}
	}
	s.tokens = append(s.tokens, tokens...)
	for s.seen < int64(len(s.tokens)) {
		n := min(chunkTokens, int64(len(s.tokens))-s.seen)
		if s.err = s.device.Execute(s.walk(s.seen, n, s.seen+n == int64(len(s.tokens)))); s.err != nil {
			return nil, s.err
		}
		s.seen += n
	}
	logits = make([]float32, s.graph.Vocab)
	if s.err = s.device.Read(s.logits(), vm.BytesOf(logits)); s.err != nil {
		return nil, s.err
	}
	for i, x := range logits {
		if s.cap > 0 {
			logits[i] = s.cap * float32(math.Tanh(float64(x/s.cap)))
		}
		if x != x {
			return nil, fmt.Errorf("the logits of token %d of the vocabulary are not a number after %d tokens: are the weights damaged?", i, s.seen)
		}
	}
	return logits, nil
}

// loadElements is the number of values of a tensor that are in memory at a time on their way to the model.
const loadElements = 8 << 20

// load reads every weight, a band of rows at a time.
func (s *Model) load(weights Weights) error {
	return s.each(func(key placeKey, b *graph.Block, p *graph.Param) error {
		view := b.View(graph.Arg{Value: key.value}, s.size(0, 1))
		view.Buffer = s.places[key]
		rows, cols := p.Shape[0], p.Shape[1]
		if p.Planes > 0 {
			view.Shape = [len(view.Shape)]int64{rows, cols}
		}
		step := max(1, loadElements/cols)
		for first := int64(0); first < rows; first += step {
			n := min(step, rows-first)
			values := make([]float32, n*cols)
			if err := weights.Read(s.name(key.layer, p), first, 0, n, cols, values); err != nil {
				return fmt.Errorf("reading %s: %w", s.name(key.layer, p), err)
			}
			band := graph.RowsOf(view, first, n)
			if p.Vector {
				band = view
				band.Offset += ir.Bytes(first) * view.DType.Bytes()
				band.Shape[0] = n
			}
			if err := s.device.Write(band, vm.Stored(values, view.DType)); err != nil {
				return err
			}
		}
		return nil
	})
}

// history is the source from which instructions load tokens.
type history struct{ s *Model }

// Tokens implements vm.Tokens. The label of the last token is unknown and not used.
func (h history) Tokens(_ ir.Section, _, _, position int64, out []int32, stride int) error {
	for i := 0; i < len(out); i += stride {
		out[i] = 0
		if position < int64(len(h.s.tokens)) {
			out[i] = h.s.tokens[position]
		}
		position++
	}
	return nil
}
