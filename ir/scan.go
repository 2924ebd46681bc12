package ir

import (
	"fmt"
	"math"
)

// This file has the rule and the work of scans.

// ScanChunk is the number of tokens whose products a scan computes at once, and for which it changes the state once.
const ScanChunk = 64

// checkScan checks that a head has one decay or one for each row of its state, and that factors are in range.
func checkScan(in *Instr) error {
	if channels, dim := in.Attr("channels").Bits, in.Attr("key_dim").Bits; channels != 1 && channels != dim {
		return fmt.Errorf("channels is %d, not 1 or key_dim, %d", int64(channels), int64(dim))
	}
	for _, name := range []string{"norm", "scale"} {
		a := in.Attr(name)
		if a.Const != 0 {
			return fmt.Errorf("attribute %s must be literal", name)
		}
		if x := a.Float(nil); !(x >= 0 && x <= math.MaxFloat32) {
			return fmt.Errorf("%s is %g", name, x)
		}
	}
	return nil
}

// scanWork returns the work of a scan, times a factor for its gradient. For each token and head of v, the state is multiplied
// by q and changed by k, and with delta multiplied by k, too; half of the products of a chunk's queries, and of its keys, with
// its keys and values are computed.
func scanWork(in *Instr, factor float64, kind WorkKind) Work {
	w := memoryWork(in)
	number := func(name string) float64 { return float64(in.Attr(name).Bits) }
	rows, dk, dv := in.Arg("v").Rows(), number("key_dim"), number("value_dim")
	chunk := float64(min(ScanChunk, max(1, rows/int64(max(1, number("batch"))))))
	perToken := 4*dk*dv + chunk*(dk+dv)
	if in.Attr("delta").Bits != 0 {
		perToken += 2*dk*dv + chunk*(dk+dv)
	}
	w.Kind, w.DType, w.Rows = kind, in.Arg("v").DType, int64(chunk)
	w.Flops = Flops(factor * perToken * number("heads") * number("shared") * float64(rows))
	return w
}
