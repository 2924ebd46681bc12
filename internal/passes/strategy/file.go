package strategy

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
	"sppo.dev/lang"
)

// fromFile returns the strategy whose order a file states. A plan that was read back has no file, but its tasks.
func fromFile(p *plan.Plan) *Strategy {
	file, v := p.Schedule.Tasks, max(1, p.Parallel.VirtualStages)
	s := &Strategy{Name: lang.StrategyCSV, Stages: StageCount{v, v}, Placed: p.Parallel.Placement}
	if file == nil {
		s.order = func(p *plan.Plan, rank int) []plan.Task { return p.Tasks[rank] }
		s.Late = slices.ContainsFunc(slices.Concat(p.Tasks...), func(t plan.Task) bool { return t.Kind == plan.WeightGrad })
		return s
	}
	v = file.Stages / len(file.Ranks)
	s.Stages, s.Placed, s.doc = StageCount{v, v}, plan.PlacedRound, "the order that "+file.Name+" states"
	if file.Folded {
		s.Placed = plan.PlacedV
	}
	for _, actions := range file.Ranks {
		for _, a := range actions {
			s.Late = s.Late || a.Kind == 'W'
		}
	}
	s.batch, s.order = fileProblem, fileOrder
	return s
}

// fileProblem checks that the batch has the microbatches of the file.
func fileProblem(p *plan.Plan) []plan.Problem {
	file, n, m := p.Schedule.Tasks, p.Subsequences.N, p.Parallel.Microbatches
	if file.Microbatches == n*m {
		return nil
	}
	batch := file.Microbatches / n * p.Parallel.DP * p.Parallel.Microbatch
	return []plan.Problem{plan.Fault("train.batch", lang.Conflict, fmt.Sprintf("batch = %d", batch),
		"batch / (dp * microbatch) is %d, but the order in %s has %d microbatches of %s", m, file.Name, file.Microbatches/n, words.Plural(n, "subsequence"))}
}

// fileOrder returns the tasks of a rank in the order of the file. Microbatch i of the file is subsequence i%N of microbatch
// i/N.
func fileOrder(p *plan.Plan, rank int) []plan.Task {
	n := p.Subsequences.N
	kinds := map[byte]plan.TaskKind{'F': plan.Forward, 'B': plan.Backward, 'I': plan.Backward, 'W': plan.WeightGrad}
	var tasks []plan.Task
	for _, a := range p.Schedule.Tasks.Ranks[rank] {
		tasks = append(tasks, plan.Task{Kind: kinds[a.Kind], Microbatch: a.Microbatch / n, Subsequence: a.Microbatch % n, Stage: a.Stage})
	}
	return tasks
}

// Text returns the order of a plan's tasks as a file states it: a line for each pipeline rank.
func Text(p *plan.Plan) string {
	var b strings.Builder
	name := Namer(p)
	for _, tasks := range p.Tasks {
		for i, t := range tasks {
			if i > 0 {
				b.WriteByte(',')
			}
			b.WriteString(name(t))
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// Namer returns a function that writes the tasks of a plan as a file states them: virtual stage, kind, microbatch. B is a
// whole backward, and I is the part of one that is not W.
func Namer(p *plan.Plan) func(plan.Task) string {
	split := map[plan.Task]bool{}
	for rank := range p.Tasks {
		for t := range p.Splits(rank) {
			split[t] = true
		}
	}
	return func(t plan.Task) string {
		kind := t.Kind.String()
		if split[t] {
			kind = "I"
		}
		return fmt.Sprintf("%d%s%d", t.Stage, kind, t.Microbatch*p.Subsequences.N+t.Subsequence)
	}
}
