package meaning

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"sppo.dev/ir"
)

// layer is a layer of the reference, with the values that its backward pass needs.
type layer struct {
	*reference
	number    int
	x, middle value // the inputs of its two branches
	pre, post [2]*normalized
	maps      map[string]*linear
	heads     [3]head // q, k, v
	o, lse    value
	sinks     []value
	act       *mlp // operands of the activation of a dense MLP
	moe       *moe
	window    int64
	attention []value // operands after q, k and v
	gate      value   // of attention's result
	scanned   linearAttention
	latent    latentAttention
	adapters  map[string]*adapter
}

// head is q, k or v on its way to attention.
type head struct {
	value    value // what attention takes, once it is ready
	norm     *normalized
	rotation ir.Rotation
	width    int64 // of what is rotated
}

// linear is a linear map with an adapter or without.
type linear struct {
	weight, bias string
	x            value
	rows, cols   int64
	adapter      *adapter
}

// adapter is the first matrix of an adapter, which several linear maps may share.
type adapter struct {
	tensor     string
	x, dropped value
	rows       int64
	down       value // scaled
	gradient   value // of down
	left       int   // linear maps whose gradients are not part of it yet
}

func (r *reference) newLayer(number int, x value) *layer {
	return &layer{reference: r, number: number, x: x, maps: map[string]*linear{}, adapters: map[string]*adapter{}, window: r.layerWindow(number)}
}

func (l *layer) name(tensor string) string { return fmt.Sprintf("layer.%d.%s", l.number, tensor) }

func (l *layer) before() bool { return l.NormPlace != "post" }
func (l *layer) after() bool  { return l.NormPlace == "post" || l.NormPlace == "pre_post" }

// forward adds the forward pass and returns the result.
func (l *layer) forward() value {
	l.middle = l.x
	switch l.mixer() {
	case "attention":
		l.middle = l.branch(0, l.x, l.has("attn_out"), "bo", l.attend)
	case "gated_delta", "kimi_delta", "mamba2":
		l.middle = l.branch(0, l.x, false, "", l.linearAttend)
	case "latent":
		l.middle = l.branch(0, l.x, l.has("attn_out"), "bo", l.attendLatent)
	}
	y := l.middle
	if l.ffn() > 0 {
		biased, mlp := l.has("mlp"), l.mlp
		if l.sparse() {
			biased, mlp = false, l.experts
		}
		y = l.branch(1, l.middle, biased, l.downBias(""), mlp)
	}
	return l.named(fmt.Sprintf("the output of layer %d", l.number), y)
}

// ffn returns the width of the layer's MLP, or 0 if it has none.
func (l *layer) ffn() int64 {
	if n := len(l.FFNs); n > 0 {
		return int64(l.FFNs[l.number%n])
	}
	return int64(l.FFN)
}

func (l *layer) has(group string) bool { return slices.Contains(l.Bias, group) }

func (l *layer) downBias(prefix string) string {
	if l.Gated {
		return prefix + "b_down"
	}
	return prefix + "b2"
}

// branch adds a residual branch with its norms.
func (l *layer) branch(i int, x value, biased bool, bias string, f func(value) value) value {
	in := x
	norm := l.name(fmt.Sprintf("ln%d", i+1))
	if l.before() {
		l.pre[i] = l.residualNorm(norm, x)
		in = l.pre[i].y
	}
	out := l.named(norm+", after it and its matrices", f(in))
	if l.after() {
		l.post[i] = l.residualNorm(norm+"_post", out)
		out = l.post[i].y
	}
	if biased {
		out = out.plus(l.bias(l.name(bias)))
	}
	return l.named(fmt.Sprintf("layer %d after branch %d", l.number, i+1), x.plus(out))
}

func (l *layer) bias(name string) value {
	return l.plain(name, ir.Matmul, newKey("bias"), l.weight(name))
}

