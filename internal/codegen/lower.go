package codegen

import (
	"fmt"
	"slices"

	"sppo.dev/internal/graph"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/walk"
	"sppo.dev/internal/schedule"
	"sppo.dev/ir"
)

// lowering lowers the tasks of one pipeline rank to instructions.
type lowering struct {
	*emitter
	weights weights
	numbers numbers
	work    work
	flow    flow
	kv      kv
	saved   map[unitKey]savedUnit
	visits  visits
}

// weights holds the parameters of which this rank has the weights.
type weights struct {
	embedding, head []*param
	layer           map[int][]*param // [global layer]
	borrowed        map[int][]*param // [global layer]: of other stages
}

// numbers holds the numbers that package train reads or sets.
type numbers struct {
	loss, evalLoss uint32
	losses         uint32    // of each token in a validation microbatch
	factors        [2]uint32 // of a label's loss if labels may be masked: one for a step and one for a validation
	step           uint32
	norm           uint32  // of the gradients
	spike          ir.View // the largest norm at which weights are still updated, or absent
	dropout        uint32  // key of the step's dropout
	load           uint32  // of the experts of all layers
}

// work holds the tasks of a section, and what their instructions have in common.
type work struct {
	tasks     []plan.Task
	actions   *schedule.List       // of these tasks
	split     map[plan.Task]bool   // backward tasks whose weight gradients are separate tasks
	deferred  map[plan.Task][]*env // [task]: envs whose second halves it has yet to emit
	touched   map[touch]bool       // accumulators that have been written
	documents map[int]uint32       // [microbatch]: positions of its tokens in their documents
	beside    *help                // work for other stages' tasks, beside the running task
}

type touch struct {
	buffer uint32
	offset ir.Bytes
}

type unitKey struct{ microbatch, subsequence, piece, layer, unit int }

// savedUnit is the location of a unit: on the device, on the host, or both once its copy has been issued.
type savedUnit struct {
	device, host uint32
	onHost       bool // it has been copied to the host
	left         bool // its device bytes have been released
	returned     bool // its reload has been issued
}

// lower generates the code of stage i: sections, and buffers with their lifetimes, but no addresses and no
// events.
func (l *layout) lower(i int) *lowering {
	s := &lowering{emitter: &emitter{layout: l, rank: i}, weights: weights{layer: map[int][]*param{}, borrowed: map[int][]*param{}}}
	s.code.Name = fmt.Sprintf("stage%d", i)
	s.lowerInit()
	s.lowerStep()
	if l.plan.Train.Validates() {
		s.lowerEval()
	}
	return s
}

// first reports whether the stage has the embedding, and last whether it has the head.
func (e *emitter) first() bool { return e.rank == e.plan.Home(0) }
func (e *emitter) last() bool  { return e.rank == e.plan.Home(len(e.stages)-1) }

// layers returns the global numbers of the layers that this rank holds.
func (e *emitter) layers() []int {
	var layers []int
	for _, j := range e.plan.StagesOf(e.rank) {
		layers = append(layers, e.stages[j]...)
	}
	return layers
}

// begin starts a section that runs tasks of the given plan.
func (s *lowering) begin(section ir.Section, phase ir.Phase, of *order) {
	s.section, s.order = section, of
	s.prov = ir.Provenance{Phase: phase, Stage: int16(s.rank), Layer: ir.None, Subsequence: ir.None, Microbatch: ir.None}
	s.work = work{deferred: map[plan.Task][]*env{}, touched: map[touch]bool{}, documents: map[int]uint32{}}
	s.flow = flow{emitter: s.emitter, inputs: map[plan.Task]uint32{}, outputs: map[plan.Task]uint32{}, host: map[plan.Task]uint32{}}
	s.kv = kv{
		emitter: s.emitter, device: map[kvKey]uint32{}, host: map[kvKey]uint32{}, inputs: map[int]uint32{}, lent: map[lentKey]*lentBlock{},
	}
	s.saved, s.visits = map[unitKey]savedUnit{}, visits{whole: map[int]plan.ParamSet{}}
	s.decidedBy("lower", "model")
}

