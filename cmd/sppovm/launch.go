package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train/world"
	"sppo.dev/ir"
)

// launch describes how the processes of a job were started, as seen by one of them.
type launch struct {
	process, processes int
	local              int    // index on its host; -1: unknown
	rendezvous         string // address of the rendezvous
	job                string // the launcher's job ID; empty: only the program identifies the job
	by                 string // the launcher; empty: flags
}

// launchFlags replace or override the launcher's variables.
type launchFlags struct {
	set     *pflag.FlagSet
	asked   launch
	timeout time.Duration
	lookup  func(variable string) string // reads the environment
}

func (l *launchFlags) define(flags *pflag.FlagSet) {
	l.set, l.lookup = flags, os.Getenv
	flags.IntVar(&l.asked.processes, "processes", 1, "number of processes, each with the same number of ranks; torchrun, srun and mpirun set it")
	flags.IntVar(&l.asked.process, "process", 0, "index of this process, counted from 0")
	flags.StringVar(&l.asked.rendezvous, "rendezvous", "", "`HOST:PORT` at which process 0 listens and to which the others connect")
	flags.StringVar(&l.asked.job, "job", "", "job ID; needed if jobs with the same program share a rendezvous address and the launcher sets no ID")
	flags.DurationVar(&l.timeout, "rendezvous-timeout", 5*time.Minute, "how long to wait for all processes to connect")
}

// launcher is a program that starts processes, with the variables that tell each process its place in the job. If
// there are several names for one value, the first variable that is set is used.
type launcher struct {
	name               string
	process, processes []string
	local, localOf     string
	needs              string   // a variable that must be set for the others to have this meaning
	job                []string // variables that identify the job
	hosts              []string // variables with lists of hosts; process 0 runs on the first host
}

