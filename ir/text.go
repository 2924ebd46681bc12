package ir

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// The text format is .sppir. It has exactly the same contents as the binary format; parse.go reads it.
//
//	sppir 4
//	program "tiny"
//	flops_model 1.5e+09
//
//	run {                                  one "key = JSON" per line; keys as in the binary header
//	  sequence = 4096
//	}
//	model {
//	  family = "gpt"
//	}
//	machine {
//	  name = "local"
//	}
//
//	line 0 "tiny.sppo:12: schedule sppo {" what instructions refer to
//	pass place
//	const next
//	group sp
//	tensor wte [256,128]
//
//	code stage0 {
//	  arena device 1048576                 the exact peak
//	  arena host 4096
//	  buffer l0.x.s0 device 0x0000a000 4096
//	  state wte weight wte.w:f32[128,128] row=$first_row col=0
//	  result loss loss:f32[1]
//
//	  section step events=3 {
//	    compute   F m0 s1   l0  p0  matmul         l0.q.s1:f32[32,16] = l0.ln1.out.s1:f32[32,16], l0.wq:f32[16,16], l0.bq:f32[16]  trans_b !place:0
//	    compute   F m0 s1   l0  p0  record         e2 !sync:0
//	    d2h       F m0 s1   l0  p0  wait           e2 !sync:0
//	  }
//	}
//
//	rank 0 stage0 dp=0 pp=0 sp=0 $next=1 @sp=[0,1]
//
// An instruction is one line. It consists of a stream, a provenance (phase I F B W O E, microbatch,
// subsequence, layer, pipeline stage; parts that do not apply are omitted), an opcode, operands, attributes,
// and after "!" the pass and the spec line that it comes from. Written operands are to the left of "=". An
// operand has a buffer, the offset in bytes if it is not 0, an element type and a shape; "-" is an absent
// operand, omitted at the end of a side. A boolean that is set is written as its name; one that is not set is
// omitted. "$" refers to a constant of the rank, "@" to a group, "e" to an event. The name "-", and every name
// with characters other than letters, digits, ".", "_" and "-", is quoted. "#" starts a comment.
const textMagic = "sppir"

// phaseLetters holds the letter of each phase in the text format.
const phaseLetters = "IFBOEW"

// Print writes a program in the text format. Equal programs give equal text.
func Print(w io.Writer, p *Program) error { return Printer{}.Print(w, p) }

// Printer writes the text format, optionally with comments for readers.
type Printer struct {
	// Annotate adds comments: the number of each instruction, the addresses of its operands, the work that each
	// record follows, and the work that each wait waits for. The text can still be parsed.
	Annotate bool
}

// Print writes the whole program.
func (pr Printer) Print(w io.Writer, p *Program) error {
	if err := p.Check(); err != nil {
		return fmt.Errorf("cannot print: %w", err)
	}
	t := printer{Printer: pr, p: p, w: w}
	t.header()
	for i := range p.Codes {
		t.code(&p.Codes[i])
	}
	for i := range p.Ranks {
		t.rank(i)
	}
	t.flush()
	return t.err
}

// PrintRank writes the code that one rank runs, with the rank's constants filled in. The output is
// for human readers and cannot be parsed.
func (pr Printer) PrintRank(w io.Writer, p *Program, rank int) error {
	if err := p.Check(); err != nil {
		return fmt.Errorf("cannot print: %w", err)
	}
	if rank < 0 || rank >= len(p.Ranks) {
		return fmt.Errorf("there is no rank %d among the %d ranks", rank, len(p.Ranks))
	}
	t := printer{Printer: pr, p: p, w: w, as: &p.Ranks[rank]}
	t.rank(rank)
	t.code(&p.Codes[t.as.Code])
	t.flush()
	return t.err
}

// Text returns the stream, opcode, operands and attributes of an instruction in the text format, without
// aligning them in columns.
func (p *Program) Text(c *Code, in *Instr) string {
	t := printer{p: p}
	t.str(in.Stream.String())
	t.byte(' ')
	t.operation(c, in, len(t.buf)+len(in.Info().Name))
	return string(t.buf)
}

// printer collects text in buf before writing it to w.
type printer struct {
	Printer
	p   *Program
	w   io.Writer
	as  *Rank // the rank whose constants are filled in, or nil
	buf []byte
	err error
}

