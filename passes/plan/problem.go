package plan

import (
	"fmt"

	"sppo.dev/lang"
)

// Problem is a fault of a request or of an edited plan.
type Problem struct {
	Key     string // of the spec
	Code    lang.Code
	Hint    string
	Message string
}

// Fault is a problem with what a key of the spec asks for; hint is what would do instead.
func Fault(key string, code lang.Code, hint, format string, args ...any) Problem {
	return Problem{key, code, hint, fmt.Sprintf(format, args...)}
}

// Plain is the first of them, for a plan without a spec.
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
