package passes

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes/order"
	"sppo.dev/internal/passes/pass"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/strategy"
	"sppo.dev/internal/shipped"
	"sppo.dev/lang"
)

// stated returns the spec of a job with the order of tasks in a file.
func stated(file string, set ...string) (*lang.Spec, error) {
	flags := append([]string{"schedule.strategy=csv(\"" + file + "\")", "schedule.sp=1", "schedule.pp=auto", "schedule.virtual_stages=auto", "schedule.subsequences=auto",
		"model.layers=48", "cluster.nodes=8"}, set...)
	return lang.Load("../../examples/tiny.sppo", lang.Options{Shipped: shipped.Files, Set: flags})
}

// statedOrder returns a plan that has only the tasks of a file.
func statedOrder(t *testing.T, file string) *plan.Plan {
	t.Helper()
	sp, err := stated(file)
	if err != nil {
		t.Fatal(err)
	}
	p := plan.New(sp)
	if problems := order.FileProblems(p); len(problems) > 0 {
		t.Fatal(plan.Plain(problems))
	}
	f := sp.Schedule.Tasks
	p.Subsequences.N, p.LayersPerStage = 1, slices.Repeat([]int{1}, f.Stages)
	p.Parallel = plan.Parallel{PP: sp.Schedule.PP, SP: 1, DP: 1, VirtualStages: sp.Schedule.VirtualStages, Placement: strategy.Of(p).Placed, Microbatches: f.Microbatches}
	strategy.Order(p)
	return p
}

// plainCells removes idle times and overlaps from the text of a file.
func plainCells(text string) string {
	text = strings.NewReplacer("\r", "", "(", "", ")OVERLAP_F_B", "", ";", ",").Replace(text)
	var lines []string
	for line := range strings.Lines(text) {
		lines = append(lines, strings.Join(strings.FieldsFunc(line, func(r rune) bool { return r == ',' || r == '\n' }), ",")+"\n")
	}
	return strings.Join(lines, "")
}

// TestTasksOfTorch reads PyTorch's schedules, and compares how many activations each rank holds with what PyTorch's
// analysis of liveness says. With SPPO_PYTHON, PyTorch writes the files again and reads back what sppo writes, its own
// schedules included.
func TestTasksOfTorch(t *testing.T) {
	slots := slotsOf(t, "testdata/torch/slots.json")
	files, err := filepath.Glob("testdata/torch/*.csv")
	if err != nil || len(files) != len(slots) {
		t.Fatalf("%d files, %d analysed: %v", len(files), len(slots), err)
	}
	written, folder := map[string][]int{}, t.TempDir()
	write := func(name string, p *plan.Plan) {
		written[name] = unitCosts{1, 1, 1}.run(t, p).held
		if err := os.WriteFile(filepath.Join(folder, name), []byte(strategy.Text(p)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range files {
		p, name := statedOrder(t, file), filepath.Base(file)
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := strategy.Text(p), plainCells(string(text)); got != want {
			t.Errorf("%s came back as\n%s\nwant\n%s", name, got, want)
		}
		if write(name, p); !slices.Equal(written[name], slots[name]) {
			t.Errorf("%s: ranks hold %v activations, PyTorch says %v", name, written[name], slots[name])
		}
	}
	for _, s := range strategy.All {
		for _, n := range []int{1, 3} {
			if s.Sliced == "" || n == 1 {
				write(fmt.Sprintf("%s-%d.csv", s.Name, n), ordered(t, s.Name, 4, s.Stages.Least, n, 8))
			}
		}
	}
	torch(t, func(python func(args ...string) []byte) {
		again := t.TempDir()
		python("testdata/torch/make.py", again)
		for _, file := range append(files, "testdata/torch/slots.json") {
			old, errOld := os.ReadFile(file)
			now, errNow := os.ReadFile(filepath.Join(again, filepath.Base(file)))
			if errOld != nil || errNow != nil || string(old) != string(now) {
				t.Errorf("%s is not what PyTorch writes now: %v, %v", file, errOld, errNow)
			}
		}
		args := []string{"testdata/torch/make.py", "--check"}
		for _, name := range slices.Sorted(maps.Keys(written)) {
			args = append(args, filepath.Join(folder, name))
		}
		var theirs map[string][]int
		if err := json.Unmarshal(python(args...), &theirs); err != nil {
			t.Fatal(err)
		}
		for name, held := range written {
			if !slices.Equal(theirs[name], held) {
				t.Errorf("%s: ranks hold %v activations, PyTorch says %v", name, held, theirs[name])
			}
		}
	})
}

func slotsOf(t *testing.T, file string) (slots map[string][]int) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &slots)
	}
	if err != nil {
		t.Fatal(err)
	}
	return slots
}