func (t *printer) flush() {
	if t.err == nil {
		_, t.err = t.w.Write(t.buf)
	}
	t.buf = t.buf[:0]
}

func (t *printer) byte(b byte)  { t.buf = append(t.buf, b) }
func (t *printer) str(s string) { t.buf = append(t.buf, s...) }
func (t *printer) int(v int64)  { t.buf = strconv.AppendInt(t.buf, v, 10) }
func (t *printer) printf(format string, args ...any) {
	t.buf = fmt.Appendf(t.buf, format, args...)
}

// name writes a name, quoted unless it is plain.
func (t *printer) name(s string) {
	if plainName(s) {
		t.str(s)
		return
	}
	t.str(jsonText(s))
}

func plainName(s string) bool {
	for i := range len(s) {
		if !nameByte(s[i]) {
			return false
		}
	}
	return s != "" && s != "-"
}

func nameByte(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9' || b == '.' || b == '_' || b == '-'
}

// pad writes one space, then more until the line that began at start is at least width characters long.
func (t *printer) pad(start, width int) {
	t.byte(' ')
	for len(t.buf)-start < width {
		t.byte(' ')
	}
}

func (t *printer) header() {
	p := t.p
	t.printf("%s %d\n", textMagic, version)
	t.printf("program %s\n", jsonText(p.Name))
	t.printf("flops_model %s\n\n", jsonText(p.FlopsModel))
	t.record("run", p.Run)
	t.record("model", p.Model)
	t.record("machine", p.Machine)
	for i, line := range p.Lines {
		t.printf("line %d %s\n", i, jsonText(line))
	}
	t.definitions("pass", p.Passes)
	t.definitions("const", p.Consts)
	t.definitions("group", p.Groups)
	for _, x := range p.Tensors {
		t.str("tensor ")
		t.name(x.Name)
		t.printf(" [%d,%d]\n", x.Shape[0], x.Shape[1])
	}
}

func (t *printer) definitions(word string, names []string) {
	for _, n := range names {
		t.str(word + " ")
		t.name(n)
		t.byte('\n')
	}
}

// record writes a struct of plain data, whose JSON tags name the fields.
func (t *printer) record(word string, v any) {
	t.printf("%s {\n", word)
	s := reflect.ValueOf(v)
	for i := range s.NumField() {
		if strings.HasSuffix(s.Type().Field(i).Tag.Get("json"), ",omitempty") && empty(s.Field(i)) {
			continue
		}
		t.printf("  %s = %s\n", jsonKey(s.Type().Field(i)), jsonText(s.Field(i).Interface()))
	}
	t.str("}\n\n")
}

// jsonText returns a value as JSON on one line. Check has ensured that encoding succeeds.
func jsonText(v any) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("internal: header that passed its check: " + err.Error())
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func (t *printer) code(c *Code) {
	t.str("\ncode ")
	t.name(c.Name)
	t.str(" {\n")
	for a, peak := range c.Arenas {
		t.printf("  arena %s %d\n", Arena(a), int64(peak))
	}
	for i := range c.Buffers {
		t.buffer(&c.Buffers[i])
	}
	for i := range c.States {
		t.state(c, &c.States[i])
	}
	for i := range c.Results {
		t.str("  result ")
		t.name(c.Results[i].Name)
		t.byte(' ')
		t.view(c, &c.Results[i].View)
		t.byte('\n')
	}
	for s := range c.Sections {
		if len(c.Sections[s]) > 0 || c.Events[s] > 0 {
			t.section(c, Section(s))
		}
	}
	t.str("}\n")
	t.flush()
}

func (t *printer) buffer(b *Buffer) {
	start := len(t.buf)
	t.str("  buffer ")
	t.name(b.Name)
	t.pad(start, 34)
	t.printf("%-6s 0x%010x %d\n", b.Arena, int64(b.Offset), int64(b.Size))
}

func (t *printer) state(c *Code, s *State) {
	t.str("  state ")
	t.name(t.p.Tensors[s.Tensor].Name)
	t.byte(' ')
	t.str(s.Role.String())
	t.byte(' ')
	t.view(c, &s.View)
	t.str(" row=")
	t.attrValue(s.Row0, KindInt)
	t.str(" col=")
	t.attrValue(s.Col0, KindInt)
	if s.End != (Attr{}) {
		t.str(" end=")
		t.attrValue(s.End, KindInt)
	}
	t.byte('\n')
}

