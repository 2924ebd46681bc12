package torch_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/interop/torch/torchtest"
	"sppo.dev/ir"
)

// oracleCase is an instruction that tests/oracle.py wants to know the result of: its operands on each of the first ranks, with
// their contents, nil for an absent one.
type oracleCase struct {
	Op     string
	Stream ir.Stream
	Attrs  []float64
	Ranks  [][]*oracleOperand
}

type oracleOperand struct {
	Arena  uint32
	Offset ir.Bytes
	Type   ir.DType
	Shape  []int64
	Data   []byte
}

// oracleBytes is the size of each arena. oracleRanks is the number of ranks: group i contains the ranks up to i.
const (
	oracleBytes = 1 << 22
	oracleRanks = 4
)

// oracleProgram returns a program without instructions, whose arenas are a buffer each.
func oracleProgram() *ir.Program {
	code := ir.Code{Name: "oracle", Arenas: [ir.NumArenas]ir.Bytes{oracleBytes, oracleBytes}}
	for a := range ir.NumArenas {
		code.Buffers = append(code.Buffers, ir.Buffer{Name: a.String(), Arena: a, Size: oracleBytes})
	}
	p := &ir.Program{Name: "oracle", Codes: []ir.Code{code}, Tensors: []ir.Tensor{{Name: "matrix", Shape: [2]int64{37, 19}}, {Name: "vector", Shape: [2]int64{53, 1}}}}
	p.Run = ir.Run{Seed: 5, Rotations: []ir.Rotation{{Rates: []float64{1, 0.3, 0.01}, Scale: 1.25, Rest: 0.5}, {Rates: []float64{0.7}, Scale: 1, Rest: 1}}}
	for i := range oracleRanks {
		p.Groups = append(p.Groups, fmt.Sprint("first", i+1))
		rank := ir.Rank{}
		for g := range oracleRanks {
			var members []int32
			for m := range g + 1 {
				members = append(members, int32(m))
			}
			if i > g {
				members = nil
			}
			rank.Groups = append(rank.Groups, members)
		}
		p.Ranks = append(p.Ranks, rank)
	}
	return p
}

// instr returns the case's instruction on a rank.
func (c *oracleCase) instr(rank int) (in ir.Instr, err error) {
	for op := range ir.Ops {
		if ir.Ops[op].Name == c.Op {
			in.Op = ir.Op(op)
		}
	}
	in.Stream = c.Stream
	for _, o := range c.Ranks[rank] {
		view := ir.Absent()
		if o != nil {
			view = ir.View{Buffer: o.Arena, Offset: o.Offset, DType: o.Type}
			copy(view.Shape[:], o.Shape)
		}
		in.Args = append(in.Args, view)
	}
	for i, a := range in.Info().Attrs {
		if a.Kind.IsFloat() {
			in.Attrs = append(in.Attrs, ir.Float(c.Attrs[i]))
		} else {
			in.Attrs = append(in.Attrs, ir.Int(int64(c.Attrs[i])))
		}
	}
	return in, in.CheckShapes()
}

// execute runs a case on the devices and returns the operands that it writes, nil for the others.
func execute(devices []*cpu.Device, c *oracleCase) (out [][][]byte, err error) {
	errs := make(chan error)
	instrs := make([]ir.Instr, len(c.Ranks))
	for r := range c.Ranks {
		if instrs[r], err = c.instr(r); err != nil {
			return nil, err
		}
		for i, o := range c.Ranks[r] {
			if o != nil {
				if err := devices[r].Write(instrs[r].Args[i], o.Data); err != nil {
					return nil, err
				}
			}
		}
	}
	for r := range c.Ranks {
		go func() {
			defer func() {
				if p := recover(); p != nil {
					errs <- fmt.Errorf("panic: %v", p)
				}
			}()
			errs <- devices[r].Execute(instrs[r : r+1])
		}()
	}
	for range c.Ranks {
		if e := <-errs; e != nil {
			err = e
		}
	}
	for r, in := range instrs {
		results := make([][]byte, len(in.Args))
		for i, view := range in.Args {
			if _, writes := in.Access(i); writes && err == nil {
				results[i] = make([]byte, view.Bytes())
				err = devices[r].Read(view, results[i])
			}
		}
		out = append(out, results)
	}
	return out, err
}

// Every opcode gives the same results on both machines, for random shapes, element types, views and attributes. The cases come from
// tests/oracle.py; SPPO_LONG=1 draws a thousand for each opcode.
func TestOracle(t *testing.T) { oracle(t) }

// So does attention by flash kernels.
func TestFlash(t *testing.T) { oracle(t, "--flash", "--op", "attention", "--op", "attention_grad") }

func oracle(t *testing.T, arguments ...string) {
	t.Helper()
	cases := "15"
	if os.Getenv("SPPO_LONG") != "" {
		cases = "1000"
	}
	seed := os.Getenv("SPPO_SEED")
	if seed == "" {
		seed = "1"
	}
	c := torchtest.Command(t, append([]string{"-u", "tests/oracle.py", "--cases", cases, "--seed", seed}, arguments...)...)
	p, pool, local := oracleProgram(), simd.NewPool(1), vm.NewLocal()
	var devices []*cpu.Device
	for r := range p.Ranks {
		d := cpu.New(pool)
		if err := d.Load(p, r, &vm.Env{Transport: local}); err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		devices = append(devices, d)
	}
	var log strings.Builder
	c.Stderr = &log
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	n, err := answer(in, out, devices)
	if err != nil {
		t.Error(err)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("%v\n%s", err, log.String())
	}
	t.Logf("%s cases\n%s", strconv.Itoa(n), log.String())
}

// answer executes the cases that it reads, one in a line, until there are no more.
func answer(in io.WriteCloser, out io.Reader, devices []*cpu.Device) (n int, err error) {
	defer in.Close()
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, math.MaxInt32)
	for ; lines.Scan(); n++ {
		var c oracleCase
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return n, err
		}
		var reply struct {
			Results [][][]byte
			Error   string
		}
		if reply.Results, err = execute(devices, &c); err != nil {
			reply.Error = err.Error()
		}
		text, err := json.Marshal(reply)
		if err != nil {
			return n, err
		}
		if _, err := in.Write(append(text, '\n')); err != nil {
			return n, err
		}
	}
	return n, lines.Err()
}
