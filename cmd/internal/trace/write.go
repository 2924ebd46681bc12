// Package trace reads and writes simulated and measured timelines as trace-event JSON, for viewers such as
// Perfetto.
//
//	write.go  Write: a process for each rank, a thread for each stream
//	read.go   Read: a measured timeline, matched with its program
package trace

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"strconv"

	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// writer writes trace events one by one, so that the entire trace is never in memory.
type writer struct {
	w        *bufio.Writer
	program  *ir.Program
	timeline *sim.Timeline
	shown    map[int]bool
	messages map[messageKey]int // number of messages so far
	first    bool
	lines    []string // lines of the program, as JSON
	buf      []byte
}

// messageKey identifies a channel between two ranks. Messages in a channel arrive in the order in which they
// are sent.
type messageKey struct {
	from, to int
	channel  vm.Channel
	received bool // the number is the receiver's count
}

// Write writes the trace-event format: a process for each rank, a thread for each stream, an arrow for each
// message, a counter for each arena. For a measured timeline, Write includes every instruction of the given ranks,
// so that Read can restore the timeline.
func Write(w io.Writer, p *ir.Program, t *sim.Timeline, ranks []int) error {
	x := &writer{w: bufio.NewWriterSize(w, 1<<20), program: p, timeline: t, shown: map[int]bool{}, messages: map[messageKey]int{}, first: true}
	for _, line := range p.Lines {
		x.lines = append(x.lines, quoted(line))
	}
	for _, r := range ranks {
		x.shown[r] = true
	}
	about, err := x.about()
	if err != nil {
		return err
	}
	fmt.Fprintf(x.w, `%s:"ms","otherData":%s,"traceEvents":[`, opening, about)
	for _, r := range ranks {
		x.rank(r)
	}
	x.w.WriteString("\n]}\n")
	return x.w.Flush()
}

// otherData describes a trace.
type otherData struct {
	Simulated   bool   `json:"simulated"`
	Device      string `json:"device,omitempty"` // device that was measured
	Program     string `json:"program"`
	Fingerprint string `json:"fingerprint,omitempty"` // fingerprint of the program's instructions
	Machine     string `json:"machine"`
	Section     string `json:"section"`
	Round       int64  `json:"round"`
}

func (x *writer) about() (string, error) {
	o := otherData{Simulated: x.timeline.Measured == "", Program: x.program.Name, Machine: x.program.Machine.Name,
		Section: x.timeline.Section.String(), Round: x.timeline.Round}
	if !o.Simulated {
		var err error
		if o.Fingerprint, err = fingerprint(x.program); err != nil {
			return "", err
		}
		o.Device = x.timeline.Measured
	}
	text, err := json.Marshal(o)
	return string(text), err
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic("internal: " + err.Error())
	}
	return string(b)
}

// event writes one trace event.
func (x *writer) event(format string, args ...any) {
	x.buf = x.buf[:0]
	if !x.first {
		x.buf = append(x.buf, ',')
	}
	x.first = false
	x.buf = append(x.buf, '\n')
	x.buf = fmt.Appendf(x.buf, format, args...)
	x.w.Write(x.buf) // errors are kept until Flush
}

func (x *writer) rank(r int) {
	rank := &x.program.Ranks[r]
	x.event(`{"ph":"M","pid":%d,"name":"process_name","args":{"name":"rank %d: replica %d, stage %d, %d in it"}}`, r, r, rank.DP, rank.PP, rank.SP)
	x.event(`{"ph":"M","pid":%d,"name":"process_sort_index","args":{"sort_index":%d}}`, r, r)
	code := &x.program.Codes[rank.Code]
	var used [ir.NumStreams]bool
	for pc := range code.Sections[x.timeline.Section] {
		in := &code.Sections[x.timeline.Section][pc]
		if s := in.Stream; !used[s] {
			used[s] = true
			x.event(`{"ph":"M","pid":%d,"tid":%d,"name":"thread_name","args":{"name":%q}}`, r, s, s)
			x.event(`{"ph":"M","pid":%d,"tid":%d,"name":"thread_sort_index","args":{"sort_index":%d}}`, r, s, s)
		}
		x.instruction(r, code, pc, in)
	}
	for a := range ir.NumArenas {
		for _, l := range x.timeline.Memory(r, a) {
			x.event(`{"ph":"C","pid":%d,"name":"%s memory","ts":%s,"args":{"bytes":%d}}`, r, a, micros(nanos(l.At)), l.Bytes())
		}
	}
}