func (t *printer) section(c *Code, s Section) {
	t.printf("\n  section %s events=%d {\n", s, c.Events[s])
	var notes map[int]string
	if t.Annotate {
		notes = syncNotes(c, s)
	}
	for i := range c.Sections[s] {
		in := &c.Sections[s][i]
		t.instr(c, in)
		if t.Annotate {
			t.annotation(c, in, i, notes)
		}
		t.byte('\n')
		if len(t.buf) >= 1<<16 {
			t.flush()
		}
	}
	t.str("  }\n")
}

// Columns of an instruction's line. They are fixed, so that one long line does not realign all others in a
// diff.
const (
	columnPhase = 14
	columnMicro = 16
	columnSub   = 19
	columnLayer = 24
	columnStage = 28
	columnOp    = 32
	columnArgs  = 47
)

func (t *printer) instr(c *Code, in *Instr) {
	start := len(t.buf)
	t.str("    ")
	t.str(in.Stream.String())
	t.pad(start, columnPhase)
	p := &in.Prov
	t.byte(phaseLetters[p.Phase])
	t.origin(start, columnMicro, 'm', int64(p.Microbatch))
	t.origin(start, columnSub, 's', int64(p.Subsequence))
	t.origin(start, columnLayer, 'l', int64(p.Layer))
	t.origin(start, columnStage, 'p', int64(p.Stage))
	t.pad(start, columnOp)
	t.operation(c, in, start+columnArgs)
	if len(t.p.Passes) > 0 || len(t.p.Lines) > 0 {
		t.str(" !")
	}
	if len(t.p.Passes) > 0 {
		t.name(t.p.Passes[p.Pass])
	}
	if len(t.p.Lines) > 0 {
		t.byte(':')
		t.int(int64(p.Line))
	}
}

// String returns the provenance as the text format shows it after the stream: F m0 s2 l0 p0.
func (p Provenance) String() string {
	text := string(phaseLetters[p.Phase])
	for _, part := range []struct {
		letter string
		v      int32
	}{{"m", p.Microbatch}, {"s", p.Subsequence}, {"l", p.Layer}, {"p", int32(p.Stage)}} {
		if part.v != None {
			text += fmt.Sprint(" ", part.letter, part.v)
		}
	}
	return text
}

func (t *printer) origin(start, column int, letter byte, v int64) {
	if v != None {
		t.pad(start, column)
		t.byte(letter)
		t.int(v)
	}
}

// operation writes the opcode, the operands and the attributes. The operands begin no earlier than at the
// offset in buf that column gives.
func (t *printer) operation(c *Code, in *Instr, column int) {
	row := in.Info()
	t.str(row.Name)
	t.pad(0, column)
	bare := len(t.buf)
	written := row.Written()
	t.views(c, in.Args[:written])
	if written > 0 && written < len(in.Args) {
		t.str(" = ")
	}
	t.views(c, in.Args[written:])
	for i := range in.Attrs {
		t.attr(&in.Attrs[i], &row.Attrs[i], len(t.buf) > bare)
	}
}

// views writes one side of an instruction. Absent operands at its end are omitted.
func (t *printer) views(c *Code, views []View) {
	n := len(views)
	for n > 0 && !views[n-1].Present() {
		n--
	}
	for i := range views[:n] {
		if i > 0 {
			t.str(", ")
		}
		if !views[i].Present() {
			t.byte('-')
			continue
		}
		t.view(c, &views[i])
	}
}

func (t *printer) view(c *Code, v *View) {
	t.name(c.Buffers[v.Buffer].Name)
	if v.Offset != 0 {
		t.byte('+')
		t.int(int64(v.Offset))
	}
	t.byte(':')
	t.str(v.DType.String())
	for i, d := range v.Dims() {
		if i == 0 {
			t.byte('[')
		} else {
			t.byte(',')
		}
		t.int(d)
	}
	t.byte(']')
}

