package cli

import (
	"errors"
	"fmt"
	"io/fs"

	"sppo.dev"
	"sppo.dev/lang"
)

// Exit codes.
const (
	Done     = 0
	Failed   = 1
	BadInput = 2
	NoFit    = 3

	Interrupted = 130 // as the shell reports a command that Ctrl-C has ended
)

// exit is an error with an exit code. Without a wrapped error there is nothing left to print.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

// Wrong marks an error as caused by the input, unless the compiler caused it or it already has an exit code.
func Wrong(err error) error {
	if err == nil || errors.As(err, new(*sppo.BugError)) || errors.As(err, new(*exit)) {
		return err
	}
	return &exit{BadInput, err}
}

// Usagef returns an error about the command line.
func Usagef(format string, args ...any) error { return Wrong(fmt.Errorf(format, args...)) }

// DoesNotFit marks an error as a memory shortfall.
func DoesNotFit(err error) error { return &exit{NoFit, err} }

// Stopped returns an error about work that the user has stopped before it had a result.
func Stopped(format string, args ...any) error {
	return &exit{Interrupted, fmt.Errorf(format, args...)}
}

// Silent returns an error for a failure that the output has already explained.
func Silent(code int) error { return &exit{code: code} }

// ExitCode returns the exit code of an error. Diagnostics mean invalid input or a job that does not fit.
func ExitCode(err error) int {
	var e *exit
	var d *lang.Diagnostic
	switch {
	case err == nil:
		return Done
	case errors.As(err, &e):
		return e.code
	case errors.As(err, &d) && d.Code == lang.DoesNotFit:
		return NoFit
	case errors.As(err, &d):
		return BadInput
	}
	return Failed
}

// Report prints an error and returns its exit code. Diagnostics are printed unchanged, other errors after the
// name of the program.
func (env *Env) Report(err error) int {
	code := ExitCode(err)
	var d *lang.Diagnostic
	switch {
	case err == nil || err.Error() == "":
	case errors.As(err, &d):
		fmt.Fprintln(env.Stderr, err)
	default:
		fmt.Fprintf(env.Stderr, "%s: %v\n", env.Name, plain(err))
	}
	return code
}

// plain rewords the error of a failed system call.
func plain(err error) error {
	var p *fs.PathError
	if !errors.As(err, &p) || err.Error() != p.Error() {
		return err
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: no such file", p.Path)
	}
	return fmt.Errorf("%s: %w", p.Path, p.Err)
}