// end ends a section.
func (s *lowering) end() {
	first, all := 0, &s.buffers
	if n := len(all.parts); n > 0 {
		first = all.parts[n-1].end
	}
	all.parts = append(all.parts, part{first, len(all.list)})
}

// decidedBy sets the pass and the spec key in the provenance of the instructions that follow.
func (e *emitter) decidedBy(pass, key string) {
	e.prov.Pass, e.prov.Line = passIndex(pass), e.tables.lines.of(key)
}

func (s *lowering) lowerInit() {
	s.begin(ir.SectionInit, ir.PhaseInit, nil)
	if s.first() {
		s.weights.embedding = s.newParams(s.model.Embedding, "")
	}
	for _, l := range s.layers() {
		s.prov.Layer = int32(l)
		s.weights.layer[l] = s.newParams(s.layerOfModel(l), graph.LayerPrefix(l))
	}
	s.prov.Layer = ir.None
	if s.last() {
		s.weights.head = s.newParams(s.model.Head, "")
		s.numbers.loss = s.result(ir.ResultLoss, 1)
		if s.plan.Train.Validates() {
			s.numbers.evalLoss = s.result(ir.ResultEvalLoss, 1)
		}
	}
	s.numbers.step = s.result(ir.ResultStep, 3)
	s.numbers.norm = s.result(ir.ResultGradNorm, 2)
	s.numbers.spike = ir.Absent()
	if s.plan.Train.Guard.Spikes > 0 {
		s.numbers.spike = vector(s.result(ir.ResultSpike, 1), ir.F32, 1)
	}
	if s.model.Gives(graph.ValueDropout) {
		s.numbers.dropout = s.resultOf(ir.ResultDropout, ir.I32, 2)
	}
	if n := s.loads(); n > 0 {
		s.numbers.load = s.result(ir.ResultExpertLoad, n)
	}
	if s.last() && s.model.Masked {
		s.numbers.factors[0] = s.result(ir.ResultWeight, 1)
		if s.plan.Train.Validates() {
			s.numbers.factors[1] = s.result(ir.ResultEvalWeight, 1)
		}
	}
	s.end()
}

// result allocates a vector of numbers that package train reads or fills.
func (e *emitter) result(name string, n int64) uint32 { return e.resultOf(name, ir.F32, n) }

func (e *emitter) resultOf(name string, d ir.DType, n int64) uint32 {
	b := e.persist(name, ir.Bytes(n)*d.Bytes())
	e.code.Results = append(e.code.Results, ir.Result{Name: name, View: vector(b, d, n)})
	return b
}

// layerOfModel returns the dataflow of a layer without recomputation.
func (l *layout) layerOfModel(layer int) *graph.Block { return l.model.LayerOf(l.model.KindOf(layer)) }

func (s *lowering) newParams(b *graph.Block, prefix string) []*param {
	var ps []*param
	for i := range b.Params {
		ps = append(ps, s.newParam(b, &b.Params[i], prefix, s.sharedWith(&b.Params[i])))
	}
	return ps
}

// sharedWith returns the embedding that a tied head on the same stage uses, or nil.
func (s *lowering) sharedWith(g *graph.Param) *param {
	for _, p := range s.weights.embedding {
		if g.Tied && p.Name == g.Name {
			return p
		}
	}
	return nil
}

func (s *lowering) lowerStep() {
	s.begin(ir.SectionStep, ir.PhaseForward, &s.training)
	s.work.split = s.plan.Splits(s.rank)
	if s.last() {
		s.op(ir.Fill, ir.Compute, []ir.View{vector(s.numbers.loss, ir.F32, 1)}, ir.Float(0))
	}
	if n := s.loads(); n > 0 {
		s.op(ir.Fill, ir.Compute, []ir.View{vector(s.numbers.load, ir.F32, n)}, ir.Float(0))
	}
	s.loadDocuments(s.plan.Parallel.Microbatches)
	s.setTasks(s.plan.Tasks[s.rank], s.training.pipeline, s.rank)
	for _, st := range s.order.steps[s.rank] {
		s.step(st)
	}
	s.optimizer()
	s.end()
}

