package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes/report"
	"sppo.dev/internal/passes/search"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

func compareJobs(flags *pflag.FlagSet) cli.Action {
	sweeps := flags.StringArray("sweep", nil, "simulate one job for each value of a key, given as `KEY=V1,V2,...`; if repeated, one for each combination of values")
	cli.Words(flags, "sweep", cli.KeyWords())
	against := flags.Bool("baselines", false, "also simulate every job with the shipped schedules of other systems: "+strings.Join(baselines(), ", "))
	var format string
	cli.Choice(flags, &format, "format", "text", "text, csv, json or svg", "text", "csv", "json", "svg")
	set := cli.JobFlags(flags)
	return func(env *cli.Env, files []string) error {
		variants, err := variantsOf(files, set(), *sweeps)
		if err == nil && *against {
			variants, err = withBaselines(variants)
		}
		if err != nil {
			return err
		}
		rows, err := simulateAll(env, variants)
		if len(rows) == 0 {
			return err
		}
		fmt.Fprintf(env.Stderr, "%s: simulated in virtual time\n", env.Name)
		return errors.Join(tables[format](env.Stdout, rows), err)
	}
}

// sayEvery is the interval between progress messages.
const sayEvery = 3 * time.Second

// simulateAll simulates all variants, one for each line of the table. For a variant that cannot be compiled,
// the line holds the reason. If none can be compiled, or if an error is hopeless, simulateAll returns only the
// error. If the user stops it, it returns the lines so far and an error.
func simulateAll(env *cli.Env, variants []variant) ([]result, error) {
	var rows []result
	var last error
	failed, said := 0, time.Now()
	w := cli.NewWatch(env)
	defer w.End()
	for i, v := range variants {
		if !cli.IsTerminal(env.Stderr) && time.Since(said) > sayEvery {
			said = time.Now()
			fmt.Fprintf(env.Stderr, "%s: %d of %d\n", env.Name, i, len(variants))
		}
		w.Say("simulating %d of %d: %s", i+1, len(variants), strings.Join(append([]string{v.file}, v.swept...), " "))
		var row result
		err := w.Do(func() (err error) {
			row, err = v.simulate()
			return err
		})
		if w.Stopped() {
			return rows, cli.Stopped("stopped after %d of %d", i, len(variants))
		}
		if hopeless(err) {
			return nil, err
		}
		if err != nil {
			last = err
			row.Error = plainly(err)
			failed++
		}
		rows = append(rows, row)
	}
	if failed == len(rows) {
		return nil, last
	}
	return rows, nil
}

// mistakes lists the error codes of overrides that would be wrong in every job.
var mistakes = []lang.Code{lang.Syntax, lang.UnknownKey, lang.UnknownName, lang.UnknownUnit, lang.WrongDimension, lang.WrongType}

// hopeless reports whether an error is due to the command line or an unreadable file rather than to one variant.
func hopeless(err error) bool {
	var d *lang.Diagnostic
	if !errors.As(err, &d) {
		var missing *fs.PathError
		return errors.As(err, &missing)
	}
	return strings.HasPrefix(d.Pos.File, "--") && slices.Contains(mistakes, d.Code)
}

// variant is a job to be simulated for one line of the table.
type variant struct {
	file  string
	set   []string // overrides for all lines
	swept []string // overrides for this line
	shown []string // these overrides as the table shows them; nil: unchanged

	group    string // lines of one group are compared with the group's first line
	baseline string // the baseline that is the schedule, or ""
}

// variantsOf combines every file with every combination of swept values; the last sweep varies fastest.
func variantsOf(files, set, sweeps []string) ([]variant, error) {
	combinations := [][]string{nil}
	for _, text := range sweeps {
		key, list, ok := strings.Cut(text, "=")
		if !ok || key == "" || list == "" {
			return nil, cli.Usagef("--sweep %s: write KEY=V1,V2,..., for example schedule.subsequences=16,32", text)
		}
		var next [][]string
		for _, c := range combinations {
			for _, value := range splitValues(list) {
				if strings.TrimSpace(value) == "" {
					return nil, cli.Usagef("--sweep %s: there is an empty value between two commas", text)
				}
				next = append(next, append(c[:len(c):len(c)], key+"="+strings.TrimSpace(value)))
			}
		}
		combinations = next
	}
	var out []variant
	for _, file := range files {
		for _, kind := range []struct {
			is   bool
			name string
		}{{cli.IsProgram(file), "program"}, {filepath.Ext(file) == ".json", "plan"}} {
			if len(sweeps) > 0 && kind.is {
				return nil, cli.Usagef("%s is a %s: --sweep needs a spec", file, kind.name)
			}
		}
		for _, c := range combinations {
			out = append(out, variant{file: file, set: set, swept: c})
		}
	}
	return out, nil
}

