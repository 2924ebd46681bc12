// Package naive is the models' published maths in float64, as plainly as it can be written: the yardstick for the
// compiled programs. It covers GPT (Radford et al., 2019: pre-LayerNorm, GELU, biases) and Llama (Touvron et al.,
// 2023: RMSNorm, rotary positions, SwiGLU, grouped-query attention), their gradients by hand, and the optimizers.
//
//   - model.go: the models, their tensors, the loss and the gradient of every tensor
//   - ops.go: the forward maths of single operations, and numerical differentiation
//   - grads.go: the same operations' gradients
//   - optimizer.go: clipping, the optimizers and the learning-rate schedule
//
// It is for tests only. It knows nothing of specs, plans, bytecode, ranks or devices, imports none of our packages, and
// shares no code with what it judges: every row of logits and every T x T matrix of attention is held at once.
//
// All matrices are row-major. The rows of a batch are interleaved: token t of sequence b is row t*batch+b.
package naive

import "fmt"

// Families of models and kinds of positions.
const (
	gpt     = "gpt"
	llama   = "llama"
	learned = "learned"
	rope    = "rope"
	none    = "none"
)

// Config is a model's shape. Nothing has a default: KVHeads equals Heads where queries are not grouped.
type Config struct {
	Family                                              string // gpt | llama
	Layers, Hidden, Heads, KVHeads, HeadDim, FFN, Vocab int
	Tied                                                bool   // the output projection is the embedding
	Positions                                           string // learned | rope | none
	RopeTheta, NormEps                                  float64
	Sequence                                            int // tokens of one sequence
}

// Tensors holds row-major values by name.
type Tensors map[string][]float64

// tensor is one row of a model's parameter list.
type tensor struct {
	name  string
	shape []int
}

// parameters is the one list of a model's tensors, in the order in which the model uses them.
func parameters(cfg Config) []tensor {
	h := cfg.Hidden
	list := []tensor{{"embed", []int{cfg.Vocab, h}}}
	if cfg.Positions == learned {
		list = append(list, tensor{"pos", []int{cfg.Sequence, h}})
	}
	for l := range cfg.Layers {
		list = append(list, layerParameters(cfg, fmt.Sprintf("layer.%d.", l))...)
	}
	list = append(list, tensor{"ln_f.gamma", []int{h}})
	if cfg.Family == gpt {
		list = append(list, tensor{"ln_f.beta", []int{h}})
	}
	if !cfg.Tied {
		list = append(list, tensor{"head", []int{cfg.Vocab, h}})
	}
	return list
}

func layerParameters(cfg Config, prefix string) []tensor {
	h, q, kv, f := cfg.Hidden, cfg.Heads*cfg.HeadDim, cfg.KVHeads*cfg.HeadDim, cfg.FFN
	list := []tensor{
		{"ln1.gamma", []int{h}}, {"ln1.beta", []int{h}},
		{"wq", []int{h, q}}, {"bq", []int{q}},
		{"wk", []int{h, kv}}, {"bk", []int{kv}},
		{"wv", []int{h, kv}}, {"bv", []int{kv}},
		{"wo", []int{q, h}}, {"bo", []int{h}},
		{"ln2.gamma", []int{h}}, {"ln2.beta", []int{h}},
		{"w1", []int{h, f}}, {"b1", []int{f}},
		{"w2", []int{f, h}}, {"b2", []int{h}},
	}
	if cfg.Family == llama {
		list = []tensor{
			{"ln1.gamma", []int{h}},
			{"wq", []int{h, q}}, {"wk", []int{h, kv}}, {"wv", []int{h, kv}}, {"wo", []int{q, h}},
			{"ln2.gamma", []int{h}},
			{"w_gate", []int{h, f}}, {"w_up", []int{h, f}}, {"w_down", []int{f, h}},
		}
	}
	for i := range list {
		list[i].name = prefix + list[i].name
	}
	return list
}

// Names lists the model's tensors in order of use.
func Names(cfg Config) []string {
	var names []string
	for _, p := range parameters(cfg) {
		names = append(names, p.name)
	}
	return names
}

// Shapes gives every tensor's sizes by name.
func Shapes(cfg Config) map[string][]int {
	shapes := map[string][]int{}
	for _, p := range parameters(cfg) {
		shapes[p.name] = p.shape
	}
	return shapes
}

// Loss is the mean cross-entropy in nats over all tokens of the batch. Each element of tokens is a sequence of
// cfg.Sequence+1 tokens: all but the last are inputs, all but the first are labels.
func Loss(cfg Config, w Tensors, tokens [][]int32) float64 {
	m := newModel(cfg, w, tokens)
	loss, _ := m.forward()
	return loss
}

// LossAndGrads is Loss together with its gradient by every tensor of the model.
func LossAndGrads(cfg Config, w Tensors, tokens [][]int32) (loss float64, grads Tensors) {
	m := newModel(cfg, w, tokens)
	loss, dx := m.forward()
	for l := cfg.Layers - 1; l >= 0; l-- {
		dx = m.layerGrad(l, dx)
	}
	addTo(m.grads["embed"], EmbedGrad(m.inputs, dx, cfg.Hidden, 0, cfg.Vocab))
	if cfg.Positions == learned {
		addTo(m.grads["pos"], EmbedGrad(m.places(), dx, cfg.Hidden, 0, cfg.Sequence))
	}
	return loss, m.grads
}

