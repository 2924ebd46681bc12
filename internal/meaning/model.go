package meaning

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"sppo.dev/ir"
)

// reference is what a section of a program must compute: the dataflow of the model on one rank, with every sequence in one piece.
type reference struct {
	*ir.Model
	run        *ir.Run
	section    ir.Section
	terms      map[value]*term
	names      map[value]string  // of values, for messages
	decays     map[value]float64 // of tensors
	owners     map[value]int     // tensors, by what their states are before and after a section, and by their gradients
	tensors    map[string]int64  // numbers
	shapes     [][2]int64
	weights    []value // by tensor
	states     [ir.NumRoles][]value
	gradients  []value              // by tensor
	after      [ir.NumRoles][]value // by tensor: what a state is at the end of the section
	other      []value              // by tensor: another value of the weight that is as good
	batch      int64
	sequence   int64
	vocabulary int64
	group      int64   // query heads for each head of keys
	scale      float64 // of each token's loss
	squares    value   // the sum of the squares of all gradients
	loss       value
	losses     value // of each token
	normed     value
	loads      map[int]value // of the experts of a layer
	joint      value         // how many tokens of a sequence have each expert among their most probable ones, in all layers
	documents  bool          // sequences may contain several documents
	masked     bool          // some labels are left out of the loss
}

// newReference returns the reference of a section.
func newReference(p *ir.Program, s ir.Section) *reference {
	r := &reference{
		Model: &p.Model, run: &p.Run, section: s, terms: map[value]*term{}, names: map[value]string{}, decays: map[value]float64{}, owners: map[value]int{}, tensors: map[string]int64{}, loads: map[int]value{},
		batch: int64(p.Run.Batch), sequence: p.Run.Sequence, vocabulary: int64(p.Model.Vocab), documents: p.Run.DataOptions.Packs(), masked: p.Run.DataOptions.Marked(),
	}
	if s == ir.SectionEval {
		r.batch = int64(p.Run.EvalSequences)
	}
	r.group = int64(max(1, p.Model.Heads/max(1, p.Model.KVHeads)))
	if r.scale = 1 / float64(r.batch*r.sequence); r.masked {
		r.scale = 1
	}
	for i := range p.Tensors {
		t := &p.Tensors[i]
		r.tensors[t.Name] = int64(i)
		r.shapes = append(r.shapes, t.Shape)
		w := r.leaf(t.Name)
		if r.weights = append(r.weights, w); !slices.Contains(r.run.NoDecay, groupOf(t)) {
			r.decays[w] = r.run.WeightDecay
		}
		for role := range ir.NumRoles {
			state := w
			if role != ir.RoleWeight && role != ir.RoleMaster {
				state = r.leaf(role.String() + " of " + t.Name)
			}
			r.owners[state] = i
			r.states[role] = append(r.states[role], state)
		}
	}
	r.gradients = make([]value, len(p.Tensors))
	r.other = make([]value, len(p.Tensors))
	for role := range r.after {
		r.after[role] = slices.Clone(r.states[role])
	}
	for as, name := range []string{"the tokens", "the labels", "the positions in documents"} {
		r.names[dataKey(int64(as))] = name
	}
	for _, name := range []string{ir.ResultStep, ir.ResultWeight, ir.ResultEvalWeight, ir.ResultSpike, ir.ResultDropout} {
		r.leaf("the " + name)
	}
	if s != ir.SectionInit {
		r.build(p)
	}
	return r
}

func leafKey(name string) value { return newKey("leaf " + name).value() }

// leaf names a value that a section begins with.
func (r *reference) leaf(name string) value {
	v := leafKey(name)
	r.names[v] = name
	return v
}

// padding reports whether a piece has rows of a tensor beyond its last, or what fills them: both are 0.
func (r *reference) padding(p *piece) bool {
	i, ok := r.owners[p.content.value]
	return p.anywhere && p.content.value.isZero() || ok && p.first >= r.shapes[i][0]
}

// groupOf returns the group of tensors that a tensor belongs to, by which weight decay is set.
func groupOf(t *ir.Tensor) string {
	name := t.Name[strings.LastIndex(t.Name, ".")+1:]
	switch {
	case strings.HasSuffix(t.Name, ".lora_a"), strings.HasSuffix(t.Name, ".lora_b"):
		return "adapters"
	case name == "gamma", name == "beta":
		return "norms"
	case strings.HasPrefix(name, "b"), name == "sinks", name == "rate", name == "skip":
		return "biases"
	case name == "embed", name == "pos":
		return "embeddings"
	case name == "head":
		return "head"
	case slices.Contains([]string{"wq", "wk", "wv", "wo", "wg", "wq_a", "wkv", "wk_rope"}, name), strings.Contains(t.Name, ".linear."):
		return "attention"
	}
	return "mlp"
}

