package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sppo/cmd/internal/cli"
	"sppo/ir"
	"sppo/vm"
	"sppo/vm/sim"
)

// mostSpans is how many instructions a trace has before it is cut down to one rank of each stage: beyond,
// files get too large for viewers to be pleasant.
const mostSpans = 500_000

func trace(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "the trace to write")
	ranks := flags.String("ranks", "", "all, stages (one rank of each) or a list as in 0,8,16; all by default, or stages where all would be too many")
	section := flags.String("section", "step", "init, step or eval")
	set := cli.SetFlag(flags, "set")
	return func(env *cli.Env, args []string) error {
		if *out == "" {
			return cli.Usagef("trace: -o says which file to write")
		}
		if err := cli.CheckOutput(*out); err != nil {
			return err
		}
		s := slices.Index(sectionNames(), *section)
		if s < 0 {
			return cli.Usagef("there is no section %q; there are %s", *section, strings.Join(sectionNames(), ", "))
		}
		job, err := cli.OpenProgram(args[0], *set)
		if err != nil {
			return err
		}
		timeline, err := sim.Run(job.Program, ir.Section(s), sim.Options{Spans: true})
		if err != nil {
			return cli.Wrong(err)
		}
		chosen, err := chooseRanks(*ranks, job.Program, timeline)
		if err != nil {
			return err
		}
		err = cli.WriteFile(*out, func(w io.Writer) error { return writeTrace(w, job.Program, timeline, chosen) })
		if err == nil {
			fmt.Fprintf(env.Stderr, "%s: simulated %s of %d ranks in %s; %d of them are in %s\n",
				env.Name, *section, len(job.Program.Ranks), timeline.Makespan, len(chosen), *out)
		}
		return err
	}
}

// chooseRanks reads --ranks.
func chooseRanks(text string, p *ir.Program, t *sim.Timeline) ([]int, error) {
	var all, stages, list []int
	seen := map[int32]bool{}
	for r := range p.Ranks {
		all = append(all, r)
		if code := p.Ranks[r].Code; !seen[code] {
			seen[code] = true
			stages = append(stages, r)
		}
	}
	switch {
	case text == "all" || text == "" && t.Instructions <= mostSpans:
		return all, nil
	case text == "stages" || text == "":
		return stages, nil
	}
	for _, word := range strings.Split(text, ",") {
		r, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || r < 0 || r >= len(p.Ranks) {
			return nil, cli.Usagef("--ranks %s: it is all, stages, or ranks from 0 to %d", text, len(p.Ranks)-1)
		}
		if !slices.Contains(list, r) {
			list = append(list, r)
		}
	}
	return list, nil
}

// traceWriter writes trace events one by one: nothing of a trace's size is in memory.
type traceWriter struct {
	w        *bufio.Writer
	program  *ir.Program
	timeline *sim.Timeline
	shown    map[int]bool
	messages map[messageKey]int // so far
	first    bool
	lines    []string // of the program, as JSON
	buf      []byte
}

// messageKey is a direction in which messages keep their order.
type messageKey struct {
	from, to int
	channel  vm.Channel
	received bool // counted by the receiver
}

// writeTrace writes the trace-event format: a process for each rank, a thread for each stream, an arrow for each
// message, a counter for each arena.
func writeTrace(w io.Writer, p *ir.Program, t *sim.Timeline, ranks []int) error {
	x := &traceWriter{w: bufio.NewWriterSize(w, 1<<20), program: p, timeline: t, shown: map[int]bool{}, messages: map[messageKey]int{}, first: true}
	for _, line := range p.Lines {
		x.lines = append(x.lines, quoted(line))
	}
	for _, r := range ranks {
		x.shown[r] = true
	}
	fmt.Fprintf(x.w, `{"displayTimeUnit":"ms","otherData":{"simulated":true,"program":%s,"machine":%s,"section":%q},"traceEvents":[`,
		quoted(p.Name), quoted(p.Machine.Name), t.Section)
	for _, r := range ranks {
		x.rank(r)
	}
	x.w.WriteString("\n]}\n")
	return x.w.Flush()
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic("internal: " + err.Error())
	}
	return string(b)
}

// event writes one object.
func (x *traceWriter) event(format string, args ...any) {
	x.buf = x.buf[:0]
	if !x.first {
		x.buf = append(x.buf, ',')
	}
	x.first = false
	x.buf = append(x.buf, '\n')
	x.buf = fmt.Appendf(x.buf, format, args...)
	x.w.Write(x.buf) // errors are kept until Flush
}

func (x *traceWriter) rank(r int) {
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
			x.event(`{"ph":"C","pid":%d,"name":"%s memory","ts":%s,"args":{"bytes":%d}}`, r, a, micros(l.At), l.Bytes)
		}
	}
}

// instruction writes a slice, and the end of an arrow where it is one. A record, or a wait for what was there before,
// takes no time and is left out.
func (x *traceWriter) instruction(r int, code *ir.Code, pc int, in *ir.Instr) {
	span := x.timeline.Rank(r).Spans[pc]
	class := in.Info().Class
	if class == ir.ClassSync && span.End <= span.Begin {
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
		r, in.Stream, micros(span.Begin), micros(span.End-span.Begin), sliceName(in), category(in), pc, v.Phase, where)
	if in.Op == ir.Send || in.Op == ir.Recv {
		x.arrow(r, in, span)
	}
}

// sliceName is short: what, and of which subsequence and layer.
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

// arrow writes one end of a message's arrow, if both ends are shown. Sends and receives are counted apart.
func (x *traceWriter) arrow(r int, in *ir.Instr, span sim.Span) {
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
		phase, r, in.Stream, micros(span.Begin), key.from, key.to, key.channel, x.messages[key])
}

// micros writes a time as the format wants it.
func micros(s ir.Seconds) string { return strconv.FormatFloat(float64(s)*1e6, 'f', 3, 64) }
