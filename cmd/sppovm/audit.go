package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train"
	"sppo.dev/internal/train/store"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// auditFlags are the flags of audit, many of which are also flags of run.
type auditFlags struct {
	runFlags
	from, to  string
	tolerance float64
}

func audit(flags *pflag.FlagSet) cli.Action {
	var f auditFlags
	cli.Choice(flags, &f.device, "device", "cpu", "cpu, or cuda (NVIDIA GPUs)", "cpu", "cuda")
	flags.StringVar(&f.from, "from", "", "the `CHECKPOINT` to start from")
	flags.StringVar(&f.to, "to", "", "the later `CHECKPOINT` to compare with")
	flags.Float64Var(&f.tolerance, "tolerance", 0, "if the plans add terms in different orders: the largest allowed difference in the weights, or in any one kind of optimizer state, relative to the norm of their change; 0: 0.001 for f32, 0.3 for bf16")
	flags.BoolVar(&f.json, "json", false, "write one JSON object to standard output")
	flags.BoolVarP(&f.quiet, "quiet", "q", false, "show warnings and errors only, no progress")
	flags.StringVar(&f.dir, "dir", "", dirHelp)
	flags.IntVar(&f.threads, "threads", 0, "number of threads for kernels; 0: one per processor core")
	flags.BoolVar(&f.force, "force", false, "run even if the job does not fit its cluster or the free memory")
	set := cli.JobFlags(flags)
	for _, name := range []string{"from", "to"} {
		cli.Files(flags, name)
	}
	return func(env *cli.Env, args []string) error {
		switch {
		case f.from == "" || f.to == "":
			return cli.Usagef("audit: give the checkpoints with --from and --to")
		case f.threads < 0 || f.tolerance < 0:
			return cli.Usagef("audit: --threads and --tolerance must be 0 or more")
		}
		job, err := openProgram(env, args[0], set())
		if err != nil {
			return err
		}
		if err := f.accept(env, args[0], job); err != nil {
			return err
		}
		f.blas = "go"
		return f.audit(env, job)
	}
}

// audit recomputes the steps between two checkpoints and compares the result with the second.
func (f *auditFlags) audit(env *cli.Env, job *cli.Job) error {
	to, err := train.OpenCheckpoint(f.to)
	if err != nil {
		return cli.Wrong(noCheckpoint("--to", f.to, err))
	}
	defer to.Close()
	tokens, err := openData(job, f.dir)
	if err != nil {
		return err
	}
	computer, err := f.open(job.Program, nil)
	if err != nil {
		return err
	}
	defer computer.close()
	j, err := train.Open(job.Program, func(rank int) (vm.Device, error) { return computer.device(rank), nil },
		train.Options{Dir: f.dir, Tokens: tokens, Transport: computer.transport, Kind: computer.kind})
	if err != nil {
		return err
	}
	return errors.Join(f.compare(env, job.Program, j, to, computer.name), j.Close())
}

// audited is the result of audit, with the JSON keys of --json.
type audited struct {
	From      int64    `json:"from"`
	To        int64    `json:"to"`
	Tensors   int      `json:"tensors"`
	Values    int64    `json:"values"`
	Differing int64    `json:"differing"` // values with differing bits
	Worst     number   `json:"worst"`     // largest over all roles: norm of difference / norm of change
	Where     string   `json:"where,omitempty"`
	Reasons   []string `json:"reasons,omitempty"` // why bits may differ; empty: they must not
	Tolerance float64  `json:"tolerance"`         // limit for Worst; 0: every bit must be equal
	Equal     bool     `json:"equal"`             // bit by bit, or within the tolerance

	byRole map[string][2]float64 // squares of the norms of difference and change, by role
	far    float64               // relative difference of the tensor named by Where
}

func (f *auditFlags) compare(env *cli.Env, p *ir.Program, j *train.Job, to *train.Checkpoint, device string) error {
	if err := j.Init(env.Context); err != nil {
		return err
	}
	if err := j.Restore(env.Context, f.from); err != nil {
		return cli.Wrong(noCheckpoint("--from", f.from, err))
	}
	from, err := store.ReadManifest(f.from)
	if err != nil {
		return cli.Wrong(fmt.Errorf("%s %w", f.from, err))
	}
	out := audited{From: int64(j.Steps()), To: to.Step, Tensors: len(to.Tensors), byRole: map[string][2]float64{}}
	if out.Reasons = reasons(j.Division(), &from.Made, &to.Made); len(out.Reasons) > 0 {
		out.Tolerance = cmp.Or(f.tolerance, rounding[p.Model.DType])
	}
	if out.To <= out.From {
		return cli.Usagef("audit: %s is of step %d, which is not after step %d of %s", f.to, out.To, out.From, f.from)
	}
	before := map[string][]float32{}
	for i := range to.Tensors {
		values, err := gathered(j, &to.Tensors[i])
		if err != nil {
			return cli.Wrong(err)
		}
		before[to.Tensors[i].Name()] = values
	}
	show := f.progress(env, p, device)
	show.changed(j)
	for int64(j.Steps()) < out.To {
		r, err := j.Step(env.Context)
		if err != nil {
			return err
		}
		show.say("step %d recomputed  loss %.6f", r.Step, r.Loss)
	}
	for i := range to.Tensors {
		if err := out.add(j, to, &to.Tensors[i], before[to.Tensors[i].Name()]); err != nil {
			return err
		}
	}
	for _, norms := range out.byRole {
		out.Worst = max(out.Worst, number(math.Sqrt(norms[0]/max(norms[1], math.SmallestNonzeroFloat64))))
	}
	out.Equal = out.Differing == 0 || float64(out.Worst) <= out.Tolerance
	return f.tell(env, &out)
}