// torch calls f with a function that runs Python with PyTorch, or skips the rest of the test.
func torch(t *testing.T, f func(python func(args ...string) []byte)) {
	t.Helper()
	t.Run("torch", func(t *testing.T) {
		name := os.Getenv("SPPO_PYTHON")
		if name == "" {
			t.Skip("SPPO_PYTHON is not set: testdata/torch/make.py says how to install PyTorch")
		}
		f(func(args ...string) []byte {
			c := exec.Command(name, args...)
			c.Stderr = os.Stderr
			out, err := c.Output()
			if err != nil {
				t.Fatal(err)
			}
			return out
		})
	})
}

// TestShippedTasks compares the shipped files with the figures of their papers, for tasks that take one unit each and a whole
// backward that takes two. In units of half a stage, 1f1b has a bubble of 6(p-1) and holds 2p activations.
func TestShippedTasks(t *testing.T) {
	figures := map[string]func(p int) (bubble, held int){
		"eager-1f1b": func(p int) (int, int) { return 3 * (p - 1), 2*p - 1 },               // Zhuang et al. 2022, section 4: the latency of 1f1b
		"v-half":     func(p int) (int, int) { return 3 * (p - 1), p + 2 },                 // Qi et al. 2024, table 1: half of both
		"v-min":      func(p int) (int, int) { return 4*(p-1) - 1, 2 * ((p + 2 + 2) / 3) }, // Qi et al. 2024, table 1: two thirds and a third
	}
	files, err := fs.Glob(shipped.Files, "schedules/*.csv")
	if err != nil || len(files) != 2*len(figures) {
		t.Fatalf("%d files: %v", len(files), err)
	}
	for _, file := range files {
		p := statedOrder(t, file)
		got := unitCosts{1, 1, 1}.run(t, p)
		pp, m := p.Parallel.PP, p.Parallel.Microbatches
		name := strings.TrimSuffix(filepath.Base(file), fmt.Sprintf("-%dx%d.csv", pp, m))
		if figures[name] == nil {
			t.Fatalf("%s has %d ranks and %d microbatches", file, pp, m)
		}
		bubble, held := figures[name](pp)
		if got.makespan-3*p.Parallel.VirtualStages*m > bubble || slices.Max(got.held) != held {
			t.Errorf("%s: a bubble of %d with %d activations, want %d with %d", file, got.makespan-3*p.Parallel.VirtualStages*m, slices.Max(got.held), bubble, held)
		}
	}
}

