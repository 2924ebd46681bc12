// Package schedule defines the intermediate form between a plan and its program. A plan determines which tasks
// a pipeline rank runs, and in which order. A schedule lists the rank's work inside and between its tasks as
// coarse actions: wait for the input, visit a layer, release the memory of an offloaded layer, begin to reload
// another layer, pass the result on.
//
// Pipeline.Write is the only code that decides this order. Three readers follow its lists without
// knowing the reasons for the order:
//
//	internal/passes/estimate   gives each action a duration: the time estimate
//	internal/passes/memory     adds up the bytes that each action takes and frees: the memory tracker
//	internal/codegen           expands each action to instructions
//
// A list depends on the order of tasks and on a Timing, above all on two numbers: by how many tasks a copy to the
// host may lag, and how many layers ahead a reload is issued. It does not depend on the placement of saved
// tensors: even a layer that keeps all of them on the device has a Release and a Reload, which then copy
// nothing. A search over thousands of placements can therefore use the same list.
//
// For example, a stage of two layers in the middle of a pipeline runs two subsequences, with lag and ahead
// values of 1:
//
//	F0.0  Begin  Visit 0  Visit 1  End
//	F0.1  Begin  Visit 0  Release F0.0 0  Visit 1  Release F0.0 1  End
//	B0.1  Release F0.1 0  Release F0.1 1  Reload B0.1 1  Begin
//	      Visit 1  Reload B0.1 0  Visit 0  Reload B0.0 1  End
//	B0.0  Begin  Visit 1  Reload B0.0 0  Visit 0  End
//
// Slots that the ranks of all stages share (mux) also appear in the list of every rank. ACTIONS.md describes all
// actions; sppoc dump --format actions prints the lists of a job.
package schedule

// List is the schedule of one rank.
type List struct {
	actions []Action
	begins  []int32 // [task]: index of its first action
}

// Of returns the actions of a task. All actions of a shared slot belong to its first task.
func (l *List) Of(place int) []Action {
	if place+1 < len(l.begins) {
		return l.actions[l.begins[place]:l.begins[place+1]]
	}
	return l.actions[l.begins[place]:]
}

// All returns the actions of all tasks.
func (l *List) All() []Action { return l.actions }

// Last returns the last action of a task. In a shared slot, only the first task has actions; for the slot's
// other tasks, Last returns the zero action.
func (l *List) Last(place int) (last Action) {
	if of := l.Of(place); len(of) > 0 {
		last = of[len(of)-1]
	}
	return last
}

// Pipeline is the input from which schedules are written.
type Pipeline struct {
	Layers     []int           // [virtual stage]
	Shared     int             // how many of the first slots the ranks of all stages share, in both passes
	Staged     bool            // results that are read much later are kept on the host, as K and V may be
	Gathers    bool            // weights of layers are divided among ranks, and gathered for each visit
	Once       bool            // weights are gathered once for all visits
	Reduces    func(Task) bool // whether a task's visits end by reducing gradients that ranks divide; nil: none are divided
	Early      bool            // the first half of a backward has such gradients, too
	Replicated bool            // other ranks hold the same layers, so that gradients are summed as early as possible
	undone     []int           // [virtual stage]: how many layers, at the end of the stage, its backwards visit
	frozen     int             // how many virtual stages at the start have no backward
	embeds     bool            // whether the backwards of the first stage include the embedding
	tasks      [][]Task
	links      [][]link // [rank][task]
}

// link connects a task with other tasks of its rank. Indices are -1 if there is no such task.
type link struct {
	undone    int32 // for a backward: its forward
	split     bool  // for a backward: whether its weight gradients are another task
	reader    int32 // the task that reads the result: the same task on the next stage, or the backward that begins with the head
	first     int32 // number of layers of all earlier tasks
	last      bool  // whether no later subsequence passes through the stage in this direction
	adds      int32 // the last task that adds to gradients of its stage's layers
	finalHead bool  // whether it is the last backward of its stage
}

// nearby is the number of tasks within which a result must be read to stay on the device: one task
// for the copy to the host, and one for the copy back.
const nearby = 2