// loads returns the number of elements of ResultExpertLoad, which all ranks have: they may share tasks of other stages.
func (l *layout) loads() int64 { return int64(l.model.Layers * l.model.Experts) }

// setTasks sets the tasks of a section, and lists their actions.
func (s *lowering) setTasks(tasks []plan.Task, of *schedule.Pipeline, rank int) {
	s.work.tasks, s.work.actions = tasks, of.Write(rank, s.plan.Timing(), nil)
	s.kv.queue = walk.NewLoadQueue(s.plan, s.model, tasks, s.work.actions)
}

func (s *lowering) step(st step) {
	if !st.kind.own() {
		s.share(st)
		return
	}
	t := s.work.tasks[st.task]
	s.at(t)
	switch st.kind {
	case receiving:
		s.flow.receive(t)
	case sending:
		s.flow.send(t)
	case counting:
		s.sumTallies(t.Microbatch)
	case sharing:
		s.runTask(st, s.newSharedSlot(t).act)
	case running:
		s.work.beside = s.helpWith(st.shared)
		s.runTask(st, s.act)
		s.work.beside.rest()
	}
	s.nowhere()
}

// sumTallies sums the tokens of each expert of all layers over all ranks that count other tokens or other layers. All ranks have counted
// them before any of them begins the backward pass of the microbatch.
func (s *lowering) sumTallies(microbatch int) {
	s.decidedBy("lower", "model.layers")
	n := int64(s.plan.Parallel.Microbatch * s.model.Experts)
	b, ok := s.kv.device[jointKey(microbatch)]
	if !ok { // the rank has no layer with experts
		b = s.allocate(s.label(plan.Task{Microbatch: microbatch}, -1, graph.ValueJoint), ir.Device, ir.Bytes(n)*ir.F32.Bytes())
		s.kv.device[jointKey(microbatch)] = b
		s.op(ir.Fill, ir.Compute, []ir.View{vector(b, ir.F32, n)}, ir.Float(0))
	}
	group, members := s.model.Counters()
	if members > 1 {
		s.allReduce(ir.Coll, vector(b, ir.F32, n), int64(group))
	}
	if s.plan.Parallel.PP > 1 {
		s.allReduce(ir.Coll, vector(b, ir.F32, n), graph.GroupPP)
	}
}

// jointKey identifies the tally of a microbatch that all layers share.
func jointKey(microbatch int) kvKey { return kvKey{microbatch, int(ir.None), graph.ValueJoint} }

// runTask expands the actions of a task. Buffers that messages may still read are held until the task ends.
func (s *lowering) runTask(st step, expand func(schedule.Action)) {
	start, lagging := s.now(), s.flow.lagging
	s.flow.lagging = nil
	for _, a := range s.work.actions.Of(st.task) {
		expand(a)
	}
	for _, b := range lagging {
		s.hold(b)
	}
	s.flow.start = start
}

// act emits an action of a task that this rank runs alone.
func (s *lowering) act(a schedule.Action) {
	t := s.work.tasks[a.Task]
	switch a.Op {
	case schedule.Begin:
		s.flow.rows = s.flow.input(t)
	case schedule.InputFromHost:
		s.aside(func() { s.flow.inputFromHost(t) })
	case schedule.Embedding:
		s.runEmbedding(t)
	case schedule.Head:
		s.flow.rows = s.backwardHead(t, s.flow.rows)
	case schedule.Enter:
		s.enter(s.layerOf(a))
	case schedule.Sum:
		s.aside(func() { s.sumGradients(s.summedBy(t, int(a.Layer))) })
	case schedule.EndOnHost:
		if reader := s.work.tasks[a.Of]; s.plan.ResultOnHost(t, reader) {
			s.flow.resultToHost(reader, s.flow.rows)
			break
		}
		s.endTask(t, a, s.flow.rows)
	case schedule.End:
		s.endTask(t, a, s.flow.rows)
	default:
		s.aside(func() { s.actOn(s.layerOf(a), t, a) })
	}
}

