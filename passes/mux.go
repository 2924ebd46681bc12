package passes

import (
	"fmt"
	"math/big"
	"slices"

	"sppo.dev/graph"
	"sppo.dev/lang"
)

// mux lets stages that idle at the start or the end of the pipeline take a part of the tasks of those that do not.
//
// Input: Parallel, Subsequences, Tasks. Output: Mux, Tasks. Paper: section 4.2; left, steady and right by its table, which
// needs at least as many subsequences as stages. A forward of subsequence x on stage i stands in slot i + x, its backward
// in slot PP + N - 2 - (i + x). With n stages active in a slot before PP - 1, each of the others takes 1/PP of every active task
// and owners keep n/PP: all ranks then carry n/PP. Every subsequence that has such a task is cut by tokens into PP pieces, the
// same for all stages: of a task in slot t the owner runs the first t + 1 and rank j the (j+1)-th, so that a helper keeps its
// piece from stage to stage until it owns the stage. Backward and forward of a piece are on the same rank: activations stay
// where they were computed. The other end is mux_right.go's.
func mux(c *Context, p *Plan) error {
	muxOff(c, p)
	if !p.Schedule.SharesTasks() {
		p.decide("mux", "mux", "off", "every stage does its own tasks")
		return nil
	}
	if found := p.share(); len(found) > 0 {
		return c.diagnose(found)
	}
	c.forget()
	if !c.candidate {
		p.decideMux("given")
	}
	return nil
}

// share shares tasks as they are to be, or says why they cannot be.
func (p *Plan) share() []problem {
	if found := p.shareProblems(); len(found) > 0 {
		return found
	}
	left, right := p.wantsShared()
	if left {
		p.shareLeft()
	}
	if right {
		p.shareRight()
	}
	return nil
}

// shareProblems are why tasks cannot be shared as they are to be.
func (p *Plan) shareProblems() []problem {
	if left, right := p.wantsShared(); !left && !right {
		return nil
	}
	return muxProblems(p)
}

// wantsShared are the ends of the pipeline that are shared, or are to be.
func (p *Plan) wantsShared() (left, right bool) {
	m := p.Schedule.Mux
	return p.Mux.Left || m == "left" || m == "on", p.Mux.Right || m == "right" || m == "on"
}

// shareLeft cuts the first subsequences and deals out their tasks.
func (p *Plan) shareLeft() {
	p.Mux.Left = true
	for x := range p.Parallel.PP - 1 {
		p.Mux.Pieces = append(p.Mux.Pieces, p.cut(x))
	}
	for i := range p.Parallel.PP - 1 {
		p.Mux.Stages[i].Applied = true
	}
	p.Tasks = p.borrowedTasks()
}

// decideMux notes what shares lead to at best.
func (p *Plan) decideMux(why string) {
	takes := func(m MuxShares) string { return Makespan(p.Parallel.PP, p.Subsequences.N, m, 1, 2).FloatString(2) }
	p.decide("mux", "mux", p.Schedule.Mux, fmt.Sprintf("%s; with tasks of one unit of time forward and two backward, and free copies, the pipeline takes %s instead of %s",
		why, takes(p.Mux.shares()), takes(MuxShares{})))
}

func muxOff(_ *Context, p *Plan) {
	pp, n := p.Parallel.PP, p.Subsequences.N
	p.Mux = Mux{Stages: make([]MuxStage, pp)}
	for i := range p.Mux.Stages {
		s := MuxStage{Steady: n, LeftRange: []int{}, RightRange: []int{}}
		if n >= pp {
			s.Left, s.Steady, s.Right = pp-1-i, n-(pp-1), i
			s.LeftRange, s.RightRange = stagesFromTo(i, pp-1), stagesFromTo(0, i)
		}
		p.Mux.Stages[i] = s
	}
}

// stagesFromTo lists a range of stages; a single one has nobody to share with.
func stagesFromTo(first, last int) []int {
	out := []int{}
	for s := first; s <= last && first < last; s++ {
		out = append(out, s)
	}
	return out
}

// cut is how a subsequence that is shared is cut: into a piece for every stage, as even as the grid of SP allows.
func (p *Plan) cut(x int) []int64 {
	step, n := int64(p.Parallel.SP), int64(p.Parallel.PP)
	pieces, begin := make([]int64, n), int64(0)
	for k := range pieces {
		end := (p.Subsequences.Lengths[x]*int64(k+1) + step*n/2) / (step * n) * step
		pieces[k], begin = end-begin, end
	}
	return pieces
}

