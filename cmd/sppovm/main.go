// Command sppovm runs programs that sppoc built; a spec it compiles itself.
//
//	main.go      the table of subcommands
//	run.go       run: load, device, steps, report
//	launch.go    which one this process is of several, by flags or by who started it
//	simulate.go  run in virtual time
//	progress.go  what a user sees of a run, and the lines of --json
//	bubble.go    the bubble, measured
//	profile.go   the timeline of the last step, measured
//	computer.go  who computes: the cpu or GPUs
//	gpus.go      GPUs; gpus_static.go what a static build says instead (-tags static)
//	devices.go   what there is to run on
//	probe.go     measure it; clusterfile.go writes the figures as a cluster file
//
// It knows no model and no schedule: the program says what happens.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"sppo.dev/cmd/internal/cli"
)

func main() {
	// The first signal asks the run to stop behind its step; then signals do again what they do by default.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	code := app.Main(&cli.Env{Context: ctx, Stdout: os.Stdout, Stderr: os.Stderr}, os.Args[1:])
	stop()
	os.Exit(code)
}

var app = cli.App{
	Name: "sppovm",
	Doc:  "sppovm runs training jobs that sppoc compiled.",
	Commands: []cli.Command{
		{
			Name: "run", Args: "FILE [--steps K] [--json] [--save CHECKPOINT]", MinArgs: 1, MaxArgs: 1, Setup: run, Files: cli.JobFiles,
			Doc: "train",
			Details: "FILE is a program (.sppb or .sppir), a spec, or a plan; the last two are compiled first. Progress goes to standard\n" +
				"error. With --json standard output gets one object a line: for each step {\"step\",\"loss\",\"tokens_per_s\",\"step_s\",\n" +
				"\"grad_norm\"}, for each validation {\"step\",\"eval_loss\"}, at the end {\"done\":true,\"steps\",\"final_loss\",\n" +
				"\"device_peak_bytes\",\"host_peak_bytes\",\"bubble_ratio\"}. Peaks are those of the rank with the highest; bubble_ratio is\n" +
				"what sppoc plan calls bubble, as measured: idle time of the ranks divided by busy time, from the start of a step to its\n" +
				"last task. A rank that waits for a processor core counts as busy. On GPUs, where measuring takes time, it is that of the\n" +
				"second step and every hundredth.\n\n" +
				"With --device sim nothing is computed and no data is read: the same instructions run in virtual time on the cluster\n" +
				"that the program was compiled for. Every line says that it is simulated, and every object has \"simulated\":true.\n\n" +
				"With --device cuda ranks are dealt to the GPUs in turn; several may share one. Libraries are looked for in SPPO_CUDA_PATH\n" +
				"first; devices says where else, and what is missing. With SPPO_CUDA_SYNC=1 the run waits behind every instruction, slowly,\n" +
				"so that an error of the GPU is told of the instruction that made it. With SPPO_CUDA_PORTABLE=1 it takes no kernels that are\n" +
				"for one architecture alone. Under a profiler that speaks NVTX, such as Nsight Systems, every rank's thread shows what it\n" +
				"issues: phase, microbatch, subsequence, layer and stage.\n\n" +
				"With --profile the begin and end of every instruction of the last step are written, by events of the GPU or the clock of\n" +
				"the cpu, as a trace that viewers such as Perfetto read; sppoc view FILE TRACE lays it over the simulation.\n" +
				"The run ends with how long the instructions of each opcode took and were simulated to take.\n\n" +
				"A job may run in several processes, on one host or on many, each with an equal part of the ranks in a row: the same command\n" +
				"line for all, started by torchrun --no-python, srun or mpirun, or by hand with --processes, --process and --rendezvous. Process 0\n" +
				"listens where MASTER_ADDR and MASTER_PORT say, or on Slurm's first node; the others find it there, and all must have the same\n" +
				"program, version and data. It prints, and reads and writes what is kept. On the cpu ranks of different processes meet over TCP,\n" +
				"and losses and weights are, to the last bit, those of one process; on GPUs they meet by NCCL, a GPU for each rank. If one\n" +
				"process fails or is lost all end, and each says which it was.\n\n" +
				"Ctrl-C stops behind the step that runs, with a checkpoint if --save is given; a second one aborts. Of several processes\n" +
				"whichever gets it stops all.",
			Examples: []string{
				"sppovm run examples/tiny.sppo",
				"sppovm run out/gpt-docs.sppb --steps 50 --json",
				"sppovm run examples/tiny.sppo --steps 5 --save tiny.ckpt",
				"sppovm run examples/tiny.sppo --resume tiny.ckpt",
				"sppovm run examples/tiny.sppo --profile tiny.json",
				"sppovm run examples/paper/gpt-7b-512k.sppo --device sim",
				"sppovm run examples/tiny.sppo --device sim --steps 20 --jitter 0.05 --slow 3=1.2",
				"srun --nodes 2 --ntasks-per-node 2 sppovm run examples/tiny.sppo",
				"sppovm run examples/tiny.sppo --processes 2 --process 0 --rendezvous node1:29500",
			},
		},
		{Name: "devices", Setup: devices, Doc: "say what there is to run on, and what is missing for GPUs"},
		{
			Name: "probe", Args: "[-o CLUSTER.sppo] [--device cpu|cuda]", Setup: probeMachine,
			Doc: "measure this machine and write a cluster file",
			Details: "Instructions are run one by one, many times over, as training runs them: products and attention by size, memory-bound\n" +
				"kernels, copies, messages. The cluster file has what follows, each figure with where it comes from; specs import it.\n" +
				"Peaks of GPUs that ship with a cluster are the data sheet's, all others the best that was measured. Measure while nothing\n" +
				"else runs: where other work has slowed down much of what counts, the file says so. With --json each\n" +
				"measurement is an object {\"item\",\"op\",\"ranks\",\"copies\",\"seconds\",\"spread\", \"flop_per_s\" or \"bytes_per_s\"}, and at\n" +
				"the end {\"done\":true,\"machine\",\"notes\",\"disturbed\"}.",
			Examples: []string{"sppovm probe -o here.sppo --name here", "sppovm probe --device cuda -o cluster.sppo"},
		},
	},
}
