package main

import (
	"bytes"
	"compress/gzip"
	_ "embed" // embeds the parts of the page
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/trace"
	"sppo.dev/internal/infile"
	"sppo.dev/internal/passes/words"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// The page is one file: its parts are combined here with the data. It loads nothing from the network.
var (
	//go:embed page/view.html
	pageHTML string
	//go:embed page/view.css
	pageStyle string
	//go:embed page/view.js
	pageScript string
)

func view(flags *pflag.FlagSet) cli.Action {
	out := flags.StringP("output", "o", "", "write the page to this file")
	ranks := flags.String("ranks", "stages", "ranks to draw: stages (one rank of each), all, or a list such as 0,8,16")
	cli.Files(flags, "output", "html", "svg")
	cli.Words(flags, "ranks", rankWords)
	svg := flags.Bool("svg", false, "draw a figure suitable for printing, as if the output ended in .svg")
	var theme string
	cli.Choice(flags, &theme, "theme", "light", "colours of a figure: light or dark; a page follows the browser", "light", "dark")
	set := cli.JobFlags(flags)
	return func(env *cli.Env, files []string) error {
		if *out == "" {
			return cli.Usagef("view: give the output file with -o")
		}
		if err := cli.CheckOutput(*out, files...); err != nil {
			return err
		}
		switch ext := strings.ToLower(filepath.Ext(*out)); {
		case ext == ".svg" || *svg:
			return draw(env, files, set(), *ranks, theme, *out)
		case flags.Changed("theme"):
			return cli.Usagef("view: --theme is for figures, such as -o timeline.svg; a page follows the browser")
		case ext != "" && ext != ".html" && ext != ".htm":
			return cli.Usagef("cannot write %s: the output must end in .html for a page or .svg for a figure", *out)
		}
		if trace.Is(files[0]) {
			return cli.Usagef("%s is a trace: give the program that was run before it, as in %s view PROGRAM %s", files[0], env.Name, files[0])
		}
		w := cli.NewWatch(env)
		defer w.End()
		p := page{watch: w}
		for _, file := range files {
			if err := p.add(file, set(), *ranks); err != nil {
				return err
			}
		}
		if err := cli.WriteFile(*out, p.write); err != nil {
			return err
		}
		w.End()
		fmt.Fprintf(env.Stderr, "%s: %s; %s shows %s of %s\n", env.Name, p.source(), *out, words.Plural(p.spans, "instruction"), words.Plural(p.ranks, "rank"))
		return nil
	}
}

// page is the input of the page's script: a head in JSON, and the columns of numbers to which the head refers.
type page struct {
	watch    *cli.Watch
	programs []pageProgram
	columns  bytes.Buffer
	spans    int
	ranks    int

	last   *ir.Program             // the program added last
	peaks  [][ir.NumArenas]ir.Peak // [code]: its memory peaks
	chosen []int                   // the ranks of that program that are shown
	paired bool                    // the second timeline is a measurement of the first program
}

// source describes where the timelines come from: a simulation, or a simulation and a measurement.
func (p *page) source() string {
	if !p.paired {
		return "simulated"
	}
	simulated, measured := p.programs[0].Makespan, p.programs[1].Makespan
	return fmt.Sprintf("a measured step took %s, %.3f times the simulated %s", ir.Seconds(measured), measured/simulated, ir.Seconds(simulated))
}

// column holds the start, the length and the type of a column of numbers.
type column [3]any

type pageProgram struct {
	Name     string      `json:"name"`
	Machine  string      `json:"machine"`
	Measured bool        `json:"measured"` // otherwise simulated
	Makespan float64     `json:"makespan"`
	TGS      float64     `json:"tgs"`
	MFU      float64     `json:"mfu"`
	Bubble   float64     `json:"bubble"`
	Exposed  float64     `json:"exposed"`
	Critical string      `json:"critical"`
	Streams  []string    `json:"streams"`
	Ops      []string    `json:"ops"`
	Passes   []string    `json:"passes"`
	Lines    []string    `json:"lines"`
	Results  []string    `json:"results"` // names of buffers
	Uses     [][2]string `json:"uses"`    // by number: the colour and the name of each use of memory
	Path     pagePath    `json:"path"`    // the critical path
	Sums     any         `json:"sums"`    // sums along the path
	Codes    []pageCode  `json:"codes"`
	Ranks    []pageRank  `json:"ranks"`
}

// pageCode has a column for each property of its instructions.
type pageCode struct {
	Op     column `json:"op"`
	Stream column `json:"stream"`
	Kind   column `json:"kind"`
	Phase  column `json:"phase"`
	Sub    column `json:"sub"`
	Layer  column `json:"layer"`
	Micro  column `json:"micro"`
	Stage  column `json:"stage"`
	Line   column `json:"line"`
	Pass   column `json:"pass"`
	Result column `json:"result"`
}

// pagePath has a column for each property of its segments. Rank holds indexes among the shown ranks: that of the
// rank itself or of one that does the same work. It holds -1 where nothing ran or no such rank is shown.
type pagePath struct {
	Rank  column `json:"rank"`
	PC    column `json:"pc"`
	Begin column `json:"begin"`
	End   column `json:"end"`
}

type pageRank struct {
	Rank   int          `json:"rank"`
	Stage  int32        `json:"stage"`
	Count  int          `json:"count"`
	Code   int          `json:"code"` // index among the shown codes
	Begin  column       `json:"begin"`
	End    column       `json:"end"`
	Memory []pageMemory `json:"memory"`

	Cause pageCauses `json:"cause"`
}

// pageCauses has a column for the instructions that wait. The other columns describe the instruction that each of
// them waits for last: the index of the shown rank, the instruction on that rank, and the actual rank.
type pageCauses struct {
	Of   column `json:"of"`
	At   column `json:"at"`
	PC   column `json:"pc"`
	Rank column `json:"rank"`
}

type pageMemory struct {
	Arena    string   `json:"arena"`
	Placed   ir.Bytes `json:"placed"` // highest byte in use
	Capacity ir.Bytes `json:"capacity"`
	When     string   `json:"when"`    // the moment with the most live bytes
	Parts    [][2]any `json:"parts"`   // name and bytes
	Largest  [][3]any `json:"largest"` // name, part and bytes

	// The columns describe changes, first to last: the time, the use, and the bytes of this use from then on.
	At    column `json:"at"`
	Use   column `json:"use"`
	Bytes column `json:"bytes"`
}

// draw writes a figure of one job.
func draw(env *cli.Env, files, set []string, ranks, theme, out string) error {
	if len(files) > 1 {
		return cli.Usagef("view: a figure shows one program; use a page to compare two")
	}
	watch := cli.NewWatch(env)
	defer watch.End()
	job, t, chosen, err := simulated(watch, files[0], set, ranks)
	if err != nil {
		return err
	}
	program := job.Program
	title := strings.TrimSuffix(filepath.Base(files[0]), ".sppo")
	err = cli.WriteFile(out, func(w io.Writer) error { return timelineFigure(w, theme, title, program, t, chosen) })
	watch.End()
	if err == nil {
		fmt.Fprintf(env.Stderr, "%s: simulated; %s shows %s\n", env.Name, out, words.Plural(len(chosen), "rank"))
	}
	return err
}

// simulated simulates a step of a job and selects the ranks to show.
func simulated(w *cli.Watch, file string, set []string, ranks string) (*cli.Job, *sim.Timeline, []int, error) {
	job, err := cli.OpenProgram(w, file, set)
	if err != nil {
		return nil, nil, nil, err
	}
	w.Say("drawing the timeline")
	t, err := sim.Run(job.Program, ir.SectionStep, sim.Options{Spans: true})
	if err != nil {
		return nil, nil, nil, cli.Wrong(err)
	}
	chosen, err := chooseRanks(ranks, job.Program, t)
	return job, t, chosen, err
}

// add simulates a job and adds it to the page. If the file is a trace, add adds it as the measurement of the
// previous job.
func (p *page) add(file string, set []string, ranks string) error {
	name := strings.TrimSuffix(filepath.Base(file), ".sppo")
	if trace.Is(file) {
		t, err := measured(file, p.last)
		if err == nil {
			p.paired = true
			p.put(name, t.Measured, t)
		}
		return err
	}
	job, t, chosen, err := simulated(p.watch, file, set, ranks)
	if err != nil {
		return err
	}
	p.last, p.chosen, p.peaks = job.Program, chosen, job.Peaks()
	p.put(name, job.Program.Machine.Name, t)
	return nil
}

// measured reads a trace of a step of the program.
func measured(file string, p *ir.Program) (*sim.Timeline, error) {
	f, size, err := infile.Open(file)
	if err != nil {
		return nil, cli.Wrong(err)
	}
	defer f.Close()
	t, err := trace.Read(io.LimitReader(f, size), p)
	switch {
	case err != nil:
		return nil, cli.Usagef("%s: %w", file, err)
	case t.Section != ir.SectionStep:
		return nil, cli.Usagef("%s: it is a trace of section %s, not of a step", file, t.Section)
	}
	return t, nil
}

// put adds a timeline of the program that was added last.
func (p *page) put(name, machine string, t *sim.Timeline) {
	program, chosen := p.last, p.chosen
	rank, stream, share := t.Busiest()
	x := pageProgram{
		Name: name, Machine: machine, Measured: t.Measured != "",
		Makespan: float64(t.Makespan), TGS: t.TGS(), MFU: t.MFU(), Bubble: t.BubbleRatio(), Exposed: float64(t.Exposed()),
		Critical: fmt.Sprintf("%s of rank %d, %.0f%%", stream, rank, 100*share),
		Passes:   program.Passes, Lines: program.Lines, Sums: cli.CriticalPath(program, t),
	}
	causes, standIns := t.Causes(), newStandIns(program, t, chosen)
	x.Path = p.path(causes, standIns)
	for s := range ir.NumStreams {
		x.Streams = append(x.Streams, s.String())
	}
	for op := range ir.Ops {
		x.Ops = append(x.Ops, ir.Ops[op].Name)
	}
	for part := range ir.PartGaps {
		x.Uses = append(x.Uses, [2]string{useColour(part), part.String()})
	}
	shown := map[int32]int{} // index among the shown codes, by code
	for _, r := range chosen {
		code := program.Ranks[r].Code
		if _, ok := shown[code]; !ok {
			shown[code] = len(x.Codes)
			x.Codes = append(x.Codes, p.code(&x, &program.Codes[code], t.Rank(r).Spans))
		}
		rank := p.rank(t, r, shown[code], program.Ranks[r].PP, len(chosen) < len(program.Ranks))
		p.causes(&rank, causes, standIns)
		x.Ranks = append(x.Ranks, rank)
	}
	p.programs = append(p.programs, x)
}

func (p *page) rank(t *sim.Timeline, r, code int, stage int32, alone bool) pageRank {
	x := pageRank{Rank: r, Stage: stage, Code: code, Count: 1}
	if alone {
		x.Count = t.Rank(r).Count
	}
	spans := t.Rank(r).Spans
	begin, end := make([]float64, len(spans)), make([]float64, len(spans))
	for pc, s := range spans {
		begin[pc], end[pc] = float64(s.Begin), float64(s.End)
	}
	x.Begin, x.End = addColumn(p, "f64", begin), addColumn(p, "f64", end)
	capacity := capacityOf(p.last)
	for a := range ir.NumArenas {
		code := p.last.Ranks[r].Code
		m := pageMemory{Arena: a.String(), Placed: p.last.Codes[code].Arenas[a], Capacity: capacity[a]}
		m.fill(&p.peaks[code][a])
		p.levels(&m, t.Memory(r, a))
		x.Memory = append(x.Memory, m)
	}
	p.spans += len(spans)
	p.ranks++
	return x
}

// capacityOf returns the memory that a rank has.
func capacityOf(p *ir.Program) [ir.NumArenas]ir.Bytes {
	return [ir.NumArenas]ir.Bytes{ir.Device: ir.Bytes(p.Machine.DeviceMemory), ir.Host: p.Machine.HostMemoryPerRank()}
}

// levels adds the columns of an arena's changes.
func (p *page) levels(m *pageMemory, levels []sim.Level) {
	var at, held []float64
	var use []uint8
	var last ir.Parts
	for _, l := range levels {
		for part, n := range l.Parts {
			if n != last[part] {
				at, use, held = append(at, float64(l.At)), append(use, uint8(part)), append(held, float64(n))
			}
		}
		last = l.Parts
	}
	m.At, m.Use, m.Bytes = addColumn(p, "f64", at), addColumn(p, "u8", use), addColumn(p, "f64", held)
}

// fill records the contents of the memory at its peak.
func (m *pageMemory) fill(peak *ir.Peak) {
	m.When, m.Parts, m.Largest = peak.At, [][2]any{}, [][3]any{}
	for part, n := range peak.Parts {
		if n > 0 {
			m.Parts = append(m.Parts, [2]any{ir.Part(part).String(), n})
		}
	}
	for _, h := range peak.Largest {
		m.Largest = append(m.Largest, [3]any{h.Name, h.Part.String(), h.Bytes})
	}
}

// code adds the instructions that a group of ranks runs; the spans come from one of these ranks.
func (p *page) code(x *pageProgram, code *ir.Code, spans []sim.Span) pageCode {
	instrs := code.Sections[ir.SectionStep]
	n := len(instrs)
	op, stream, phase, pass := make([]uint8, n), make([]uint8, n), make([]uint8, n), make([]uint8, n)
	sub, layer, micro, stage, line := make([]int16, n), make([]int16, n), make([]int16, n), make([]int16, n), make([]uint16, n)
	result := make([]int32, n)
	first := int32(len(x.Results))
	for i := range code.Buffers {
		x.Results = append(x.Results, code.Buffers[i].Name)
	}
	for pc := range instrs {
		in := &instrs[pc]
		v := &in.Prov
		op[pc], stream[pc], phase[pc], pass[pc], line[pc] = uint8(in.Op), uint8(in.Stream), uint8(v.Phase), v.Pass, v.Line
		sub[pc], layer[pc], micro[pc], stage[pc] = int16(v.Subsequence), int16(v.Layer), int16(v.Microbatch), v.Stage
		result[pc] = ir.None
		if in.Info().Written() > 0 && in.Args[0].Present() {
			result[pc] = first + int32(in.Args[0].Buffer)
		}
	}
	return pageCode{
		addColumn(p, "u8", op), addColumn(p, "u8", stream), addColumn(p, "u8", spanKinds(code, spans)), addColumn(p, "u8", phase), addColumn(p, "i16", sub),
		addColumn(p, "i16", layer), addColumn(p, "i16", micro), addColumn(p, "i16", stage), addColumn(p, "u16", line), addColumn(p, "u8", pass), addColumn(p, "i32", result),
	}
}

// addColumn stores a column, aligned to 8 bytes.
func addColumn[T any](p *page, kind string, values []T) column {
	for p.columns.Len()%8 != 0 {
		p.columns.WriteByte(0)
	}
	c := column{p.columns.Len(), len(values), kind}
	if err := binary.Write(&p.columns, binary.LittleEndian, values); err != nil {
		panic("internal: " + err.Error())
	}
	return c
}

// Kinds of spans; each has a colour on the page. The script has the same list.
const (
	showForward = iota
	showBackward
	showOther
	showD2H
	showH2D
	showCollective
	showMessage
	showBubble
	showExposed
	showCollectiveWait
	showWeights
	showNothing = 255
)

// spanKinds returns the kind of span to show for each instruction. For a wait on the compute stream, waitKind
// selects the kind; waits on other streams are not shown.
func spanKinds(code *ir.Code, spans []sim.Span) []uint8 {
	instrs := code.Sections[ir.SectionStep]
	kinds := make([]uint8, len(instrs))
	recorded := make([]int, code.Events[ir.SectionStep]) // by event: the instruction after which it is recorded
	var last [ir.NumStreams]int
	for pc := range instrs {
		in := &instrs[pc]
		switch in.Info().Class {
		case ir.ClassSync:
			event := in.Attr("event").Bits
			kinds[pc] = showNothing
			if in.Op == ir.Record {
				recorded[event] = last[in.Stream]
			} else if in.Stream == ir.Compute {
				kinds[pc] = waitKind(instrs[recorded[event]].Stream, spans[pc], spans[recorded[event]])
			}
			continue
		case ir.ClassComm:
			kinds[pc] = showCollective
			if in.Op == ir.Send || in.Op == ir.Recv {
				kinds[pc] = showMessage
			}
		default:
			kinds[pc] = workKind(in)
		}
		last[in.Stream] = pc
	}
	return kinds
}

// waitKind returns showExposed for a wait for a copy, and showCollectiveWait for a wait for a collective that
// began in the first half of the wait. All other waits are bubbles.
func waitKind(stream ir.Stream, wait, work sim.Span) uint8 {
	late := work.Begin-wait.Begin > (wait.End-wait.Begin)/2
	switch {
	case stream == ir.D2H || stream == ir.H2D:
		return showExposed
	case (stream == ir.Coll || stream == ir.Params) && !late:
		return showCollectiveWait
	}
	return showBubble
}

func workKind(in *ir.Instr) uint8 {
	switch {
	case in.Op == ir.CopyD2H:
		return showD2H
	case in.Op == ir.CopyH2D:
		return showH2D
	case in.Prov.Phase == ir.PhaseForward:
		return showForward
	case in.Prov.Phase == ir.PhaseBackward:
		return showBackward
	case in.Prov.Phase == ir.PhaseWeights:
		return showWeights
	}
	return showOther
}

// write assembles the page.
func (p *page) write(w io.Writer) error {
	var names []string
	for i := range p.programs {
		names = append(names, p.programs[i].Name)
	}
	head, err := json.Marshal(map[string]any{"programs": p.programs})
	if err != nil {
		return err
	}
	filled := strings.NewReplacer("{{.Title}}", html.EscapeString(strings.Join(names, " and ")), "{{.Style}}", pageStyle,
		"{{.Head}}", string(head), "{{.Script}}", pageScript).Replace(pageHTML)
	before, after, _ := strings.Cut(filled, "{{.Data}}")
	if _, err := io.WriteString(w, before); err != nil {
		return err
	}
	base := base64.NewEncoder(base64.StdEncoding, w)
	zip := gzip.NewWriter(base)
	_, err = zip.Write(p.columns.Bytes())
	if err := errors.Join(err, zip.Close(), base.Close()); err != nil {
		return err
	}
	_, err = io.WriteString(w, after)
	return err
}