// model is one evaluation: weights, the batch as interleaved rows, what the forward left for the backward, and the
// gradients gathered so far.
type model struct {
	cfg            Config
	w, grads       Tensors
	batch          int
	inputs, labels []int32
	tapes          []tape
}

// tape is what one layer's backward needs of its forward.
type tape struct {
	x, norm1, q, k, v, attention []float64
	mid, norm2, gate, up, act    []float64 // gate is llama's only
}

func newModel(cfg Config, w Tensors, tokens [][]int32) *model {
	check(cfg, w, tokens)
	m := &model{cfg: cfg, w: w, grads: Tensors{}, batch: len(tokens), tapes: make([]tape, cfg.Layers)}
	for name, values := range w {
		m.grads[name] = make([]float64, len(values))
	}
	for t := range cfg.Sequence {
		for _, sequence := range tokens {
			m.inputs = append(m.inputs, sequence[t])
			m.labels = append(m.labels, sequence[t+1])
		}
	}
	return m
}

// check panics on what only a mistake in a test can cause, so that it does not pass as a strange number.
func check(cfg Config, w Tensors, tokens [][]int32) {
	demand(cfg.Family == gpt || cfg.Family == llama, "family %q", cfg.Family)
	demand(cfg.Positions == learned || cfg.Positions == rope || cfg.Positions == none, "positions %q", cfg.Positions)
	demand(cfg.KVHeads > 0 && cfg.Heads%cfg.KVHeads == 0, "%d heads over %d kv heads", cfg.Heads, cfg.KVHeads)
	list := parameters(cfg)
	demand(len(w) == len(list), "%d tensors where the model has %d", len(w), len(list))
	for _, p := range list {
		size := 1
		for _, n := range p.shape {
			size *= n
		}
		demand(len(w[p.name]) == size, "tensor %q has %d values, its shape is %v", p.name, len(w[p.name]), p.shape)
	}
	demand(len(tokens) > 0, "an empty batch")
	for b, sequence := range tokens {
		demand(len(sequence) == cfg.Sequence+1, "sequence %d has %d tokens, not %d+1", b, len(sequence), cfg.Sequence)
		for _, token := range sequence {
			demand(token >= 0 && int(token) < cfg.Vocab, "token %d outside a vocabulary of %d", token, cfg.Vocab)
		}
	}
}

func demand(ok bool, format string, args ...any) {
	if !ok {
		panic("internal: naive: " + fmt.Sprintf(format, args...))
	}
}

// places is the position of every row in its sequence.
func (m *model) places() []int32 {
	places := make([]int32, len(m.inputs))
	for row := range places {
		places[row] = int32(row / m.batch)
	}
	return places
}

// forward returns the loss and its gradient by the last layer's output: head and loss are differentiated on the spot,
// because nothing lies between their forward and their backward.
func (m *model) forward() (loss float64, dx []float64) {
	x := Embed(m.w["embed"], m.inputs, m.cfg.Hidden, 0)
	if m.cfg.Positions == learned {
		addTo(x, Embed(m.w["pos"], m.places(), m.cfg.Hidden, 0))
	}
	for l := range m.cfg.Layers {
		x = m.layer(l, x)
	}
	head := "head"
	if m.cfg.Tied {
		head = "embed"
	}
	rows, h, v := len(m.inputs), m.cfg.Hidden, m.cfg.Vocab
	y := m.norm(x, "ln_f")
	logits := MatMul(y, m.w[head], nil, rows, v, h, false, true)
	losses, lse := CrossEntropy(logits, m.labels, v)
	for _, l := range losses {
		loss += l / float64(rows)
	}
	dlogits := CrossEntropyGrad(logits, m.labels, lse, v, v, 0, 1/float64(rows))
	addTo(m.grads[head], MatMul(dlogits, y, nil, v, h, rows, true, false))
	return loss, m.normGrad(x, MatMul(dlogits, m.w[head], nil, rows, h, v, false, false), "ln_f")
}

// layer is x + attention(norm(x)), then that + mlp(norm(that)).
func (m *model) layer(l int, x []float64) []float64 {
	t, in := &m.tapes[l], fmt.Sprintf("layer.%d.", l)
	t.x = x
	t.norm1 = m.norm(x, in+"ln1")
	t.q = m.linear(t.norm1, in+"wq", in+"bq")
	t.k = m.linear(t.norm1, in+"wk", in+"bk")
	t.v = m.linear(t.norm1, in+"wv", in+"bv")
	if m.cfg.Positions == rope {
		t.q = Rope(t.q, m.batch, m.cfg.Heads, m.cfg.HeadDim, 0, m.cfg.RopeTheta)
		t.k = Rope(t.k, m.batch, m.cfg.KVHeads, m.cfg.HeadDim, 0, m.cfg.RopeTheta)
	}
	t.attention, _ = Attention(t.q, t.k, t.v, m.attentionShape())
	t.mid = add(x, m.linear(t.attention, in+"wo", in+"bo"))
	t.norm2 = m.norm(t.mid, in+"ln2")
	if m.cfg.Family == llama {
		t.gate = m.linear(t.norm2, in+"w_gate", "")
		t.up = m.linear(t.norm2, in+"w_up", "")
		t.act = SwiGLU(t.gate, t.up)
		return add(t.mid, m.linear(t.act, in+"w_down", ""))
	}
	t.up = m.linear(t.norm2, in+"w1", in+"b1")
	t.act = GELU(t.up)
	return add(t.mid, m.linear(t.act, in+"w2", in+"b2"))
}

