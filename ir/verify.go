package ir

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
)

// The verifier proves, before a program reaches a device and regardless of its origin, that
//
//   - every operand has the place, shape and type that its row requires, and lies inside its buffer and arena;
//   - every conflicting pair of accesses of a rank is ordered by the rank's own streams and events
//     (verifyorder.go);
//   - every byte that is read has been written before, through the same buffer: buffers that share bytes are never
//     live at the same time (verifylives.go);
//   - a buffer represents one value in a section: its bytes are not overwritten or changed until all readers
//     of the buffer have run;
//   - at least part of every result is read;
//   - sends and receives match, collectives agree, and the job cannot deadlock (verifyranks.go);
//   - the figures in the header are in range, and the results that a run needs exist (verifyheader.go);
//   - ranks together hold every tensor exactly once, apart from copies (verifystates.go);
//   - gradients are those of what the forward pass computes, complete, and summed over all ranks that hold their weight
//     (verifyformula.go);
//   - the arenas fit the machine.
//
// Properties that depend only on the code are checked once for all ranks that run it.

// Verify checks a program. The error is a *VerifyError.
func Verify(p *Program) error { return VerifyOptions{}.Verify(p) }

// VerifyOptions holds options that relax the check.
type VerifyOptions struct {
	AllowOverCapacity bool // accept arenas that are larger than the machine's memory
	AllowUnread       bool // accept results that are never read, as in programs whose values mean nothing; formulas are not checked
	AllowReuse        bool // accept buffers that hold several values one after another, as in programs that measure instructions
}

// findingLimit is the maximum number of findings in an error.
const findingLimit = 20

// Verify checks a program. The error is a *VerifyError.
func (o VerifyOptions) Verify(p *Program) error {
	all := findings{limit: findingLimit}
	for _, err := range p.malformed(findingLimit) {
		all.add(Finding{Kind: FindMalformed, At: Site{Rank: None, Index: None}, Msg: err.Error()})
	}
	if all.empty() {
		verifyHeader(p, &all)
	}
	if all.empty() {
		about, unsaved, sound := o.verifyCodes(p, &all)
		if sound {
			verifyRanks(p, &all)
		}
		if all.empty() {
			verifyRoles(p, &all)
		}
		if all.empty() {
			all.append(&unsaved)
		}
		if all.empty() && !o.AllowReuse {
			verifyUpdates(p, about.updated, &all)
		}
		if all.empty() && !o.AllowUnread {
			verifyUnread(p, about.unread, &all)
		}
		if all.empty() && !o.AllowReuse && !o.AllowUnread && trains(p) && differentiates(p) {
			verifyFormulas(p, &all)
		}
		if !o.AllowOverCapacity {
			verifyCapacity(p, &all)
		}
	}
	if all.empty() {
		return nil
	}
	return &VerifyError{Findings: all.list, More: all.more}
}

// codeFacts is what checks of the whole program need to know about each code.
type codeFacts struct {
	unread  [][]result // results that are never read
	updated [][]extent // how much of each state a step writes
}

// verifyCodes checks the codes concurrently; findings are in the order of the codes. It returns facts about each
// code, what checkpoints would lack, and whether every instruction is valid by itself, which later checks rely on.
func (o VerifyOptions) verifyCodes(p *Program, all *findings) (about codeFacts, unsaved findings, sound bool) {
	about = codeFacts{make([][]result, len(p.Codes)), make([][]extent, len(p.Codes))}
	each, unkept := make([]findings, len(p.Codes)), make([]findings, len(p.Codes))
	unsaved.limit = findingLimit
	var wg sync.WaitGroup
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	unsound := make([]bool, len(p.Codes))
	for i := range p.Codes {
		slots <- struct{}{}
		wg.Go(func() {
			v := codeVerifier{VerifyOptions: o, p: p, code: &p.Codes[i], findings: findings{limit: findingLimit}, unsaved: findings{limit: findingLimit}}
			v.instructions()
			unsound[i] = !v.findings.empty()
			// order and lifetimes are checked byte by byte, which requires valid views
			if !unsound[i] {
				v.order()
			}
			each[i], unkept[i] = v.findings, v.unsaved
			about.unread[i], about.updated[i] = v.unread, v.updated
			<-slots
		})
	}
	wg.Wait()
	for i := range each {
		all.append(&each[i])
		unsaved.append(&unkept[i])
	}
	return about, unsaved, !slices.Contains(unsound, true)
}