// actOn emits an action on a layer.
func (s *lowering) actOn(layer int, t plan.Task, a schedule.Action) {
	switch a.Op {
	case schedule.KVFromHost:
		s.kv.kvFromHost(t, layer)
	case schedule.Gather, schedule.Complete:
		s.gatherWeights(layer, s.readBy(t, layer))
	case schedule.Free:
		delete(s.visits.whole, layer)
	case schedule.Reduce:
		s.reduceGradients(layer)
	case schedule.LoadInput, schedule.Recompute:
		s.recompute(t, a)
	case schedule.Visit:
		s.visit(t, layer)
	case schedule.Release:
		s.releaseOffloaded(t, layer)
	case schedule.Reload:
		s.reload(t, layer)
	default:
		panic("codegen: an action without instructions: " + schedule.Ops[a.Op].Name)
	}
}

// summedBy returns the parameters of a Sum: those of the k-th layer of a task's stage or, after the last layer, of the head.
func (s *lowering) summedBy(t plan.Task, k int) []*param {
	if k == len(s.stages[t.Stage]) {
		return s.weights.head
	}
	layer := s.stages[t.Stage][k]
	s.prov.Layer = int32(layer)
	return s.weights.layer[layer]
}

// layerOf returns the global number of an action's layer.
func (s *lowering) layerOf(a schedule.Action) int {
	return s.stages[s.work.tasks[a.Task].Stage][a.Layer]
}

// nowhere removes the task from the provenance of the instructions that follow.
func (e *emitter) nowhere() {
	e.prov.Microbatch, e.prov.Subsequence, e.prov.Layer, e.prov.Stage = ir.None, ir.None, ir.None, int16(e.rank)
}

// at sets the provenance of the instructions of a task.
func (e *emitter) at(t plan.Task) {
	e.prov.Microbatch, e.prov.Subsequence = int32(t.Microbatch), int32(t.Subsequence)
	e.prov.Stage = int16(t.Stage)
	switch {
	case !e.trains():
		e.prov.Phase = ir.PhaseEval
	case t.Kind == plan.Forward:
		e.prov.Phase = ir.PhaseForward
	case t.Kind == plan.WeightGrad:
		e.prov.Phase = ir.PhaseWeights
	default:
		e.prov.Phase = ir.PhaseBackward
	}
}

// hidden returns the size of the rows that stages pass on, and a function that views a buffer as these rows.
func (e *emitter) hidden(z graph.Size) (ir.Bytes, func(uint32) ir.View) {
	rows, cols, d := z.Tokens*z.Batch/z.SP, int64(e.plan.Model.Hidden), e.model.DType()
	return ir.Bytes(rows*cols) * d.Bytes(), func(b uint32) ir.View { return matrix(b, d, rows, cols) }
}

// label names a buffer of a task: "m0.s3.l2.q", or "m0.s3p1.l2.q" for a piece.
func (e *emitter) label(t plan.Task, layer int, value string) string {
	prefix := ""
	if !e.trains() {
		prefix = "eval."
	}
	subsequence := fmt.Sprintf("%sm%d.s%d", prefix, t.Microbatch, t.Subsequence)
	if t.Piece > 0 {
		subsequence += fmt.Sprintf("p%d", t.Piece)
	}
	if layer < 0 {
		return subsequence + "." + value
	}
	return fmt.Sprintf("%s.l%d.%s", subsequence, layer, value)
}