// add adds a term and returns its value.
func (r *reference) add(name string, op ir.Op, t term, k key, operands ...value) value {
	v := k.of(operands...).value()
	if old := r.terms[v]; old != nil {
		return v
	}
	t.name, t.op, t.operands, t.value, t.whole = name, op, operands, v, &content{value: v}
	r.terms[v] = &t
	if r.names[v] == "" {
		r.names[v] = name
	}
	return v
}

func (r *reference) plain(name string, op ir.Op, k key, operands ...value) value {
	return r.add(name, op, term{}, k, operands...)
}

// named gives a sum a name.
func (r *reference) named(name string, v value) value {
	if r.names[v] == "" {
		r.names[v] = name
	}
	return v
}

// overTokens returns a term that is a sum over the tokens of the batch.
func (r *reference) overTokens(name string, op ir.Op, k key, operands ...value) value {
	return r.overGroups(name, op, 1, k, operands...)
}

// overGroups returns a term that is a sum over the tokens of the batch and groups of columns.
func (r *reference) overGroups(name string, op ir.Op, groups int64, k key, operands ...value) value {
	return r.add(name, op, term{kind: overTokens, need: box{{0, r.batch}, {0, r.sequence}, {0, groups}, full}}, k, operands...)
}

// product returns the product of an activation and a matrix with n rows, or its transpose with n columns.
func (r *reference) product(name string, x, w value, transB bool, n int64) value {
	return r.add(name, ir.Matmul, term{kind: overCols, need: nowhere.by(features, interval{0, n})}, productKey(false, transB), x, w)
}

// outer returns the gradient of a matrix: the product of x, transposed, and dy.
func (r *reference) outer(name string, x, dy value) value {
	return r.overTokens(name, ir.Matmul, productKey(true, false), x, dy)
}

// weight returns the value of a tensor, or panics with a refusal if the program lacks it.
func (r *reference) weight(name string) value {
	i, ok := r.tensors[name]
	if !ok {
		panic(&Refusal{Rank: -1, Problem: "the program has no tensor " + name + ", which its model needs"})
	}
	return r.weights[i]
}

// gradient adds to the gradient of a tensor.
func (r *reference) gradient(name string, v value) {
	i := r.tensors[name]
	r.gradients[i] = r.gradients[i].plus(v)
}

// build adds the terms of the model's forward pass, of its backward pass if the section is a step, and of updates.
func (r *reference) build(p *ir.Program) {
	x := r.embedding()
	var layers []*layer
	for i := range r.Layers {
		l := r.newLayer(i, x)
		x = l.forward()
		layers = append(layers, l)
	}
	dx := r.head(x)
	if r.section != ir.SectionStep {
		return
	}
	for _, l := range slices.Backward(layers) {
		dx = l.backward(dx)
	}
	r.embeddingGradient(dx)
	for i, g := range r.gradients {
		for name, number := range r.tensors {
			if number == int64(i) {
				r.owners[r.named("the gradient of "+name, g)] = i
			}
		}
	}
	r.updates(p)
}

// factor returns a factor of a model, which is 1 if the program does not give it.
func factor(given float64) float64 {
	if given == 0 {
		return 1
	}
	return given
}

// lookup returns the rows of a table for numbers that are below n.
func (r *reference) lookup(name string, rows, table value, scale float64, n int64) value {
	return r.add(name, ir.Embed, term{kind: overCols, need: nowhere.by(features, interval{0, n})}, newKey("embed").float(scale), rows, table)
}

func (r *reference) embedding() value {
	x := r.lookup("the embedding", dataKey(ir.AsTokens), r.weight("embed"), factor(r.EmbedScale), r.vocabulary)
	switch {
	case r.Positions != "learned":
	case r.documents:
		x = x.plus(r.lookup("the embedding of positions", dataKey(ir.AsPositions), r.weight("pos"), 1, r.sequence))
	default:
		x = r.plain("the embedding with positions", ir.PositionEmbed, newKey("position_embed"), x, r.weight("pos"))
	}
	return r.named("the input of layer 0", x)
}

func (r *reference) embeddingGradient(dx value) {
	r.gradient("embed", r.overTokens("embed.grad", ir.EmbedGrad, newKey("embed_grad").float(factor(r.EmbedScale)), dataKey(ir.AsTokens), dx))
	switch {
	case r.Positions != "learned":
	case r.documents:
		r.gradient("pos", r.overTokens("pos.grad", ir.EmbedGrad, newKey("embed_grad").float(1), dataKey(ir.AsPositions), dx))
	default:
		r.gradient("pos", r.add("pos.grad", ir.PositionEmbedGrad, term{kind: overTokens, need: nowhere.by(sequences, interval{0, r.batch})}, newKey("position_embed_grad"), dx))
	}
}