// verifyCapacity compares the arenas with the machine's memory, if that is known.
func verifyCapacity(p *Program, all *findings) {
	limits := [NumArenas]Bytes{Device: Bytes(p.Machine.DeviceMemory), Host: p.Machine.HostMemoryPerRank()}
	for i := range p.Codes {
		c := &p.Codes[i]
		for a, peak := range c.Arenas {
			if limit := limits[a]; limit > 0 && peak > limit {
				all.add(Finding{
					Kind: FindCapacity, At: Site{Rank: None, Code: c.Name, Index: None},
					Msg: fmt.Sprintf("the %s arena takes %s (%d bytes), but %s has %s", Arena(a), peak, int64(peak), p.Machine.Name, limit),
				})
			}
		}
	}
}

// codeVerifier checks the properties that all ranks of a code share.
type codeVerifier struct {
	p    *Program
	code *Code
	findings
	VerifyOptions
	unread       []result
	unsaved      findings            // see survives
	stateBuffers []bool              // see isState
	updated      []extent            // by state
	states       *[NumArenas][]owned // see kept
}

// instructions checks the properties of instructions that do not depend on order.
func (v *codeVerifier) instructions() {
	v.buffers()
	v.statesAndResults()
	for s := range v.code.Sections {
		for i := range v.code.Sections[s] {
			v.instr(Section(s), i)
		}
	}
}

// siteOf returns the site of an instruction of a code.
func siteOf(p *Program, c *Code, s Section, i int) Site {
	in := &c.Sections[s][i]
	site := Site{Rank: None, Code: c.Name, Section: s, Index: i, Text: p.Text(c, in)}
	if len(p.Lines) > 0 {
		site.Line = p.Lines[in.Prov.Line]
	}
	return site
}

// report adds a finding about instruction i; other is the other instruction of the pair, or None.
func (v *codeVerifier) report(kind FindingKind, s Section, i, other int, format string, args ...any) {
	if len(v.list) >= v.limit {
		v.more++
		return
	}
	f := Finding{Kind: kind, At: siteOf(v.p, v.code, s, i), Msg: fmt.Sprintf(format, args...)}
	if other != None {
		o := siteOf(v.p, v.code, s, other)
		f.Other = &o
	}
	v.add(f)
}

// reportCode adds a finding about the code as a whole.
func (v *codeVerifier) reportCode(kind FindingKind, format string, args ...any) {
	v.add(Finding{Kind: kind, At: Site{Rank: None, Code: v.code.Name, Index: None}, Msg: fmt.Sprintf(format, args...)})
}

// buffers checks that buffers lie in their arenas, and that no arena is larger than its buffers need.
func (v *codeVerifier) buffers() {
	var highest [NumArenas]Bytes
	for i := range v.code.Buffers {
		b := &v.code.Buffers[i]
		if err := v.code.holds(b); err != nil {
			v.reportCode(FindBounds, "%v", err)
		}
		highest[b.Arena] = max(highest[b.Arena], Plus(b.Offset, b.Size))
	}
	for a, peak := range v.code.Arenas {
		if peak > highest[a] {
			v.reportCode(FindBounds, "the %s arena has %d bytes, but its highest buffer ends at %d", Arena(a), int64(peak), int64(highest[a]))
		}
	}
}

// resultRule is a rule for a result that the VM uses.
type resultRule struct {
	name     string
	section  Section // the section that it belongs to
	filled   bool    // the VM writes the result before the section; otherwise, the VM reads it after the section
	elements int64   // 0: any number
	dtype    DType
}

var resultRules = []resultRule{
	{ResultLoss, SectionStep, false, 1, F32},
	{ResultEvalLoss, SectionEval, false, 1, F32},
	{ResultLosses, SectionEval, false, 0, F32},
	{ResultGradNorm, SectionStep, false, 2, F32},
	{ResultStep, SectionStep, true, 3, F32},
	{ResultWeight, SectionStep, true, 1, F32},
	{ResultEvalWeight, SectionEval, true, 1, F32},
	{ResultSpike, SectionStep, true, 1, F32},
	{ResultDropout, SectionStep, true, 2, I32},
	{ResultExpertLoad, SectionStep, false, 0, F32},
}

func resultRuleOf(name string) *resultRule {
	i := slices.IndexFunc(resultRules, func(r resultRule) bool { return r.name == name })
	if i < 0 {
		return nil
	}
	return &resultRules[i]
}

