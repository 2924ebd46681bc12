package plantest

import (
	"math/big"
	"slices"

	"sppo.dev/internal/passes/plan"
)

// This file models a pipeline of equal tasks whose ranks share tasks, with exact fractions.

// Shares selects where tasks are shared: left at the start of the pipeline, right at its turnaround.
type Shares struct{ Left, Right bool }

// SharesOf returns where a plan shares tasks.
func SharesOf(m plan.Mux) Shares { return Shares{Left: m.Left, Right: m.Right} }

// Of returns each rank's share of a task: the one for subsequence x (of n) on stage i (of pp). The shares add
// up to 1; ranks that are not listed have no share.
func (m Shares) Of(pp, n, i, x int) map[int]*big.Rat {
	part := func(a int) *big.Rat { return big.NewRat(int64(a), int64(pp)) }
	first, end, active := i, i, pp // range of helping ranks; number of stages that are not idle in the slot
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

// Makespan returns the time of a sequence of n equal subsequences on pp stages. Forward tasks take
// f, backward tasks b, and copies no time. Every rank runs its shares slot by slot and stage by
// stage. A share starts when both the previous task of its subsequence and the previous task of its
// stage are complete.
func Makespan(pp, n int, m Shares, f, b int64) *big.Rat {
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