// attr writes an attribute. Groups and events are marked by their first character; a boolean is written as
// its name.
func (t *printer) attr(a *Attr, info *AttrInfo, separate bool) {
	if info.Kind.MayBeLeftOut() && a.Bits == 0 && a.Const == 0 {
		return
	}
	if separate {
		t.byte(' ')
	}
	if info.Kind == KindBool && a.Bits == 1 {
		t.str(info.Name)
		return
	}
	if info.Kind != KindGroup && info.Kind != KindEvent {
		t.str(info.Name)
		t.byte('=')
	}
	t.attrValue(*a, info.Kind)
}

func (t *printer) attrValue(a Attr, kind AttrKind) {
	if a.Const != 0 {
		if t.as != nil {
			t.int(t.as.Consts[a.Const-1])
			return
		}
		t.byte('$')
		t.name(t.p.Consts[a.Const-1])
		return
	}
	switch kind {
	case KindFloat, KindFactor:
		t.float(a.Bits)
	case KindFunction:
		t.str(Functions[a.Bits])
	case KindTensor:
		t.name(t.p.Tensors[a.Bits].Name)
	case KindGroup:
		t.byte('@')
		t.name(t.p.Groups[a.Bits])
	case KindEvent:
		t.byte('e')
		t.int(int64(a.Bits))
	default:
		t.int(int64(a.Bits))
	}
}

// float writes the shortest number that reads back as the same bits. A NaN is written as its bits,
// because NaN has several bit patterns.
func (t *printer) float(bits uint64) {
	f := math.Float64frombits(bits)
	switch {
	case math.IsNaN(f):
		t.printf("0x%016x", bits)
	case math.IsInf(f, 1):
		t.str("Inf")
	default:
		t.buf = strconv.AppendFloat(t.buf, f, 'g', -1, 64)
	}
}

func (t *printer) rank(i int) {
	r := &t.p.Ranks[i]
	if i == 0 {
		t.byte('\n')
	}
	t.printf("rank %d ", i)
	t.name(t.p.Codes[r.Code].Name)
	t.printf(" dp=%d pp=%d sp=%d", r.DP, r.PP, r.SP)
	for j, v := range r.Consts {
		t.str(" $")
		t.name(t.p.Consts[j])
		t.byte('=')
		t.int(v)
	}
	for j, members := range r.Groups {
		if len(members) == 0 {
			continue
		}
		t.str(" @")
		t.name(t.p.Groups[j])
		for k, m := range members {
			if k == 0 {
				t.str("=[")
			} else {
				t.byte(',')
			}
			t.int(int64(m))
		}
		t.byte(']')
	}
	t.byte('\n')
}

// annotation ends the line of instruction i with its addresses and notes.
func (t *printer) annotation(c *Code, in *Instr, i int, notes map[int]string) {
	t.printf("  # %d:", i)
	for j := range in.Args {
		v := &in.Args[j]
		if !v.Present() {
			continue
		}
		b := &c.Buffers[v.Buffer]
		t.printf(" %s@%c+0x%x", in.Info().Operands[j].Name, b.Arena.String()[0], int64(b.Offset+v.Offset))
	}
	if in.Info().Class == ClassSync && notes[i] != "" {
		t.byte(' ')
		t.str(notes[i])
	}
}

// syncNotes describes, for each record, the work that it follows and, for each wait, the work that it waits
// for.
func syncNotes(c *Code, s Section) map[int]string {
	notes := map[int]string{}
	marks := make([]string, c.Events[s])
	var last [NumStreams]int // 1 + the last instruction of each stream that is not a record or wait
	for i := range c.Sections[s] {
		in := &c.Sections[s][i]
		switch in.Op {
		case Record:
			what := c.describe(s, last[in.Stream]-1)
			notes[i] = "after " + what
			marks[in.Attrs[0].Bits] = in.Stream.String() + " " + what
		case Wait:
			if mark := marks[in.Attrs[0].Bits]; mark != "" {
				notes[i] = "for " + mark
			}
		default:
			last[in.Stream] = i + 1
		}
	}
	return notes
}

// describe names an instruction by its number, opcode and first operand that is present.
func (c *Code) describe(s Section, i int) string {
	if i < 0 {
		return "nothing yet"
	}
	in := &c.Sections[s][i]
	what := fmt.Sprintf("%d: %s", i, in.Info().Name)
	if k := slices.IndexFunc(in.Args, View.Present); k >= 0 {
		what += " " + c.Buffers[in.Args[k].Buffer].Name
	}
	return what
}
