package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/codegen"
	"sppo.dev/internal/irtest"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plantest"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// `auto` should not be slower than a value that a user writes. TestFleetPins plans the jobs of the fleet and these
// with everything open, and again with each of some drawn values of keys pinned.

// pinnedJobs lists jobs that were found slower than with a pin, and that pin, which is compared beside the drawn ones.
var pinnedJobs = map[string]string{
	"llama-8b h200 1 1 32K":                        "schedule.order=layer",
	"qwen3-4b h100 1 3 100000 train.batch=3":       "schedule.dp=3",
	"mistral-7b a100-80g 1 5 100000 train.batch=5": "schedule.dp=5 schedule.optimizer_offload=host",
	"llama-8b h100 1 5 100000 train.batch=8":       "schedule.sp=5 schedule.sp_mode=ring schedule.optimizer_offload=host",
}

const (
	drawnPins    = 12   // number of values pinned in each job
	pinTolerance = 1.01 // auto's estimated time over that of the pinned plan
)

// pinResult is the outcome of one job, a line of the file that SPPO_PINS names.
type pinResult struct {
	Job    string             `json:"job"`
	Auto   ir.Seconds         `json:"auto"`   // estimated time of a step in seconds; 0 if nothing fits
	Pinned map[string]float64 `json:"pinned"` // estimated time with a value pinned; values with which nothing fits are left out
	// For values that beat auto by more than the tolerance: simulated time with everything open over that with the
	// value pinned, or 0 if nothing fits with everything open.
	Simulated map[string]float64 `json:"simulated,omitempty"`
	Seconds   float64            `json:"seconds"` // how long planning took
}

// TestFleetPins compares the plan of each job with plans in which one value is pinned: for each of dp, sp and pp one
// drawn value, and drawn values of all keys. It takes several hours on two cores. If SPPO_PINS names a file, results are
// appended to it as they are found, and jobs that it already has are not planned again.
func TestFleetPins(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("takes several hours: make fleet-pins")
	}
	seed, file := irtest.Seed(t), os.Getenv("SPPO_PINS")
	done, err := readPins(file)
	if err != nil {
		t.Fatal(err)
	}
	var (
		mutex   sync.Mutex
		results []pinResult
	)
	t.Run("jobs", func(t *testing.T) {
		for i, name := range slices.Concat(slices.Sorted(maps.Keys(pinnedJobs)), fleetJobs) {
			if r, ok := done[name]; ok {
				results = append(results, r)
				continue
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				r := pinned(t, name, rand.New(rand.NewPCG(seed, uint64(i))))
				mutex.Lock()
				defer mutex.Unlock()
				results = append(results, r)
				if err := appendPins(file, r); err != nil {
					t.Error(err)
				}
			})
		}
	})
	reportPins(t, results)
}

// overlapJobs lists jobs like those of the fleet in which ranks on several nodes hold the same weights.
var overlapJobs = []string{
	"llama-8b h100 2 8 32K train.batch=16",
	"llama-3.2-1b a100-80g 4 8 16K train.batch=128",
	"qwen3-14b h200 2 8 128K train.batch=4",
	"llama-70b h100 8 8 64K train.batch=8",
	"llama-8b h100 4 8 1M",
}

// TestOverlapPays checks that communication of gradients and weights beside other work makes no plan of auto slower, by more than
// the tolerance of pins. The long form takes all jobs of the fleet; fleet-pins compares with each value of overlap, too.
func TestOverlapPays(t *testing.T) {
	jobs := overlapJobs[:2]
	if os.Getenv("SPPO_LONG") != "" {
		jobs = slices.Concat(overlapJobs, fleetJobs)
	}
	for _, name := range jobs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file, set := fleetFile(t, strings.Fields(name))
			auto, err := placed(file, set)
			if err != nil {
				t.Fatal(err)
			}
			off, err := placed(file, append(set, "schedule.overlap=off"))
			if err != nil {
				t.Fatal(err)
			}
			switch with, without := auto.Plan, off.Plan; {
			case !without.Memory.Fits:
			case !with.Memory.Fits:
				t.Errorf("nothing fits, and without overlap it takes %v", without.Time.StepS)
			case with.Time.StepS > pinTolerance*without.Time.StepS:
				t.Errorf("%v, and without overlap %v (estimated; simulated: %v and %v)", with.Time.StepS, without.Time.StepS, simulatedStep(t, auto), simulatedStep(t, off))
			default:
				t.Logf("%v, and without overlap %v", with.Time.StepS, without.Time.StepS)
			}
		})
	}
}

