package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/codegen"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/passes"
	"sppo.dev/vm/sim"
)

// SetFlag is the flag that overrides keys of a spec.
func SetFlag(flags *pflag.FlagSet, name string) *[]string {
	set := flags.StringArray(name, nil, "override a key of the spec by `KEY=VALUE`, as in schedule.sp=4; may be given again")
	Words(flags, name, KeyWords())
	return set
}

// Extensions of the files that commands read.
var (
	SpecFiles    = []string{"sppo"}
	PlanFiles    = []string{"sppo", "json"}
	ProgramFiles = []string{"sppb", "sppir"}
	JobFiles     = append(PlanFiles[:2:2], ProgramFiles...)
)

// LoadSpec reads and checks a specification; shipped clusters are found from anywhere.
func LoadSpec(file string, set []string) (*lang.Spec, error) {
	for _, s := range set {
		if !strings.Contains(s, "=") {
			return nil, Usagef("--set %s: it is KEY=VALUE, as in schedule.sp=4", s)
		}
	}
	if err := IsSpec(file); err != nil {
		return nil, err
	}
	if file == "-" {
		text, err := io.ReadAll(os.Stdin)
		if err != nil {
			return nil, err
		}
		spec, err := sppo.Parse("standard input", text, set...)
		return spec, Wrong(err)
	}
	spec, err := sppo.Load(file, set...)
	return spec, Wrong(err)
}

// IsSpec refuses files that are something else by their name, rather than complain about every character of them.
func IsSpec(file string) error {
	switch strings.ToLower(filepath.Ext(file)) {
	case ".sppb", ".sppir":
		return Usagef("%s is a program: this wants what it is made of, a spec", file)
	case ".json":
		return Usagef("%s is a plan by its name: this wants a spec", file)
	}
	return nil
}

// Job is what a file on the command line stands for, as far as it is known: a program has no plan, a plan no spec.
type Job struct {
	Spec    *lang.Spec
	Plan    *passes.Plan
	Program *ir.Program

	Timeline *sim.Timeline // of a step, with spans, once Simulate has run
}

// IsProgram reports whether a file is a program by its name: whatever is neither a spec nor a plan.
func IsProgram(file string) bool {
	ext := strings.ToLower(filepath.Ext(file))
	return ext != ".sppo" && ext != ".json"
}

// OpenPlan makes a plan of a spec, or reads one. A plan that was read is taken as it is.
func OpenPlan(file string, set []string, o passes.Options) (*Job, error) {
	if filepath.Ext(file) == ".json" {
		return readPlan(file, set, o)
	}
	spec, err := LoadSpec(file, set)
	if err != nil {
		return nil, err
	}
	plan, err := sppo.PlanWith(spec, o)
	if err != nil {
		return nil, Wrong(err)
	}
	return &Job{Spec: spec, Plan: plan}, nil
}

// Measure places the plan, where the search of its sizes has not done so.
func (j *Job) Measure() error {
	if j.Plan.Memory.Placed {
		return nil
	}
	return codegen.Measure(j.Plan)
}

func readPlan(file string, set []string, o passes.Options) (*Job, error) {
	switch {
	case len(set) > 0:
		return nil, Usagef("%s is a plan: --set goes with a spec", file)
	case len(o.Passes)+len(o.Disable)+len(o.PrintAfter) > 0 || o.StopAfter != "":
		return nil, Usagef("%s is a plan: its passes have run", file)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, Wrong(err)
	}
	plan, err := passes.ReadJSON(bytes.NewReader(data))
	var at *lang.Diagnostic
	if errors.As(err, &at) {
		at.Pos.File = file
	}
	if err != nil {
		return nil, Wrong(err)
	}
	if err := passes.Verify(plan); err != nil {
		return nil, Usagef("%s: %w", file, err)
	}
	passes.Predict(plan) // of what may have been edited
	return &Job{Plan: plan}, nil
}

// OpenProgram reads a program, or compiles a spec or a plan to one.
func OpenProgram(file string, set []string) (*Job, error) {
	if IsProgram(file) {
		if len(set) > 0 {
			return nil, Usagef("%s is a program: --set goes with a spec", file)
		}
		program, err := ReadProgram(file)
		return &Job{Program: program}, err
	}
	job, err := OpenPlan(file, set, passes.Options{})
	if err != nil {
		return nil, err
	}
	return job, job.Compile()
}

// ReadProgram reads what is a program already.
func ReadProgram(file string) (*ir.Program, error) {
	if !IsProgram(file) {
		return nil, Usagef("%s is no program: sppoc build makes one of a spec or a plan", file)
	}
	program, err := ir.ReadFile(file)
	return program, Wrong(err)
}

// Compile builds the program of the plan. Whether it fits is Plan.Memory's.
func (j *Job) Compile() (err error) {
	j.Program, err = sppo.Build(j.Plan)
	return Wrong(err)
}

// Verify proves a program that came from a file. A lack of memory is what force overlooks, and nothing else.
func Verify(file string, p *ir.Program, force bool) error {
	err := ir.VerifyOptions{AllowOverCapacity: force}.Verify(p)
	if err == nil {
		return nil
	}
	named := fmt.Errorf("%s: %w", file, err)
	var v *ir.VerifyError
	if errors.As(err, &v) && !slices.ContainsFunc(v.Findings, func(f ir.Finding) bool { return f.Kind != ir.FindCapacity }) {
		return DoesNotFit(named)
	}
	return Wrong(named)
}
