package cli

import (
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
)

// CheckpointCopy computes the host memory for the copy from which a checkpoint of the program is written during
// training. Stages in the result are indexes into the program's codes.
func CheckpointCopy(p *ir.Program) (*plan.CheckpointCopy, error) {
	copies, err := train.CopyBytes(p)
	if err != nil {
		return nil, err
	}
	c := &plan.CheckpointCopy{Bytes: make([]ir.Bytes, len(p.Codes)), Fits: true}
	for rank, bytes := range copies {
		stage := p.Ranks[rank].Code
		c.Bytes[stage] = max(c.Bytes[stage], bytes)
	}
	limit := p.Machine.HostMemoryPerRank()
	if limit == 0 { // unknown
		return c, nil
	}
	for stage, bytes := range c.Bytes {
		if over := p.Codes[stage].Arenas[ir.Host] + bytes - limit; over > c.ShortBytes {
			c.Fits, c.ShortStage, c.ShortBytes = false, stage, over
		}
	}
	return c, nil
}