// instruction writes a slice and, for a send or receive, one end of the message's arrow. In a simulated timeline,
// instructions that record an event, and waits that end immediately, take no time and are left out.
func (x *writer) instruction(r int, code *ir.Code, pc int, in *ir.Instr) {
	span := x.timeline.Rank(r).Spans[pc]
	class := in.Info().Class
	if class == ir.ClassSync && span.End <= span.Begin && x.timeline.Measured == "" {
		return
	}
	v := &in.Prov
	where := ""
	for _, f := range [...]struct {
		name  string
		value int32
	}{{"microbatch", v.Microbatch}, {"subsequence", v.Subsequence}, {"layer", v.Layer}, {"stage", int32(v.Stage)}} {
		if f.value != ir.None {
			where += fmt.Sprintf(`,"%s":%d`, f.name, f.value)
		}
	}
	if in.Info().Written() > 0 && in.Args[0].Present() {
		where += `,"writes":` + quoted(code.Buffers[in.Args[0].Buffer].Name)
	}
	if int(v.Line) < len(x.lines) {
		where += `,"spec":` + x.lines[v.Line]
	}
	if int(v.Pass) < len(x.program.Passes) {
		where += fmt.Sprintf(`,"pass":%q`, x.program.Passes[v.Pass])
	}
	x.event(`{"ph":"X","pid":%d,"tid":%d,"ts":%s,"dur":%s,"name":%q,"cat":%q,"args":{"pc":%d,"phase":%q%s}}`,
		r, in.Stream, micros(nanos(span.Begin)), micros(nanos(span.End)-nanos(span.Begin)), sliceName(in), category(in), pc, v.Phase, where)
	if in.Op == ir.Send || in.Op == ir.Recv {
		x.arrow(r, in, span)
	}
}

// sliceName returns a short name: the opcode, the subsequence and the layer.
func sliceName(in *ir.Instr) string {
	name := in.Info().Name
	if s := in.Prov.Subsequence; s != ir.None {
		name += fmt.Sprintf(" s%d", s)
	}
	if l := in.Prov.Layer; l != ir.None {
		name += fmt.Sprintf(" l%d", l)
	}
	return name
}

func category(in *ir.Instr) string {
	if in.Info().Class == ir.ClassKernel {
		return in.Prov.Phase.String()
	}
	return in.Info().Class.String()
}

// arrow writes one end of a message's arrow if both ranks are shown. Sends and receives are counted separately,
// so that the two ends of a message have the same number.
func (x *writer) arrow(r int, in *ir.Instr, span sim.Span) {
	peer := int(in.Attr("peer").Int(x.program.Ranks[r].Consts))
	if !x.shown[peer] {
		return
	}
	key, phase := messageKey{r, peer, vm.ChannelOf(in.Stream), false}, `"s"`
	if in.Op == ir.Recv {
		key.from, key.to, key.received, phase = peer, r, true, `"f","bp":"e"`
	}
	x.messages[key]++
	x.event(`{"ph":%s,"pid":%d,"tid":%d,"ts":%s,"id":"%d>%d.%d.%d","name":"message","cat":"message"}`,
		phase, r, in.Stream, micros(nanos(span.Begin)), key.from, key.to, key.channel, x.messages[key])
}

// nanos rounds a time to the precision of the format. Starts and ends are rounded, not durations: with rounded
// durations, a slice could end after the start of its successor, and viewers would nest the two.
func nanos(s ir.Seconds) int64 { return int64(math.Round(float64(s) * 1e9)) }

// micros formats a time in microseconds.
func micros(nanos int64) string { return strconv.FormatFloat(float64(nanos)/1e3, 'f', 3, 64) }