// baselines lists the shipped schedules of other systems whose sizes the compiler chooses.
func baselines() []string { return lang.ShippedAuto(shipped.Files, "schedule") }

// withBaselines adds, after every variant, the same job with each of the baselines as its schedule.
func withBaselines(variants []variant) (out []variant, err error) {
	const key = "schedule="
	for _, v := range variants {
		if cli.IsProgram(v.file) || filepath.Ext(v.file) == ".json" {
			return nil, cli.Usagef("%s is a program or a plan: --baselines needs a spec or the folder of a model", v.file)
		}
		of := v.swept[:len(v.swept):len(v.swept)]
		v.group = v.file + " " + strings.Join(of, " ")
		own := v
		own.shown = append(of, key+ownSchedule)
		out = append(out, own)
		for _, name := range baselines() {
			b := v
			b.baseline, b.swept, b.shown = name, append(of, key+name+"()"), append(of, key+name)
			out = append(out, b)
		}
	}
	return out, nil
}

// ownSchedule is the name of the schedule that a job has without a baseline.
const ownSchedule = "its own"

// splitValues splits a list of values at commas outside of brackets, because a value may itself be a list.
func splitValues(list string) []string {
	var out []string
	depth, from := 0, 0
	for i, c := range list {
		switch c {
		case '[', '(':
			depth++
		case ']', ')':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, list[from:i])
				from = i + 1
			}
		}
	}
	return append(out, list[from:])
}

// result is one line of the table. Users may rely on its JSON keys and on the CSV columns, which have the same
// names.
type result struct {
	Name         string   `json:"name"`
	Set          []string `json:"set"`
	Simulated    bool     `json:"simulated"`
	Ranks        int      `json:"ranks"`
	Layout       string   `json:"layout"` // dp x pp x sp
	Subsequences int      `json:"subsequences"`
	StepS        float64  `json:"step_s"`
	TGS          float64  `json:"tgs"`
	MFU          float64  `json:"mfu"`
	BubbleRatio  float64  `json:"bubble_ratio"`
	ExposedS     float64  `json:"exposed_transfer_s"`
	DevicePeak   ir.Bytes `json:"device_peak_bytes"`
	HostPeak     ir.Bytes `json:"host_peak_bytes"`
	Fits         bool     `json:"fits"`
	Error        string   `json:"error,omitempty"`
	Batch        int64    `json:"batch"`    // sequences per step
	Schedule     []string `json:"schedule"` // decisions such as "schedule.strategy=sppo"; empty for a program
	Sequence     int64    `json:"sequence"` // tokens per sequence
	GPUs         int      `json:"gpus"`     // of the cluster

	capacity [ir.NumArenas]ir.Bytes

	group, baseline string // of its variant

	weighed map[string]string // the share of the saved activations, for keys that the offload pass decides
}

// share writes a share as the value of a key that the offload pass decides.
func share(of float64) string { return fmt.Sprintf("%.0f%%", 100*of) }

// job returns the file's name without its folder or extension.
func (r *result) job() string { return strings.TrimSuffix(filepath.Base(r.Name), ".sppo") }

// label returns a name for a line. The parameter same reports whether all lines have the same job.
func (r *result) label(same bool) string {
	var words []string
	if !same || len(r.Set) == 0 {
		words = append(words, r.job())
	}
	for _, s := range r.Set {
		words = append(words, keyName(s))
	}
	return strings.Join(words, " ")
}

// keyName returns the text after the name of the block, such as "pp" for "schedule.pp" or "lr = 1" for
// "train.optimizer.lr = 1".
func keyName(text string) string {
	key, _, _ := strings.Cut(text, "=")
	return text[strings.LastIndexByte(key, '.')+1:]
}

func oneJob(rows []result) bool {
	return !slices.ContainsFunc(rows, func(r result) bool { return r.Name != rows[0].Name })
}