// muxProblems are why a requested mux cannot be, each with the nearest thing that can.
func muxProblems(p *Plan) []problem {
	par, n := p.Parallel, p.Subsequences.N
	switch {
	case par.PP < 2:
		return []problem{fault("schedule.mux", lang.Infeasible, "mux = off, or pp of at least 2", "one stage has nobody to share its tasks with")}
	case p.chosenStrategy().name != strategies[0].name:
		return []problem{fault("schedule.mux", lang.Infeasible, "strategy = sppo, or mux = off", "mux fills the bubbles of one sequence, which strategy = %s does not have", p.chosenStrategy().name)}
	case par.VirtualStages > 1:
		return []problem{fault("schedule.mux", lang.Infeasible, "virtual_stages = 1, or mux = off", "mux and %d virtual stages fill the same bubbles", par.VirtualStages)}
	case n < par.PP:
		return []problem{fault("schedule.mux", lang.Infeasible, fmt.Sprintf("subsequences = %d, or mux = off", par.PP),
			"mux needs as many subsequences as stages: there are %d for %d", n, par.PP)}
	}
	if left, _ := p.wantsShared(); left {
		return leftProblems(p)
	}
	return nil
}

func leftProblems(p *Plan) []problem {
	par := p.Parallel
	for x, tokens := range p.Subsequences.Lengths[:par.PP-1] {
		if least := int64(par.PP * par.SP); tokens < least {
			return []problem{fault("schedule.mux", lang.Infeasible, "fewer subsequences, or mux = off",
				"subsequence %d has %d tokens, and %d pieces for sp = %d take at least %d", x, tokens, par.PP, par.SP, least)}
		}
	}
	return nil
}

// slot is where a task stands in the pipeline of equal tasks: those of a slot run at the same time.
type slot struct {
	kind               TaskKind
	microbatch, number int
}

func slotOf(t Task) slot { return slot{t.Kind, t.Microbatch, t.Slot()} }

// Shared reports whether the ranks of all stages share in a task's slot, so that they run it layer by layer together.
func (p *Plan) Shared(t Task) bool { return t.Slot() < p.sharedSlots() }

// sharedSlots is the number of slots, from the first on, that the ranks of all stages share.
func (p *Plan) sharedSlots() int {
	if !p.Mux.Left {
		return 0
	}
	return p.Parallel.PP - 1
}

// Runner is the pipeline rank that does a task: the one that has its stage, or the one that helps it.
func (p *Plan) Runner(t Task) int {
	if helper := t.Piece - 1; p.Shared(t) && helper > t.Slot() {
		return helper
	}
	return p.Home(t.Stage)
}

// helps reports whether a rank has a part of the tasks that a stage, another rank's, has in a shared slot. Those who do are the
// last, and their parts come behind the owner's, in the order of ranks.
func (p *Plan) helps(rank, stage, slot int) bool {
	return rank > stage && rank > slot && slot < p.Parallel.PP-1
}

// Begins reports whether a slot is the first, in the order of its pass, in which a rank helps a stage.
func (p *Plan) Begins(kind TaskKind, rank, stage, slot int) bool {
	before := slot - 1
	if kind == Backward {
		before = slot + 1
	}
	return p.helps(rank, stage, slot) && (before < stage || !p.helps(rank, stage, before))
}

// ParamSet is a set of a layer's parameters, a bit for each.
type ParamSet uint64

// paramsRead are the parameters that a layer reads in a pass.
func paramsRead(b *graph.Block, kind TaskKind) (set ParamSet) {
	nodes := b.Forward
	if kind == Backward {
		nodes = b.Backward
	}
	for i := range nodes {
		for _, a := range nodes[i].Args {
			if a.Value != graph.Missing && b.Values[a.Value].Kind == graph.Weight {
				set |= 1 << b.Values[a.Value].Param
			}
		}
	}
	return set
}

// Borrows are the parameters of the k-th layer of another rank's stage that a rank reads in its tasks on that stage: all that
// they have to be lent.
func (p *Plan) Borrows(g *graph.Model, kind TaskKind, rank, stage, k int) (set ParamSet) {
	for _, t := range p.Tasks[rank] {
		if t.Kind == kind && t.Stage == stage && t.Microbatch == 0 && p.Home(stage) != rank {
			set |= paramsRead(p.LayerOf(g, t, k), kind)
		}
	}
	return set
}

