package mux

import (
	"fmt"
	"slices"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
)

// This file decides how tasks near the turnaround are shared. In slot t = stage + subsequence >= N, stages
// 0 .. t-N have no forwards left. Each of them computes part of the attention of every task of the slot: helper
// j < i of stage i takes a block of the stage's keys and values in the tasks of subsequences N-i+j and later,
// whose queries all follow the block. Matmuls are not shared. The same stages are idle during the backwards of
// these tasks, which are shared in the same way.

// shareRight decides which keys the helpers of each stage take in its last tasks.
func shareRight(p *plan.Plan) {
	p.Mux.Right = true
	for i := 1; i < p.Parallel.PP; i++ {
		p.Mux.Stages[i].Blocks, p.Mux.Stages[i].Applied = blocks(p, i), true
	}
}

// blocks returns the boundaries, in tokens, of the blocks of a stage's keys that its helpers take in each of its
// last tasks: helper j takes the block from the j-th boundary to the next. Each block is 1/PP of the keys that a
// query of the task sees on average, rounded to the grid. It ends before the first task in which its helper
// takes part, so that all keys that a helper needs have been computed by then.
func blocks(p *plan.Plan, stage int) [][]int64 {
	n, grid := p.Subsequences.N, p.Subsequences.Align
	var tasks [][]int64
	for x := n - stage; x < n; x++ {
		borders := []int64{0}
		share := meanKeys(p, x) / float64(p.Parallel.PP)
		for j := range p.Helpers(plan.Task{Kind: plan.Forward, Subsequence: x, Stage: stage}) {
			end := int64(share*float64(j+1)/float64(grid)+0.5) * grid
			room := p.Size(p.FirstHelped(stage, j)).Prefix
			borders = append(borders, max(borders[j]+grid, min(end, room)))
		}
		tasks = append(tasks, borders)
	}
	return tasks
}

// meanKeys returns the mean number of keys that the queries of a subsequence see.
func meanKeys(p *plan.Plan, x int) float64 {
	z := p.Size(x)
	return float64(z.Prefix) + float64(z.Tokens+1)/2
}

// checkBlocks checks that every stage except the first has blocks for each of its tasks with helpers, that
// blocks end before the tasks that use them, and that stages run one sequence after another.
func checkBlocks(p *plan.Plan) error {
	for i := range p.Mux.Stages {
		blocks := p.Mux.Stages[i].Blocks
		if !p.Mux.Right || i == 0 {
			if len(blocks) > 0 {
				return fmt.Errorf("mux of stage %d: the plan has blocks of keys, but no stage to hold them", i)
			}
			continue
		}
		if len(blocks) != i {
			return fmt.Errorf("mux of stage %d: there are blocks of keys for %d tasks, but %d have helpers", i, len(blocks), i)
		}
		for k := range blocks {
			if err := checkBorders(p, i, k); err != nil {
				return fmt.Errorf("mux of stage %d, subsequence %d: %w", i, p.Subsequences.N-i+k, err)
			}
		}
	}
	if !p.Mux.Right || p.Mux.Left {
		return nil
	}
	for rank, tasks := range p.Tasks {
		if !slices.Equal(tasks, strategy.OneSequence(p, rank)) {
			return fmt.Errorf("mux: stage %d does not run its tasks one sequence after another", rank)
		}
	}
	return nil
}

// checkBorders checks the blocks of a stage's k-th task with helpers against the keys that a helper can hold by
// then, and against the blocks of the previous task.
func checkBorders(p *plan.Plan, stage, k int) error {
	blocks := p.Mux.Stages[stage].Blocks
	borders := blocks[k]
	t := plan.Task{Kind: plan.Forward, Subsequence: p.Subsequences.N - stage + k, Stage: stage}
	if helpers := p.Helpers(t); len(borders) != helpers+1 || borders[0] != 0 {
		return fmt.Errorf("blocks of keys have %d boundaries, starting with 0, for %d helpers", len(borders), helpers)
	}
	for j := range len(borders) - 1 {
		end := borders[j+1]
		if room := p.Size(p.FirstHelped(stage, j)).Prefix; end <= borders[j] || end > room {
			return fmt.Errorf("a block of keys ends at %d, but must end after its start at %d and not after token %d, where the first task that its helper shares begins", end, borders[j], room)
		}
		if k > 0 && j+1 < len(blocks[k-1]) && end < blocks[k-1][j+1] {
			return fmt.Errorf("a block of keys ends at %d, before that of the previous task, which ends at %d", end, blocks[k-1][j+1])
		}
	}
	return nil
}