// normalized is a norm: its operands and results.
type normalized struct {
	name          string // prefix of its tensors
	x, y, stats   value
	gamma         value
	width, groups int64
	numbers       int64
	rms           bool
	offset        float64 // of its weights
	eps           float64 // 0: the model's
}

// norm adds a norm of groups of columns, with the model's offset.
func (r *reference) norm(name string, x value, width, groups int64, rms bool) *normalized {
	return r.normOf(name, x, width, groups, rms, r.NormOffset)
}

func (r *reference) normOf(name string, x value, width, groups int64, rms bool, offset float64) *normalized {
	return r.normalize(&normalized{name: name, x: x, width: width, groups: groups, rms: rms, offset: offset, numbers: 1, gamma: r.weight(name + ".gamma")})
}

// normalize adds the results of a norm.
func (r *reference) normalize(n *normalized) *normalized {
	op, operands := ir.RMSNorm, []value{n.x, n.gamma}
	if n.eps == 0 {
		n.eps = r.NormEps
	}
	if !n.rms {
		n.numbers, op, operands = 2, ir.LayerNorm, append(operands, r.weight(n.name+".beta"))
	}
	n.y = r.plain(n.name+".out", op, normKey(n.numbers, n.width, n.eps, n.offset), operands...)
	n.stats = r.plain(n.name+".stats", op, statsKey(n.numbers, n.width, n.eps), n.x)
	return n
}

func (r *reference) residualNorm(name string, x value) *normalized {
	return r.norm(name, x, int64(r.Hidden), 1, r.Norm == "rmsnorm")
}

// normGradient adds the gradients of a norm, and returns that of its operand.
func (r *reference) normGradient(n *normalized, dy value) value {
	op := ir.LayerNormGrad
	if n.rms {
		op = ir.RMSNormGrad
	}
	if n.gamma != constantOne {
		r.gradient(n.name+".gamma", r.overGroups(n.name+".gamma.grad", op, n.groups, newKey("norm_grad_gamma").int(n.numbers).int(n.width), dy, n.x, n.stats))
	}
	if !n.rms {
		r.gradient(n.name+".beta", r.overTokens(n.name+".beta.grad", ir.BiasGrad, newKey("bias_grad"), dy))
	}
	return r.plain("the gradient through "+n.name, op, newKey("norm_grad").int(n.numbers).int(n.width).float(n.offset), dy, n.x, n.stats, n.gamma)
}

// head adds the head and the loss and, in a step, their gradients. It returns the gradient of x.
func (r *reference) head(x value) value {
	n, table := r.residualNorm("ln_f", x), "head"
	if r.Tied {
		table = "embed"
	}
	w, y := r.weight(table), n.y.times(factor(r.LogitScale))
	r.named("the result of ln_f, scaled", y)
	logits := r.product("the logits", y, w, true, int64(r.Hidden))
	labels := dataKey(ir.AsTokens)
	var counted, weight []value
	if r.masked {
		labels = dataKey(ir.AsLabels)
		counted, weight = []value{labels}, []value{leafKey("the " + ir.ResultWeight)}
		if r.section == ir.SectionEval {
			weight[0] = leafKey("the " + ir.ResultEvalWeight)
		}
	}
	stats := r.add("the statistics of the logits", ir.CrossEntropyStats, term{kind: parallel, need: nowhere.by(features, interval{0, r.vocabulary})}, entropyStatsKey(r.LogitSoftcap), logits, labels)
	r.losses = r.plain("the losses of tokens", ir.CrossEntropy, newKey("losses"), append([]value{stats}, counted...)...)
	r.loss = r.overTokens("the loss", ir.CrossEntropy, newKey("loss"), append(append([]value{stats}, counted...), weight...)...)
	if !r.masked { // labels may be given all the same
		r.plain("the losses of tokens", ir.CrossEntropy, newKey("losses"), stats, labels)
	}
	if r.section != ir.SectionStep {
		return value{}
	}
	dlogits := r.plain("the gradient of the logits", ir.CrossEntropyGrad, newKey("cross_entropy_grad").float(r.LogitSoftcap), append([]value{logits, stats, labels}, weight...)...)
	r.gradient(table, r.outer(table+".grad", dlogits, y))
	dy := r.product("the gradient of ln_f.out", dlogits, w, false, r.vocabulary).times(factor(r.LogitScale))
	return r.named("the gradient of the last layer's output", r.normGradient(n, dy))
}

// layerWindow returns the number of tokens that a query of a layer sees; 0: all.
func (r *reference) layerWindow(layer int) int64 {
	if n := len(r.Windows); n > 0 && r.Windows[layer%n] < r.sequence {
		return r.Windows[layer%n]
	}
	return 0
}

