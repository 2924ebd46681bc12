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
	"sppo.dev/ir"
	"sppo.dev/vm/world"
)

// launch is how the processes of a job were started, as one of them finds it.
type launch struct {
	process, processes int
	local              int    // which one of its host; -1: unknown
	rendezvous         string // where they meet
	job                string // as what; empty: nothing but the program tells
	by                 string // who started them; empty: flags say so
}

// launchFlags say what no launcher says, or something else.
type launchFlags struct {
	set     *pflag.FlagSet
	asked   launch
	timeout time.Duration
	lookup  func(variable string) string // of the environment
}

func (l *launchFlags) define(flags *pflag.FlagSet) {
	l.set, l.lookup = flags, os.Getenv
	flags.IntVar(&l.asked.processes, "processes", 1, "run as one of so many processes, each with as many ranks; torchrun, srun and mpirun say so themselves")
	flags.IntVar(&l.asked.process, "process", 0, "which of the processes this is, from 0")
	flags.StringVar(&l.asked.rendezvous, "rendezvous", "", "`HOST:PORT` where process 0 listens and the others find it")
	flags.StringVar(&l.asked.job, "job", "", "a name that keeps apart jobs which meet at one place, where neither launcher nor program does")
	flags.DurationVar(&l.timeout, "rendezvous-timeout", 5*time.Minute, "how long to wait until all processes are there")
}

// launcher is a program that starts processes, and the variables by which it tells each which one it is. Of several names the first
// that is set counts.
type launcher struct {
	name               string
	process, processes []string
	local, localOf     string
	needs              string   // a variable without which the others mean something else
	job                []string // what tells a job from others
	hosts              []string // lists of the hosts, the first of which is that of process 0
}

// launchers in the order in which they are looked for: one that is started by another stands before it.
var launchers = []launcher{
	{name: "torchrun", process: []string{"RANK"}, processes: []string{"WORLD_SIZE"}, local: "LOCAL_RANK", localOf: "LOCAL_WORLD_SIZE",
		needs: "MASTER_ADDR", job: []string{"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
	{name: "mpirun", process: []string{"OMPI_COMM_WORLD_RANK"}, processes: []string{"OMPI_COMM_WORLD_SIZE"}, local: "OMPI_COMM_WORLD_LOCAL_RANK",
		localOf: "OMPI_COMM_WORLD_LOCAL_SIZE", job: []string{"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
	{name: "mpiexec", process: []string{"PMI_RANK"}, processes: []string{"PMI_SIZE"}, local: "MPI_LOCALRANKID", localOf: "MPI_LOCALNRANKS",
		needs: "MPI_LOCALRANKID"},
	{name: "srun", process: []string{"SLURM_PROCID"}, processes: []string{"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}, local: "SLURM_LOCALID",
		needs: "SLURM_STEP_ID", // a batch script itself is one process, whatever it may start
		job:   []string{"SLURM_JOB_ID", "SLURM_STEP_ID"}, hosts: []string{"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"}},
}

// find says how this process was started: nil if it is alone.
func (l *launchFlags) find() (*launch, error) {
	out, err := l.ofLauncher()
	if err != nil {
		return nil, err
	}
	changed := l.set.Changed
	if changed("processes") || changed("process") {
		if !changed("processes") && out.by == "" {
			return nil, cli.Usagef("--process says which one of --processes, which is missing")
		}
		out.by, out.local = "", -1
		if changed("processes") {
			out.processes = l.asked.processes
		}
		if changed("process") {
			out.process = l.asked.process
		} else if out.processes > 1 {
			return nil, cli.Usagef("--processes %d: --process says which of them this is, from 0 to %d", out.processes, out.processes-1)
		}
	}
	out.rendezvous, out.job = cmp.Or(l.asked.rendezvous, out.rendezvous), cmp.Or(l.asked.job, out.job)
	switch {
	case out.processes < 1:
		return nil, cli.Usagef("--processes %d: there is at least one", out.processes)
	case out.process < 0 || out.process >= out.processes:
		return nil, cli.Usagef("process %d of %d: they are counted from 0 to %d", out.process, out.processes, out.processes-1)
	case l.timeout <= 0:
		return nil, cli.Usagef("--rendezvous-timeout is more than 0")
	case out.processes == 1:
		return nil, nil
	case out.rendezvous == "":
		return nil, cli.Usagef("%d processes have to find each other: --rendezvous HOST:PORT is where process 0 listens", out.processes)
	}
	if _, port, err := net.SplitHostPort(out.rendezvous); err != nil || port == "" {
		return nil, cli.Usagef("--rendezvous %s: it is HOST:PORT, as in node1:29500", out.rendezvous)
	}
	return out, nil
}

// ofLauncher reads the environment.
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
				return nil, cli.Usagef("%s has started this process with %s=%s, which is no number", x.name, strings.Join(n.names, " or "), n.value)
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

// place finds where process 0 listens: where the variables of torchrun say so, whoever has set them, or on the first host.
func (l *launchFlags) place(x *launcher, out *launch) error {
	host := cmp.Or(l.lookup("MASTER_ADDR"), firstHost(l.first(x.hosts)))
	if host == "" && l.lookup(x.localOf) == strconv.Itoa(out.processes) {
		host = "127.0.0.1"
	}
	if host == "" {
		return nil // a flag has to say it
	}
	port := portOf(cmp.Or(out.job, x.name))
	if given := l.lookup("MASTER_PORT"); given != "" {
		var err error
		if port, err = strconv.Atoi(given); err != nil {
			return cli.Usagef("MASTER_PORT=%s is no number", given)
		}
		if l.lookup("TORCHELASTIC_USE_AGENT_STORE") == "True" {
			port++ // torchrun itself listens at the other
		}
	}
	out.rendezvous = net.JoinHostPort(host, strconv.Itoa(port))
	return nil
}

// portOf picks a port by the name of a job, among those that systems do not give away by themselves.
func portOf(job string) int {
	h := fnv.New32a()
	h.Write([]byte(job))
	return 20000 + int(h.Sum32()%10000)
}

// firstHost is the first of a list as Slurm writes it: of node[003-010,12],other it is node003.
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

// join meets the other processes of the job.
func (f *runFlags) join(env *cli.Env, p *ir.Program) (*world.World, error) {
	l := f.launch
	if n := len(p.Ranks); n%l.processes != 0 {
		return nil, cli.Usagef("the %d ranks of the program do not divide over %d processes; they do over %s", n, l.processes, divisors(n))
	}
	sum := sha256.New()
	if err := ir.Encode(sum, p); err != nil {
		return nil, err
	}
	digest := hex.EncodeToString(sum.Sum(nil)[:8])
	o := world.Options{
		Process: l.process, Processes: l.processes, Ranks: len(p.Ranks), Rendezvous: l.rendezvous, Timeout: f.launching.timeout,
		Job: cmp.Or(l.job, fmt.Sprintf("%s %s in %d processes", p.Name, digest, l.processes)),
		Terms: []world.Term{{Name: "version", Value: cli.Version(env.Name)}, {Name: "program", Value: digest},
			{Name: "device", Value: f.device}, {Name: "choice of --blas", Value: f.blas}},
		Local: l.local, Wires: f.device == "cpu",
		Tell: func(what string) {
			if !f.quiet {
				fmt.Fprintln(env.Stderr, what)
			}
		},
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

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

// divisors lists those of a number, for people.
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

// untilStopped is a context that ends also when the user of another process asks to stop.
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