// layerGrad takes the gradient by a layer's output to that by its input.
func (m *model) layerGrad(l int, dout []float64) []float64 {
	t, in := &m.tapes[l], fmt.Sprintf("layer.%d.", l)
	var dnorm2 []float64
	if m.cfg.Family == llama {
		dgate, dup := SwiGLUGrad(t.gate, t.up, m.linearGrad(t.act, dout, in+"w_down", ""))
		dnorm2 = add(m.linearGrad(t.norm2, dgate, in+"w_gate", ""), m.linearGrad(t.norm2, dup, in+"w_up", ""))
	} else {
		dup := GELUGrad(t.up, m.linearGrad(t.act, dout, in+"w2", in+"b2"))
		dnorm2 = m.linearGrad(t.norm2, dup, in+"w1", in+"b1")
	}
	dmid := add(dout, m.normGrad(t.mid, dnorm2, in+"ln2"))

	dattention := m.linearGrad(t.attention, dmid, in+"wo", in+"bo")
	dq, dk, dv := AttentionGrad(t.q, t.k, t.v, t.attention, dattention, m.attentionShape())
	if m.cfg.Positions == rope {
		dq = RopeGrad(dq, m.batch, m.cfg.Heads, m.cfg.HeadDim, 0, m.cfg.RopeTheta)
		dk = RopeGrad(dk, m.batch, m.cfg.KVHeads, m.cfg.HeadDim, 0, m.cfg.RopeTheta)
	}
	dnorm1 := m.linearGrad(t.norm1, dq, in+"wq", in+"bq")
	addTo(dnorm1, m.linearGrad(t.norm1, dk, in+"wk", in+"bk"))
	addTo(dnorm1, m.linearGrad(t.norm1, dv, in+"wv", in+"bv"))
	return add(dmid, m.normGrad(t.x, dnorm1, in+"ln1"))
}

func (m *model) attentionShape() AttentionShape {
	return AttentionShape{Queries: m.cfg.Sequence, Batch: m.batch,
		Heads: m.cfg.Heads, KVHeads: m.cfg.KVHeads, HeadDim: m.cfg.HeadDim}
}

func (m *model) norm(x []float64, name string) []float64 {
	if m.cfg.Family == llama {
		return RMSNorm(x, m.w[name+".gamma"], m.cfg.NormEps)
	}
	return LayerNorm(x, m.w[name+".gamma"], m.w[name+".beta"], m.cfg.NormEps)
}

func (m *model) normGrad(x, dy []float64, name string) []float64 {
	gamma := m.w[name+".gamma"]
	if m.cfg.Family == llama {
		dx, dgamma := RMSNormGrad(x, gamma, dy, m.cfg.NormEps)
		addTo(m.grads[name+".gamma"], dgamma)
		return dx
	}
	dx, dgamma, dbeta := LayerNormGrad(x, gamma, dy, m.cfg.NormEps)
	addTo(m.grads[name+".gamma"], dgamma)
	addTo(m.grads[name+".beta"], dbeta)
	return dx
}

// linear is x*W + b. A model without biases has no tensor of the bias's name, and MatMul takes that nil for none.
func (m *model) linear(x []float64, weight, bias string) []float64 {
	rows := len(m.inputs)
	in := len(x) / rows
	return MatMul(x, m.w[weight], m.w[bias], rows, len(m.w[weight])/in, in, false, false)
}

func (m *model) linearGrad(x, dy []float64, weight, bias string) []float64 {
	rows := len(m.inputs)
	in, out := len(x)/rows, len(dy)/rows
	addTo(m.grads[weight], MatMul(x, dy, nil, in, out, rows, true, false))
	if m.w[bias] != nil {
		addTo(m.grads[bias], columnSums(dy, out))
	}
	return MatMul(dy, m.w[weight], nil, rows, in, out, false, true)
}

func add(a, b []float64) []float64 {
	sum := make([]float64, len(a))
	for i := range a {
		sum[i] = a[i] + b[i]
	}
	return sum
}

func addTo(to, from []float64) {
	for i := range from {
		to[i] += from[i]
	}
}

// columnSums adds up the rows of a matrix.
func columnSums(x []float64, width int) []float64 {
	sums := make([]float64, width)
	for i, value := range x {
		sums[i%width] += value
	}
	return sums
}