// linear adds a linear map of x.
func (l *layer) linear(weight, bias string, biased bool, x value, rows, cols int64) value {
	m := &linear{weight: l.name(weight), x: x, rows: rows, cols: cols}
	l.maps[weight] = m
	y := l.product(m.weight+" times its input", x, l.weight(m.weight), false, rows)
	if biased {
		m.bias = l.name(bias)
		y = y.plus(l.bias(m.bias))
	}
	if m.adapter = l.adapterOf(weight, x, rows); m.adapter != nil {
		m.adapter.left++
		y = y.plus(l.product(m.weight+".lora_b times its input", m.adapter.down, l.weight(m.weight+".lora_b"), false, int64(l.AdapterRank)))
	}
	return l.named("the result of "+m.weight, y)
}

// Matrices of targets of Kimi delta attention. Other attention has targets of the first names, too.
var (
	kimiMaps    = map[string]string{"q_proj": "linear.wq", "k_proj": "linear.wk", "v_proj": "linear.wv", "o_proj": "linear.wo"}
	kimiOwnMaps = map[string]string{"b_proj": "linear.wb", "f_a_proj": "linear.wa_low", "f_b_proj": "linear.wa", "g_a_proj": "linear.wz_low", "g_b_proj": "linear.wz"}
)

// adapterName says which matrices an adapter's target has, and the name of its first matrix.
func (l *layer) adapterName(weight string) string {
	up, down := "w1", "w2"
	if l.Gated {
		up, down = "w_up", "w_down"
	}
	kimi, latents := slices.Contains(l.Mixers, "kimi_delta"), slices.Contains(l.Mixers, "latent")
	for _, t := range l.AdapterTargets {
		if name := cmp.Or(kimiMaps[t], kimiOwnMaps[t]); kimi && name == weight {
			return name
		}
		if kimiOwnMaps[t] != "" || latents && (t == "k_proj" || t == "v_proj") || l.QLatent > 0 && t == "q_proj" {
			continue // a map of no other attention of the model
		}
		matrices, name := []string{"w" + t[:1]}, "w"+t[:1]
		switch t {
		case "q_proj":
			if l.AttnGate {
				matrices, name = []string{"wq", "wg"}, "wqg"
			}
		case "in_proj_qkvz":
			matrices, name = []string{"linear.wq", "linear.wk", "linear.wv", "linear.wz"}, "linear.wqkvz"
		case "in_proj_ba":
			matrices, name = []string{"linear.wb", "linear.wa"}, "linear.wba"
		case "in_proj_qkv":
			matrices, name = []string{"linear.wq", "linear.wk", "linear.wv"}, "linear.wqkv"
		case "in_proj_z", "in_proj_b", "in_proj_a":
			name = "linear.w" + strings.TrimPrefix(t, "in_proj_")
			matrices = []string{name}
		case "in_proj":
			matrices, name = []string{"linear.wz", "linear.wv", "linear.wk", "linear.wq", "linear.wa"}, "linear.w_in"
		case "out_proj":
			matrices, name = []string{"linear.wo"}, "linear.wo"
		case "q_a_proj":
			matrices, name = []string{"wq_a"}, "wq_a"
		case "kv_a_proj_with_mqa":
			matrices, name = []string{"wkv", "wk_rope"}, "wkv_a"
		case "kv_b_proj":
			matrices, name = []string{"wk", "wv"}, "wkv_b"
		case "qkv_proj":
			matrices, name = []string{"wq", "wk", "wv"}, "wqkv"
		case "up_proj":
			matrices, name = []string{up}, up
		case "down_proj":
			matrices, name = []string{down}, down
		case "gate_proj":
			matrices, name = []string{"w_gate"}, "w_gate"
		case "gate_up_proj":
			matrices, name = []string{"w_gate", up}, "w_gate_up"
		}
		if own, shared := strings.CutPrefix(weight, "shared."); slices.Contains(matrices, own) {
			if shared {
				return "shared." + name
			}
			return name
		}
	}
	return ""
}

func (l *layer) adapterOf(weight string, x value, rows int64) *adapter {
	if l.Adapter == "" {
		return nil
	}
	name := l.adapterName(weight)
	if name == "" {
		return nil
	}
	if a := l.adapters[name]; a != nil {
		return a
	}
	a := &adapter{tensor: l.name(name + ".lora_a"), x: x, dropped: x, rows: rows}
	l.adapters[name] = a
	if l.AdapterDropout > 0 && l.section == ir.SectionStep {
		a.dropped = l.drop(a, x)
	}
	a.down = l.product(a.tensor+" times its input", a.dropped, l.weight(a.tensor), false, rows).times(l.AdapterAlpha / float64(l.AdapterRank))
	l.named(a.tensor+" times its input, scaled", a.down)
	return a
}