// endTask passes on the task's result, if any: to a task of the same rank, to another rank in a message or, in
// a validation, to the head.
func (s *lowering) endTask(t plan.Task, a schedule.Action, x uint32) {
	_, _, feeds := s.order.plan.Target(t)
	switch {
	case a.Of >= 0:
		s.flow.inputs[s.work.tasks[a.Of]] = x
	case feeds:
		s.flow.outputs[t] = x
	case t.Kind == plan.Forward:
		s.evalHead(t, x)
	}
}

// input returns the buffer of a task's input.
func (f *flow) input(t plan.Task) uint32 {
	x := f.inputs[t]
	delete(f.inputs, t)
	return x
}

// runEmbedding emits the embedding for a task: forward, backward or weight gradients.
func (s *lowering) runEmbedding(t plan.Task) {
	switch {
	case t.Kind == plan.Forward:
		s.flow.rows = s.embed(t)
	case len(s.model.Embedding.Backward) == 0: // the embedding is not trained
	case t.Kind == plan.Backward:
		s.embeddingGradients(t, s.flow.rows)
	case t.Kind == plan.WeightGrad:
		s.finishBackward(t)
	}
}

func (s *lowering) embed(t plan.Task) uint32 {
	s.decidedBy("lower", "model.vocab")
	e := s.newEnv(s.model.Embedding, s.weights.embedding, t, ir.None, s.plan.SizeOf(t))
	e.run(s.model.Embedding.Forward)
	return e.at[s.model.Embedding.Output].buffer
}

// visit emits a layer for a task: forward, backward or weight gradients.
func (s *lowering) visit(t plan.Task, layer int) {
	s.kv.rest = s.kv.queue.Visit()
	switch t.Kind {
	case plan.Forward:
		s.flow.rows = s.forwardLayer(t, layer, s.flow.rows)
	case plan.Backward:
		s.flow.rows = s.backwardLayer(t, layer, s.flow.rows)
	case plan.WeightGrad:
		s.finishBackward(t)
	}
}

// block returns the dataflow of a layer for a task; the plan decides what its backward pass recomputes.
func (l *layout) block(t plan.Task, layer int) *graph.Block {
	return l.plan.LayerOf(l.model, t, layer-l.stages[t.Stage][0])
}

func (s *lowering) forwardLayer(t plan.Task, layer int, x uint32) uint32 {
	b := s.block(t, layer)
	s.prov.Layer = int32(layer)
	s.decidedBy("lower", "model.layers")
	e := s.newEnv(b, s.paramsOf(t, layer), t, layer, s.sizeOf(t))
	e.put(b.Input, x, 0)
	if s.trains() {
		e.saveUnits()
	}
	e.run(b.Forward)
	s.prov.Layer = ir.None
	return e.at[b.Output].buffer
}

// receive issues the message with a task's input. Its buffer is reserved from the start of the previous task,
// so that the message may arrive while that task runs.
func (f *flow) receive(t plan.Task) {
	from, source, _ := f.order.plan.Source(t)
	stream, peer := ir.RecvPrev, constPrev
	switch f.order.plan.WayOf(source) {
	case plan.Aside:
		stream, peer = ir.MuxIn, rankConst(from)
	case plan.Back:
		stream, peer = ir.RecvNext, constNext
	}
	b := f.allocateInput(t)
	f.reserve(b, f.start)
	f.message(ir.Recv, stream, peer, t, b)
	f.inputs[t] = b
}

// allocateInput creates the buffer of a task's input, which another task produces.
func (f *flow) allocateInput(t plan.Task) uint32 {
	layers, name, layer := f.stages[t.Stage], "ln1.in", ir.None
	switch last := t.Stage == len(f.stages)-1; {
	case last && (t.Kind == plan.Backward || len(layers) == 0):
		name = "ln_f.in"
	case t.Kind == plan.Backward && len(layers) == 0:
		name = "embed.d.out"
	case t.Kind == plan.Backward:
		layer, name = layers[len(layers)-1], "d.out"
	default:
		layer = layers[0]
	}
	size, _ := f.hidden(f.plan.SizeOf(t))
	return f.allocate(f.label(t, layer, name), ir.Device, size)
}