// Pieces are the tasks that a task is cut into: itself, where it is whole.
func (p *Plan) Pieces(t Task) []Task {
	if t.Subsequence >= len(p.Mux.Pieces) {
		return []Task{t}
	}
	tasks := make([]Task, len(p.Mux.Pieces[t.Subsequence]))
	for k := range tasks {
		tasks[k] = t
		tasks[k].Piece = k + 1
	}
	return tasks
}

// mostPieces is into how many a subsequence is cut at most, 0 where none is.
func (p *Plan) mostPieces() (most int) {
	for _, pieces := range p.Mux.Pieces {
		most = max(most, len(pieces))
	}
	return most
}

// SlotTasks are all tasks of a shared slot on all stages, in the order of stages and of the sequence, which a backward
// turns round.
func (p *Plan) SlotTasks(kind TaskKind, microbatch, slot int) []Task {
	var tasks []Task
	for i := range slot + 1 {
		tasks = append(tasks, p.Pieces(Task{Kind: kind, Microbatch: microbatch, Subsequence: slot - i, Stage: i})...)
	}
	if kind == Backward {
		slices.Reverse(tasks)
	}
	return tasks
}

// Sees reports whether a rank has a later part of the sequence than a task's to do on the task's stage: in the forward pass it
// then needs K and V of the task, in the backward pass it adds to their gradients.
func (p *Plan) Sees(rank int, t Task) bool { return p.sees(rank, t, p.Runner(t)) }

func (p *Plan) sees(rank int, t Task, runner int) bool {
	return rank == p.Home(t.Stage) || p.helps(rank, t.Stage, t.Slot()+1) || p.waitsFor(rank, t, runner)
}

// waitsFor reports whether a rank that helps a task's stage sees the task, which a runner does, in its own slot.
func (p *Plan) waitsFor(rank int, t Task, runner int) bool {
	return p.helps(rank, t.Stage, t.Slot()) && rank > runner
}

// borrowedTasks are what every rank does where tasks are shared: the slots of the start, then its own stage, and the same
// backward.
func (p *Plan) borrowedTasks() [][]Task {
	pp := p.Parallel.PP
	orders := make([][]Task, pp)
	for m := range p.Parallel.Microbatches {
		forward := make([][]Task, pp)
		for slot := range pp - 1 {
			for _, t := range p.SlotTasks(Forward, m, slot) {
				rank := p.Runner(t)
				forward[rank] = append(forward[rank], t)
			}
		}
		for rank := range orders {
			all := append(forward[rank], p.ownTasks(m, rank, pp-1-rank)...)
			orders[rank] = append(append(orders[rank], all...), mirrored(all)...)
		}
	}
	return orders
}

// ownTasks are the forwards of a stage from a subsequence on.
func (p *Plan) ownTasks(microbatch, stage, first int) []Task {
	var tasks []Task
	for x := first; x < p.Subsequences.N; x++ {
		tasks = append(tasks, p.Pieces(Task{Kind: Forward, Microbatch: microbatch, Subsequence: x, Stage: stage})...)
	}
	return tasks
}

// Unshared is the plan of a validation: the forwards of the first microbatch, each on the rank that has its stage. Pieces
// stay pieces, since the ranks of a stage divide rows by them.
func (p *Plan) Unshared() *Plan {
	u := *p
	u.Mux.Left, u.Mux.Right = false, false
	u.Tasks = make([][]Task, p.Parallel.PP)
	for rank := range u.Tasks {
		u.Tasks[rank] = u.ownTasks(0, rank, 0)
	}
	return &u
}