func (l *layer) drop(a *adapter, x value) value {
	return l.plain("what dropout leaves for "+a.tensor, ir.Dropout, dropoutKey(l.tensors[a.tensor], l.AdapterDropout), x, leafKey("the "+ir.ResultDropout))
}

// linearGradient adds the gradients of a linear map and returns that of its operand.
func (l *layer) linearGradient(weight string, dy value) value {
	m := l.maps[weight]
	dx := l.product("the gradient through "+m.weight, dy, l.weight(m.weight), true, m.cols)
	l.gradient(m.weight, l.outer(m.weight+".grad", m.x, dy))
	if m.bias != "" {
		l.gradient(m.bias, l.overTokens(m.bias+".grad", ir.BiasGrad, newKey("bias_grad"), dy))
	}
	a := m.adapter
	if a == nil {
		return dx
	}
	b := m.weight + ".lora_b"
	a.gradient = a.gradient.plus(l.product("the gradient through "+b, dy, l.weight(b), true, m.cols))
	l.gradient(b, l.outer(b+".grad", a.down, dy))
	if a.left--; a.left > 0 {
		return dx
	}
	down := l.named("the gradient of "+a.tensor+" times its input", a.gradient.times(l.AdapterAlpha/float64(l.AdapterRank)))
	l.gradient(a.tensor, l.outer(a.tensor+".grad", a.dropped, down))
	through := l.product("the gradient through "+a.tensor, down, l.weight(a.tensor), true, int64(l.AdapterRank))
	if a.dropped != a.x {
		through = l.drop(a, through)
	}
	return dx.plus(through)
}

// attend adds attention.
func (l *layer) attend(x value) value {
	q, kv := int64(l.Heads*l.HeadDim), int64(l.KVHeads*l.HeadDim)
	for i, name := range []string{"q", "k", "v"} {
		h, width := &l.heads[i], kv
		if i == 0 {
			width = q
		}
		h.value = l.linear("w"+name, "b"+name, l.has("qkv"), x, int64(l.Hidden), width)
		if i < 2 {
			h.rotation, h.width = l.rotation(l.number, i == 0), int64(l.HeadDim)
			l.ready(name, h, width)
		}
	}
	return l.attendHeads(x)
}

// attendHeads adds attention of heads that are ready, and its last linear map. x is the input of the layer's matrices.
func (l *layer) attendHeads(x value) value {
	q := int64(l.Heads) * l.valueDim()
	if l.documents {
		l.attention = []value{dataKey(ir.AsPositions)}
	}
	operands := append([]value{l.heads[0].value, l.heads[1].value, l.heads[2].value}, l.attention...)
	t := term{kind: softmax, window: l.visibleTokens(), partner: l.attentionKey(resultLSE).of(operands...).value()}
	l.o = l.add(l.name("attention"), ir.Attention, t, l.attentionKey(resultO), operands...)
	t.partner = value{}
	l.lse = l.add(l.name("attention's lse"), ir.Attention, t, l.attentionKey(resultLSE), operands...)
	if l.AttnSinks {
		l.sink(l.weight(l.name("sinks")))
	}
	y := l.o
	if l.AttnGate {
		l.gate = l.linear("wg", "", false, x, int64(l.Hidden), q)
		y = l.plain(l.name("attention, gated"), ir.GLU, functionKey("glu", "sigmoid"), l.gate, y)
	}
	return l.linear("wo", "", false, y, q, int64(l.Hidden))
}

// ready adds the rotation of queries or keys, and the norm before or after it.
func (l *layer) ready(name string, h *head, width int64) {
	if l.QKNorm == "rotated" {
		h.value = l.turn(l.name(name), h, h.value, false)
	}
	if l.QKNorm != "none" && l.QKNorm != "" {
		group := width
		if l.QKNorm != "all" {
			group = int64(l.HeadDim)
		}
		h.norm = l.norm(l.name(name+"_norm"), h.value, group, width/group, true)
		h.value = h.norm.y
	}
	if l.QKNorm != "rotated" {
		h.value = l.turn(l.name(name), h, h.value, false)
	}
}

