package lang

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/fstest"
)

// withTasks parses a spec whose order of tasks is in a file with that text.
func withTasks(text string, set ...string) (*Spec, error) {
	spec := "import \"base.sppo\"\nschedule s {\n  strategy = csv(\"tasks.csv\")\n}\n"
	files := map[string]string{"base.sppo": exampleBase, "tasks.csv": text}
	return Parse("test.sppo", []byte(spec), Options{Set: set, ReadFile: readFrom(files)})
}

func TestTasks(t *testing.T) {
	s, err := withTasks("0F0,0F1,,(0B0;0I1)OVERLAP_F_B, ,0W1\r\n 1F0,1B0,1F1,1I1,1W1,\r\n")
	if err != nil {
		t.Fatal(err)
	}
	sch := s.Schedule
	if got := fmt.Sprint(sch.Tasks.Ranks[1]); got != "[{1 70 0} {1 66 0} {1 70 1} {1 73 1} {1 87 1}]" || len(sch.Tasks.Ranks[0]) != 5 {
		t.Errorf("%s", got)
	}
	if sch.PP != 2 || sch.VirtualStages != 1 || sch.Subsequences.Count != 1 || sch.Tasks.Microbatches != 2 || sch.Tasks.Folded || sch.Tasks.Name != "tasks.csv" {
		t.Errorf("%+v %+v", sch, sch.Tasks)
	}
	if at := s.At("schedule.strategy[0][3]").String(); at != "tasks.csv:1:15" {
		t.Errorf("the fourth action is at %s", at)
	}
	if s, err := withTasks("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0"); err != nil || !s.Schedule.Tasks.Folded || s.Schedule.VirtualStages != 2 {
		t.Errorf("a V: %v", err)
	}
}

func TestWrongTasks(t *testing.T) {
	const good = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
	for _, c := range []struct{ text, at, message, hint, set string }{
		{"", "1:1", "rank 0 has no tasks", "remove the line", ""},
		{good + "\n", "3:1", "rank 2 has no tasks", "remove the line", ""},
		{"0F0,0B0x\n", "1:5", "`0B0x` is not a computation of rank 0", "as in 0F1", ""},
		{"0F0,0BW0\n", "1:5", "`0BW0` is not a computation", "files of early versions of PyTorch write BW", ""},
		{"0F0,0UNSHARD,0B0\n", "1:5", "`0UNSHARD` is not a computation", "compute_only", ""},
		{"0F0, 0WAIT_SEND_F0,0B0\n", "1:6", "`0WAIT_SEND_F0` is not a computation", "compute_only", ""},
		{"0F0,(0B0;0F)OVERLAP_F_B\n", "1:10", "`0F` is not a computation", "as in 0F1", ""},
		{"0F\u00e9,0B\n", "1:1", "`0F\u00e9` is not a computation", "", ""},
		{"0F0,1F0,1B0,0B0\n1F1", "2:1", "1F1 is on rank 1, but virtual stage 1 is also on rank 0", "move all of virtual stage 1 to one line", ""},
		{"0F0,1F0,1B0,0B0\n2F0,2B0", "2:5", "rank 1 has 1 of the 3 virtual stages", "write 2 on each line", ""},
		{"0F0,999999F0\n", "1:5", "rank 0 has 2 of the 1000000 virtual stages", "write 1000000 on each line", ""},
		{"1F0,1B0\n0F0,0B0", "1:1", "virtual stage 1 is on rank 0, but with the others round-robin it belongs on rank 1", "move it to line 2", ""},
		{"0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n4F0,5F0", "1:5", "virtual stage 2 is on rank 0", "move it to line 3", ""},
		{"0F0,0F1,0B0,0B1,0F0\n", "1:17", "0F0 is on rank 0 twice", "remove it", ""},
		{"0F0,0B0,0W0\n", "1:9", "0W0 repeats a part of the whole backward 0B0", "write either 0B0, or both 0I0 and 0W0", ""},
		{"0F0,0W0,0B0\n", "1:9", "0B0 repeats a part", "write either 0B0, or both", ""},
		{"0F0,0I0\n", "1:5", "rank 0 has no 0W0", "write 0W0, or 0B0 instead of 0I0", ""},
		{"0F0,0W0\n", "1:5", "rank 0 has no 0I0", "write 0I0, or 0B0 instead of 0W0", ""},
		{"0F0,0B0,0F1\n", "1:9", "rank 0 has no 0B1", "write 0B1, or 0I1 and 0W1", ""},
		{"0F0,0B0,0F99999,0B99999\n", "1:17", "rank 0 has no 0F1", "every virtual stage has every microbatch, 0 to 99999", ""},
		{good, "--set:1:13", "pp = 4, but tasks.csv has 2 lines", "pp = 2, or omit it", "schedule.pp=4"},
		{good, "--set:1:25", "virtual_stages = 2, but tasks.csv has 1 virtual stages", "virtual_stages = 1, or omit it", "schedule.virtual_stages=2"},
		{good, "--set:1:23", "tasks.csv has 2 microbatches, which cannot be 3 subsequences each", "subsequences = 2", "schedule.subsequences=3"},
		{good, "--set:1:32", "`csv` takes one file", "", `schedule.strategy=csv("a.csv", "tasks.csv")`},
		{good, "--set:1:23", "cannot read \"a.csv\": no such file", "paths are relative", `schedule.strategy=csv("a.csv")`},
	} {
		var set []string
		if c.set != "" {
			set = []string{c.set}
		} else {
			c.at = "tasks.csv:" + c.at
		}
		_, err := withTasks(c.text, set...)
		var ds Diagnostics
		if !errors.As(err, &ds) || ds[0].Pos.String() != c.at || !strings.Contains(ds[0].Message, c.message) || !strings.Contains(ds[0].Hint, c.hint) {
			t.Errorf("%q with %q:\n%v\nwant at %s: %s (%s)", c.text, c.set, err, c.at, c.message, c.hint)
		}
	}
}