// simulate compiles a variant and runs one step. The program is released before the next variant is compiled.
func (v *variant) simulate() (result, error) {
	c := result{Name: v.file, Set: append([]string{}, v.swept...), Simulated: true, Schedule: []string{}, group: v.group, baseline: v.baseline}
	if v.shown != nil {
		c.Set = v.shown
	}
	job, err := cli.OpenProgram(nil, v.file, append(v.set[:len(v.set):len(v.set)], v.swept...))
	if err != nil {
		return c, v.asSwept(err)
	}
	p := job.Program
	c.Batch, c.Sequence = int64(p.Run.Batch), p.Run.Sequence
	if job.Plan != nil {
		keys, values := search.Pins(job.Plan.Schedule)
		for i, key := range keys {
			if values[i] != "" {
				c.Schedule = append(c.Schedule, key+"="+values[i])
			}
		}
		_, offloaded, recomputed := report.Shares(job.Plan)
		c.weighed = map[string]string{"schedule.recompute": share(recomputed), "schedule.offload": share(offloaded)}
	}
	t, err := sim.Run(p, ir.SectionStep, sim.Options{})
	if err != nil {
		return c, err
	}
	c.Ranks, c.StepS, c.TGS, c.MFU = len(p.Ranks), float64(t.Makespan), t.TGS(), t.MFU()
	c.BubbleRatio, c.ExposedS = t.BubbleRatio(), float64(t.Exposed())
	var dp, pp, sp int32
	for _, r := range p.Ranks {
		dp, pp, sp = max(dp, r.DP+1), max(pp, r.PP+1), max(sp, r.SP+1)
	}
	c.Layout = fmt.Sprintf("%d x %d x %d", dp, pp, sp)
	for i := range p.Codes {
		code := &p.Codes[i]
		c.DevicePeak, c.HostPeak = max(c.DevicePeak, code.Arenas[ir.Device]), max(c.HostPeak, code.Arenas[ir.Host])
		for pc := range code.Sections[ir.SectionStep] {
			c.Subsequences = max(c.Subsequences, int(code.Sections[ir.SectionStep][pc].Prov.Subsequence)+1)
		}
	}
	c.capacity, c.GPUs = capacityOf(p), p.Machine.Nodes*p.Machine.GPUsPerNode
	c.Fits = c.DevicePeak <= c.capacity[ir.Device] && c.HostPeak <= c.capacity[ir.Host]
	return c, nil
}

// asSwept replaces --set by --sweep in an error about a swept value.
func (v *variant) asSwept(err error) error {
	var all lang.Diagnostics
	if errors.As(err, &all) {
		for _, d := range all {
			if d.Pos.File == "--set" && slices.Contains(v.swept, d.Source) {
				d.Pos.File = "--sweep"
			}
		}
	}
	return err
}

// plainly reduces an error to one line, without its position if that is on the command line.
func plainly(err error) string {
	var d *lang.Diagnostic
	if errors.As(err, &d) {
		if d.Pos.Line == 0 || strings.HasPrefix(d.Pos.File, "--") {
			return d.Message
		}
		return fmt.Sprintf("%s: %s", d.Pos, d.Message)
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}

// tables maps each format to its writer.
var tables = map[string]func(io.Writer, []result) error{
	"text": compareText,
	"csv":  compareCSV,
	"svg":  comparisonFigure,
	"json": func(w io.Writer, rows []result) error {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(struct {
			Simulated bool     `json:"simulated"`
			Rows      []result `json:"rows"`
		}{true, rows})
	},
}

// rate returns the tokens per second of all GPUs.
func (r *result) rate() float64 { return r.TGS * float64(r.Ranks) }

// decided returns the value of a key in the plan, or "". If the offload pass has decided it unit by unit, the value is a share.
func (r *result) decided(key string) string {
	for _, s := range r.Schedule {
		if k, value, _ := strings.Cut(s, "="); k == key {
			return value
		}
	}
	return r.weighed[key]
}

func compareCSV(w io.Writer, rows []result) error {
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	c := csv.NewWriter(w)
	err := c.Write(strings.Fields("name set simulated ranks layout subsequences step_s tgs mfu bubble_ratio exposed_transfer_s device_peak_bytes host_peak_bytes fits error batch schedule sequence gpus"))
	for _, r := range rows {
		err = errors.Join(err, c.Write([]string{
			r.Name, strings.Join(r.Set, " "), strconv.FormatBool(r.Simulated), strconv.Itoa(r.Ranks), r.Layout, strconv.Itoa(r.Subsequences),
			number(r.StepS), number(r.TGS), number(r.MFU), number(r.BubbleRatio), number(r.ExposedS),
			fmt.Sprint(int64(r.DevicePeak)), fmt.Sprint(int64(r.HostPeak)), strconv.FormatBool(r.Fits), r.Error,
			fmt.Sprint(r.Batch), strings.Join(r.Schedule, " "), fmt.Sprint(r.Sequence), strconv.Itoa(r.GPUs),
		}))
	}
	c.Flush()
	return errors.Join(err, c.Error())
}