// readyGradient adds the gradients of what ready adds.
func (l *layer) readyGradient(name string, h *head, g value) value {
	if l.QKNorm != "rotated" {
		g = l.turn(l.name(name), h, g, true)
	}
	if h.norm != nil {
		g = l.normGradient(h.norm, g)
	}
	if l.QKNorm == "rotated" {
		g = l.turn(l.name(name), h, g, true)
	}
	return g
}

// sink adds the sinks to the results of attention.
func (l *layer) sink(sinks value) {
	l.sinks = []value{sinks}
	operands, d := []value{l.o, l.lse, sinks}, l.valueDim()
	l.o = l.plain(l.name("attention with sinks"), ir.AttentionSink, sinkKey(d, resultO), operands...)
	l.lse = l.plain(l.name("the lse of attention with sinks"), ir.AttentionSink, sinkKey(d, resultLSE), operands...)
}

// visibleTokens returns the number of tokens that a query sees at most.
func (l *layer) visibleTokens() int64 {
	if l.window == 0 {
		return l.sequence
	}
	return l.window
}

func (l *layer) attentionKey(result int64) key {
	return attentionKey(int64(l.HeadDim), l.valueDim(), l.window, l.AttnSoftcap).int(result)
}

// turn adds the rotation of queries or keys.
func (l *layer) turn(name string, h *head, x value, back bool) value {
	if len(h.rotation.Rates) == 0 {
		return l.named(name, x.times(h.rotation.Rest))
	}
	operands := []value{x}
	if l.documents {
		operands = append(operands, dataKey(ir.AsPositions))
	}
	if back {
		name = "the gradient through the rotation of " + name
	}
	return l.plain(name, ir.Rope, rotationKey(h.rotation, h.width, back), operands...)
}

// attendGradient adds the gradients of attention, and returns that of its operand.
func (l *layer) attendGradient(dy value) (dx value) {
	d, dx := l.headsGradient(dy)
	for i := 2; i >= 0; i-- {
		name := []string{"q", "k", "v"}[i]
		g := d[i]
		if i < 2 {
			g = l.readyGradient(name, &l.heads[i], g)
		}
		dx = dx.plus(l.linearGradient("w"+name, g))
	}
	return dx
}

// headsGradient adds the gradients of attendHeads. It returns those of q, k and v as attention takes them, and that of x through the gate.
func (l *layer) headsGradient(dy value) (d [3]value, dx value) {
	do := l.linearGradient("wo", dy)
	if l.AttnGate {
		g := l.named(l.name("the gradient of attention, gated"), do)
		dx = l.linearGradient("wg", l.plain(l.name("d.attention's gate"), ir.GLUGrad, functionKey("glu_grad_gate", "sigmoid"), g, l.gate, l.o))
		do = l.plain(l.name("the gradient of attention"), ir.GLUGrad, functionKey("glu_grad_up", "sigmoid"), g, l.gate, l.o)
	}
	l.named(l.name("the gradient of attention"), do)
	l.plain(l.name("delta"), ir.AttentionDelta, deltaKey(l.valueDim()), deltaValues(do, l.o)...)
	operands := slices.Concat([]value{do, l.heads[0].value, l.heads[1].value, l.heads[2].value}, l.attention, l.sinks)
	for _, sinks := range l.sinks {
		l.gradient(l.name("sinks"), l.overTokens(l.name("sinks.grad"), ir.AttentionSinkGrad, sinkGradKey(l.valueDim()), do, l.o, l.lse, sinks))
	}
	d = [3]value{l.add(l.name("d.q"), ir.AttentionGrad, term{kind: overKeys, window: l.visibleTokens()}, l.attentionKey(resultDQ), operands...)}
	for i, name := range []string{"d.k", "d.v"} {
		t := term{kind: overQuery, window: l.visibleTokens(), need: box{full, {0, l.sequence}, full, {0, l.group}}}
		d[i+1] = l.add(l.name(name), ir.AttentionGrad, t, l.attentionKey(resultDK+int64(i)), operands...)
	}
	return d, dx
}

func (l *layer) activation() int64 { return int64(slices.Index(ir.Functions, l.Activation)) }

