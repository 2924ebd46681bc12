package ir

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"sync"
)

// Decode reads the binary format. The program that it returns is well formed (see Check), but not verified.
func Decode(data []byte) (*Program, error) {
	p, err := decodeFile(data)
	if err != nil {
		return nil, fmt.Errorf("not a readable program: %w", err)
	}
	return p, nil
}

// checkPreamble checks that a file is a program that this build can read.
func checkPreamble(data []byte) error {
	if len(data) < len(magic) || string(data[:len(magic)]) != magic {
		return errors.New("it does not have the signature of a .sppb file")
	}
	if len(data) < preambleBytes+trailerBytes {
		return errTruncated
	}
	if v := binary.LittleEndian.Uint32(data[len(magic):]); v != version {
		return fmt.Errorf("format version %d, but this build reads version %d", v, version)
	}
	if h := binary.LittleEndian.Uint64(data[len(magic)+4:]); h != tableHash() {
		return fmt.Errorf("compiled with another opcode table (%016x, here %016x): compile it again with this build", h, tableHash())
	}
	return nil
}

func decodeFile(data []byte) (*Program, error) {
	if err := checkPreamble(data); err != nil {
		return nil, err
	}
	body := data[:len(data)-trailerBytes]
	end := data[len(body):]
	if end[0] != partEnd || binary.LittleEndian.Uint32(end[1:]) != crc32.Checksum(data[:len(data)-4], castagnoli) {
		return nil, errors.New("the checksum does not match: truncated or damaged")
	}
	return decodeParts(body[preambleBytes:])
}

