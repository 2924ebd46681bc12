package kernels

import (
	"fmt"
	"math"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// table gives for every kernel opcode the source of its kernels and the function that prepares its launches.
var table = [ir.NumOps]struct {
	source string
	bind   func(*binder)
}{
	ir.InitNormal:              {"embed.cu", initNormal},
	ir.Fill:                    {"elementwise.cu", fill},
	ir.Embed:                   {"embed.cu", embedRows},
	ir.EmbedGrad:               {"embed.cu", embedGrad},
	ir.PositionEmbed:           {"elementwise.cu", positionEmbed},
	ir.PositionEmbedGrad:       {"elementwise.cu", positionEmbedGrad},
	ir.LayerNorm:               {"norm.cu", layerNorm},
	ir.LayerNormGrad:           {"norm.cu", layerNormGrad},
	ir.RMSNorm:                 {"norm.cu", rmsNorm},
	ir.RMSNormGrad:             {"norm.cu", rmsNormGrad},
	ir.Matmul:                  {"matmul.cu", matmul},
	ir.BiasGrad:                {"columns.cu", biasGrad},
	ir.Rope:                    {"rope.cu", rope},
	ir.Attention:               {"attention.cu", attention},
	ir.AttentionGrad:           {"attention.cu", attentionGrad},
	ir.AttentionMerge:          {"attention.cu", attentionMerge},
	ir.AttentionDelta:          {"attention.cu", attentionDelta},
	ir.AttentionSink:           {"attention.cu", attentionSink},
	ir.AttentionSinkGrad:       {"attention.cu", attentionSinkGrad},
	ir.Route:                   {"experts.cu", route},
	ir.RouteGrad:               {"experts.cu", routeGrad},
	ir.ExpertCounts:            {"experts.cu", expertCounts},
	ir.RouterLossGrad:          {"experts.cu", routerLossGrad},
	ir.ExpertLoad:              {"experts.cu", expertLoad},
	ir.ExpertBias:              {"experts.cu", expertBias},
	ir.Permute:                 {"experts.cu", permuteRows},
	ir.PermuteGrad:             {"experts.cu", permuteGrad},
	ir.Unpermute:               {"experts.cu", unpermuteRows},
	ir.UnpermuteGrad:           {"experts.cu", unpermuteGrad},
	ir.MatmulGrouped:           {"matmul.cu", matmulGrouped},
	ir.MatmulGroupedWeightGrad: {"matmul.cu", matmulGroupedWeightGrad},
	ir.Scan:                    {"scan.cu", scan},
	ir.ScanGrad:                {"scan.cu", scanGrad},
	ir.Conv:                    {"scan.cu", conv},
	ir.ConvGrad:                {"scan.cu", convGrad},
	ir.Decay:                   {"scan.cu", decay},
	ir.DecayGrad:               {"scan.cu", decayGrad},
	ir.ScaleColumns:            {"scan.cu", scaleColumns},
	ir.ScaleColumnsGrad:        {"scan.cu", scaleColumnsGrad},
	ir.Activation:              {"activation.cu", activation("activation", "y", "x")},
	ir.ActivationGrad:          {"activation.cu", activation("activation_grad", "dx", "dy", "x")},
	ir.GLU:                     {"activation.cu", activation("glu", "y", "gate", "up")},
	ir.GLUGrad:                 {"activation.cu", activation("glu_grad", "dgate", "dup", "dy", "gate", "up")},
	ir.Add:                     {"elementwise.cu", add},
	ir.Cast:                    {"elementwise.cu", cast},
	ir.CrossEntropyStats:       {"loss.cu", crossEntropyStats},
	ir.CrossEntropy:            {"loss.cu", crossEntropy},
	ir.CrossEntropyGrad:        {"loss.cu", crossEntropyGrad},
	ir.SumSq:                   {"optimizer.cu", sumSq},
	ir.GradNorm:                {"optimizer.cu", gradNorm},
	ir.AdamW:                   {"optimizer.cu", adamW},
	ir.SGD:                     {"optimizer.cu", sgd},
	ir.Nesterov:                {"optimizer.cu", nesterov},
	ir.Axpby:                   {"optimizer.cu", axpby},
	ir.Normalize:               {"optimizer.cu", normalize},
	ir.Dropout:                 {"elementwise.cu", dropout},
	ir.ConcatHeads:             {"elementwise.cu", concatHeads},
	ir.ConcatHeadsGrad:         {"elementwise.cu", concatHeadsGrad},
}

// activation launches the kernel for an activation function; all operands but ends have the same shape and type.
func activation(kernel string, operands ...string) func(*binder) {
	return func(b *binder) {
		kernel := kernel + "_" + ir.Functions[b.int("function")]
		n := b.elements(operands[0])
		args := []any{}
		for _, o := range operands {
			args = append(args, o)
		}
		_, cols := b.shape(operands[0])
		b.launch(kernel+"_"+b.types(operands[0]), spread(n, 8), append(args, n, "ends", b.elements("ends"), cols)...)
	}
}

func add(b *binder) {
	n := b.elements("y")
	_, cols := b.shape("y")
	b.launch("add_"+b.types("y", "a", "b"), spread(n, 8), "y", "a", "b", "bias", b.biasType(), n, cols)
}

// biasType returns 1 if there is a bias in bf16, otherwise 0.
func (b *binder) biasType() int64 {
	if b.has("bias") && b.types("bias") == "b" {
		return 1
	}
	return 0
}

func cast(b *binder) {
	n := b.elements("y")
	b.launch("cast_"+b.types("y", "x"), spread(n, 8), "y", "x", n)
}

// fill repeats the element in an 8-byte word.
func fill(b *binder) {
	v, value := b.in.Arg("y"), b.float("value")
	element := uint64(uint8(value))
	switch v.DType {
	case ir.F32:
		element = uint64(math.Float32bits(float32(value)))
	case ir.BF16:
		element = uint64(vm.BF16(float32(value)))
	case ir.I32:
		element = uint64(uint32(int32(value)))
	}
	size := int64(v.DType.Bytes())
	for ; size < 8; size *= 2 {
		element |= element << (8 * size)
	}
	bytes := int64(v.Bytes())
	b.launch("fill", spread(bytes, 16), "y", bytes, int64(element))
}

func positionEmbed(b *binder) {
	n := b.elements("y")
	_, cols := b.shape("y")
	b.launch("position_embed_"+b.types("y"), spread(n, 8), "y", "x", "table", n, b.int("batch"), cols)
}

func positionEmbedGrad(b *binder) {
	n := b.elements("dtable")
	_, cols := b.shape("dtable")
	b.launch("position_embed_grad_"+b.types("dy"), spread(n, 1), "dtable", "dy", n, b.int("batch"), cols, b.int("accumulate"))
}

func concatHeads(b *binder) {
	r, first := b.shape("shared")
	b.launch("concat_heads_"+b.types("y"), rows(r), "y", "shared", "x", b.int("heads"), first, b.int("head_dim")-first)
}

func concatHeadsGrad(b *binder) {
	r, first := b.shape("dshared")
	b.launch("concat_heads_grad_"+b.types("dshared", "dy"), rows(r), "dshared", "dx", "dy", b.int("heads"), first, b.int("head_dim")-first)
}

func layerNorm(b *binder) {
	r, c := b.shape("x")
	b.launch("layernorm_"+b.types("x"), rows(r), "y", "stats", "x", "gamma", "beta", c, b.float("eps"), b.float("offset"))
}

func rmsNorm(b *binder) {
	r, c := b.shape("x")
	b.launch("rmsnorm_"+b.types("x"), rows(r), "y", "stats", "x", "gamma", c, b.float("eps"), b.float("offset")).Block = rowThreads(c)
}

// The sums over rows come first, because dx may overwrite their inputs.
func layerNormGrad(b *binder) {
	r, c := b.shape("x")
	if b.has("dgamma") || b.has("dbeta") {
		b.columnSums("layernorm_columns_"+b.types("x"), r, c, []string{"dgamma", "dbeta"}, "dy", "x", "stats")
	}
	b.launch("layernorm_grad_"+b.types("x"), rows(r), "dx", "dy", "x", "stats", "gamma", "residual", c, b.float("offset"))
}

func rmsNormGrad(b *binder) {
	r, c := b.shape("x")
	if b.has("dgamma") {
		b.columnSums("rmsnorm_columns_"+b.types("x"), r, c, []string{"dgamma"}, "dy", "x", "stats")
	}
	b.launch("rmsnorm_grad_"+b.types("x"), rows(r), "dx", "dy", "x", "stats", "gamma", "residual", c, b.float("offset")).Block = rowThreads(c)
}

// rowThreads returns the size of a block that handles one row: a warp if the row is short, such as a head.
func rowThreads(cols int64) int64 {
	if cols <= 8*32 {
		return 32
	}
	return threads
}

func biasGrad(b *binder) {
	r, c := b.shape("dy")
	b.columnSums("bias_grad_"+b.types("dy"), r, c, []string{"db"}, "dy")
}

// columnSums launches a kernel that sums chunks of rows into the workspace, and for each sum a kernel that joins
// the chunks.
func (b *binder) columnSums(kernel string, r, c int64, sums []string, in ...any) {
	source := b.source
	b.source = "columns.cu"
	most := int64(64) // chunks
	if c <= 8*32 {
		most = 2048 // there are many short rows, such as heads; one block handles a chunk
	}
	chunk := max(64, ceil(r, most)) // rows per chunk
	chunks := ceil(r, chunk)
	partial := b.reserve(4 * int64(len(sums)) * chunks * c)
	b.launch(kernel, [3]int64{ceil(c, 256), chunks, 1}, append(append([]any{partial}, in...), r, c, chunk)...)
	for i, sum := range sums {
		if !b.has(sum) {
			continue
		}
		b.launch("join_columns", rows(ceil(c, threads)), sum, partial+workspace(4*int64(i)*chunks*c), chunks, c, b.int("accumulate"))
	}
	b.source = source
}

// matmul uses tiles of 64 by 64 in f32 and of 128 by 128 on tensor cores.
func matmul(b *binder) {
	m, n := b.shape("c")
	k, cols := b.shape("a")
	transA, transB := b.int("trans_a"), b.int("trans_b")
	if transA == 0 {
		k = cols
	}
	if b.types("a") == "f" {
		b.launch("matmul_"+b.types("c", "a"), rows(ceil(n, 64)*ceil(m, 64)), "c", "a", "b", "bias", m, n, k, transA, transB, b.int("accumulate"))
		return
	}
	kernel := "matmul_" + b.types("c", "a") + "_" + "nt"[transA:transA+1] + "nt"[transB:transB+1]
	b.launch(kernel, rows(ceil(n, 128)*ceil(m, 128)), "c", "a", "b", "bias", m, n, k, b.int("accumulate"))
}

func rope(b *binder) {
	r, _ := b.shape("y")
	batch, dim := b.int("batch"), b.int("head_dim")
	if dim > 2*512 {
		b.err = fmt.Errorf("a head_dim of %d is more than the kernel's 1024", dim)
	}
	rotation := b.in.Rotation(&b.program.Run)
	var rates []Arg
	for _, rate := range rotation.Rates {
		rates = append(rates, b.arg(rate/(2*math.Pi)))
	}
	grid := rows(r / batch)
	if b.has("positions") {
		grid[1] = batch
	}
	b.launch("rope_"+b.types("y", "x"), grid, "y", "x", "positions", b.int("heads"), dim, batch, b.int("position"), tabled,
		b.int("inverse"), b.int("chunks"), b.int("member"), int64(len(rates)), rotation.Scale, rotation.Rest,
		rotation.Beta, rotation.Period).Table = rates
}

// dropout launches one block per row; every thread computes the key of the row's token.
func dropout(b *binder) {
	r, c := b.shape("x")
	rate, tensor := b.float("rate"), vm.DropoutTensor(b.program.Tensors[b.int("tensor")].Name)
	b.launch("dropout_"+b.types("x"), rows(r), "y", "x", "key", int64(tensor), int64(vm.DropoutThreshold(rate)), float64(vm.DropoutScale(rate)),
		c, b.int("col"), b.int("first")+b.int("replica"), b.int("position"), b.int("batch"), b.int("chunks"), b.int("member")).Block = rowThreads(c)
}

func embedRows(b *binder) {
	r, c := b.shape("y")
	v, _ := b.shape("table")
	b.launch("embed_"+b.types("y"), rows(r), "y", "tokens", "table", v, c, b.int("first"), b.embedScale())
}

// embedScale returns the factor for rows of the table.
func (b *binder) embedScale() float64 {
	if scale := b.float("scale"); scale != 0 {
		return scale
	}
	return 1
}

func embedGrad(b *binder) {
	r, c := b.shape("dy")
	v, _ := b.shape("dtable")
	if b.int("accumulate") == 0 {
		bytes := int64(b.in.Arg("dtable").Bytes())
		b.launch("fill", spread(bytes, 16), "dtable", bytes, int64(0)).Source = "elementwise.cu"
	}
	b.launch("embed_grad_"+b.types("dy"), [3]int64{r, ceil(c, 8*threads), 1}, "dtable", "tokens", "dy", r, v, c, b.int("first"), b.embedScale())
}

func initNormal(b *binder) {
	r, c := b.shape("w")
	tensor := &b.program.Tensors[b.int("tensor")]
	key := vm.InitialValues(b.program.Run.Seed, tensor.Name).Key()
	b.launch("init_normal_"+b.types("w"), spread(r*c, 1), "w", int64(key), r, c, b.int("row"), b.int("col"),
		tensor.EndOf(b.int("end")), tensor.Shape[1], b.float("std"))
}

// crossEntropyStats uses as many threads as the kernel that computes statistics and gradient jointly, because
// the number of threads determines the order of sums.
func crossEntropyStats(b *binder) {
	r, c := b.shape("logits")
	b.launch("cross_entropy_stats_"+b.types("logits"), rows(r), "stats", "logits", "labels", c, b.int("first"), b.int("valid"), b.float("softcap")).Block = wideThreads
}

// parts returns the numbers of vocabulary parts and of rows, from the shape of the statistics.
func (b *binder) parts() (parts, r int64) {
	shape := b.in.Arg("stats").Shape
	return int64(shape[0]), int64(shape[1])
}

func crossEntropy(b *binder) {
	parts, r := b.parts()
	b.launch("cross_entropy", rows(1), "loss", "losses", "stats", "labels", "weight", parts, r, b.float("scale"))
}

func crossEntropyGrad(b *binder) {
	parts, r := b.parts()
	_, c := b.shape("logits")
	b.launch("cross_entropy_grad_"+b.types("dlogits", "logits"), rows(r), "dlogits", "logits", "stats", "labels",
		parts, r, c, b.int("first"), b.int("valid"), b.float("scale"), b.float("softcap"), "weight")
}

// tabled is the argument that passes the address of the launch's table.
var tabled = Arg{Kind: Table}

// sumSq uses as many blocks for each tensor as a separate launch would, because the number of blocks determines
// the partial sums.
func sumSq(b *binder) {
	var words []Arg
	all := int64(0)
	b.each(func() {
		n := b.elements("x")
		blocks := min(ceil(n, 8*threads), 1024)
		words = append(words, b.args(all, blocks, n, "x", b.reserve(8*blocks), "y", b.float("weight"))...)
		all += blocks
	})
	tensors := int64(len(b.members))
	b.launch("sumsq_"+b.types("x"), rows(all), tabled, tensors).Table = words
	b.launch("sumsq_join", rows(tensors), tabled).Table = words
}

func gradNorm(b *binder) {
	b.launch("grad_norm", rows(1), "y", "sums", "limit", b.elements("sums"), b.float("max_norm"))
}

// adamW divides tensors into tiles of eight elements per thread; blocks loop over the tiles of all tensors.
func adamW(b *binder) {
	var words []Arg
	tiles := int64(0)
	b.each(func() {
		n := b.elements("w")
		words = append(words, b.args(tiles, n, "w", "m", "v", "copy", "grad", b.float("weight_decay"))...)
		tiles += ceil(n, 8*threads)
	})
	b.launch("adamw_"+b.types("m"), spread(tiles*threads, 1), tabled, int64(len(b.members)), tiles, "step", "norm",
		b.float("beta1"), b.float("beta2"), b.float("eps")).Table = words
}

func sgd(b *binder) {
	_, cols := b.shape("w")
	n := b.in.UpdatedRows(b.int("row")) * cols
	if rest := b.elements("w") - n; rest > 0 && b.has("copy") {
		bytes := rest * int64(ir.BF16.Bytes())
		b.launch("fill", spread(bytes, 16), rowsOf{"copy", n / cols}, bytes, int64(0)).Source = "elementwise.cu"
	}
	if n == 0 {
		return
	}
	b.launch("sgd_"+b.types("grad")+b.momentumType(), spread(n, 8), "w", "m", "copy", rowsOf{"grad", b.int("row")}, "step", "norm",
		b.float("momentum"), b.float("weight_decay"), b.float("scale"), b.int("scaled"), n)
}

// momentumType returns the letter of the momentum's type, or that of f32 if there is no momentum.
func (b *binder) momentumType() string {
	if b.has("m") {
		return b.types("m")
	}
	return "f"
}

func nesterov(b *binder) {
	n := b.elements("m")
	b.launch("nesterov_"+b.types("y", "m"), spread(n, 8), "y", "m", "grad", "norm", b.float("momentum"), n)
}

func axpby(b *binder) {
	n := b.elements("y")
	b.launch("axpby_"+b.types("y", "a"), spread(n, 8), "y", "a", "b", b.float("alpha"), b.float("beta"), n)
}

func normalize(b *binder) {
	n := b.elements("y")
	b.launch("normalize_"+b.types("y"), spread(n, 8), "y", "x", "sum", b.float("eps"), n)
}
