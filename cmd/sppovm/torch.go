package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
)

// The machines that can run a program.
const (
	engineOwn   = "sppo"
	engineTorch = "torch"
)

// pythonVariable names the Python interpreter that has the package sppo_torch.
const pythonVariable = "SPPO_PYTHON"

// Flags of run that the PyTorch machine has, too, and those that have done their work before it starts.
var (
	torchFlags = []string{"device", "steps", "json", "quiet", "seed", "save", "save-every", "keep", "resume", "dir", "threads"}
	spentFlags = []string{"engine", "set", "cluster", "nodes", "sequence", "force", "processes", "process", "rendezvous"}
)

// torchArguments returns the arguments that correspond to the flags that were given.
func (f *runFlags) torchArguments() (arguments []string, err error) {
	if f.device != "cpu" && f.device != "cuda" {
		return nil, cli.Usagef("--engine torch needs --device cpu or cuda")
	}
	f.launching.set.Visit(func(f *pflag.Flag) {
		switch {
		case slices.Contains(torchFlags, f.Name):
			if f.Value.Type() != "bool" {
				arguments = append(arguments, "--"+f.Name, f.Value.String())
			} else if f.Value.String() == "true" {
				arguments = append(arguments, "--"+f.Name)
			}
		case !slices.Contains(spentFlags, f.Name) && err == nil:
			err = cli.Usagef("--%s is not available with --engine torch", f.Name)
		}
	})
	return arguments, err
}

// runTorch runs a program on the machine in interop/torch, in place of our own. After Ctrl-C it ends at once.
func (f *runFlags) runTorch(env *cli.Env, p *ir.Program) error {
	arguments, err := f.torchArguments()
	if err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "sppovm")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	file := filepath.Join(folder, "job.sppb")
	if err := ir.WriteFile(file, p); err != nil {
		return err
	}
	python := os.Getenv(pythonVariable)
	if python == "" {
		python = "python3"
	}
	if out, err := exec.Command(python, "-c", "import sppo_torch, torch").CombinedOutput(); err != nil {
		return cli.Wrong(fmt.Errorf("%s cannot import sppo_torch and torch: install interop/torch with pip, or let %s name another Python\n%s", python, pythonVariable, out))
	}
	if p.Run.DataKind == "tokens" { // the package cannot read token files, and asks this program for their sequences
		self, err := os.Executable()
		if err != nil {
			return err
		}
		arguments = append(arguments, "--sequences", folder, "--sequences-by", self)
	}
	c := exec.CommandContext(env.Context, python, append([]string{"-m", "sppo_torch", "run", file}, arguments...)...)
	c.Stdout, c.Stderr, c.Env = env.Stdout, env.Stderr, append(os.Environ(), f.torchEnvironment()...)
	var exit *exec.ExitError
	switch err := c.Run(); {
	case env.Context.Err() != nil:
		return cli.Stopped("the run on PyTorch was stopped")
	case errors.As(err, &exit): // it has printed why
		return cli.Silent(exit.ExitCode())
	default:
		return err
	}
}

// torchEnvironment returns the variables by which torch.distributed finds the other processes. torchrun has set more of them than
// these, so that they are left as they are.
func (f *runFlags) torchEnvironment() []string {
	if f.launch == nil || f.launch.by == "torchrun" {
		return nil
	}
	host, port, _ := net.SplitHostPort(f.launch.rendezvous) // find has checked it
	return []string{
		"RANK=" + strconv.Itoa(f.launch.process), "WORLD_SIZE=" + strconv.Itoa(f.launch.processes),
		"LOCAL_RANK=" + strconv.Itoa(max(0, f.launch.local)), "MASTER_ADDR=" + host, "MASTER_PORT=" + port,
	}
}
