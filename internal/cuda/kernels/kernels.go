// Package kernels holds the CUDA C++ sources for every kernel opcode and defines how an instruction launches them.
// Both the GPU device and the emulator, which tests the sources without a GPU, use this launch interface.
//
//	kernels.go     launches; the sources; Bind
//	table.go       the table: by opcode, from an instruction to its launches
//	table_*.go     larger families of kernels
//	join.go        instructions that are launched as one
//	common.cuh     shared by all sources: element types, vectors, sums over blocks, tensor cores
//	attention.cuh  shared by the attention kernels that use tensor cores
//	hopper.cuh     shared by the attention kernels for Hopper
//	*.cu           the kernels, one file per family
//
// The sources include only these headers, so the run-time compiler needs no others. The package does not deal
// with compilation, operand addresses or streams.
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

// Headers returns the headers that sources include, by name.
func Headers() map[string]string {
	out := map[string]string{}
	for _, name := range []string{"common.cuh", "attention.cuh", "hopper.cuh"} {
		out[name] = Text(name)
	}
	return out
}

// Target returns the only architecture that a source supports, such as 90a, or "" if it supports all.
func Target(source string) string {
	if source = plain(source); source == hopperSource || source == hopperGradSource || source == HopperPrimitives {
		return "90a"
	}
	return ""
}

// Sources of the building blocks of attention, which only tests launch: for all architectures, and for Hopper.
const (
	Primitives       = "primitives.cu"
	HopperPrimitives = "primitives_hopper.cu"
)

// Card describes capabilities beyond those of the oldest supported GPU.
type Card struct {
	Hopper     bool // Hopper's matrix units, and a compiler that supports them
	CopyEngine bool // tensor maps, which let the copy engine load tiles
}

// Attention kernels that cap scores, or whose sequences hold several documents, have their own sources. Each of
// these is a plain file preceded by definitions, so plain kernels need no checks at run time.
const (
	boundsScores = "_capped"
	hasDocuments = "_packed"
)

var variedFiles = []string{"attention.cu", "attention_tensor.cu", hopperSource, hopperGradSource}

// variants lists the name suffixes of variant sources and their kernels, with the definitions before each source.
var variants = []struct{ ending, definitions string }{
	{boundsScores, "#define SOFTCAP 1\n"},
	{hasDocuments, "#define PACKED 1\n"},
	{boundsScores + hasDocuments, "#define SOFTCAP 1\n#define PACKED 1\n"},
}

// variant returns the source name of a file's variant with the given ending.
func variant(file, ending string) string { return strings.TrimSuffix(file, ".cu") + ending + ".cu" }

// plain returns the file from which a source is made.
func plain(source string) string {
	return strings.Replace(strings.Replace(source, hasDocuments+".cu", ".cu", 1), boundsScores+".cu", ".cu", 1)
}

// Variant reports whether the kernels of a source cap scores, and whether they support several documents.
func Variant(source string) (capped, packed bool) {
	return strings.Contains(source, boundsScores), strings.Contains(source, hasDocuments+".cu")
}

// Sources lists the sources to compile, each as a separate module.
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

// Text returns the text of a source or header. The compiler sees the line numbers of the file.
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

// Digest returns a hash of all sources. Releases with different sources have different hashes.
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

// ArgKind defines what a kernel argument holds. Every argument is 8 bytes.
type ArgKind uint8

// Kinds of arguments.
const (
	Operand   ArgKind = iota // the address of byte Offset of the instruction's operand Value, or 0 if it is absent
	Workspace                // the address of byte Value of the workspace
	Scalar                   // Value itself: the bits of an int64 or of a float64
	Table                    // the address of the launch's table
)

// Arg is one argument of a launch.
type Arg struct {
	Kind   ArgKind
	Apart  int32 // of an operand: the position of its instruction relative to the plan's
	Value  uint64
	Offset uint64
}

// Launch is one of an instruction's kernel launches. Blocks are one-dimensional.
type Launch struct {
	Source      string // file that contains the kernel
	Kernel      string
	Grid        [3]int64
	Block       int64 // threads
	SharedBytes int64 // dynamic shared memory; more than 48 KiB must be allowed before the launch
	Args        []Arg
	Boxes       []Boxes // tensor maps at the start of the launch's table
	Table       []Arg   // constant entries of the table in device memory, 8 bytes each
}

