package ir

// This file interprets, over formulas, what passes from tokens to those that follow: the state of a scan, and the last rows of a
// convolution. What an instruction leaves has one formula, whatever it begins with, because that formula is the same for all tokens. What
// it begins with must be what the instruction for the tokens just before has left, or 0 at the start of a sequence. Gradients pass back in
// the same way.

// carriers lists, by opcode, the operand with what an instruction begins with. What it leaves is result nextResult of the opcode whose
// gradient it is, or its own.
var carriers = map[Op]string{Scan: "state", ScanGrad: "state", Conv: "tail", ConvGrad: "tail"}

const nextResult = 1

// carried returns what an instruction begins with and removes it from the operands, because formulas do not depend on it.
func carried(in *Instr, args *[maxArgs]meaning) (before meaning) {
	if name, ok := carriers[in.Op]; ok {
		j := in.Info().operand(name)
		before, args[j] = args[j], meaning{}
	}
	return before
}

// follows checks that what an instruction for some tokens begins with is what the tokens before have left.
func (c *interpreted) follows(in *Instr, before meaning, outs []formula, r rows) {
	name, ok := carriers[in.Op]
	switch {
	case !ok || r.n == 0:
	case !in.Arg(name).Present() || before.formula == nothing:
		if r.position > 0 {
			c.wrong(nil, "%s is 0, but the tokens from %d on are not the first of their sequence", name, r.position)
		}
	case before.formula != outs[nextResult] || before.of != 0:
		c.wrong(c.origin(outs[0]), "%s is not what the same instruction leaves for later tokens", name)
	case before.rows.sequence != r.sequence || before.rows.position+before.rows.n != r.position:
		c.wrong(nil, "%s comes after %d tokens of sequence %d, but the other operands have rows for those from %d of sequence %d on",
			name, before.rows.position+before.rows.n, before.rows.sequence, r.position, r.sequence)
	}
}

// precedes checks that the gradient of what the tokens of an instruction leave is the one that the tokens after them have computed.
func (c *interpreted) precedes(in *Instr, args *[maxArgs]meaning, outs []formula, r rows) {
	if _, ok := carriers[in.Op]; !ok || r.n == 0 {
		return
	}
	switch after := args[in.Info().operand("dnext")]; {
	case !in.Arg("dnext").Present() || after.formula == nothing:
		if end := r.position + r.n; end != c.p.Run.Sequence {
			c.wrong(nil, "dnext is 0, but the tokens up to %d are not the last of their sequence", end)
		}
	case after.of != outs[nextResult]:
		c.wrong(c.origin(outs[0]), "dnext is not the gradient of what the instruction leaves for later tokens")
	case after.rows.sequence != r.sequence || after.rows.position != r.position+r.n:
		c.wrong(nil, "dnext comes from the tokens from %d of sequence %d on, but the other operands have rows for those up to %d of sequence %d",
			after.rows.position, after.rows.sequence, r.position+r.n, r.sequence)
	}
}
