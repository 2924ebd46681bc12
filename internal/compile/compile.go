// Package compile plans jobs and builds their programs: it connects the passes, the code generator and the
// verifier for package sppo, the commands and the tools.
package compile

import (
	"errors"
	"fmt"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/meaning"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// Plan runs the passes over a spec. Unless o.Measure is set, the search places a candidate's buffers to find out
// whether the candidate fits. An error in the spec is a lang.Diagnostics.
func Plan(spec *lang.Spec, o passes.Options) (*plan.Plan, error) {
	if o.Measure == nil {
		o.Measure = codegen.MeasureFit
	}
	p := plan.New(spec)
	if err := passes.Run(spec, p, o); err != nil {
		return nil, err
	}
	return p, nil
}

// Build generates the program of a plan and verifies it. It sets Memory to the peaks of the placed buffers, and also
// builds programs that exceed their cluster's memory. If the program fails verification, the error is a *BugError.
// The argument times may be nil.
func Build(p *plan.Plan, times *passes.Times) (*ir.Program, error) {
	program, err := codegen.BuildTimed(p, times)
	if err != nil {
		return nil, err
	}
	defer times.Time("verify")()
	return program, proved(program)
}

// proved verifies a program that the compiler generated; a failure is a bug in the compiler.
func proved(p *ir.Program) error {
	if err := Verify(p); err != nil {
		return &BugError{err}
	}
	return nil
}

// Verify proves everything except that the program fits its machine.
func Verify(p *ir.Program) error { return ir.VerifyOptions{AllowOverCapacity: true}.Verify(p) }

// mostProved is the number of instructions of all ranks up to which Prove proves a program: it takes about a second.
const mostProved = 1_000_000

// Prove proves what a program that Build has generated computes. If it is not asked to, because the program is long, or if a
// rule is missing, it says why; the tensors are those that a step updates. If the program computes something else than its model, the
// error is a *BugError.
func Prove(p *ir.Program) (tensors int, unproved string, err error) {
	instructions := 0
	for r := range p.Ranks {
		for _, section := range p.Codes[p.Ranks[r].Code].Sections {
			instructions += len(section)
		}
	}
	if instructions > mostProved {
		return 0, fmt.Sprintf("not asked, because the ranks have %d instructions, more than %d", instructions, mostProved), nil
	}
	proof, err := meaning.Prove(p)
	var refused *meaning.Refusal
	switch {
	case errors.As(err, &refused) && refused.Unknown:
		return 0, "not proved: " + refused.Problem, nil
	case err != nil:
		return 0, "", &BugError{err}
	}
	return proof.Trained, "", nil
}

// BugError reports a bug in the compiler: a program that it generated fails verification or cannot be simulated.
// The job is not at fault.
type BugError struct{ Err error } // an *ir.VerifyError, what the program computes instead of its model, or the reason why the program cannot be simulated

func (e *BugError) Error() string {
	what := "the program that it compiled cannot run: " + e.Err.Error()
	var v *ir.VerifyError
	var refused *meaning.Refusal
	if errors.As(e.Err, &refused) {
		what = "the program that it compiled computes something else than its model: " + refused.Error()
	}
	if errors.As(e.Err, &v) && len(v.Findings) > 0 {
		what = fmt.Sprintf("the program that it compiled breaks the verifier's rule %q\n%s", v.Findings[0].Kind, &v.Findings[0])
		if more := len(v.Findings) - 1 + v.More; more > 0 {
			what += fmt.Sprintf("\nand %d more", more)
		}
	}
	return "this is a bug in sppo, not a mistake in the job: " + what +
		"\nplease report it with this message, the version, the command line, and the spec with the files that it imports"
}

func (e *BugError) Unwrap() error { return e.Err }
