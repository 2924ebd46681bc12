package field

import (
	"fmt"

	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// opcodes has a row for every opcode except the collectives, which share one function, and events, which are not executed.
var opcodes = [ir.NumOps]func(*call){
	ir.LoadTokens:              loadTokens,
	ir.InitNormal:              initNormal,
	ir.Fill:                    fill,
	ir.Embed:                   embed,
	ir.EmbedGrad:               embedGrad,
	ir.PositionEmbed:           positionEmbed,
	ir.PositionEmbedGrad:       positionEmbedGrad,
	ir.LayerNorm:               layerNorm,
	ir.LayerNormGrad:           layerNormGrad,
	ir.RMSNorm:                 rmsNorm,
	ir.RMSNormGrad:             rmsNormGrad,
	ir.Matmul:                  matmul,
	ir.BiasGrad:                biasGrad,
	ir.Rope:                    rope,
	ir.Attention:               attention,
	ir.AttentionGrad:           attentionGrad,
	ir.AttentionMerge:          attentionMerge,
	ir.AttentionDelta:          attentionDelta,
	ir.AttentionSink:           attentionSink,
	ir.AttentionSinkGrad:       attentionSinkGrad,
	ir.ConcatHeads:             concatHeads,
	ir.ConcatHeadsGrad:         concatHeadsGrad,
	ir.Route:                   routeTokens,
	ir.RouteGrad:               routeGrad,
	ir.ExpertCounts:            expertCounts,
	ir.RouterLossGrad:          routerLossGrad,
	ir.ExpertLoad:              expertLoad,
	ir.ExpertBias:              expertBias,
	ir.Permute:                 permute,
	ir.PermuteGrad:             permuteGrad,
	ir.Unpermute:               unpermute,
	ir.UnpermuteGrad:           unpermuteGrad,
	ir.MatmulGrouped:           matmulGrouped,
	ir.MatmulGroupedWeightGrad: matmulGroupedWeightGrad,
	ir.Scan:                    scan,
	ir.ScanGrad:                scanGrad,
	ir.Conv:                    conv,
	ir.ConvGrad:                convGrad,
	ir.Decay:                   decay,
	ir.DecayGrad:               decayGrad,
	ir.ScaleColumns:            scaleColumns,
	ir.ScaleColumnsGrad:        scaleColumnsGrad,
	ir.Activation:              activation,
	ir.ActivationGrad:          activationGrad,
	ir.GLU:                     glu,
	ir.GLUGrad:                 gluGrad,
	ir.Add:                     add,
	ir.Cast:                    cast,
	ir.CrossEntropyStats:       crossEntropyStats,
	ir.CrossEntropy:            crossEntropy,
	ir.CrossEntropyGrad:        crossEntropyGrad,
	ir.SumSq:                   sumSq,
	ir.GradNorm:                gradNorm,
	ir.AdamW:                   adamW,
	ir.SGD:                     sgd,
	ir.Nesterov:                nesterov,
	ir.Axpby:                   axpby,
	ir.Normalize:               normalize,
	ir.Dropout:                 dropout,
	ir.CopyD2H:                 move,
	ir.CopyH2D:                 move,
	ir.CopyD2D:                 move,
	ir.Send:                    send,
	ir.Recv:                    recv,
}

// call is one execution of an instruction.
type call struct {
	*Device
	in     *ir.Instr
	consts []int64
	err    error
}

// locate checks that the operands exist, and records the highest bytes that they touch.
func (c *call) locate() error {
	for i := range c.in.Args {
		v, operand := &c.in.Args[i], &c.in.Info().Operands[i]
		if !v.Present() {
			if !operand.Optional {
				return fmt.Errorf("%s is missing", operand.Name)
			}
			continue
		}
		lo, hi, err := c.code.Locate(v)
		if err == nil && lo%2+hi%2 != 0 {
			err = fmt.Errorf("bytes %d to %d are not a whole number of elements", lo, hi)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", operand.Name, err)
		}
		arena := c.code.Buffers[v.Buffer].Arena
		c.peaks[arena] = max(c.peaks[arena], hi)
	}
	return nil
}

// vector is an operand as a sequence of elements.
type vector struct {
	elements []element
	step     int // between elements: 2 for types of four bytes
}

func (v vector) len() int             { return len(v.elements) / v.step }
func (v vector) at(i int) element     { return v.elements[i*v.step] }
func (v vector) set(i int, e element) { v.elements[i*v.step] = e }
func (v vector) from(i int) vector    { return vector{v.elements[i*v.step:], v.step} }

// row returns elements i*n to (i+1)*n-1.
func (v vector) row(i, n int) vector { return vector{v.elements[i*n*v.step : (i+1)*n*v.step], v.step} }

// put sets an element, or adds to it.
func (v vector) put(i int, e element, accumulate bool) {
	if accumulate {
		e = e.plus(v.at(i))
	}
	v.set(i, e)
}

// setAll sets every element to a function of its index.
func (v vector) setAll(f func(i int) element) {
	for i := range v.len() {
		v.set(i, f(i))
	}
}

func (v vector) clear() { v.setAll(func(int) element { return zero }) }

// list returns a copy of the elements.
func (v vector) list() []element {
	out := make([]element, v.len())
	for i := range out {
		out[i] = v.at(i)
	}
	return out
}

func (d *Device) vector(v ir.View) (vector, error) {
	lo, hi, err := d.code.Locate(&v)
	if err != nil {
		return vector{}, err
	}
	return vector{d.arenas[d.code.Buffers[v.Buffer].Arena][lo/2 : hi/2], max(1, int(v.DType.Bytes())/2)}, nil
}

// arg returns the elements of an operand by its index.
func (c *call) arg(i int) []element {
	v, err := c.Device.vector(c.in.Args[i])
	if err != nil {
		panic(err) // locate has checked it
	}
	return v.elements
}

func (c *call) has(name string) bool { return c.in.Arg(name).Present() }

// bytes returns all elements of an operand, whatever its type.
func (c *call) bytes(name string) []element { return c.operand(name).elements }

// operand returns an operand, or an empty vector if it is absent.
func (c *call) operand(name string) vector {
	v := c.in.Arg(name)
	if !v.Present() {
		return vector{step: 1}
	}
	out, err := c.Device.vector(v)
	if err != nil {
		panic(err) // locate has checked it
	}
	return out
}

// ints returns the integers of an operand, or nil if it is absent.
func (c *call) ints(name string) []int32 {
	if !c.has(name) {
		return nil
	}
	v := c.operand(name)
	out := make([]int32, v.len())
	for i := range out {
		out[i] = int32(v.at(i).value)
	}
	return out
}

func (c *call) shape(name string) (rows, cols int) {
	v := c.in.Arg(name)
	return int(v.Rows()), int(v.Cols())
}

func (c *call) int(name string) int          { return int(c.in.Attr(name).Int(c.consts)) }
func (c *call) bool(name string) bool        { return c.int(name) != 0 }
func (c *call) float(name string) float64    { return c.in.Attr(name).Float(c.consts) }
func (c *call) constant(name string) element { return constant(c.float(name)) }

// factor is an attribute whose absence, 0, means 1.
func (c *call) factor(name string) element {
	if c.float(name) == 0 {
		return one
	}
	return c.constant(name)
}

// each sets every element of an operand to a function of its index.
func (c *call) each(y string, f func(i int) element) { c.operand(y).setAll(f) }

func move(c *call) { copy(c.bytes("y"), c.bytes("x")) }

func loadTokens(c *call) {
	y := c.operand("tokens")
	tokens := make([]int32, y.len())
	w := vm.Window{
		Batch: c.int("batch"), Chunks: c.int("chunks"), As: c.int("as"),
		Sequence: int64(c.int("replica") + c.int("first")), Position: int64(c.int("position")),
	}
	c.err = w.Load(c.env.Tokens, c.section, c.round, tokens)
	for i, token := range tokens {
		y.set(i, element{value: uint32(token)})
	}
}
