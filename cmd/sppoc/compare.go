package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"sppo/cmd/internal/cli"
	"sppo/ir"
	"sppo/vm/sim"
)

func compareJobs(flags *pflag.FlagSet) cli.Action {
	sweeps := flags.StringArray("sweep", nil, "KEY=V1,V2,...: one line for each value of a key; given again, for every combination")
	format := flags.String("format", "text", "text, csv, json or svg")
	set := cli.SetFlag(flags, "set")
	return func(env *cli.Env, files []string) error {
		write, ok := tables[*format]
		if !ok {
			return cli.Usagef("there is no format %q; there are text, csv, json and svg", *format)
		}
		variants, err := variantsOf(files, *set, *sweeps)
		if err != nil {
			return err
		}
		var rows []result
		var last error
		failed := 0
		for _, v := range variants {
			if err := env.Context.Err(); err != nil {
				return err
			}
			row, err := v.simulate()
			if err != nil {
				if last = err; len(variants) > 1 {
					last = fmt.Errorf("%s: %w", v.name(), err)
				}
				row.Error = plainly(err)
				failed++
			}
			rows = append(rows, row)
		}
		if failed == len(rows) {
			return last
		}
		fmt.Fprintf(env.Stderr, "%s: simulated in virtual time\n", env.Name)
		return write(env.Stdout, rows)
	}
}

// variant is one line to be.
type variant struct {
	file  string
	set   []string // of all lines
	swept []string // of this one
}

func (v *variant) name() string { return strings.Join(append([]string{v.file}, v.swept...), " ") }

// variantsOf is every file with every combination of swept values, the last sweep running fastest.
func variantsOf(files, set, sweeps []string) ([]variant, error) {
	combinations := [][]string{nil}
	for _, text := range sweeps {
		key, list, ok := strings.Cut(text, "=")
		if !ok || key == "" || list == "" {
			return nil, cli.Usagef("--sweep %s: it is KEY=V1,V2,... as in schedule.subsequences=16,32", text)
		}
		var next [][]string
		for _, c := range combinations {
			for _, value := range splitValues(list) {
				next = append(next, append(c[:len(c):len(c)], key+"="+strings.TrimSpace(value)))
			}
		}
		combinations = next
	}
	var out []variant
	for _, file := range files {
		if len(sweeps) > 0 && cli.IsProgram(file) {
			return nil, cli.Usagef("%s is a program: --sweep goes with a spec", file)
		}
		for _, c := range combinations {
			out = append(out, variant{file, set, c})
		}
	}
	return out, nil
}

// splitValues splits at commas outside of brackets: a value may be a list.
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

// result is a line. Its JSON keys, and the columns of CSV after them, are a contract.
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
}

// label is a line's name for people.
func (r *result) label() string {
	return strings.Join(append([]string{strings.TrimSuffix(filepath.Base(r.Name), ".sppo")}, r.Set...), " ")
}

// simulate compiles a variant and runs a step of it. The program is gone before the next one is made.
func (v *variant) simulate() (result, error) {
	c := result{Name: v.file, Set: append([]string{}, v.swept...), Simulated: true}
	job, err := cli.OpenProgram(v.file, append(v.set[:len(v.set):len(v.set)], v.swept...))
	if err != nil {
		return c, err
	}
	p := job.Program
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
	c.Fits = c.DevicePeak <= ir.Bytes(p.Machine.DeviceMemory) && c.HostPeak <= p.Machine.HostMemoryPerRank()
	return c, nil
}

// plainly is the first line of an error.
func plainly(err error) string {
	first, _, _ := strings.Cut(err.Error(), "\n")
	return first
}

// tables are the formats.
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

func compareText(w io.Writer, rows []result) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "job (simulated)\tdp x pp x sp\tN\tstep\tspeed\ttokens/s a GPU\tMFU\tbubble\texposed\tdevice peak\thost peak\t")
	first := 0.0
	for i := range rows {
		r := &rows[i]
		name := r.label()
		if r.Error != "" {
			fmt.Fprintf(t, "%s\t\t\t\t\t\t\t\t\t\t\t%s\n", name, r.Error)
			continue
		}
		rate := r.TGS * float64(r.Ranks)
		if first == 0 {
			first = rate
		}
		note := ""
		if !r.Fits {
			note = "does not fit"
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%.2f\t%s\t%.1f%%\t%.1f%%\t%s\t%s\t%s\t%s\n", name, r.Layout, r.Subsequences, ir.Seconds(r.StepS),
			rate/first, cli.Short(r.TGS), 100*r.MFU, 100*r.BubbleRatio, ir.Seconds(r.ExposedS), r.DevicePeak, r.HostPeak, note)
	}
	if err := t.Flush(); err != nil || len(rows) < 2 {
		return err
	}
	_, err := fmt.Fprintln(w, "\nspeed is tokens a second of all GPUs over those of the first line")
	return err
}

func compareCSV(w io.Writer, rows []result) error {
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	c := csv.NewWriter(w)
	err := c.Write(strings.Fields("name set simulated ranks layout subsequences step_s tgs mfu bubble_ratio exposed_transfer_s device_peak_bytes host_peak_bytes fits error"))
	for _, r := range rows {
		err = errors.Join(err, c.Write([]string{
			r.Name, strings.Join(r.Set, " "), strconv.FormatBool(r.Simulated), strconv.Itoa(r.Ranks), r.Layout, strconv.Itoa(r.Subsequences),
			number(r.StepS), number(r.TGS), number(r.MFU), number(r.BubbleRatio), number(r.ExposedS),
			fmt.Sprint(int64(r.DevicePeak)), fmt.Sprint(int64(r.HostPeak)), strconv.FormatBool(r.Fits), r.Error,
		}))
	}
	c.Flush()
	return errors.Join(err, c.Error())
}