// send issues the message with a task's result. Its buffer is held until the end of the next task.
func (f *flow) send(t plan.Task) {
	to, _, _ := f.order.plan.Target(t)
	stream, peer := ir.SendNext, constNext
	switch f.order.plan.WayOf(t) {
	case plan.Aside:
		stream, peer = ir.Mux, rankConst(to)
	case plan.Back:
		stream, peer = ir.SendPrev, constPrev
	}
	b := f.outputs[t]
	delete(f.outputs, t)
	f.message(ir.Send, stream, peer, t, b)
	f.lagging = append(f.lagging, b)
}

func (e *emitter) message(op ir.Op, stream ir.Stream, peer string, t plan.Task, b uint32) {
	_, view := e.hidden(e.plan.SizeOf(t))
	e.decidedBy("schedule", "schedule.pp")
	e.op(op, stream, []ir.View{view(b)}, e.constRef(peer))
}

func (s *lowering) embeddingGradients(t plan.Task, dy uint32) {
	s.decidedBy("lower", "model.vocab")
	e := s.newEnv(s.model.Embedding, s.weights.embedding, t, ir.None, s.plan.SizeOf(t))
	e.suffix = ".b"
	e.put(s.model.Embedding.DOutput, dy, 0)
	e.runBackward()
}

// finishBackward emits the next deferred second half of a backward task, in the order of the first halves.
func (s *lowering) finishBackward(t plan.Task) {
	e := s.work.deferred[t][0]
	s.work.deferred[t] = s.work.deferred[t][1:]
	s.prov.Layer = int32(e.layer)
	s.decidedBy("lower", e.key())
	e.runWeightGrads()
	s.prov.Layer = ir.None
}

func (s *lowering) backwardLayer(t plan.Task, layer int, dy uint32) uint32 {
	b := s.block(t, layer)
	s.prov.Layer = int32(layer)
	s.decidedBy("lower", "model.layers")
	e := s.newEnv(b, s.paramsOf(t, layer), t, layer, s.sizeOf(t))
	e.put(b.DOutput, dy, 0)
	e.backward = true
	e.loadUnits()
	e.runBackward()
	s.prov.Layer = ir.None
	return e.gradient()
}

// gradient returns the gradient of the block's input, if there is one.
func (e *env) gradient() uint32 {
	if e.block.DInput == graph.Missing {
		return ir.NoBuffer
	}
	return e.at[e.block.DInput].buffer
}

func (s *lowering) backwardHead(t plan.Task, x uint32) uint32 {
	b := s.model.Head
	s.decidedBy("lower", "model.vocab")
	e := s.newEnv(b, s.weights.head, t, ir.None, s.plan.HeadSize(s.plan.SizeOf(t)))
	e.weigh(float64(s.plan.Train.Batch), s.numbers.factors[0])
	e.put(b.Input, x, 0)
	e.put(b.Loss, s.numbers.loss, 0)
	e.run(b.Backward)
	return e.gradient()
}