// Boxes describes a bf16 tensor to the copy engine: four dimensions, innermost first, without gaps. The engine
// copies one box at a time, in rows of 128, 64 or 32 bytes whose 16-byte chunks are swizzled as hopper.cuh describes.
// Elements outside the tensor are loaded as zeros.
type Boxes struct {
	Tensor      Arg
	Extent, Box [4]int64
}

// MapBytes is the size of a tensor map.
const MapBytes = 128

// Plan lists the kernels that an instruction launches, in order, on its stream. Instructions that may run
// concurrently must have different workspaces; a workspace needs no particular contents. Instructions on empty
// operands launch nothing.
type Plan struct {
	Launches       []Launch
	WorkspaceBytes int64
}

// Bind plans the launches of an instruction of a rank. The shapes of its operands must have passed ir.Verify.
// It returns an error for an instruction that the kernels do not support.
func Bind(card Card, p *ir.Program, rank int, in *ir.Instr) (plan Plan, err error) {
	row := table[in.Op]
	if row.bind == nil {
		return Plan{}, fmt.Errorf("%s is not a kernel", in.Info().Name)
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

// binder prepares the launches of one instruction or of a joined group.
type binder struct {
	card    Card
	program *ir.Program
	rank    int
	consts  []int64
	members []*ir.Instr // instructions of the group
	apart   []int32     // their positions relative to the plan's instruction
	member  int         // index of the current member
	in      *ir.Instr   // the current member
	source  string
	plan    Plan
	err     error
}

// take selects the current member.
func (b *binder) take(member int) { b.in, b.member = b.members[member], member }

// each selects every member in turn and calls the function do, then selects the first member again.
func (b *binder) each(do func()) {
	for i := range b.members {
		b.take(i)
		do()
	}
	b.take(0)
}

// threads is the default size of a block; wideThreads is the size of a KERNEL_WIDE block.
const (
	threads     = 256
	wideThreads = 512
)

// launch appends a kernel launch. Arguments may be anything that arg converts, such as operand names and numbers.
func (b *binder) launch(kernel string, grid [3]int64, args ...any) *Launch {
	l := Launch{Source: b.source, Kernel: kernel, Grid: grid, Block: threads, Args: b.args(args...)}
	for i, n := range grid {
		if limit := [3]int64{math.MaxInt32, math.MaxUint16, math.MaxUint16}[i]; n > limit {
			b.err = fmt.Errorf("%s needs %d blocks in dimension %c of its grid, but a GPU allows %d; more "+
				"schedule.subsequences or a smaller schedule.microbatch would make its operands smaller", kernel, n, 'x'+i, limit)
		}
	}
	b.plan.Launches = append(b.plan.Launches, l)
	return &b.plan.Launches[len(b.plan.Launches)-1]
}

// workspace is a kernel argument: an address in the workspace.
type workspace int64

// rowsOf is a kernel argument: the rows of an operand, starting at `row`.
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

// args converts several arguments.
func (b *binder) args(values ...any) (out []Arg) {
	for _, v := range values {
		out = append(out, b.arg(v))
	}
	return out
}

// reserve allocates bytes in the workspace.
func (b *binder) reserve(bytes int64) workspace {
	at := b.plan.WorkspaceBytes
	b.plan.WorkspaceBytes += (bytes + 255) &^ 255
	return workspace(at)
}

func (b *binder) has(name string) bool      { return b.in.Arg(name).Present() }
func (b *binder) int(name string) int64     { return b.in.Attr(name).Int(b.consts) }
func (b *binder) float(name string) float64 { return b.in.Attr(name).Float(b.consts) }

// aligned reports whether operands are aligned as the copy engine requires.
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

// shape returns the shape of an operand as a matrix.
func (b *binder) shape(name string) (rows, cols int64) {
	v := b.in.Arg(name)
	return v.Rows(), v.Cols()
}

// types returns the letters of operands' element types, as used in kernel names.
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

// rows returns a grid with one block per row.
func rows(n int64) [3]int64 { return [3]int64{n, 1, 1} }

// spread returns a grid in which each thread handles the given number of elements, or more in a loop if the
// grid would otherwise be too large.
func spread(elements, each int64) [3]int64 {
	const enough = 132 * 16 // enough blocks for the largest GPU
	return rows(min(ceil(elements, threads*each), enough))
}

func ceil(n, by int64) int64 { return (n + by - 1) / by }