// TestTasksElsewhere checks that a spec does not show the text of files outside its folder, and that it can name shipped ones.
func TestTasksElsewhere(t *testing.T) {
	spec := "import \"base.sppo\"\nschedule s {\n  strategy = csv(\"../secret\")\n}\n"
	_, err := Parse("jobs/test.sppo", []byte(spec), Options{ReadFile: readFrom(map[string]string{"jobs/base.sppo": exampleBase, "secret": "password\n"})})
	if err == nil || strings.Contains(err.Error(), "password") || !strings.Contains(err.Error(), "secret:1:1") {
		t.Errorf("%v", err)
	}
	spec = strings.ReplaceAll(spec, "../secret", "orders/one.csv")
	files := fstest.MapFS{"orders/one.csv": {Data: []byte("0F0,0B0\n")}}
	s, err := Parse("jobs/test.sppo", []byte(spec), Options{Shipped: files, ReadFile: readFrom(map[string]string{"jobs/base.sppo": exampleBase})})
	if err != nil || s.Schedule.Tasks.Name != "orders/one.csv" || !strings.Contains(s.Text("elsewhere"), `csv("orders/one.csv")`) {
		t.Errorf("%v", err)
	}
	if s, err = withTasks("0F0,0B0\n"); err != nil || !strings.Contains(s.Text("elsewhere"), `csv("../tasks.csv")`) {
		t.Errorf("%v", err)
	}
}

// FuzzTasks checks that no file causes a panic, that diagnostics point at positions that exist, and that an accepted file has
// every task once.
func FuzzTasks(f *testing.F) {
	f.Add("0F0,0F1,,(0B0;0I1)OVERLAP_F_B,0W1\r\n1F0,1B0,1F1,1I1,1W1\n", 1)
	f.Add("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0", 2)
	f.Add("0F0,0UNSHARD,0BW1\n1F0,,\n", 0)
	f.Fuzz(func(t *testing.T, text string, n int) {
		flag := fmt.Sprintf("schedule.subsequences=%d", n)
		s, err := withTasks(text, flag)
		var ds Diagnostics
		if err != nil && !errors.As(err, &ds) {
			t.Fatalf("not diagnostics: %v", err)
		}
		for _, d := range ds {
			if d.Pos.File != "test.sppo" && d.Pos.File != "base.sppo" {
				checkDiagnostic(t, d, map[string]string{"tasks.csv": text, "--set": flag})
			}
		}
		if err != nil {
			return
		}
		backwards := map[byte]float64{'B': 1, 'I': 0.5, 'W': 0.5}
		forward, backward := 0, 0.0
		for _, actions := range s.Schedule.Tasks.Ranks {
			for _, a := range actions {
				if backward += backwards[a.Kind]; a.Kind == 'F' {
					forward++
				}
			}
		}
		if want := s.Schedule.Tasks.Stages * s.Schedule.Tasks.Microbatches; forward != want || backward != float64(want) || want%n != 0 {
			t.Errorf("%d forwards and %g backwards, want %d", forward, backward, want)
		}
	})
}
