package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/compile"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/infile"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/estimate"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// SetFlag defines the flag that overrides keys of a spec.
func SetFlag(flags *pflag.FlagSet, name string) *[]string {
	set := flags.StringArray(name, nil, "override a key of the spec with `KEY=VALUE`, for example schedule.sp=4, or select another cluster or schedule, for example cluster=h100 or schedule=megatron(pp = 4); may be repeated")
	Words(flags, name, KeyWords())
	return set
}

// Extensions of input files.
var (
	SpecFiles    = []string{"sppo"}
	PlanFiles    = []string{"sppo", "json"}
	ProgramFiles = []string{"sppb", "sppir"}
	JobFiles     = append(PlanFiles[:2:2], ProgramFiles...)
)

// LoadSpec reads and checks a specification; imports of shipped files work in any folder.
func LoadSpec(file string, set []string) (*lang.Spec, error) {
	if isFolder(file) {
		return loadFolder(file, set)
	}
	for _, s := range set {
		if !strings.Contains(s, "=") {
			return nil, Usagef("--set %s: write KEY=VALUE, for example schedule.sp=4", s)
		}
	}
	text, err := ReadSpec(file)
	if err != nil {
		return nil, err
	}
	if file == "-" {
		file = "standard input"
	}
	spec, err := sppo.Parse(file, text, set...)
	return spec, Wrong(err)
}

// ReadSpec reads the text of a specification; "-" means standard input.
func ReadSpec(file string) ([]byte, error) {
	if err := errors.Join(IsSpec(file), exists(file)); err != nil {
		return nil, err
	}
	if file == "-" {
		return io.ReadAll(io.LimitReader(os.Stdin, lang.MaxFileBytes+1)) // one extra byte, to detect a larger file
	}
	text, err := infile.Read(file, lang.MaxFileBytes)
	return text, Wrong(err)
}

// IsSpec refuses files whose extension shows that they are not specs. Parsed as specs, they would cause an
// error for almost every character.
func IsSpec(file string) error {
	if isConfig(file) {
		return configInstead(file)
	}
	switch strings.ToLower(filepath.Ext(file)) {
	case ".sppb", ".sppir":
		return Usagef("%s is a program; this command needs a spec", file)
	case ".json":
		return Usagef("%s is a plan; this command needs a spec", file)
	}
	return nil
}

// isConfig reports whether a path names the config.json of a model.
func isConfig(file string) bool { return filepath.Base(file) == hf.ConfigFile }

func configInstead(file string) error {
	return Usagef("%s describes a model; give its folder instead: %s", file, filepath.Dir(file))
}

// Job is an input file with everything derived from it. If the file is a program, there is no plan; if it is a
// plan, there is no spec.
type Job struct {
	Spec    *lang.Spec
	Plan    *plan.Plan
	Program *ir.Program

	Timeline *sim.Timeline // timeline of a simulated step, with spans; set by Simulate

	Times *passes.Times // of the passes; nil: nobody asks

	short *plan.Plan // of the shorter step that stands for a long step; Program is then its program, until Compile
}

// IsProgram reports whether a file is a program: any existing file without the extension of a spec or a plan, or a
// file with the extension of a program.
func IsProgram(file string) bool {
	switch strings.ToLower(filepath.Ext(file)) {
	case ".sppo", ".json":
		return false
	case ".sppb", ".sppir":
		return !isFolder(file)
	}
	info, err := os.Stat(file)
	return err == nil && !info.IsDir()
}

// OpenPlan plans a spec, or reads a plan and uses it unchanged.
func OpenPlan(file string, set []string, o passes.Options) (*Job, error) {
	if filepath.Ext(file) == ".json" {
		return readPlan(file, set, o)
	}
	end := o.Times.Time("read")
	spec, err := LoadSpec(file, set)
	end()
	if err != nil {
		return nil, err
	}
	plan, err := compile.Plan(spec, o)
	if err != nil {
		return nil, Wrong(err)
	}
	return &Job{Spec: spec, Plan: plan, Times: o.Times}, nil
}

// Measure places the buffers of the plan, unless the search has already done so. It builds the whole program of a step
// that stands for a long step, because Simulate needs it too.
func (j *Job) Measure() error {
	if j.Plan.Memory.Placed {
		return nil
	}
	if j.short = strategy.Short(j.Plan); j.short != nil && j.simulates() {
		var err error
		j.Program, err = codegen.BuildTimed(j.short, j.Times)
		codegen.Adopt(j.Plan, j.short)
		return err
	}
	return codegen.MeasureTimed(j.Plan, j.Times)
}

// maxPlan is the maximum size of a plan file, in bytes.
const maxPlan = 1 << 30

func readPlan(file string, set []string, o passes.Options) (*Job, error) {
	switch {
	case isConfig(file):
		return nil, configInstead(file)
	case len(set) > 0:
		return nil, Usagef("%s is a plan: --set, --cluster, --nodes and --sequence need a spec", file)
	case len(o.Disable)+len(o.PrintAfter) > 0 || o.StopAfter != "":
		return nil, Usagef("%s is a plan: its passes have already run", file)
	}
	data, err := infile.Read(file, maxPlan)
	if err != nil {
		return nil, Wrong(err)
	}
	plan, err := plan.ReadJSON(bytes.NewReader(data))
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
	estimate.Predict(plan) // the plan may have been edited
	return &Job{Plan: plan}, nil
}

// OpenProgram reads a program, or compiles a spec or a plan to one.
func OpenProgram(w *Watch, file string, set []string) (*Job, error) {
	if IsProgram(file) {
		if len(set) > 0 {
			return nil, Usagef("%s is a program: --set, --cluster, --nodes and --sequence need a spec", file)
		}
		w.Say("reading %s", file)
		program, err := ReadProgram(file)
		return &Job{Program: program}, err
	}
	w.Say("searching")
	job, err := OpenPlan(file, set, w.Options(passes.Options{}))
	if err != nil {
		return nil, err
	}
	w.Say("building the program")
	return job, w.Do(job.Compile)
}

// ReadProgram reads a program.
func ReadProgram(file string) (*ir.Program, error) {
	if err := exists(file); err != nil {
		return nil, err
	}
	if !IsProgram(file) {
		return nil, Usagef("%s is not a program; sppoc build compiles specs and plans", file)
	}
	if info, err := os.Stat(file); err == nil {
		sparing(info.Size() > largeProgram)
	}
	program, err := ir.ReadFile(file)
	return program, Wrong(err)
}

// largeProgram is the size of a program file, in bytes, above which the program takes more than about half a gibibyte.
const largeProgram = 64 << 20

// sparing makes the garbage collector run more often if a process holds a large program, unless the user has decided how often.
// Otherwise, the process would need twice the memory of the program.
func sparing(large bool) {
	if large && os.Getenv("GOGC") == "" {
		debug.SetGCPercent(25)
	}
}

// Compile builds the program of the plan. Afterwards Plan.Memory.Fits reports whether the program fits.
func (j *Job) Compile() (err error) {
	j.short = nil
	sparing(j.Plan.LayerVisits() > strategy.LongStep)
	j.Program, err = compile.Build(j.Plan, j.Times)
	return Wrong(err)
}

// Verify runs the verifier on a program read from a file. With force, it tolerates a memory shortfall, but no other
// error.
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