func (l *layer) mlp(x value) (y value) {
	y, l.act = l.dense("", l.ffn(), l.has("mlp"), x)
	return y
}

func (l *layer) mlpGradient(dy value) value { return l.denseGradient("", l.act, dy) }

// dense adds a dense MLP, whose tensors have names with a prefix.
func (l *layer) dense(prefix string, f int64, biased bool, x value) (value, *mlp) {
	h, m := int64(l.Hidden), &mlp{}
	if !l.Gated {
		m.up = l.linear(prefix+"w1", prefix+"b1", biased, x, h, f)
		y := l.plain(l.name(prefix+"activation"), ir.Activation, newKey("activation").int(l.activation()), m.up)
		return l.linear(prefix+"w2", "", false, y, f, h), m
	}
	m.gate, m.up = l.linear(prefix+"w_gate", prefix+"b_gate", biased, x, h, f), l.linear(prefix+"w_up", prefix+"b_up", biased, x, h, f)
	y := l.plain(l.name(prefix+"glu"), ir.GLU, newKey("glu").int(l.activation()), m.gate, m.up)
	return l.linear(prefix+"w_down", "", false, y, f, h), m
}

func (l *layer) denseGradient(prefix string, m *mlp, dy value) value {
	if !l.Gated {
		g := l.named(l.name("the gradient of the "+prefix+"activation"), l.linearGradient(prefix+"w2", dy))
		return l.linearGradient(prefix+"w1", l.plain(l.name("d."+prefix+"w1.out"), ir.ActivationGrad, newKey("activation_grad").int(l.activation()), g, m.up))
	}
	g := l.named(l.name("the gradient of "+prefix+"glu"), l.linearGradient(prefix+"w_down", dy))
	gate := l.plain(l.name("d."+prefix+"gate"), ir.GLUGrad, newKey("glu_grad_gate").int(l.activation()), g, m.gate, m.up)
	up := l.plain(l.name("d."+prefix+"up"), ir.GLUGrad, newKey("glu_grad_up").int(l.activation()), g, m.gate, m.up)
	dx := l.linearGradient(prefix+"w_up", up)
	return dx.plus(l.linearGradient(prefix+"w_gate", gate))
}

// backward adds the backward pass, given the gradient of the layer's output, and returns that of its input.
func (l *layer) backward(dy value) value {
	if l.ffn() > 0 {
		biased, gradient := l.has("mlp"), l.mlpGradient
		if l.sparse() {
			biased, gradient = false, l.expertsGradient
		}
		dy = l.branchGradient(1, dy, biased, l.downBias(""), gradient)
	}
	switch l.mixer() {
	case "attention":
		dy = l.branchGradient(0, dy, l.has("attn_out"), "bo", l.attendGradient)
	case "gated_delta", "kimi_delta", "mamba2":
		dy = l.branchGradient(0, dy, false, "", l.linearAttendGradient)
	case "latent":
		dy = l.branchGradient(0, dy, l.has("attn_out"), "bo", l.attendLatentGradient)
	}
	return l.named(fmt.Sprintf("the gradient of the input of layer %d", l.number), dy)
}

func (l *layer) branchGradient(i int, dy value, biased bool, bias string, f func(value) value) value {
	if biased {
		l.gradient(l.name(bias), l.overTokens(l.name(bias)+".grad", ir.BiasGrad, newKey("bias_grad"), dy))
	}
	g := dy
	if l.after() {
		g = l.normGradient(l.post[i], g)
	}
	if g = f(g); l.before() {
		g = l.normGradient(l.pre[i], l.named(l.name(fmt.Sprintf("the gradient of ln%d.out", i+1)), g))
	}
	return l.named(fmt.Sprintf("the gradient of the input of branch %d of layer %d", i+1, l.number), dy.plus(g))
}

