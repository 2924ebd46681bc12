package ir

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Part is a purpose for which memory is used.
type Part uint8

// Uses of memory, most specific first: a buffer with several of these uses is assigned to the first of them.
const (
	PartWeights Part = iota
	PartOptimizer
	PartGradients // of weights
	PartKVGradients
	PartKV
	PartLogits
	PartSaved // activations that a forward pass saves for its backward pass
	PartMessages
	PartStaging // all other buffers on the host
	PartWorking
	PartGaps
	NumParts
)

// partInfo holds the names of each use in reports and in JSON.
var partInfo = [NumParts]struct{ name, key string }{
	PartWeights:     {"weights", "weights"},
	PartOptimizer:   {"optimizer", "optimizer"},
	PartGradients:   {"gradients", "gradients"},
	PartKVGradients: {"gradients of K and V", "kv_gradients"},
	PartKV:          {"K and V", "kv"},
	PartLogits:      {"logits", "logits"},
	PartSaved:       {"saved activations", "saved_activations"},
	PartMessages:    {"messages", "messages"},
	PartStaging:     {"staging on the host", "staging"},
	PartWorking:     {"working memory", "working"},
	PartGaps:        {"gaps", "gaps"},
}

func (p Part) String() string { return partInfo[p].name }

// Key returns the part's name in JSON.
func (p Part) Key() string { return partInfo[p].key }

// operandParts lists the operands that determine the use of a buffer. A matmul with a transposed
// first factor computes the gradient of a weight. In any other matmul, the second factor is a
// weight.
var operandParts = map[Op]map[string]Part{
	Matmul:            {"b": PartWeights, "bias": PartWeights},
	Embed:             {"table": PartWeights},
	EmbedGrad:         {"dtable": PartGradients},
	PositionEmbed:     {"table": PartWeights},
	PositionEmbedGrad: {"dtable": PartGradients},
	LayerNorm:         {"gamma": PartWeights, "beta": PartWeights},
	LayerNormGrad:     {"gamma": PartWeights, "dgamma": PartGradients, "dbeta": PartGradients},
	RMSNorm:           {"gamma": PartWeights},
	RMSNormGrad:       {"gamma": PartWeights, "dgamma": PartGradients},
	BiasGrad:          {"db": PartGradients},
	Attention:         {"k": PartKV, "v": PartKV},
	AttentionGrad:     {"k": PartKV, "v": PartKV, "dk": PartKVGradients, "dv": PartKVGradients},
	ConcatHeads:       {"y": PartKV},
	ConcatHeadsGrad:   {"dy": PartKVGradients},
	Scan:              {"next": PartKV},
	ScanGrad:          {"dnext": PartKVGradients},
	Conv:              {"next": PartKV, "w": PartWeights},
	ConvGrad:          {"dnext": PartKVGradients, "w": PartWeights, "dw": PartGradients},
	Decay:             {"rate": PartWeights, "bias": PartWeights},
	DecayGrad:         {"drate": PartGradients, "dbias": PartGradients},
	ScaleColumns:      {"factor": PartWeights},
	ScaleColumnsGrad:  {"factor": PartWeights, "dfactor": PartGradients},
	CrossEntropyStats: {"logits": PartLogits},
	CrossEntropyGrad:  {"logits": PartLogits, "dlogits": PartLogits},
	SumSq:             {"x": PartGradients},
	AdamW:             {"w": PartOptimizer, "m": PartOptimizer, "v": PartOptimizer, "copy": PartWeights, "grad": PartGradients},
	SGD:               {"w": PartOptimizer, "m": PartOptimizer, "copy": PartWeights},
	Nesterov:          {"m": PartOptimizer, "grad": PartGradients},
	Send:              {"x": PartMessages},
	Recv:              {"y": PartMessages},
}

// partOfOperand returns the use of the buffer of operand i, if the operand determines it.
func (in *Instr) partOfOperand(i int) (Part, bool) {
	name := in.Info().Operands[i].Name
	if in.Op == Matmul && in.Attr("trans_a").Bits != 0 {
		return PartGradients, name == "c"
	}
	part, known := operandParts[in.Op][name]
	return part, known
}

