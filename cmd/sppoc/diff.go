package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/report"
	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
)

func diff(flags *pflag.FlagSet) cli.Action {
	all := flags.Bool("all", false, "of plans, print every value that differs, instead of choices, times and memory")
	programs := flags.Bool("programs", false, "compile specs and plans, and compare the resulting programs")
	context := flags.IntP("unified", "U", 3, "lines of context around each difference between programs")
	setA := cli.SetFlag(flags, "set-a")
	setB := cli.SetFlag(flags, "set-b")
	return func(env *cli.Env, args []string) error {
		sets := [2][]string{*setA, *setB}
		if *programs || cli.IsProgram(args[0]) || cli.IsProgram(args[1]) {
			if *all {
				return cli.Usagef("diff: --all is for plans; of programs, all differences are printed")
			}
			return diffPrograms(env, args, sets, *context)
		}
		return diffPlans(env, args, sets, *all)
	}
}

func diffPrograms(env *cli.Env, files []string, sets [2][]string, context int) error {
	w := cli.NewWatch(env)
	defer w.End()
	var texts [2][]string
	for i, file := range files {
		job, err := cli.OpenProgram(w, file, sets[i])
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if err := ir.Print(&b, job.Program); err != nil {
			return cli.Wrong(err)
		}
		texts[i] = strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	}
	w.End()
	_, err := io.WriteString(env.Stdout, unified(files[0], files[1], texts[0], texts[1], max(0, context)))
	return err
}

// chosenParts are the parts of a plan that hold the request and the choices.
var chosenParts = []string{"model.", "cluster.", "train.", "schedule."}

// diffPlans prints one line for each value that differs between two plans: its path, the old and the new value. Without
// all, it prints the differences between the requests and the choices, then those between times and memory.
func diffPlans(env *cli.Env, files []string, sets [2][]string, all bool) error {
	w := cli.NewWatch(env)
	defer w.End()
	var flat, sums [2]map[string]string
	for i, file := range files {
		w.Say("searching")
		job, err := cli.OpenPlan(file, sets[i], w.Options(passes.Options{}))
		if err != nil {
			return err
		}
		w.Say("simulating the program")
		if err := w.Do(job.Measure); err != nil {
			return cli.Wrong(err)
		}
		if err := w.Do(job.Simulate); err != nil {
			return err
		}
		if flat[i], err = flatten(job.Plan); err != nil {
			return err
		}
		sums[i] = report.Sums(job.Plan)
	}
	w.End()
	lines := differences(flat)
	if !all {
		count := len(lines)
		lines = slices.DeleteFunc(lines, func(line string) bool {
			return !slices.ContainsFunc(chosenParts, func(part string) bool { return strings.HasPrefix(line, part) })
		})
		if lines = append(lines, differences(sums)...); count > 0 {
			lines = append(lines, fmt.Sprintf("%s of the plans %s; --all prints %s\n", words.Plural(count, "value"),
				map[bool]string{true: "differs", false: "differ"}[count == 1], map[bool]string{true: "it", false: "them"}[count == 1]))
		}
	}
	_, err := io.WriteString(env.Stdout, strings.Join(lines, ""))
	return err
}

// differences returns a line for each key whose values differ, sorted by key.
func differences(values [2]map[string]string) (lines []string) {
	keys := maps.Clone(values[0])
	maps.Copy(keys, values[1])
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		old, was := values[0][k]
		now, is := values[1][k]
		switch {
		case !was:
			lines = append(lines, fmt.Sprintf("%s: + %s\n", k, now))
		case !is:
			lines = append(lines, fmt.Sprintf("%s: - %s\n", k, old))
		case old != now:
			lines = append(lines, fmt.Sprintf("%s: %s -> %s\n", k, old, now))
		}
	}
	return lines
}

// flatten returns the values of a plan by path. Decisions are keyed by subject, and parts of the critical path
// by kind of work and stage, rather than by index. Spec positions and lists of largest buffers are omitted.
func flatten(p *plan.Plan) (map[string]string, error) {
	var text bytes.Buffer
	if err := p.WriteJSON(&text); err != nil {
		return nil, err
	}
	d := json.NewDecoder(&text)
	d.UseNumber()
	var all map[string]any
	if err := d.Decode(&all); err != nil {
		return nil, err
	}
	delete(all, "decisions")
	delete(all, "lines")
	delete(all, "spec")
	path := map[string]any{}
	for _, c := range p.Time.CriticalPath {
		path[fmt.Sprintf("%s of stage %d", c.Work, c.Stage)] = float64(c.Seconds)
	}
	all["time"].(map[string]any)["critical_path"] = path
	for _, arena := range []string{"device_peaks", "host_peaks"} {
		peaks, _ := all["memory"].(map[string]any)[arena].([]any)
		for _, peak := range peaks {
			delete(peak.(map[string]any), "largest")
		}
	}
	out := map[string]string{}
	flattenInto(out, "", all)
	for _, d := range p.Decisions {
		out["decisions."+d.Pass+"."+d.What] = fmt.Sprintf("%s (%s)", d.Value, d.Why)
	}
	return out, nil
}

func flattenInto(out map[string]string, path string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			flattenInto(out, strings.TrimPrefix(path+"."+k, "."), x)
		}
	case []any:
		if scalars(v) {
			out[path] = fmt.Sprint(v)
			return
		}
		for i, x := range v {
			flattenInto(out, path+"["+strconv.Itoa(i)+"]", x)
		}
	default:
		out[path] = fmt.Sprint(v)
	}
}

func scalars(list []any) bool {
	return !slices.ContainsFunc(list, func(x any) bool {
		switch x.(type) {
		case map[string]any, []any:
			return true
		}
		return false
	})
}