// New prepares the schedules of all ranks, given the tasks of each rank in order. untrained is the number of
// layers at the start that have no backward.
func New(tasks [][]Task, layers []int, untrained int) *Pipeline {
	p := &Pipeline{Layers: layers, embeds: untrained == 0, tasks: tasks}
	for _, n := range layers {
		p.undone = append(p.undone, max(0, n-untrained))
		if untrained > 0 && n <= untrained {
			p.frozen++
		}
		untrained = max(0, untrained-n)
	}
	for _, mine := range tasks {
		place, n, last := make(map[Task]int32, len(mine)), 0, 0
		for i, t := range mine {
			place[t], last = int32(i), max(last, t.Subsequence)
		}
		find := func(t Task) int32 {
			if at, ok := place[t]; ok {
				return at
			}
			return -1
		}
		links := make([]link, len(mine))
		for i, t := range mine {
			links[i] = link{undone: -1, reader: -1, first: int32(n), last: t.Subsequence == last}
			n += layers[t.Stage]
			next := t
			switch next.Stage++; {
			case t.Kind == WeightGrad:
				continue
			case t.Kind == Backward:
				links[i].undone, links[i].split, next.Stage = find(t.As(Forward)), find(t.As(WeightGrad)) >= 0, t.Stage-1
			case next.Stage == len(layers):
				next = t.As(Backward)
			}
			if t.Kind == Forward || p.feeds(t.Stage) {
				links[i].reader = find(next)
			}
		}
		markFinal(mine, links)
		p.links = append(p.links, links)
	}
	return p
}

// feeds reports whether the stage before a virtual stage needs the gradient of its input.
func (p *Pipeline) feeds(stage int) bool { return stage > p.frozen }

// Timing is the part of a schedule's input that may change while copies are being chosen.
type Timing struct {
	Lag        int  // number of tasks by which copies to the host may lag
	Ahead      int  // number of backward layers by which reloads are issued in advance
	Recomputes bool // the first backward of a stage recomputes K and V from the inputs of layers
}

// inputLoads is the number of layer inputs that are on the device at a time to recompute K and V: one in use, and the
// others being loaded.
const inputLoads = 3

// Write lists the actions of a rank. It overwrites the list passed as reuse, which may be nil and must not be read
// afterwards.
func (p *Pipeline) Write(rank int, timing Timing, reuse *List) *List {
	if reuse == nil {
		reuse = &List{}
	}
	tasks, n := p.tasks[rank], 0
	if last := len(tasks) - 1; last >= 0 {
		n = int(p.links[rank][last].first) + p.Layers[tasks[last].Stage]
	}
	w := writer{
		Pipeline: p, rank: rank, list: reuse, tasks: tasks, links: p.links[rank], Timing: timing,
		released: make([]bool, n), reloaded: make([]int, len(tasks)),
	}
	w.list.actions, w.list.begins = w.list.actions[:0], w.list.begins[:0]
	w.planVisits(n)
	for i := 0; i < len(tasks); {
		end := w.beginGroup(i)
		for ; i < end; i++ {
			w.list.begins = append(w.list.begins, int32(len(w.list.actions)))
			switch {
			case !w.isShared(tasks[i]):
				w.task(i, end)
			case i == w.groupFirst:
				w.slot(i, end)
			}
		}
		w.endGroup(end)
	}
	return w.list
}

// writer writes the list of one rank.
type writer struct {
	*Pipeline
	Timing
	rank  int
	list  *List
	tasks []Task
	links []link

	released []bool // of each layer of each task, which start at link.first: whether a forward's copies have been released
	reloaded []int  // [place]: number of the backward's layers whose reloads have been issued

	group, groupFirst int        // number and first task of the current group
	waiting           []offloads // forwards whose copies are still allowed to run, oldest first
	leaving           []int      // elements of waiting whose copies end during the current group

	visits []Action // the rank's visits to its own layers that have not ended; empty if nothing is divided
	whole  []Action // visits to the layers whose weights are gathered
	lent   []Action // visits to the layers whose weights have been lent since the last Enter
}

// offloads describes a forward's copies to the host.
type offloads struct{ task, group int }