// launchers lists the known launchers in the order in which they are detected: each comes before those that may
// start it.
var launchers = []launcher{
	{name: "torchrun", process: []string{"RANK"}, processes: []string{"WORLD_SIZE"}, local: "LOCAL_RANK", localOf: "LOCAL_WORLD_SIZE",
		needs: "MASTER_ADDR", job: []string{"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
	{name: "mpirun", process: []string{"OMPI_COMM_WORLD_RANK"}, processes: []string{"OMPI_COMM_WORLD_SIZE"}, local: "OMPI_COMM_WORLD_LOCAL_RANK",
		localOf: "OMPI_COMM_WORLD_LOCAL_SIZE", job: []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
	{name: "mpiexec", process: []string{"PMI_RANK"}, processes: []string{"PMI_SIZE"}, local: "MPI_LOCALRANKID", localOf: "MPI_LOCALNRANKS",
		needs: "MPI_LOCALRANKID"},
	{name: "srun", process: []string{"SLURM_PROCID"}, processes: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, local: "SLURM_LOCALID",
		needs: "SLURM_STEP_ID", // not set in a batch script, which is a single process even if it starts others
		job:   []string{"SLURM_JOB_ID", "SLURM_STEP_ID"}, hosts: []string{"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"}},
}

// find returns how this process was started, or nil if the job has no other process.
func (l *launchFlags) find() (*launch, error) {
	out, err := l.ofLauncher()
	if err != nil {
		return nil, err
	}
	changed := l.set.Changed
	if changed("processes") || changed("process") {
		if !changed("processes") && out.by == "" {
			return nil, cli.Usagef("--process needs --processes, the number of processes")
		}
		out.by, out.local = "", -1
		if changed("processes") {
			out.processes = l.asked.processes
		}
		if changed("process") {
			out.process = l.asked.process
		} else if out.processes > 1 {
			return nil, cli.Usagef("--processes %d: give the index of this process with --process, from 0 to %d", out.processes, out.processes-1)
		}
	}
	out.rendezvous, out.job = cmp.Or(l.asked.rendezvous, out.rendezvous), cmp.Or(l.asked.job, out.job)
	switch {
	case out.processes < 1:
		return nil, cli.Usagef("--processes %d: must be at least 1", out.processes)
	case out.process < 0 || out.process >= out.processes:
		return nil, cli.Usagef("process %d of %d: must be from 0 to %d", out.process, out.processes, out.processes-1)
	case l.timeout <= 0:
		return nil, cli.Usagef("--rendezvous-timeout must be more than 0")
	case out.processes == 1:
		return nil, nil
	case out.rendezvous == "":
		return nil, cli.Usagef("%d processes need a common address: --rendezvous HOST:PORT, where process 0 listens", out.processes)
	}
	if _, port, err := net.SplitHostPort(out.rendezvous); err != nil || port == "" {
		return nil, cli.Usagef("--rendezvous %s: write HOST:PORT, for example node1:29500", out.rendezvous)
	}
	return out, nil
}

// ofLauncher returns the launch that the environment describes, or that of a single process if no launcher has
// set any variables.
func (l *launchFlags) ofLauncher() (*launch, error) {
	for i := range launchers {
		x := &launchers[i]
		process, processes := l.first(x.process), l.first(x.processes)
		if process == "" || processes == "" || x.needs != "" && l.lookup(x.needs) == "" {
			continue
		}
		out := &launch{by: x.name, local: -1}
		for _, n := range []struct {
			names []string
			value string
			to    *int
		}{{x.process, process, &out.process}, {x.processes, processes, &out.processes}, {[]string{x.local}, l.lookup(x.local), &out.local}} {
			if n.value == "" {
				continue
			}
			var err error
			if *n.to, err = strconv.Atoi(n.value); err != nil {
				return nil, cli.Usagef("%s started this process with %s=%s, which is not a number", x.name, strings.Join(n.names, " or "), n.value)
			}
		}
		var names []string
		for _, variable := range x.job {
			if v := l.lookup(variable); v != "" {
				names = append(names, v)
			}
		}
		if len(names) > 0 {
			out.job = strings.Join(append([]string{x.name}, names...), " ")
		}
		return out, l.place(x, out)
	}
	return &launch{processes: 1, local: -1}, nil
}

func (l *launchFlags) first(variables []string) string {
	for _, v := range variables {
		if value := l.lookup(v); value != "" {
			return value
		}
	}
	return ""
}

// place sets the rendezvous address, on which process 0 listens. Host and port come from torchrun's variables, even
// if these were set for another launcher. Without them, they are the first host and a port derived from the job ID.
func (l *launchFlags) place(x *launcher, out *launch) error {
	host := cmp.Or(l.lookup("MASTER_ADDR"), firstHost(l.first(x.hosts)))
	if host == "" && l.lookup(x.localOf) == strconv.Itoa(out.processes) {
		host = "127.0.0.1"
	}
	if host == "" {
		return nil // a flag must give the address
	}
	port := portOf(cmp.Or(out.job, x.name))
	if given := l.lookup("MASTER_PORT"); given != "" {
		var err error
		if port, err = strconv.Atoi(given); err != nil {
			return cli.Usagef("MASTER_PORT=%s is not a number", given)
		}
		if l.lookup("TORCHELASTIC_USE_AGENT_STORE") == "True" {
			port++ // torchrun itself listens on MASTER_PORT
		}
	}
	out.rendezvous = net.JoinHostPort(host, strconv.Itoa(port))
	return nil
}

// portOf derives a port from the job ID, outside the range from which operating systems assign ports.
func portOf(job string) int {
	h := fnv.New32a()
	h.Write([]byte(job))
	return 20000 + int(h.Sum32()%10000)
}

// firstHost returns the first host of a list in Slurm's format: node003 for node[003-010,12],other.
func firstHost(list string) string {
	for out := ""; ; {
		at := strings.IndexAny(list, ",[")
		if at < 0 {
			return out + list
		}
		out += list[:at]
		if list[at] == ',' {
			return out
		}
		inside, behind, _ := strings.Cut(list[at+1:], "]")
		if end := strings.IndexAny(inside, ",-"); end >= 0 {
			inside = inside[:end]
		}
		out, list = out+inside, behind
	}
}

// join connects to the other processes of the job.
func (f *runFlags) join(env *cli.Env, p *ir.Program) (*world.World, error) {
	l := f.launch
	if n := len(p.Ranks); n%l.processes != 0 {
		return nil, cli.Usagef("%d ranks cannot be divided evenly over %d processes; use %s", n, l.processes, divisors(n))
	}
	sum := sha256.New()
	if err := ir.Encode(sum, p); err != nil {
		return nil, err
	}
	digest := hex.EncodeToString(sum.Sum(nil)[:8])
	o := world.Options{
		Process: l.process, Processes: l.processes, Ranks: len(p.Ranks), Rendezvous: l.rendezvous, Timeout: f.launching.timeout,
		Secret: os.Getenv(world.SecretVariable),
		Job:    cmp.Or(l.job, fmt.Sprintf("%s %s in %d processes", p.Name, digest, l.processes)),
		Terms: append([]world.Term{{Name: "version", Value: cli.Version(env.Name)}, {Name: "program", Value: digest},
			{Name: "device", Value: f.device}, {Name: "choice of --blas", Value: f.blas}}, f.agreed()...),
		Local: l.local, Wires: f.device == "cpu",
		Tell: func(what string) { fmt.Fprintln(env.Stderr, what) },
	}
	w, err := world.Join(env.Context, o)
	if err != nil {
		return nil, err
	}
	if w.Leads() && !f.quiet {
		first, end := w.Ranks()
		fmt.Fprintf(env.Stderr, "%d processes on %s, %s each\n", l.processes, count(w.Hosts(), "host"), count(end-first, "rank"))
	}
	return w, nil
}

// agreed lists the values of the flags that must be equal in all processes. Flags for outputs and for files that may
// have another path on each host are not among them; their contents are compared later.
func (f *runFlags) agreed() (terms []world.Term) {
	for _, name := range []string{"steps", "save", "save-every", "keep", "save-wait", "resume", "start-over", "cast", "nccl", "tune", "graphs", "split"} {
		flag := f.launching.set.Lookup(name)
		if flag == nil {
			continue // eval and run have different flags
		}
		value := flag.Value.String()
		if name == "steps" {
			value = strconv.Itoa(f.steps) // the program's last step unless the flag is given
		}
		terms = append(terms, world.Term{Name: "--" + name, Value: strconv.Quote(value)})
	}
	return terms
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// divisors returns a text that lists the divisors of a number.
func divisors(n int) string {
	var out []string
	for d := 1; d <= n; d++ {
		if n%d == 0 {
			out = append(out, strconv.Itoa(d))
		}
	}
	if len(out) == 1 {
		return out[0]
	}
	return strings.Join(out[:len(out)-1], ", ") + " or " + out[len(out)-1]
}

// untilStopped returns a context that is also cancelled when the user stops another process of the job.
func untilStopped(ctx context.Context, w *world.World) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-w.Stopped():
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
