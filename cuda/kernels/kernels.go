// Package kernels holds the CUDA C++ sources of every kernel opcode and says how an instruction launches them. It is the
// one truth about the launch interface, for the device that runs on a GPU and for the emulator that proves the sources
// without one.
//
//	kernels.go     what a launch is; the sources; Bind
//	table.go       THE table: by opcode, from an instruction to its launches
//	table_*.go     families with more to say
//	join.go        instructions that are launched as one
//	common.cuh     what all sources share: element types, vectors, sums over blocks, tensor cores
//	attention.cuh  what those of attention on tensor cores share
//	*.cu           the kernels, one file for each family
//
// The sources include nothing but these headers, so the run-time compiler needs no headers. The package does not know how
// they are compiled, where operands lie, nor what a stream is.
package kernels

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strings"

	"sppo.dev/ir"
)

//go:embed *.cu *.cuh
var files embed.FS

// Headers are the texts that sources include, by name.
func Headers() map[string]string {
	out := map[string]string{}
	for _, name := range []string{"common.cuh", "attention.cuh", "hopper.cuh"} {
		out[name] = Text(name)
	}
	return out
}

// Target is the architecture that a source is for alone, such as 90a; nothing where it is for all.
func Target(source string) string {
	if source = plain(source); source == hopperSource || source == hopperGradSource {
		return "90a"
	}
	return ""
}

// Card is what kernels may count on beside the oldest GPU that they are for.
type Card struct {
	Hopper     bool // its matrix units, and a compiler that knows them
	CopyEngine bool // and tensor maps, by which its copy engine is told what to bring
}

// Kernels of attention that bound scores, or whose sequences hold several documents, have sources of their own, which are the files
// of the others with definitions before: the compiler is told what the others need not ask.
const (
	boundsScores = "_capped"
	hasDocuments = "_packed"
)

var variedFiles = []string{"attention.cu", "attention_tensor.cu", hopperSource, hopperGradSource}

// variants are the endings of the names of such sources and of their kernels, and what is defined.
var variants = []struct{ ending, definitions string }{
	{boundsScores, "#define SOFTCAP 1\n"},
	{hasDocuments, "#define PACKED 1\n"},
	{boundsScores + hasDocuments, "#define SOFTCAP 1\n#define PACKED 1\n"},
}

// variant is the source of a variant of a file.
func variant(file, ending string) string { return strings.TrimSuffix(file, ".cu") + ending + ".cu" }

// plain is the file that a source is made from.
func plain(source string) string {
	return strings.Replace(strings.Replace(source, hasDocuments+".cu", ".cu", 1), boundsScores+".cu", ".cu", 1)
}

// Variant reports whether the kernels of a source bound scores, and whether they look at documents.
func Variant(source string) (capped, packed bool) {
	return strings.Contains(source, boundsScores), strings.Contains(source, hasDocuments+".cu")
}

// Sources lists what to compile, each a module of its own.
func Sources() []string {
	entries, err := files.ReadDir(".")
	if err != nil {
		panic("internal: kernels: " + err.Error())
	}
	var out []string
	for _, e := range entries {
		if path.Ext(e.Name()) == ".cu" {
			out = append(out, e.Name())
		}
	}
	for _, v := range variants {
		for _, file := range variedFiles {
			out = append(out, variant(file, v.ending))
		}
	}
	return out
}

// Text is the text of a source or of a header. Its lines have the numbers that they have in the file.
func Text(name string) string {
	text, err := files.ReadFile(plain(name))
	if err != nil {
		panic("internal: kernels: " + err.Error())
	}
	for _, v := range variants {
		if name == variant(plain(name), v.ending) {
			return v.definitions + "#line 1\n" + string(text)
		}
	}
	return string(text)
}