func (w *writer) add(a Action) { w.list.actions = append(w.list.actions, a) }

func (w *writer) layersOf(i int) int { return w.Layers[w.tasks[i].Stage] }

// isShared reports whether the ranks of all stages share a task's slot.
func (p *Pipeline) isShared(t Task) bool { return t.Slot() < p.Shared }

// beginGroup begins the group of a task and returns the index after the group's last task. Pieces that run one after
// another, or together layer by layer, form one group; copies of other tasks end during the last of these
// pieces. Any other task is a group of its own.
func (w *writer) beginGroup(i int) (end int) {
	w.group++
	w.groupFirst = i
	for end = i + 1; end < len(w.tasks) && w.tasks[i].Piece > 0 && SameSlot(w.tasks[i], w.tasks[end]); end++ {
	}
	w.leaving = w.leaving[:0]
	for len(w.waiting) > 0 && (w.tasks[i].Kind == Backward || w.waiting[0].group+w.Lag <= w.group) {
		if task := w.waiting[0].task; !w.undoes(i, end, task) {
			w.leaving = append(w.leaving, task)
		}
		w.waiting = w.waiting[1:]
	}
	return end
}

// undoes reports whether any of the tasks first to end-1 is the backward of the given forward.
func (w *writer) undoes(first, end, forward int) bool {
	for i := first; i < end; i++ {
		if int(w.links[i].undone) == forward {
			return true
		}
	}
	return false
}

func (w *writer) endGroup(end int) {
	for i := w.groupFirst; i < end; i++ {
		if w.tasks[i].Kind == Forward {
			w.waiting = append(w.waiting, offloads{i, w.group})
		}
	}
}

// task lists the actions of a task that is not shared.
func (w *writer) task(i, groupEnd int) {
	t, place := w.tasks[i], int32(i)
	layers, coming := w.layersOf(i), w.coming(i)
	w.begin(i, coming)
	switch {
	case t.Kind == Forward && t.Stage == 0:
		w.add(Action{Op: Embedding, Task: place})
	case t.Kind == Backward && t.Stage == len(w.Layers)-1:
		w.add(Action{Op: Head, Task: place})
	}
	for at := range layers {
		if at < w.visited(i) {
			w.ownVisit(i, at)
		}
		if at == 0 {
			w.sumHead(i)
		}
		if i+1 == groupEnd {
			w.releaseBeside(at, at == layers-1)
		}
		w.reloadUpTo(i, coming, at+w.Ahead)
	}
	if layers == 0 {
		w.sumHead(i)
		if i+1 == groupEnd {
			w.releaseBeside(0, true)
		}
	}
	if t.Kind != Forward && t.Stage == 0 && w.embeds {
		w.add(Action{Op: Embedding, Task: place})
	}
	w.end(i)
}

// begin lists the beginning of a task, and the copies that are issued with it. If a backward directly follows its
// forward, no other task can hide the copies, so they end before the backward begins.
func (w *writer) begin(i, coming int) {
	backward := w.tasks[i].Kind == Backward
	if backward {
		if f := i - 1; int(w.links[i].undone) == f && f >= 0 {
			for k := range w.layersOf(i) {
				w.release(f, k)
			}
		}
		w.reloadUpTo(i, 0, w.Ahead-1)
	}
	w.add(Action{Op: Begin, Task: int32(i)})
	if backward {
		w.reloadUpTo(i, coming, w.Ahead-1)
	}
	w.inputFromHost(i + 1)
}

// ownVisit lists a task's visit to its layer number at.
func (w *writer) ownVisit(i, at int) {
	if w.tasks[i].Kind != WeightGrad {
		w.enter()
		w.leave()
	}
	w.recompute(i, at)
	w.add(w.visit(Visit, i, at))
	w.reduce(i, at)
}

// end lists the action that passes a task's result on.
func (w *writer) end(i int) {
	end := Action{Op: End, Task: int32(i), Of: w.links[i].reader}
	if w.Staged && int(end.Of) > i+nearby {
		end.Op = EndOnHost
	}
	w.add(end)
}