// use records how the instructions of a code use a buffer.
type use struct {
	part   Part
	phases [NumPhases]bool // phases of the tasks that use it
	tasks  int             // number of tasks that use it, counted up to 2
	task   Provenance      // the last of these tasks
}

// sameTask reports whether two instructions belong to one task.
func (p Provenance) sameTask(q Provenance) bool {
	return p.Phase == q.Phase && p.Microbatch == q.Microbatch && p.Subsequence == q.Subsequence && p.Stage == q.Stage
}

// severalStages reports whether the tasks of a step belong to several virtual stages.
func (c *Code) severalStages() bool {
	step := c.Sections[SectionStep]
	first := slices.IndexFunc(step, func(in Instr) bool { return in.Prov.Phase.OfTask() })
	return first >= 0 && slices.ContainsFunc(step[first:], func(in Instr) bool { return in.Prov.Phase.OfTask() && in.Prov.Stage != step[first].Prov.Stage })
}

// task names the task of an instruction, or its section if it has none. If a rank has several virtual stages, the task is that of
// one of them.
func (p Provenance) task(s Section, virtual bool) string {
	if !p.Phase.OfTask() {
		return p.Phase.String() + " of the " + s.String() + " section"
	}
	text, stage := p.Phase.String(), "stage"
	if virtual {
		stage = "virtual stage"
	}
	for _, x := range []struct {
		name  string
		index int32
	}{{"microbatch", p.Microbatch}, {"subsequence", p.Subsequence}, {stage, int32(p.Stage)}, {"layer", p.Layer}} {
		if x.index != None {
			text += fmt.Sprintf(" %s %d", x.name, x.index)
		}
	}
	return text
}

// note records an instruction that touches the buffer as its operand i.
func (u *use) note(in *Instr, i int) {
	if part, known := in.partOfOperand(i); known {
		u.part = min(u.part, part)
	}
	if in.Prov.Phase.OfTask() {
		u.phases[in.Prov.Phase] = true
		if u.tasks == 0 || u.tasks == 1 && !u.task.sameTask(in.Prov) {
			u.tasks++
			u.task = in.Prov
		}
	}
}

// settle determines the use of a value that one task passes to another. It is a saved activation if a backward
// pass or a separate task for weight gradients uses it later, and otherwise a message.
func (u *use) settle() {
	later := u.phases[PhaseBackward] || u.phases[PhaseWeights]
	switch {
	case u.phases[PhaseForward] && later, u.phases[PhaseBackward] && u.phases[PhaseWeights]:
		u.part = min(u.part, PartSaved)
	case u.tasks > 1:
		u.part = min(u.part, PartMessages)
	}
}

// Parts returns the use of each buffer of a code.
func (c *Code) Parts() []Part {
	uses := make([]use, len(c.Buffers))
	for b := range uses {
		uses[b].part = PartWorking
	}
	for i := range c.States {
		if s := &c.States[i]; s.View.Present() {
			u := &uses[s.View.Buffer]
			u.part = min(u.part, roles[s.Role].part)
		}
	}
	c.eachOperand(func(_ Section, _ int, in *Instr, i int) { uses[in.Args[i].Buffer].note(in, i) })
	for b := range uses {
		uses[b].settle()
	}
	for range 2 { // a use spreads to the copy on the host, and from there to the reloaded buffer
		c.eachOperand(func(_ Section, _ int, in *Instr, i int) {
			if in.Op == CopyD2H || in.Op == CopyH2D {
				y, x := &uses[in.Args[0].Buffer], &uses[in.Args[1].Buffer]
				both := min(y.part, x.part)
				y.part, x.part = both, both
			}
		})
	}
	parts := make([]Part, len(uses))
	for b := range uses {
		parts[b] = uses[b].part
		if c.Buffers[b].Arena == Host && parts[b] >= PartMessages {
			parts[b] = PartStaging
		}
	}
	return parts
}

