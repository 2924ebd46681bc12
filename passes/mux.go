package passes

import "fmt"

// mux says which tasks of a stage lie next to a bubble. Nothing is borrowed yet: Applied is false everywhere.
//
// Input: Parallel, Subsequences.N. Output: Mux. Paper: section 4.2; left, steady and right by its table, which needs
// at least as many subsequences as stages.
func mux(c *Context, p *Plan) error {
	muxOff(c, p)
	why := "given"
	if p.Schedule.Mux != "off" {
		why = "auto is off"
	}
	p.decide("mux", "mux", "off", why)
	return nil
}

func muxOff(_ *Context, p *Plan) {
	pp, n := p.Parallel.PP, p.Subsequences.N
	p.Mux.Stages = make([]MuxStage, pp)
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

// checkMux: counts cover the tasks of a stage, and nothing is applied.
func checkMux(_ *Context, p *Plan) error {
	if len(p.Mux.Stages) != p.Parallel.PP {
		return fmt.Errorf("mux is given for %d stages of %d", len(p.Mux.Stages), p.Parallel.PP)
	}
	for i, s := range p.Mux.Stages {
		if s.Left+s.Steady+s.Right != p.Subsequences.N {
			return fmt.Errorf("mux of stage %d covers %d of %d subsequences", i, s.Left+s.Steady+s.Right, p.Subsequences.N)
		}
		if s.Applied {
			return fmt.Errorf("mux of stage %d: borrowing is not implemented yet", i)
		}
	}
	return nil
}