// inputFromHost lists the copies from the host for a task. They run during the previous task.
func (w *writer) inputFromHost(i int) {
	if !w.Staged || i == len(w.tasks) {
		return
	}
	w.add(Action{Op: InputFromHost, Task: int32(i)})
	for at := range w.layersOf(i) {
		if w.returns(i) {
			w.add(w.visit(KVFromHost, i, at))
		}
	}
}

// returns reports whether a task is the first backward of a stage that is not the last, so that other stages have run
// since its forwards.
func (w *writer) returns(i int) bool {
	return w.tasks[i].Kind == Backward && w.links[i].last && w.tasks[i].Stage < len(w.Layers)-1
}

// recompute lists the recomputation of K and V of the whole sequence in layer number at, if a task begins with it. Inputs
// are loaded a few at a time, in advance.
func (w *writer) recompute(i, at int) {
	if !w.Recomputes || !w.returns(i) {
		return
	}
	const early = inputLoads - 1
	load, compute, n := w.visit(LoadInput, i, at), w.visit(Recompute, i, at), w.tasks[i].Subsequence+1
	for x := range n + early {
		if load.Of = int32(x); x < n {
			w.add(load)
		}
		if compute.Of = int32(x - early); x >= early {
			w.add(compute)
		}
	}
}

// visited returns the number of layers that a task visits.
func (w *writer) visited(i int) int {
	if w.tasks[i].Kind == Forward {
		return w.layersOf(i)
	}
	return w.undone[w.tasks[i].Stage]
}

// visit returns an action of a task in layer number at, counted in the order in which the task visits its layers.
func (w *writer) visit(op Op, i, at int) Action {
	k := at
	if w.tasks[i].Kind != Forward {
		k = w.layersOf(i) - 1 - at
	}
	return Action{Op: op, Task: int32(i), Layer: int32(k)}
}

// releaseBeside lists the releases during layer number at of a group. The copies of a forward's
// layer may take as many groups as lag allows. The last layer of the group also has the remaining releases of
// forwards with more layers.
func (w *writer) releaseBeside(at int, last bool) {
	for _, f := range w.leaving {
		for k, layers := at, w.layersOf(f); k < layers && (k == at || last); k++ {
			w.release(f, k)
		}
	}
}

// release lists the release of a forward's layer, unless it has been listed.
func (w *writer) release(forward, k int) {
	released := &w.released[int(w.links[forward].first)+k]
	if *released {
		return
	}
	*released = true
	w.add(Action{Op: Release, Task: int32(forward), Layer: int32(k)})
}

// coming returns how many of the backward tasks directly after a task may have their reloads issued while
// that task runs; ahead limits this number. The number is 0 if the first of them is the task's own backward,
// whose tensors are not yet offloaded. After a forward it is at most 1, because the copies to the host on which
// later backwards depend may not have ended.
func (w *writer) coming(i int) int {
	rest := w.tasks[i+1:]
	if len(rest) == 0 || int(w.links[i+1].undone) == i {
		return 0
	}
	if w.tasks[i].Kind == Forward {
		rest = rest[:1]
	}
	n := 0
	for layers := 0; n < len(rest) && rest[n].Kind == Backward && layers < w.Ahead; n++ {
		layers += w.Layers[rest[n].Stage]
	}
	return n
}

// reloadUpTo lists all reloads up to layer number last that have not been listed yet. Layers are counted from
// the start of a task. The reloads are in the order in which the task and the backward tasks after it need
// them.
func (w *writer) reloadUpTo(i, coming, last int) {
	for m := i; m <= i+coming && last >= 0; m++ {
		layers := w.layersOf(m)
		if w.tasks[m].Kind == Backward {
			for ; w.reloaded[m] <= last && w.reloaded[m] < layers; w.reloaded[m]++ {
				w.reload(m, layers-1-w.reloaded[m])
			}
		}
		last -= layers
	}
}

// reload lists the reload of a backward's layer. If the copies to the host have not been released, they are released
// first.
func (w *writer) reload(i, k int) {
	if f := w.links[i].undone; f >= 0 {
		w.release(int(f), k)
	}
	w.add(Action{Op: Reload, Task: int32(i), Layer: int32(k)})
}