// eachOperand calls f for every operand that is present.
func (c *Code) eachOperand(f func(s Section, pc int, in *Instr, i int)) {
	for s := range NumSections {
		for pc := range c.Sections[s] {
			in := &c.Sections[s][pc]
			for i := range in.Args {
				if in.Args[i].Present() {
					f(s, pc, in, i)
				}
			}
		}
	}
}

// Peak describes what a rank's arena contains at its peak. The parts add up to Bytes.
type Peak struct {
	Bytes   Bytes  `json:"bytes"` // the end of the highest buffer
	At      string `json:"at"`    // the point with the most live bytes, such as "backward microbatch 0 subsequence 3 stage 1 layer 7"
	Parts   Parts  `json:"parts"`
	Largest []Held `json:"largest"`
}

// Held is a live buffer.
type Held struct {
	Name  string `json:"name"`
	Part  Part   `json:"part"`
	Bytes Bytes  `json:"bytes"`
}

// Parts holds the bytes of each part. In JSON, parts of 0 bytes are omitted.
type Parts [NumParts]Bytes

// MarshalJSON implements json.Marshaler. It writes an object with the parts in their order.
func (p Parts) MarshalJSON() ([]byte, error) {
	var b strings.Builder
	b.WriteByte('{')
	for part, n := range p {
		if n == 0 {
			continue
		}
		if b.Len() > 1 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:%d", partInfo[part].key, n)
	}
	b.WriteByte('}')
	return []byte(b.String()), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (p *Parts) UnmarshalJSON(text []byte) error {
	var all map[Part]Bytes
	if err := json.Unmarshal(text, &all); err != nil {
		return err
	}
	*p = Parts{}
	for part, n := range all {
		p[part] = n
	}
	return nil
}

// MarshalText implements encoding.TextMarshaler. It returns the part's key.
func (p Part) MarshalText() ([]byte, error) { return []byte(p.Key()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Part) UnmarshalText(text []byte) error {
	for part := range NumParts {
		if partInfo[part].key == string(text) {
			*p = part
			return nil
		}
	}
	return fmt.Errorf("no part of memory is named %q", text)
}

// mostHeld is the number of buffers that a Peak lists.
const mostHeld = 10

// Peaks describes each arena at its peak. lives holds the lifetimes of all buffers; if it is nil, they are
// derived from the instructions.
func (c *Code) Peaks(lives []Life) (peaks [NumArenas]Peak) {
	if lives == nil {
		lives = c.lives()
	}
	parts := c.Parts()
	for a := range peaks {
		peaks[a] = c.peak(Arena(a), parts, lives)
	}
	return peaks
}

// Life is the range of instructions of one section during which a buffer owns its bytes.
type Life struct {
	Whole      bool // live in all sections at all times
	Section    Section
	First, End int // first and last instruction; the range is empty if End is before First
}

func (l *Life) at(s Section, pc int) bool {
	return l.Whole || l.Section == s && l.First <= pc && pc <= l.End
}

// lives derives lifetimes from the instructions that use a buffer. If the last use is on a stream
// other than compute, the buffer is live until the compute stream has waited for that use.
func (c *Code) lives() []Life {
	lives := make([]Life, len(c.Buffers))
	touched := make([]bool, len(c.Buffers))
	for b := range lives {
		lives[b].End = -1
	}
	whole := func(v View) {
		if v.Present() {
			lives[v.Buffer].Whole = true
		}
	}
	for i := range c.States {
		whole(c.States[i].View)
	}
	for i := range c.Results {
		whole(c.Results[i].View)
	}
	var awaited [NumSections][]int
	for s := range c.Sections {
		awaited[s] = c.awaited(Section(s))
	}
	c.eachOperand(func(s Section, pc int, in *Instr, i int) {
		b := in.Args[i].Buffer
		l := &lives[b]
		switch {
		case !touched[b]:
			touched[b], l.Section, l.First = true, s, pc
		case l.Section != s:
			l.Whole = true
		}
		l.End = max(l.End, awaited[s][pc])
	})
	return lives
}

// awaited returns, for every instruction of a section, the position of the first wait on the compute stream
// after which the instruction is known to be done. For instructions on the compute stream, and for those that
// the compute stream does not wait for, it returns their own position.
func (c *Code) awaited(s Section) []int {
	instrs := c.Sections[s]
	out := make([]int, len(instrs))
	waits := make([]int, c.Events[s]) // by event: 0, or the position of the wait
	for pc := range instrs {
		if in := &instrs[pc]; in.Op == Wait && in.Stream == Compute {
			waits[in.Attr("event").Bits] = pc
		}
	}
	var next [NumStreams]int // by stream: the position of the first wait that covers instruction pc
	for pc := len(instrs) - 1; pc >= 0; pc-- {
		in := &instrs[pc]
		if in.Op == Record && in.Stream != Compute {
			if at := waits[in.Attr("event").Bits]; at > 0 && (next[in.Stream] == 0 || at < next[in.Stream]) {
				next[in.Stream] = at
			}
		}
		out[pc] = max(pc, next[in.Stream])
	}
	return out
}

// peak assigns every byte of an arena to the buffer that owns it when the arena is fullest.
func (c *Code) peak(a Arena, parts []Part, lives []Life) Peak {
	p := Peak{Bytes: c.Arenas[a], Largest: []Held{}}
	section, pc := c.fullest(a, lives)
	if p.Bytes > 0 && pc < len(c.Sections[section]) {
		p.At = c.Sections[section][pc].Prov.task(section, c.severalStages())
	}
	free := extents{{0, p.Bytes}}
	for b := range c.Buffers {
		if x := &c.Buffers[b]; x.Arena == a && lives[b].at(section, pc) {
			own := free.take(x.Offset, x.Offset+x.Size)
			p.Parts[parts[b]] += own
			p.Largest = append(p.Largest, Held{x.Name, parts[b], own})
		}
	}
	p.Parts[PartGaps] = p.Bytes
	for part := range PartGaps {
		p.Parts[PartGaps] -= p.Parts[part]
	}
	slices.SortStableFunc(p.Largest, func(x, y Held) int { return cmp.Compare(y.Bytes, x.Bytes) })
	p.Largest = p.Largest[:min(len(p.Largest), mostHeld)]
	return p
}

// extents are sorted ranges of bytes.
type extents []struct{ from, to Bytes }

// take removes a range, and returns the number of its bytes that were present.
func (e *extents) take(from, to Bytes) (taken Bytes) {
	first, _ := slices.BinarySearchFunc(*e, from, func(x struct{ from, to Bytes }, at Bytes) int {
		if x.to <= at {
			return -1
		}
		return 1
	})
	end := first
	var rest extents
	for ; end < len(*e) && (*e)[end].from < to; end++ {
		x := (*e)[end]
		taken += min(x.to, to) - max(x.from, from)
		if x.from < from {
			rest = append(rest, struct{ from, to Bytes }{x.from, from})
		}
		if to < x.to {
			rest = append(rest, struct{ from, to Bytes }{to, x.to})
		}
	}
	*e = slices.Replace(*e, first, end, rest...)
	return taken
}

// fullest returns the first instruction at which the most bytes are live.
func (c *Code) fullest(a Arena, lives []Life) (section Section, pc int) {
	var changes [NumSections][]Bytes // [section][instruction]: changes in live bytes
	for s := range changes {
		changes[s] = make([]Bytes, len(c.Sections[s])+1)
	}
	for b := range c.Buffers {
		x, l := &c.Buffers[b], &lives[b]
		if x.Arena == a && !l.Whole && l.First <= l.End {
			changes[l.Section][l.First] += x.Size
			changes[l.Section][l.End+1] -= x.Size
		}
	}
	section, most := SectionStep, Bytes(-1)
	for s := range changes {
		held := Bytes(0)
		for at := range c.Sections[s] {
			if held += changes[s][at]; held > most {
				section, pc, most = Section(s), at, held
			}
		}
	}
	return section, pc
}
