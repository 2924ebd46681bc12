package schedule

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
)

// TestPage writes ACTIONS.md from the table.
func TestPage(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# The actions of a schedule

A schedule lists the work of a pipeline rank: its tasks in order, each with its actions. It is written by
` + "`schedule.Pipeline`" + `, and read by the estimates of time and memory and by code generation. ` + "`sppoc dump --format actions`" + ` prints
the schedules of a job. In its output, an action is followed by its task, unless that is the task of the line, by a layer or
round, and, after "for" or "of", by what it is for. This page is generated from the table in ` + "`action.go`" + `.

| action | what it does | task | layer | for or of |
| --- | --- | --- | --- | --- |
`)
	shared := false
	for op := range Ops {
		info := &Ops[op]
		if info.Name == "" || info.Doc == "" {
			t.Errorf("action %d has no name or no description", op)
		}
		if Op(op) == HandOut {
			shared = true
			b.WriteString(`
In slots that the ranks of all stages share (` + "`mux`" + `), all actions are listed under the rank's first task of the slot. Actions
marked "all ranks" come in the same order in the schedules of all ranks.

| action | what it does | task | layer | for or of |
| --- | --- | --- | --- | --- |
`)
		}
		doc, task := info.Doc, cmp.Or(info.Task, "that of the line")
		if info.Common {
			doc = "All ranks: " + strings.ToLower(doc[:1]) + doc[1:]
		}
		if shared && info.Task == "" {
			task = ""
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", info.Name, doc, task, info.Layer, info.Of)
	}
	irtest.Golden(t, "ACTIONS.md", []byte(strings.ReplaceAll(b.String(), "  |", " |")))
}

// checkFields checks that the fields of an action have no values to which Ops gives no meaning.
func checkFields(t *testing.T, a Action, listed int) {
	t.Helper()
	info := &Ops[a.Op]
	if info.Task == "" && int(a.Task) != listed && a.Op != End && a.Op != EndOnHost {
		t.Fatalf("%s, listed under task %d, has task %d", a.Op, listed, a.Task)
	}
	if info.Layer == "" && a.Layer != 0 || info.Of == "" && a.Of != 0 {
		t.Fatalf("%s has layer %d and of %d, but one of them means nothing", a.Op, a.Layer, a.Of)
	}
}