// rotation returns how queries, or keys, of a layer are rotated.
func (r *reference) rotation(layer int, queries bool) ir.Rotation {
	scale := 1.0
	if queries {
		if scale = r.AttnScale * math.Sqrt(float64(r.HeadDim)); math.Abs(scale-1) < 1e-12 {
			scale = 1
		}
	}
	out := ir.Rotation{Scale: scale, Rest: scale}
	turns := r.Positions == "rope"
	if n := len(r.PositionPattern); n > 0 {
		turns = r.PositionPattern[layer%n] == "rope"
	}
	if !turns {
		return out
	}
	windowed := len(r.Windows) > 0 && r.Windows[layer%len(r.Windows)] != 0
	width := int(math.Round(r.RopePartial * float64(r.HeadDim)))
	local := r.RopeLocalTheta != 0 && windowed
	for i := range width / 2 {
		place := -2 * float64(i) / float64(width)
		if local {
			out.Rates = append(out.Rates, math.Pow(r.RopeLocalTheta, place))
			continue
		}
		rate := math.Pow(r.RopeTheta, place)
		out.Rates = append(out.Rates, rate/r.stretch(rate, i, width))
	}
	if !local && r.RopeAmplitude != 0 {
		out.Scale = scale * r.RopeAmplitude
	}
	if queries && r.RopeBeta != 0 {
		out.Beta, out.Period = r.RopeBeta, int64(r.RopeOriginal)
	}
	return out
}

// stretch returns the number by which the frequency of a pair of a head's elements is divided: llama3 as in Llama 3.1's published code,
// yarn after Peng et al. (2023), longrope after Ding et al. (2024).
func (r *reference) stretch(rate float64, pair, width int) float64 {
	kept := 0.0 // share of the original frequency
	switch r.RopeScaling {
	case "none", "":
		return 1
	case "longrope":
		if r.sequence > int64(r.RopeOriginal) {
			return r.RopeLong[pair]
		}
		return r.RopeShort[pair]
	case "llama3":
		turns := float64(r.RopeOriginal) * rate / (2 * math.Pi)
		kept = (turns - r.RopeLow) / (r.RopeHigh - r.RopeLow)
	case "yarn":
		turned := func(turns float64) float64 {
			return float64(width) * math.Log(float64(r.RopeOriginal)/(turns*2*math.Pi)) / (2 * math.Log(r.RopeTheta))
		}
		low, high := turned(r.RopeFast), turned(r.RopeSlow)
		if r.RopeTruncate {
			low, high = math.Floor(low), math.Ceil(high)
		}
		if low, high = max(low, 0), min(high, float64(width-1)); low == high {
			high += 0.001
		}
		kept = 1 - (float64(pair)-low)/(high-low)
	}
	kept = min(max(kept, 0), 1)
	return 1 / ((1-kept)/r.RopeFactor + kept)
}

// describe says what a piece is.
func (r *reference) describe(p *piece) string {
	if p.content == nil {
		return "not written"
	}
	place := fmt.Sprintf("rows %d to %d", p.first, p.first+p.n-1)
	if p.sequence > 0 || p.batch > 1 {
		place = fmt.Sprintf("tokens %d to %d of sequences %d to %d", p.first, p.first+p.n-1, p.sequence, p.sequence+p.batch-1)
	}
	if p.cols != full {
		place += fmt.Sprintf(", columns %d to %d", p.cols.lo, p.cols.hi-1)
	}
	if p.anywhere {
		place = fmt.Sprintf("%d elements", p.elements())
	}
	var sum []string
	switch name := r.names[p.content.value]; {
	case name != "":
		sum = append(sum, name)
	case !p.content.value.isZero():
		sum = append(sum, "a value that the model does not have")
	case len(p.parts) == 0:
		sum = append(sum, "0")
	}
	for i := range p.parts {
		sum = append(sum, p.parts[i].describe(p.rectangle))
	}
	return strings.Join(sum, " + ") + " (" + place + ")"
}

// nearest describes the terms of an opcode that have most of some operands.
func (r *reference) nearest(op ir.Op, operands []value) string {
	var best []string
	most := 1
	for _, t := range r.terms {
		if t.op != op {
			continue
		}
		n := 0
		for i, v := range t.operands {
			if i < len(operands) && operands[i] == v {
				n++
			}
		}
		if n > most {
			best, most = nil, n
		}
		if n == most {
			var names []string
			for _, v := range t.operands {
				names = append(names, r.names[v])
			}
			best = append(best, fmt.Sprintf("%s = %s(%s)", t.name, ir.Ops[op].Name, strings.Join(names, ", ")))
		}
	}
	if slices.Sort(best); len(best) == 0 {
		return ""
	}
	return "; it has " + strings.Join(best[:min(2, len(best))], " and ")
}
