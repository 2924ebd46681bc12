package plan

import (
	"fmt"

	"sppo.dev/lang"
)

// Problem is an error in a request or in an edited plan.
type Problem struct {
	Key     string // of the spec
	Code    lang.Code
	Hint    string
	Message string
}

// Fault returns a problem with the value of a spec key; hint is a suggested fix.
func Fault(key string, code lang.Code, hint, format string, args ...any) Problem {
	return Problem{key, code, hint, fmt.Sprintf(format, args...)}
}

// Plain returns the first problem as an error, for a plan without a spec, or nil if there is none.
func Plain(problems []Problem) error {
	if len(problems) == 0 {
		return nil
	}
	f := problems[0]
	if f.Hint != "" {
		return fmt.Errorf("%s: %s (%s)", f.Key, f.Message, f.Hint)
	}
	return fmt.Errorf("%s: %s", f.Key, f.Message)
}