// checkMux: counts cover the tasks of a stage, pieces add up, and tasks are shared as they say.
func checkMux(_ *Context, p *Plan) error {
	if len(p.Mux.Stages) != p.Parallel.PP {
		return fmt.Errorf("mux is given for %d stages of %d", len(p.Mux.Stages), p.Parallel.PP)
	}
	for i, s := range p.Mux.Stages {
		if s.Left+s.Steady+s.Right != p.Subsequences.N {
			return fmt.Errorf("mux of stage %d covers %d of %d subsequences", i, s.Left+s.Steady+s.Right, p.Subsequences.N)
		}
		if s.Applied != (p.Mux.Left && i < p.Parallel.PP-1 || p.Mux.Right && i > 0) {
			return fmt.Errorf("mux of stage %d: applied is %t, left %t and right %t", i, s.Applied, p.Mux.Left, p.Mux.Right)
		}
	}
	if p.Mux.Left || p.Mux.Right {
		if err := plain(muxProblems(p)); err != nil {
			return err
		}
	}
	if err := p.checkBlocks(); err != nil {
		return err
	}
	if p.Mux.Left {
		return p.checkPieces()
	}
	if len(p.Mux.Pieces) > 0 {
		return fmt.Errorf("mux: there are pieces, and nothing is shared")
	}
	return nil
}

// checkPieces: as many pieces as stages for every subsequence that is shared, on the grid of SP, which add up to it.
func (p *Plan) checkPieces() error {
	pp, sp := p.Parallel.PP, int64(p.Parallel.SP)
	if len(p.Mux.Pieces) != pp-1 {
		return fmt.Errorf("mux: pieces are given for %d subsequences, and %d are shared", len(p.Mux.Pieces), pp-1)
	}
	for x, pieces := range p.Mux.Pieces {
		if len(pieces) != pp {
			return fmt.Errorf("mux: subsequence %d has %d pieces for %d stages", x, len(pieces), pp)
		}
		sum := int64(0)
		for _, n := range pieces {
			if n < sp || n%sp != 0 {
				return fmt.Errorf("mux: a piece of subsequence %d has %d tokens, and they are multiples of sp = %d", x, n, sp)
			}
			sum += n
		}
		if want := p.Subsequences.Lengths[x]; sum != want {
			return fmt.Errorf("mux: the pieces of subsequence %d make %d tokens of %d", x, sum, want)
		}
	}
	return nil
}

// MuxShares says at which ends of a pipeline tasks are shared.
type MuxShares struct{ Left, Right bool }

func (m Mux) shares() MuxShares { return MuxShares{Left: m.Left, Right: m.Right} }

// Of are the shares of ranks in subsequence x of n on stage i of pp. They add up to 1; who is not there has none.
func (m MuxShares) Of(pp, n, i, x int) map[int]*big.Rat {
	part := func(a int) *big.Rat { return big.NewRat(int64(a), int64(pp)) }
	first, end, active := i, i, pp // ranks that help, stages that do not idle in the slot
	switch slot := i + x; {
	case m.Left && slot < pp-1:
		first, end, active = slot+1, pp, slot+1
	case m.Right && slot >= n:
		first, end, active = 0, slot-n+1, pp-1-(slot-n)
	}
	shares := map[int]*big.Rat{i: part(active)}
	for r := first; r < end; r++ {
		shares[r] = part(1)
	}
	return shares
}

// Makespan is that of one sequence of n equal subsequences through pp stages, whose tasks take f and b and copies nothing:
// every rank goes through its shares slot by slot and stage by stage; a share starts when the task before on its
// subsequence, and the one before on its stage, are complete.
func Makespan(pp, n int, m MuxShares, f, b int64) *big.Rat {
	type task struct{ i, x int }
	var order []task
	for slot := range pp + n - 1 {
		for i := max(0, slot-n+1); i <= min(pp-1, slot); i++ {
			order = append(order, task{i, slot - i})
		}
	}
	now := make([]*big.Rat, pp)
	for r := range now {
		now[r] = new(big.Rat)
	}
	pass := func(cost int64, on int) {
		done := map[task]*big.Rat{}
		for _, t := range order {
			end := new(big.Rat)
			for r, share := range m.Of(pp, n, t.i, t.x) {
				start := now[r]
				for _, before := range []task{{t.i - on, t.x}, {t.i, t.x - on}} {
					start = latest(start, done[before])
				}
				now[r] = new(big.Rat).Add(start, new(big.Rat).Mul(share, big.NewRat(cost, 1)))
				end = latest(end, now[r])
			}
			done[t] = end
		}
	}
	pass(f, 1)
	slices.Reverse(order)
	pass(b, -1)
	end := now[0]
	for _, t := range now {
		end = latest(end, t)
	}
	return end
}

func latest(a, b *big.Rat) *big.Rat {
	if b != nil && b.Cmp(a) > 0 {
		return b
	}
	return a
}