// lowerEval emits one validation microbatch: only forward tasks, with nothing saved.
func (s *lowering) lowerEval() {
	s.begin(ir.SectionEval, ir.PhaseEval, &s.validation)
	if s.last() {
		s.op(ir.Fill, ir.Compute, []ir.View{vector(s.numbers.evalLoss, ir.F32, 1)}, ir.Float(0))
		n := s.plan.Train.Sequence * int64(s.plan.Parallel.Microbatch)
		s.numbers.losses = s.allocate(ir.ResultLosses, ir.Device, ir.Bytes(n)*ir.F32.Bytes())
		s.code.Results = append(s.code.Results, ir.Result{Name: ir.ResultLosses, View: vector(s.numbers.losses, ir.F32, n)})
	}
	s.loadDocuments(1)
	var tasks []plan.Task
	var steps []step
	index := map[int]int{} // index in the rank's tasks -> index in tasks
	for _, st := range s.order.steps[s.rank] {
		t := s.order.plan.Tasks[s.rank][st.task]
		if t.Kind != plan.Forward || t.Microbatch != 0 || st.kind == counting {
			continue
		}
		steps = append(steps, st)
		if st.kind == running {
			index[st.task] = len(tasks)
			tasks = append(tasks, t)
		}
	}
	s.setTasks(tasks, walk.PipelineOf(s.plan, [][]plan.Task{tasks}, 0), 0)
	for _, st := range steps {
		s.step(step{kind: st.kind, task: index[st.task]})
	}
	if s.last() {
		s.averageOverReplicas(s.numbers.evalLoss)
		s.hold(s.numbers.losses) // package train reads the losses
	}
	s.end()
}

func (s *lowering) evalHead(t plan.Task, x uint32) {
	b := s.model.Head
	s.decidedBy("lower", "model.vocab")
	e := s.newEnv(b, s.weights.head, t, ir.None, s.plan.HeadSize(s.plan.SizeOf(t)))
	e.weigh(float64(s.evalSequences()), s.numbers.factors[1])
	e.put(b.Input, x, 0)
	e.put(b.Loss, s.numbers.evalLoss, 0)
	e.put(b.Losses, s.numbers.losses, ir.Bytes(e.size.Prefix*e.size.Batch)*ir.F32.Bytes())
	e.run(b.Forward)
}

// weigh sets the factor of a token's loss: 1 divided by the number of tokens in the given number of sequences,
// or, if labels may be masked, a number that package train sets.
func (e *env) weigh(sequences float64, weight uint32) {
	e.lossScale = 1 / (float64(e.s.plan.Train.Sequence) * sequences)
	if v := e.block.Given(graph.ValueWeight); v != graph.Missing {
		e.lossScale = 1
		e.put(v, weight, 0)
	}
}

// readsPositions reports whether the rank has attention that reads positions in the section: of its own layers, or of layers
// whose attention it shares.
func (s *lowering) readsPositions() bool {
	own := s.plan.StagesOf(s.rank)
	for j, layers := range s.stages {
		left, right := s.trains() && s.plan.Mux.Left && j < s.rank, s.trains() && s.plan.Mux.Right && j > s.rank
		for _, layer := range layers {
			if s.layerOfModel(layer).Given(graph.ValuePositions) == graph.Missing {
				continue
			}
			if slices.Contains(own, j) || left || right && s.model.Full(layer) {
				return true
			}
		}
	}
	return false
}

// loadDocuments begins a section by loading the positions of all its tokens in their documents, for ranks that
// need them. They stay live until the last attention reads them.
func (s *lowering) loadDocuments(microbatches int) {
	if !s.readsPositions() {
		return
	}
	z := s.plan.Size(0)
	replica := graph.ConstReplica
	if !s.trains() {
		replica = graph.ConstEvalFirst
	}
	for m := range microbatches {
		s.prov.Microbatch = int32(m)
		b := s.allocate(s.label(plan.Task{Microbatch: m}, -1, graph.ValuePositions), ir.Device, ir.Bytes(z.Sequence*z.Batch)*ir.I32.Bytes())
		s.work.documents[m] = b
		s.op(ir.LoadTokens, ir.Compute, []ir.View{vector(b, ir.I32, z.Sequence*z.Batch)}, ir.Int(int64(m)*z.Batch), s.constRef(replica),
			ir.Int(0), ir.Int(z.Batch), ir.Int(0), ir.Int(ir.AsPositions))
	}
	s.prov.Microbatch = ir.None
}

// evalSequences returns the number of sequences in one eval section, over all replicas.
func (l *layout) evalSequences() int {
	if !l.plan.Train.Validates() {
		return 0
	}
	return l.plan.Parallel.DP * l.plan.Parallel.Microbatch
}