func (v *codeVerifier) statesAndResults() {
	for i := range v.code.States {
		s := &v.code.States[i]
		name := fmt.Sprintf("state %s of %s", s.Role, v.p.Tensors[s.Tensor].Name)
		if err := v.locate(&s.View); err != nil {
			v.reportCode(FindBounds, "%s: %v", name, err)
		}
		if n := len(s.View.Dims()); n > 2 {
			v.reportCode(FindShape, "%s has %d dimensions, not 1 or 2", name, n)
		}
	}
	seen := map[string]bool{}
	for i := range v.code.Results {
		r := &v.code.Results[i]
		rule := resultRuleOf(r.Name)
		err := v.locate(&r.View)
		switch {
		case rule == nil:
			v.reportCode(FindShape, "there is no result called %s", r.Name)
		case seen[r.Name]:
			v.reportCode(FindShape, "a second result %s", r.Name)
		case err != nil:
			v.reportCode(FindBounds, "result %s: %v", r.Name, err)
		case r.View.DType != rule.dtype || rule.elements > 0 && r.View.Elements() != rule.elements:
			v.reportCode(FindShape, "result %s is %s[%d], not %s[%d]", r.Name, r.View.DType, r.View.Elements(), rule.dtype, rule.elements)
		}
		seen[r.Name] = true
	}
}

// instr checks an instruction by itself.
func (v *codeVerifier) instr(s Section, i int) {
	in := &v.code.Sections[s][i]
	row := in.Info()
	if len(row.Streams) > 0 && !slices.Contains(row.Streams, in.Stream) {
		v.report(FindPlace, s, i, None, "%s does not run on stream %s", row.Name, in.Stream)
	}
	if o := &in.Prov; min(o.Microbatch, o.Subsequence, o.Layer, int32(o.Stage)) < None {
		v.report(FindHeader, s, i, None, "comes from microbatch %d, subsequence %d, layer %d and stage %d, none of which may be below %d",
			o.Microbatch, o.Subsequence, o.Layer, o.Stage, None)
	}
	for j := range in.Attrs {
		if row.Attrs[j].Kind == KindBool && in.Attrs[j].Bits > 1 {
			v.report(FindShape, s, i, None, "attribute %s is %d, not 0 or 1", row.Attrs[j].Name, in.Attrs[j].Bits)
			return
		}
	}
	for j := range in.Args {
		view := &in.Args[j]
		if !view.Present() {
			continue
		}
		if err := v.locate(view); err != nil {
			v.report(FindBounds, s, i, None, "%s: %v", row.Operands[j].Name, err)
			return
		}
		if a := v.code.Buffers[view.Buffer].Arena; a != row.Operands[j].Arena {
			v.report(FindPlace, s, i, None, "%s is in the %s arena, not the %s arena", row.Operands[j].Name, a, row.Operands[j].Arena)
			return
		}
	}
	if err := in.CheckShapes(); err != nil {
		v.report(FindShape, s, i, None, "%v", err)
		return
	}
	v.selfOverlap(s, i)
}

// locate checks that a view lies in its buffer, aligned to its elements.
func (v *codeVerifier) locate(view *View) error {
	_, _, err := v.code.Locate(view)
	return err
}

// extent returns the range of arena bytes of a view that locate has accepted.
func (c *Code) extent(v *View) (lo, hi Bytes) {
	lo = c.Buffers[v.Buffer].Offset + v.Offset
	return lo, lo + v.Bytes()
}

// selfOverlap checks that an instruction's outputs do not overlap its other operands, unless both are the same
// view and the row allows that view to be both read and written.
func (v *codeVerifier) selfOverlap(s Section, i int) {
	in := &v.code.Sections[s][i]
	row := in.Info()
	for j := range row.Written() {
		a := &in.Args[j]
		if !a.Present() {
			continue
		}
		lo, hi := v.code.extent(a)
		for k := j + 1; k < len(in.Args); k++ {
			b := &in.Args[k]
			if !b.Present() || row.Operands[k].Arena != row.Operands[j].Arena {
				continue
			}
			lo2, hi2 := v.code.extent(b)
			inPlace := row.InPlace && row.Operands[j].Dir == Write && row.Operands[k].Dir == Read &&
				lo == lo2 && a.DType == b.DType && a.Shape == b.Shape
			if lo < hi2 && lo2 < hi && !inPlace {
				v.report(FindOverlap, s, i, None, "%s is written over %s", row.Operands[j].Name, row.Operands[k].Name)
				return
			}
		}
	}
}