// rounding holds, for each data type, the tolerance for differences due to the order of sums, relative to the norm
// of the change. It is many times larger than the differences measured over a few steps, and far smaller than those
// that wrong results show.
var rounding = map[string]float64{"f32": 0.001, "bf16": 0.3}

// reasons lists the reasons why a job's results may be rounded differently from those of the jobs that made the
// checkpoints. A run may have continued under another plan between the checkpoints, so the job is compared with
// both.
func reasons(mine store.Division, made ...*store.Division) (list []string) {
	add := func(reason string) {
		if !slices.Contains(list, reason) {
			list = append(list, reason)
		}
	}
	for _, m := range made {
		switch {
		case len(m.Sums) == 0 || len(mine.Sums) == 0:
			add("a program or a checkpoint does not record the order of its sums")
		case len(m.Devices) > 1 || !slices.Equal(m.Devices, mine.Devices):
			add(fmt.Sprintf("device %s instead of %s", strings.Join(mine.Devices, " and "), strings.Join(m.Devices, " and ")))
		}
		theirs := map[string]string{}
		for _, s := range m.Sums {
			key, value, _ := strings.Cut(s, " = ")
			theirs[key] = value
		}
		for _, s := range mine.Sums {
			key, value, _ := strings.Cut(s, " = ")
			was, ok := theirs[key]
			switch {
			case ok && was == value:
			case digest.MatchString(value):
				add("another " + key)
			case ok:
				add(fmt.Sprintf("%s = %s instead of %s", key, value, was))
			default:
				add(s)
			}
			delete(theirs, key)
		}
		for _, key := range slices.Sorted(maps.Keys(theirs)) {
			add("no " + key)
		}
	}
	return list
}

// digest matches the values of ir.Run.Sums that are hashes, which a message should not show.
var digest = regexp.MustCompile(`^[0-9a-f]{16}$`)

// gathered returns the job's values for an entry of a checkpoint.
func gathered(j *train.Job, e *store.Tensor) ([]float32, error) {
	for role := range ir.NumRoles {
		if role.String() == e.Role {
			values, _, err := j.Tensor(e.Tensor, role)
			return values, err
		}
	}
	return nil, fmt.Errorf("%s of %s is unknown to this release", e.Role, e.Tensor)
}

// add compares an entry of the later checkpoint with the job's values. before holds the values at the earlier
// checkpoint.
func (out *audited) add(j *train.Job, to *train.Checkpoint, e *store.Tensor, before []float32) error {
	got, err := gathered(j, e)
	if err != nil {
		return err
	}
	want := make([]float32, len(got))
	if err := to.ReadEntry(e, want); err != nil {
		return err
	}
	difference, change := 0.0, 0.0
	first := -1
	for i := range got {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			out.Differing++
			if first < 0 {
				first = i
			}
		}
		d, c := float64(got[i])-float64(want[i]), float64(got[i])-float64(before[i])
		difference, change = difference+d*d, change+c*c
	}
	out.Values += int64(len(got))
	sum := out.byRole[e.Role]
	out.byRole[e.Role] = [2]float64{sum[0] + difference, sum[1] + change}
	if first < 0 {
		return nil
	}
	relative := math.Sqrt(difference / change)
	if math.IsNaN(relative) || out.Where == "" || relative > out.far {
		cols := int(e.Shape[1])
		out.far = relative
		out.Where = fmt.Sprintf("%s of %s: row %d, column %d is %v in the checkpoint and %v recomputed", e.Role, e.Tensor, first/cols, first%cols, want[first], got[first])
	}
	return nil
}

func (f *auditFlags) tell(env *cli.Env, out *audited) error {
	if f.json {
		if err := json.NewEncoder(env.Stdout).Encode(out); err != nil {
			return err
		}
	} else {
		io.WriteString(env.Stdout, out.inWords())
	}
	if !out.Equal {
		return cli.Silent(cli.Failed)
	}
	return nil
}

// inWords describes the findings.
func (out *audited) inWords() string {
	steps := fmt.Sprintf("steps %d to %d: ", out.From+1, out.To)
	if out.Differing == 0 {
		return steps + fmt.Sprintf("all %d values of %d tensors are equal, bit for bit\n", out.Values, out.Tensors)
	}
	text := steps + fmt.Sprintf("%d of %d values differ, by up to %.3g relative to the change in these steps; ", out.Differing, out.Values, float64(out.Worst))
	if len(out.Reasons) == 0 {
		text += "both add in the same order, so all values must be equal\n"
	} else {
		verdict := "this is within"
		if !out.Equal {
			verdict = "this is more than"
		}
		text += fmt.Sprintf("%s the tolerance of %g for a different order of summation: %s\n", verdict, out.Tolerance, strings.Join(out.Reasons, "; "))
	}
	return text + out.Where + "\n"
}