// updates adds the norm of the gradient and the updates of all tensors that are trained.
func (r *reference) updates(p *ir.Program) {
	for i := range p.Tensors {
		if r.trained(p, i) && !r.balanced(p, i) {
			r.squares = r.squares.plus(r.add("the squares of "+r.names[r.gradients[i]], ir.SumSq,
				term{kind: overAll, need: box{full, {0, r.shapes[i][0]}, {0, r.shapes[i][1]}, full}}, newKey("sumsq"), r.gradients[i]))
		}
	}
	operands := []value{r.named("the squares of all gradients", r.squares)}
	if r.run.Spikes != 0 {
		operands = append(operands, leafKey("the "+ir.ResultSpike))
	}
	r.normed = r.plain("the norm of the gradient", ir.GradNorm, newKey("grad_norm"), operands...)
	step := leafKey("the " + ir.ResultStep)
	for i := range p.Tensors {
		w, g, name := r.weights[i], r.gradients[i], p.Tensors[i].Name
		switch kind := r.run.Optimizer; {
		case r.balanced(p, i):
			layer, _ := strconv.Atoi(strings.Split(name, ".")[1])
			r.after[ir.RoleWeight][i] = r.plain("the updated "+name, ir.ExpertBias, newKey("expert_bias"), w, r.loads[layer], r.normed)
		case !r.trained(p, i):
		case kind == "adamw", kind == "muon" && !matrixOfLayer(&p.Tensors[i]):
			operands := []value{w, r.states[ir.RoleMoment1][i], r.states[ir.RoleMoment2][i], g, step, r.normed}
			for n, role := range []ir.Role{ir.RoleWeight, ir.RoleMoment1, ir.RoleMoment2} {
				r.after[role][i] = r.plain("the updated "+role.String()+" of "+name, ir.AdamW, newKey("adamw").int(int64(n)), operands...)
			}
		case kind == "muon":
			r.muon(p, i)
		case kind == "sgd":
			operands := []value{w, g, r.states[ir.RoleMomentum][i], step, r.normed}
			for n, role := range []ir.Role{ir.RoleWeight, ir.RoleMomentum} {
				r.after[role][i] = r.plain("the updated "+role.String()+" of "+name, ir.SGD, sgdKey(int64(n), 1, 0), operands...)
			}
		}
		r.after[ir.RoleMaster][i] = r.after[ir.RoleWeight][i]
		for _, state := range r.after {
			r.owners[state[i]] = i
		}
		if !r.other[i].isZero() {
			r.owners[r.other[i]] = i
		}
	}
}

// matrixOfLayer reports whether a tensor is one that Muon updates.
func matrixOfLayer(t *ir.Tensor) bool {
	return strings.HasPrefix(t.Name, "layer.") && !slices.Contains([]string{"norms", "biases"}, groupOf(t))
}

// balanced reports whether a step changes a tensor according to the load of experts.
func (r *reference) balanced(p *ir.Program, i int) bool {
	return r.trained(p, i) && strings.HasSuffix(p.Tensors[i].Name, ".router.correction")
}

// trained reports whether a step updates a tensor.
func (r *reference) trained(p *ir.Program, i int) bool {
	return !slices.Contains(r.run.Frozen, p.Tensors[i].Name)
}

// initial returns what a tensor is at the beginning of a run: a fill, or normally distributed values.
func (r *reference) initial(name string, shape [2]int64, tensor int64) value {
	short, drawn := name[max(0, lastDot(name)+1):], r.InitStd
	switch {
	case strings.HasSuffix(name, ".linear.norm.gamma"):
		return constantOne
	case strings.HasSuffix(name, ".linear."+short) && short[0] == 'w' && short != "wo": // may have a single column
	case short == "skip":
		return constantOne
	case short == "b_dt":
		return constantOne.times(-3.5)
	case short == "rate":
		drawn = 1
	case strings.HasPrefix(short, "conv_"):
		drawn = 1 / math.Sqrt(3*float64(r.LinearConv))
	case short == "gamma":
		return constantOne.times(1 - r.NormOffset)
	case short == "lora_a":
		drawn = 1 / math.Sqrt(3*float64(shape[0]))
	case short == "lora_b", shape[1] == 1 && short[0] != 'w', strings.HasPrefix(short, "b"):
		return value{}
	case slices.Contains([]string{"wo", "w2", "w_down", "w_out"}, short):
		drawn /= math.Sqrt(2 * float64(r.Layers))
	}
	return r.named("the initial "+name, normalKey(tensor, drawn).value())
}

func lastDot(name string) int {
	for i := len(name) - 1; i >= 0; i-- {
		if name[i] == '.' {
			return i
		}
	}
	return -1
}