func decodeParts(body []byte) (*Program, error) {
	parts, err := splitParts(body)
	if err != nil {
		return nil, err
	}
	var h header
	if err := json.Unmarshal(parts[0], &h); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	p := &Program{
		Name: h.Name, Run: h.Run, Model: h.Model, Machine: h.Machine, FlopsModel: h.FlopsModel, Lines: h.Lines,
		Passes: h.Passes, Consts: h.Consts, Groups: h.Groups, Tensors: h.Tensors,
	}
	if err := decodeCodes(p, parts[1:len(parts)-1]); err != nil {
		return nil, err
	}
	d := decoder{data: parts[len(parts)-1]}
	d.ranks(p)
	if err := d.finish(); err != nil {
		return nil, fmt.Errorf("ranks: %w", err)
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	return p, nil
}

// splitParts returns the payloads of the header, the codes and the ranks, in that order.
func splitParts(body []byte) ([][]byte, error) {
	var parts [][]byte
	for len(body) > 0 {
		if len(body) < 9 {
			return nil, errTruncated
		}
		kind, n := body[0], binary.LittleEndian.Uint64(body[1:])
		body = body[9:]
		if n > uint64(len(body)) {
			return nil, errTruncated
		}
		want := byte(partCode)
		switch {
		case len(parts) == 0:
			want = partHeader
		case n == uint64(len(body)):
			want = partRanks
		}
		if kind != want {
			return nil, fmt.Errorf("part %d is of kind %q, not %q", len(parts), kind, want)
		}
		parts = append(parts, body[:n])
		body = body[n:]
	}
	if len(parts) < 2 {
		return nil, errTruncated
	}
	return parts, nil
}

// decodeCodes reads the codes concurrently; they are independent.
func decodeCodes(p *Program, parts [][]byte) error {
	if len(parts) == 0 {
		return nil
	}
	p.Codes = make([]Code, len(parts))
	errs := make([]error, len(parts))
	var wg sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i := range parts {
		slots <- struct{}{}
		wg.Go(func() {
			d := decoder{data: parts[i]}
			d.code(&p.Codes[i])
			errs[i] = d.finish()
			<-slots
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("code %d: %w", i, err)
		}
	}
	return nil
}

var errTruncated = errors.New("truncated")

// decoder reads a part of a file. After the first error, every read returns zero, and finish returns it.
type decoder struct {
	data []byte
	at   int
	err  error
}

func (d *decoder) fail(err error) {
	if d.err == nil {
		d.err = err
	}
	d.at = len(d.data)
}

func (d *decoder) finish() error {
	if d.err == nil && d.at != len(d.data) {
		return fmt.Errorf("%d bytes too many", len(d.data)-d.at)
	}
	return d.err
}

func (d *decoder) left() int { return len(d.data) - d.at }

func (d *decoder) byte() byte {
	if d.at >= len(d.data) {
		d.fail(errTruncated)
		return 0
	}
	b := d.data[d.at]
	d.at++
	return b
}

func (d *decoder) uint() uint64 {
	if d.at < len(d.data) && d.data[d.at] < 0x80 {
		v := d.data[d.at]
		d.at++
		return uint64(v)
	}
	v, n := binary.Uvarint(d.data[d.at:])
	if n <= 0 {
		d.fail(errTruncated)
		return 0
	}
	d.at += n
	return v
}

func (d *decoder) int() int64 {
	u := d.uint()
	return int64(u>>1) ^ -int64(u&1)
}

func (d *decoder) float() uint64 {
	if d.left() < 8 {
		d.fail(errTruncated)
		return 0
	}
	v := binary.LittleEndian.Uint64(d.data[d.at:])
	d.at += 8
	return v
}

// count reads the length of a list whose elements take at least size bytes each, and checks that the rest of
// the part is large enough.
func (d *decoder) count(size int) int {
	n := d.uint()
	if n > uint64(d.left()/size) {
		d.fail(errTruncated)
		return 0
	}
	return int(n)
}

func (d *decoder) string() string {
	n := d.count(1)
	s := string(d.data[d.at : d.at+n])
	d.at += n
	return s
}

// int32 reads a signed number that must fit in an int32.
func (d *decoder) int32() int32 {
	v := d.int()
	if v != int64(int32(v)) {
		d.fail(fmt.Errorf("%d is out of range", v))
	}
	return int32(v)
}

func (d *decoder) code(c *Code) {
	c.Name = d.string()
	for a := range c.Arenas {
		c.Arenas[a] = Bytes(d.uint())
	}
	d.buffers(c)
	if n := d.count(6); n > 0 {
		c.States = make([]State, n)
	}
	for i := range c.States {
		s := &c.States[i]
		s.Tensor = d.uint31()
		s.Role = Role(d.byte())
		d.view(&s.View)
		s.Row0 = d.attr(KindInt)
		s.Col0 = d.attr(KindInt)
		s.End = d.attr(KindInt)
	}
	if n := d.count(2); n > 0 {
		c.Results = make([]Result, n)
	}
	for i := range c.Results {
		c.Results[i].Name = d.string()
		d.view(&c.Results[i].View)
	}
	for s := range c.Sections {
		c.Events[s] = d.uint31()
		c.Sections[s] = d.section()
	}
}

// uint31 reads an unsigned number that must fit in an int32.
func (d *decoder) uint31() int32 {
	v := d.uint()
	if v > 1<<31-1 {
		d.fail(fmt.Errorf("%d is out of range", v))
		return 0
	}
	return int32(v)
}

func (d *decoder) buffers(c *Code) {
	n := d.count(5)
	if n == 0 {
		return
	}
	c.Buffers = make([]Buffer, n)
	name, end := "", Bytes(0)
	for i := range c.Buffers {
		b := &c.Buffers[i]
		shared := d.uint()
		if shared > uint64(len(name)) {
			d.fail(errors.New("a name shares a longer prefix than its predecessor has"))
			return
		}
		// Reject names that no compiler writes: because prefixes are shared, a small file could
		// give millions of buffers very long names.
		if b.Name = name[:shared] + d.string(); len(b.Name) > maxNameBytes {
			d.fail(fmt.Errorf("a name of %d bytes", len(b.Name)))
			return
		}
		b.Arena = Arena(d.byte())
		b.Offset = end + Bytes(d.int())
		b.Size = Bytes(d.uint())
		name, end = b.Name, b.Offset+b.Size
	}
}

// maxNameBytes is the maximum length of a buffer's name.
const maxNameBytes = 1 << 10

// section reads the instructions of a section. It allocates all operands in one array and all attributes in
// another, because millions of small slices would take twice the memory.
func (d *decoder) section() []Instr {
	n := d.count(4)
	args := make([]View, d.count(1))
	attrs := make([]Attr, d.attrCount(n))
	if n == 0 || d.err != nil {
		return nil
	}
	instrs := make([]Instr, n)
	last := newBases()
	prov := Provenance{}
	for i := range instrs {
		in := &instrs[i]
		in.Op, in.Stream = Op(d.byte()), Stream(d.byte())
		if in.Op >= NumOps {
			d.fail(fmt.Errorf("opcode %d of %d", in.Op, NumOps))
			return nil
		}
		d.provenance(&prov)
		in.Prov = prov
		base := &last[in.Op]
		if len(base.Args) > len(args) || len(base.Attrs) > len(attrs) {
			d.fail(errors.New("more operands than declared"))
			return nil
		}
		in.Args, args = carve(args, base.Args)
		in.Attrs, attrs = carve(attrs, base.Attrs)
		for j := range in.Args {
			d.view(&in.Args[j])
		}
		d.attrs(in)
		base.Args, base.Attrs = in.Args, in.Attrs
	}
	if len(args) != 0 || len(attrs) != 0 {
		d.fail(errors.New("fewer operands than declared"))
	}
	return instrs
}

// attrCount reads the total number of attributes of n instructions.
func (d *decoder) attrCount(n int) int {
	v := d.uint()
	if v > uint64(n)*maxAttrs {
		d.fail(errTruncated)
		return 0
	}
	return int(v)
}

// maxAttrs is the maximum number of attributes of an opcode, which a test of the table checks.
const maxAttrs = 16

// carve copies model to the front of store, and returns that piece (nil if model is empty) and the rest of
// store.
func carve[T any](store, model []T) (piece, rest []T) {
	n := len(model)
	if n == 0 {
		return nil, store
	}
	copy(store, model)
	return store[:n:n], store[n:]
}

func (d *decoder) provenance(p *Provenance) {
	mask := d.byte()
	if mask == 0 {
		return
	}
	f := provFields(p)
	for i := range f {
		if mask&(1<<i) != 0 {
			f[i] += d.int()
		}
	}
	*p = Provenance{
		Microbatch: int32(f[0]), Subsequence: int32(f[1]), Layer: int32(f[2]), Stage: int16(f[3]),
		Line: uint16(f[4]), Pass: uint8(f[5]), Phase: Phase(f[6]),
	}
	if mask >= 1<<len(f) || provFields(p) != f {
		d.fail(errors.New("provenance is out of range"))
	}
}

// view reads differences and applies them to v, which holds the base.
func (d *decoder) view(v *View) {
	mask := d.byte()
	if mask&viewBuffer != 0 {
		v.Buffer += uint32(d.int32())
	}
	if mask&viewOffset != 0 {
		v.Offset += Bytes(d.int())
	}
	if mask&viewDType != 0 {
		v.DType = DType(d.byte())
	}
	if mask >= viewDim0 {
		for i := range v.Shape {
			if mask&(viewDim0<<i) != 0 {
				v.Shape[i] += d.int()
			}
		}
	}
}

func (d *decoder) attrs(in *Instr) {
	mask := d.uint()
	if mask>>len(in.Attrs) != 0 {
		d.fail(fmt.Errorf("%s has no attribute %d", in.Info().Name, len(in.Attrs)))
		return
	}
	for i := range in.Attrs {
		if mask&(1<<i) != 0 {
			in.Attrs[i] = d.attr(in.Info().Attrs[i].Kind)
		}
	}
}

func (d *decoder) attr(kind AttrKind) Attr {
	c := d.uint31()
	switch {
	case c != 0:
		return Attr{Const: c}
	case kind.IsFloat():
		return Attr{Bits: d.float()}
	}
	return Int(d.int())
}

func (d *decoder) ranks(p *Program) {
	n := d.count(4)
	if n == 0 {
		return
	}
	// The file has at least one byte per rank for each constant and group.
	if n*(len(p.Consts)+len(p.Groups)) > d.left() {
		d.fail(errTruncated)
		return
	}
	p.Ranks = make([]Rank, n)
	for i := range p.Ranks {
		r := &p.Ranks[i]
		r.Code, r.DP, r.PP, r.SP = d.int32(), d.int32(), d.int32(), d.int32()
		if len(p.Consts) > 0 {
			r.Consts = make([]int64, len(p.Consts))
		}
		for j := range r.Consts {
			r.Consts[j] = d.int()
		}
		if len(p.Groups) > 0 {
			r.Groups = make([][]int32, len(p.Groups))
		}
		for j := range r.Groups {
			r.Groups[j] = d.members()
		}
	}
}

func (d *decoder) members() []int32 {
	n := d.count(1)
	if n == 0 {
		return nil
	}
	members, last := make([]int32, n), int64(0)
	for i := range members {
		last += d.int()
		if last != int64(int32(last)) {
			d.fail(fmt.Errorf("rank %d is out of range", last))
			return nil
		}
		members[i] = int32(last)
	}
	return members
}