// Digest tells the texts of all sources from those of other releases.
func Digest() string {
	sum := sha256.New()
	headers := Headers()
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		fmt.Fprintln(sum, name, headers[name])
	}
	for _, name := range Sources() {
		fmt.Fprintln(sum, name, Text(name))
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// ArgKind says where the 8 bytes of an argument come from. Every argument of every kernel has 8.
type ArgKind uint8

// Kinds of arguments.
const (
	Operand   ArgKind = iota // the address of byte Offset of operand Value of the instruction, or 0 where it is absent
	Workspace                // the address of byte Value of the workspace
	Scalar                   // Value itself: the bits of an int64 or of a float64
	Table                    // the address of the launch's table
)

// Arg is one argument of a launch.
type Arg struct {
	Kind   ArgKind
	Apart  int32 // of an operand: how many instructions behind the plan's own its instruction stands
	Value  uint64
	Offset uint64
}

// Launch is one kernel of an instruction. Blocks are one-dimensional.
type Launch struct {
	Source      string // file that holds the kernel
	Kernel      string
	Grid        [3]int64
	Block       int64 // threads
	SharedBytes int64 // dynamic shared memory; above 48 KiB the function must be told so before its launch
	Args        []Arg
	Boxes       []Boxes // tensor maps, with which its table begins
	Table       []Arg   // what device memory must hold for it, 8 bytes each: it never changes
}

// Boxes is a tensor of bf16 as the copy engine sees it: in four dimensions, the innermost first, without gaps. It brings a box at a
// time, of rows of 128 or 64 bytes whose chunks of 16 change places as hopper.cuh says; what is outside of the tensor is zero.
type Boxes struct {
	Tensor      Arg
	Extent, Box [4]int64
}

// MapBytes is the size of a tensor map.
const MapBytes = 128

// Plan is what an instruction launches, one after another on its stream. No two instructions that may run at once can
// have the same workspace, which needs no particular contents. Instructions on empty operands launch nothing.
type Plan struct {
	Launches       []Launch
	WorkspaceBytes int64
}

// Bind looks an instruction of a rank up in the table. The operands' shapes are those that ir.Verify has approved; what
// the kernels cannot serve is an error.
func Bind(card Card, p *ir.Program, rank int, in *ir.Instr) (plan Plan, err error) {
	row := table[in.Op]
	if row.bind == nil {
		return Plan{}, fmt.Errorf("%s is no kernel", in.Info().Name)
	}
	b := &binder{card: card, program: p, rank: rank, consts: p.Ranks[rank].Consts, in: in, source: row.source, members: []*ir.Instr{in}, apart: []int32{0}}
	for i := range in.Args {
		if in.Args[i].Present() && in.Args[i].Elements() == 0 {
			return Plan{}, nil
		}
	}
	row.bind(b)
	return b.plan, b.err
}

// binder makes the launches of one instruction, or of a group that is joined.
type binder struct {
	card    Card
	program *ir.Program
	rank    int
	consts  []int64
	members []*ir.Instr // of the group
	apart   []int32     // where they stand, counted from the plan's own
	member  int         // the one that is asked about
	in      *ir.Instr   // is it
	source  string
	plan    Plan
	err     error
}

// take turns to a member.
func (b *binder) take(member int) { b.in, b.member = b.members[member], member }

// each does something for each member, and turns back to the first.
func (b *binder) each(do func()) {
	for i := range b.members {
		b.take(i)
		do()
	}
	b.take(0)
}

// threads is the size of a block wherever nothing says otherwise, wideThreads that of a KERNEL_WIDE.
const (
	threads     = 256
	wideThreads = 512
)

// launch appends a kernel. Arguments are operands by name, and numbers.
func (b *binder) launch(kernel string, grid [3]int64, args ...any) *Launch {
	l := Launch{Source: b.source, Kernel: kernel, Grid: grid, Block: threads, Args: b.args(args...)}
	for i, n := range grid {
		if limit := [3]int64{math.MaxInt32, math.MaxUint16, math.MaxUint16}[i]; n > limit {
			b.err = fmt.Errorf("%s needs %d blocks in dimension %c of its grid, where a GPU takes %d: "+
				"more schedule.subsequences or a smaller schedule.microbatch make its operands smaller", kernel, n, 'x'+i, limit)
		}
	}
	b.plan.Launches = append(b.plan.Launches, l)
	return &b.plan.Launches[len(b.plan.Launches)-1]
}

// workspace is an address in the workspace as an argument.
type workspace int64

// rowsOf is an operand from a row on.
type rowsOf struct {
	name string
	row  int64
}

func (b *binder) arg(a any) Arg {
	switch v := a.(type) {
	case string:
		for i, o := range b.in.Info().Operands {
			if o.Name == v {
				return Arg{Kind: Operand, Apart: b.apart[b.member], Value: uint64(i)}
			}
		}
		panic("internal: kernels: " + b.in.Info().Name + " has no operand " + v)
	case Arg:
		return v
	case rowsOf:
		a, view := b.arg(v.name), b.in.Arg(v.name)
		a.Offset = uint64(v.row * view.Cols() * int64(view.DType.Bytes()))
		return a
	case workspace:
		return Arg{Kind: Workspace, Value: uint64(v)}
	case int64:
		return Arg{Kind: Scalar, Value: uint64(v)}
	case float64:
		return Arg{Kind: Scalar, Value: math.Float64bits(v)}
	}
	panic(fmt.Sprintf("internal: kernels: an argument of type %T", a))
}

// args makes arguments of several.
func (b *binder) args(values ...any) (out []Arg) {
	for _, v := range values {
		out = append(out, b.arg(v))
	}
	return out
}

// reserve is a place of its own in the workspace.
func (b *binder) reserve(bytes int64) workspace {
	at := b.plan.WorkspaceBytes
	b.plan.WorkspaceBytes += (bytes + 255) &^ 255
	return workspace(at)
}

func (b *binder) has(name string) bool      { return b.in.Arg(name).Present() }
func (b *binder) int(name string) int64     { return b.in.Attr(name).Int(b.consts) }
func (b *binder) float(name string) float64 { return b.in.Attr(name).Float(b.consts) }

// aligned reports whether operands lie where the copy engine can take them from.
func (b *binder) aligned(names ...string) bool {
	buffers := b.program.Codes[b.program.Ranks[b.rank].Code].Buffers
	for _, name := range names {
		v := b.in.Arg(name)
		if (buffers[v.Buffer].Offset+v.Offset)%16 != 0 {
			return false
		}
	}
	return true
}
func (b *binder) elements(name string) int64 {
	return b.in.Arg(name).Elements()
}

// shape sees an operand as a matrix.
func (b *binder) shape(name string) (rows, cols int64) {
	v := b.in.Arg(name)
	return v.Rows(), v.Cols()
}

// types are the letters of operands' element types, by which kernels' names tell instances apart.
func (b *binder) types(names ...string) string {
	letters := ""
	for _, name := range names {
		switch t := b.in.Arg(name).DType; t {
		case ir.F32:
			letters += "f"
		case ir.BF16:
			letters += "b"
		default:
			b.err = fmt.Errorf("%s is %s, not f32 or bf16", name, t)
		}
	}
	return letters
}

// rows is a grid of a block for each row.
func rows(n int64) [3]int64 { return [3]int64{n, 1, 1} }

// spread is a grid whose threads have some elements each, and walk on where there are more.
func spread(elements, each int64) [3]int64 {
	const enough = 132 * 16 // blocks that fill the largest GPU
	return rows(min(ceil(elements, threads*each), enough))
}

func ceil(n, by int64) int64 { return (n + by - 1) / by }