// readPins returns the results in a file by job. There are none if the file does not exist.
func readPins(file string) (map[string]pinResult, error) {
	done := map[string]pinResult{}
	f, err := os.Open(file)
	if file == "" || errors.Is(err, os.ErrNotExist) {
		return done, nil
	} else if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var r pinResult
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		done[r.Job] = r
	}
	return done, lines.Err()
}

func appendPins(file string, r pinResult) error {
	if file == "" {
		return nil
	}
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(line, '\n'))
	return errors.Join(err, f.Close())
}

// reportPins logs how often auto was slower, and every value that beat it, the worst first.
func reportPins(t *testing.T, results []pinResult) {
	type loss struct {
		job, pin              string
		estimated, simulated  float64
		automatic, withPinned ir.Seconds
	}
	var losses []loss
	compared := 0
	for _, r := range results {
		compared += len(r.Pinned)
		for pin, simulated := range r.Simulated {
			losses = append(losses, loss{r.Job, pin, float64(r.Auto) / r.Pinned[pin], simulated, r.Auto, ir.Seconds(r.Pinned[pin])})
		}
	}
	slices.SortFunc(losses, func(a, b loss) int {
		return cmp.Or(cmp.Compare(b.estimated, a.estimated), strings.Compare(a.job+a.pin, b.job+b.pin))
	})
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "job\tpinned\tauto\twith the pin\testimated\tsimulated")
	for _, l := range losses {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%.3f\t%.3f\n", l.job, l.pin, l.automatic, l.withPinned, l.estimated, l.simulated)
	}
	w.Flush()
	t.Logf("%d jobs, %d pinned plans that fit; auto is slower than %d of them by more than %.0f%%\n%s",
		len(results), compared, len(losses), 100*(pinTolerance-1), table.String())
	if len(losses) > 0 {
		t.Fail()
	}
}

// pinned plans a job with everything open and with each of the drawn pins.
func pinned(t *testing.T, name string, r *rand.Rand) pinResult {
	file, set := fleetFile(t, strings.Fields(name))
	begun := time.Now()
	auto, err := placed(file, set)
	if err != nil {
		t.Fatal(err)
	}
	result := pinResult{Job: name, Pinned: map[string]float64{}, Simulated: map[string]float64{}}
	if auto.Plan.Memory.Fits {
		result.Auto = auto.Plan.Time.StepS
	}
	var open ir.Seconds // simulated time with everything open, once known
	pins := drawPins(auto.Spec, set, r)
	if known := pinnedJobs[name]; known != "" {
		pins = append(pins, known)
	}
	for _, pin := range pins {
		job, err := placed(file, append(slices.Clone(set), strings.Fields(pin)...))
		if err != nil || !job.Plan.Memory.Fits {
			continue // the value contradicts others, or does not fit
		}
		step := job.Plan.Time.StepS
		result.Pinned[pin] = float64(step)
		if result.Auto > 0 && float64(result.Auto) <= pinTolerance*float64(step) {
			continue
		}
		if result.Auto > 0 && open == 0 {
			open = simulatedStep(t, auto)
		}
		result.Simulated[pin] = float64(open / simulatedStep(t, job))
	}
	result.Seconds = time.Since(begun).Seconds()
	return result
}

// drawPins draws values to pin, one each of dp, sp and pp first, among keys that the job leaves open.
func drawPins(sp *lang.Spec, set []string, r *rand.Rand) (pins []string) {
	values := plantest.PinnedValues(sp)
	var rest []string
	for _, k := range lang.KeysOf("schedule") {
		if slices.ContainsFunc(set, func(s string) bool { return strings.HasPrefix(s, k.Path()+"=") }) {
			continue
		}
		of := slices.Clone(values[k.Name])
		r.Shuffle(len(of), func(i, j int) { of[i], of[j] = of[j], of[i] })
		for i, v := range of {
			if first := k.Name == "dp" || k.Name == "sp" || k.Name == "pp"; first && i == 0 {
				pins = append(pins, k.Path()+"="+v)
			} else {
				rest = append(rest, k.Path()+"="+v)
			}
		}
	}
	r.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	return append(pins, rest[:min(len(rest), drawnPins-len(pins))]...)
}

// placed plans a job and places its buffers.
func placed(file string, set []string) (*cli.Job, error) {
	job, err := cli.OpenPlan(file, set, passes.Options{Measure: codegen.MeasureFit})
	if err != nil {
		return nil, err
	}
	return job, job.Measure()
}

// simulatedStep builds a job's program and returns the simulated time of a step.
func simulatedStep(t *testing.T, job *cli.Job) ir.Seconds {
	if err := job.Compile(); err != nil {
		t.Fatal(err)
	}
	timeline, err := sim.Run(job.Program, ir.SectionStep, sim.Options{})
	if err != nil {
		t.Fatal(err)
	}
	job.Program = nil // large
	return timeline.Makespan
}
