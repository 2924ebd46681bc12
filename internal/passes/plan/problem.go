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

// Misplaced is an error in the order of tasks: a task that cannot run where it stands.
type Misplaced struct {
	Rank, Index int  // it is Tasks[Rank][Index]
	Task, First Task // First must run before; zero: no such task
	Stuck       Task // where the rank that runs First waits as well; zero: it does not wait
	Why         string
}

func (m *Misplaced) Error() string { return m.Text(Task.String) }

// Text returns the error with tasks in the given spelling.
func (m *Misplaced) Text(name func(Task) string) string {
	switch {
	case m.First == Task{}:
		return fmt.Sprintf("%s: %s", name(m.Task), m.Why)
	case m.Stuck == Task{}:
		return fmt.Sprintf("%s comes before %s: %s", name(m.Task), name(m.First), m.Why)
	}
	return fmt.Sprintf("%s waits forever for %s, which comes after %s on its rank: %s", name(m.Task), name(m.First), name(m.Stuck), m.Why)
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
