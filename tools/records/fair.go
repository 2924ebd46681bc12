package main

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
)

// comparison is a command that compares a job's own schedule with the fair baselines.
type comparison struct{ machines, command string }

var comparisons = []comparison{
	{"eight H100", "sppoc compare examples/long/llama-8b-1m.sppo --baselines --sweep train.sequence=128K,256K,512K,1M"},
	{"eight H200", "sppoc compare examples/long/llama-8b-1m.sppo --baselines --cluster h200 --sweep train.sequence=1M"},
}

const fairIntro = `
## Where the advantage over other systems begins

The comparison above is with published figures. The following commands simulate Llama-3.1-8B on the same machine with the schedules
of other systems (` + "`internal/shipped/baselines`" + `), whose sizes the compiler chooses. Three of these save the output of attention and
recompute only the rest of a layer, as people do today. The advantage is small as long as one of these three fits: all of them spend
nearly all of a long step on the same attention. It becomes large where none of these fits, so that layers have to be recomputed as
a whole.

`

// resultLine matches the lines of the output of compare that the page shows.
var resultLine = regexp.MustCompile(`(?m)^sequence=.*\.$`)

// fair returns the section with the comparisons. Those that are not selected are copied from the old page.
func fair(old string, wanted *regexp.Regexp) (string, error) {
	text := fairIntro
	for _, c := range comparisons {
		head := "    $ " + c.command + "\n"
		_, block, known := strings.Cut(old, head)
		block, _, _ = strings.Cut(block, "\n\n")
		if !known || wanted.MatchString("baselines") {
			out, err := exec.Command("go", append([]string{"run", "./cmd/sppoc"}, strings.Fields(c.command)[1:]...)...).Output()
			if err != nil {
				return "", fmt.Errorf("%s: %w", c.command, err)
			}
			block = "    " + strings.Join(resultLine.FindAllString(string(out), -1), "\n    ")
		}
		text += "On " + c.machines + ":\n\n" + head + strings.TrimRight(block, "\n") + "\n\n"
	}
	return strings.TrimRight(text, "\n") + "\n", nil
}
