package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/sppovm/internal/watch"
	"sppo.dev/internal/passes/words"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/probe"
	"sppo.dev/ir"
)

// progress reports a run: as text for people, as JSON for programs.
type progress struct {
	text    io.Writer // progress
	loud    io.Writer // warnings, also those of quiet runs
	json    io.Writer // for the objects of simulations and of probe; nil: not wanted
	rewrite bool      // text is a terminal, so the line of the step is overwritten
	steps   int       // number of the last step
	newest  int       // number of the last completed step

	watchers watch.Observers // observers of a real run; a simulation has none

	began    time.Time // start of the first step
	first    int       // steps done before the run began
	shown    time.Time
	pending  bool    // the current line of the terminal is not finished
	eval     float64 // loss of the last validation, after step evalStep
	evalStep int
}

// printEvery is the minimum time between the lines of two steps if lines are not overwritten.
const printEvery = time.Second

// header describes the run.
func (s *progress) header(p *ir.Program, device string) {
	dp, pp, sp := degrees(p)
	var memory [ir.NumArenas]ir.Bytes
	for _, r := range p.Ranks {
		for a := range memory {
			memory[a] = max(memory[a], p.Codes[r.Code].Arenas[a])
		}
	}
	fmt.Fprintf(s.text, "device %s\n", device)
	fmt.Fprintf(s.text, "%s: %s parameters, %s of %d tokens per step in %s\n",
		p.Name, cli.Short(float64(parameters(p))), words.Plural(p.Run.Batch, "sequence"), p.Run.Sequence, words.Plural(int(subsequences(p)), "subsequence"))
	fmt.Fprintf(s.text, "%s = %s x %s x %s per stage; at most %s device and %s host memory per rank\n",
		words.Plural(len(p.Ranks), "rank"), words.Plural(dp, "replica"), words.Plural(pp, "stage"), words.Plural(sp, "rank"), memory[ir.Device], memory[ir.Host])
}

// degrees returns the numbers of replicas, of stages, and of ranks per stage.
func degrees(p *ir.Program) (dp, pp, sp int) {
	for _, r := range p.Ranks {
		dp, pp, sp = max(dp, int(r.DP)+1), max(pp, int(r.PP)+1), max(sp, int(r.SP)+1)
	}
	return dp, pp, sp
}

// parameters counts the elements of all tensors.
func parameters(p *ir.Program) (n int64) {
	for _, t := range p.Tensors {
		n += t.Shape[0] * t.Shape[1]
	}
	return n
}

// subsequences counts the subsequences named by the instructions' provenance.
func subsequences(p *ir.Program) int32 {
	highest := int32(0)
	for c := range p.Codes {
		for i := range p.Codes[c].Sections[ir.SectionStep] {
			highest = max(highest, p.Codes[c].Sections[ir.SectionStep][i].Prov.Subsequence)
		}
	}
	return highest + 1
}

func (s *progress) begin(step int) {
	s.began, s.first, s.newest = time.Now(), step, step
}

// due reports whether it is time to print another line of progress.
func (s *progress) due() bool {
	if time.Since(s.shown) < printEvery {
		return false
	}
	s.shown = time.Now()
	return true
}

func (s *progress) step(r *watch.Step) {
	s.newest = r.Step
	s.watchers.Observe(r)
	last := r.Step >= s.steps
	if !s.due() && !s.rewrite && !last {
		return
	}
	took := time.Since(s.began) / time.Duration(r.Step-s.first)
	left := took * time.Duration(s.steps-r.Step)
	text := fmt.Sprintf("step %d/%d  loss %.4f  %s tokens/s  %s left", r.Step, s.steps, float64(r.Loss), cli.Short(float64(r.TokensPerSecond)), left.Round(time.Second))
	if !s.rewrite {
		fmt.Fprintln(s.text, text)
		return
	}
	cli.Overwrite(s.text, text)
	s.pending = true
}

// measuring reports the measurement that begins.
func (s *progress) measuring(item probe.Item, ranks, number, of int) {
	text := fmt.Sprintf("measurement %d of %d: %s on %s", number, of, item.Name, count(ranks, "rank"))
	switch {
	case s.rewrite:
		cli.Overwrite(s.text, text)
		s.pending = true
	case number == 1 || s.due():
		fmt.Fprintln(s.text, text)
	}
}

// clear removes the line of the terminal that is not finished.
func (s *progress) clear() {
	if s.pending {
		cli.Overwrite(s.text, "")
		s.pending = false
	}
}

// say writes a permanent line, and passes it to the watchers as a note.
func (s *progress) say(format string, args ...any) {
	s.print(s.text, format, args...)
	s.note(format, args...)
}

// warn is like say for what a user must know even if the run shows no progress.
func (s *progress) warn(format string, args ...any) {
	s.print(s.loud, format, args...)
	s.note(format, args...)
}

// changed warns of each setting in which a job differs from the run that saved the checkpoint it continues from.
func (s *progress) changed(job *train.Job) {
	path, changes := job.Restored()
	for _, c := range changes {
		s.warn("note: %s has %s, but the program has %s", path, c[0], c[1])
	}
}

func (s *progress) note(format string, args ...any) {
	s.watchers.Observe(&watch.Note{Note: fmt.Sprintf(format, args...), Step: s.newest, Time: time.Now()})
}

// print writes a permanent line that the watchers do not receive.
func (s *progress) print(to io.Writer, format string, args ...any) {
	if s.pending {
		fmt.Fprintln(s.text)
		s.pending = false
	}
	fmt.Fprintf(to, format+"\n", args...)
}

func (s *progress) saved(c *train.Saved) {
	const short = 100 * time.Microsecond
	text := fmt.Sprintf("saved %s: %s in %s, of which training waited for %s", c.Path, ir.Bytes(c.Bytes), c.Took.Round(short), c.Waited.Round(short))
	s.print(s.text, "%s", text)
	s.watchers.Observe(&watch.Note{Note: text, Step: c.Step, Time: time.Now()}) // writing may end after later steps
}

func (s *progress) validation(v *watch.Validation) {
	s.eval, s.evalStep = float64(v.Loss), v.Step
	s.print(s.text, "step %d  validation loss %.4f", v.Step, float64(v.Loss))
	s.watchers.Observe(v)
}

func (s *progress) done(steps int, loss float64, device, host ir.Bytes, bubble float64) {
	if steps == s.first { // there is no loss
		s.print(s.text, "done: no steps left after step %d", steps)
		s.watchers.Observe(&watch.Done{Done: true, Steps: steps, FinalLoss: number(math.NaN()), DevicePeak: device, HostPeak: host, BubbleRatio: number(math.NaN())})
		return
	}
	summary := fmt.Sprintf("done: %s in %s, last loss %.4f", count(steps-s.first, "step"), time.Since(s.began).Round(100*time.Millisecond), loss)
	if s.evalStep == steps { // an older loss would be mistaken for the current one
		summary += fmt.Sprintf(", validation loss %.4f", s.eval)
	}
	s.print(s.text, "%s; peak %s device and %s host memory per rank; bubble %.0f%%", summary, device, host, 100*bubble)
	s.watchers.Observe(&watch.Done{Done: true, Steps: steps, FinalLoss: number(loss), DevicePeak: device, HostPeak: host, BubbleRatio: number(bubble)})
}

// line writes a JSON object.
func (s *progress) line(object any) {
	if s.json == nil {
		return
	}
	text, err := json.Marshal(object)
	if err != nil {
		panic("internal: " + err.Error())
	}
	fmt.Fprintf(s.json, "%s\n", text)
}

// number is a number that becomes null in JSON if JSON cannot express its value.
type number = watch.Number