// TestTasksAreWhatTheFileStates plans jobs with the orders of strategies, as files, and compares the plans. The search
// must find them, although only one product of dp and microbatch has the microbatches of the file.
func TestTasksAreWhatTheFileStates(t *testing.T) {
	for _, c := range []struct {
		strategy  string
		v, n, m   int
		microfits bool
	}{
		{"zb-v", 2, 1, 4, false}, {"seq1f1b", 1, 4, 4, false}, {"interleaved-sppo", 2, 4, 2, true}, {"zb-h1", 1, 2, 4, true},
	} {
		want := ordered(t, c.strategy, 2, c.v, c.n, c.m)
		file := filepath.Join(t.TempDir(), "tasks.csv")
		if err := os.WriteFile(file, []byte(strategy.Text(want)), 0o644); err != nil {
			t.Fatal(err)
		}
		set := []string{fmt.Sprintf("train.batch=%d", c.m), fmt.Sprintf("schedule.subsequences=%d", c.n), "model.layers=4"}
		if c.microfits {
			set = append(set, fmt.Sprintf("train.batch=%d", 4*c.m), "schedule.microbatch=auto", "schedule.dp=auto")
		}
		sp, err := stated(file, set...)
		if err != nil {
			t.Fatal(err)
		}
		p := plan.New(sp)
		if err := Run(sp, p, pass.Options{}); err != nil {
			t.Fatalf("%s: %v", c.strategy, err)
		}
		if got, order := strategy.Text(p), strategy.Text(want); got != order || p.Parallel.Microbatches != c.m {
			t.Errorf("%s became\n%s\nwant\n%s", c.strategy, got, order)
		}
		var text strings.Builder
		if err := p.WriteJSON(&text); err != nil {
			t.Fatal(err)
		}
		back, err := plan.ReadJSON(strings.NewReader(text.String()))
		if err != nil {
			t.Fatal(err)
		}
		if err := Verify(back); err != nil || strategy.Of(back).Late != strategy.Of(p).Late {
			t.Errorf("%s: the plan came back with %+v: %v", c.strategy, strategy.Of(back), err)
		}
	}
}

// TestWrongTasks checks that a task that cannot run where a file has it is refused at its cell, with the change that would
// be right.
func TestWrongTasks(t *testing.T) {
	for _, c := range []struct{ text, at, message, hint, set string }{
		{"0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n", "2:1", "", "", ""},
		{"0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "1:5", "0B0 waits forever for 1B0, which comes after 1F1 on its rank", "move 1B0 before 1F1, on line 2, or 0B0 further back", ""},
		{"0F0,0F1,0B1,0B0\n1B0,1F0,1F1,1B1\n", "2:1", "1B0 comes before 1F0: a backward needs the forwards", "move 1B0 after 1F0", ""},
		{"0F0, 0F1,0B1,0B0\n1F0,1F1,1I1,1W0,1I0,1W1\n", "2:13", "1W0 comes before 1I0: weight gradients need", "move 1W0 after 1I0", ""},
		{"0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "1:9", "0B0 comes before 0B1: gradients of K and V", "move 0B0 after 0B1", "schedule.subsequences=2"},
		{"0F1,0F0,0B1,0B0\n1F0,1F1,1B1,1B0\n", "1:1", "0F1 comes before 0F0: a forward reads K and V", "move 0F1 after 0F0", "schedule.subsequences=2"},
		{"0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n", "2:5", "1B0 comes before 1F1: a backward needs the forwards of all subsequences", "move 1B0 after 1F1", "schedule.subsequences=2"},
		{"0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", "--set", "tasks.csv has 2 microbatches of 1 subsequence", "batch = 2", "train.batch=3"},
	} {
		file := filepath.Join(t.TempDir(), "tasks.csv")
		if err := os.WriteFile(file, []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		set := []string{"train.batch=2"}
		if c.set != "" {
			set = append(set, c.set)
		}
		sp, err := stated(file, set...)
		if err == nil {
			err = Run(sp, plan.New(sp), pass.Options{})
		}
		if c.message == "" {
			if err != nil {
				t.Errorf("%q: %v", c.text, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.at+": error: ") && c.at != "--set" || !strings.Contains(err.Error(), c.message) || !strings.Contains(err.Error(), "hint: "+c.hint) {
			t.Errorf("%q with %s: %v, want at %s: %s (%s)", c.text, c.set, err, c.at, c.message, c.hint)
		}
	}
}
