// Command sppovm runs programs built by sppoc, or specs, which it compiles first.
//
//	main.go      the table of subcommands
//	run.go       run: load, device, steps, report
//	start.go     launch: starts the processes of a job, and restarts them after a failure
//	launch.go    which of several processes this is, by flags or launcher
//	simulate.go  run in virtual time
//	watching.go  connects observers to a run; package watch has the observers
//	report.go    report
//	progress.go  progress lines, and the lines of --json
//	bubble.go    the measured bubble
//	profile.go   the measured timeline of the last step
//	computer.go  the device: the CPU or GPUs
//	gpus.go      GPUs; gpus_static.go replaces it in a static build (-tags static)
//	save.go      when and where to write checkpoints, and which one to resume from
//	eval.go      eval
//	sample.go    sample
//	audit.go     audit: compares recomputed steps with a checkpoint
//	weights.go   run --weights, export: Hugging Face model folders
//	devices.go   lists available devices
//	probe.go     measures them; clusterfile.go writes the figures as a cluster file
//
// sppovm does not depend on models or schedules; the compiled program determines what it does.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"sppo.dev/cmd/internal/cli"
)

func main() {
	// The first signal asks the run to stop after its step; later signals have their default effect.
	ctx, stop := signal.NotifyContext(context.Background(), stopping()...)
	context.AfterFunc(ctx, stop)
	code := app.Main(&cli.Env{Context: ctx, Stdout: os.Stdout, Stderr: os.Stderr}, os.Args[1:])
	stop()
	os.Exit(code)
}

// stopping lists the signals that end a run after its step. They come from a user, a scheduler that reclaims
// the machine, a terminal that closes, or Slurm's early warning (--signal=USR1@120). A signal that is already
// ignored when sppovm starts, as under nohup, stays ignored.
func stopping() (list []os.Signal) {
	for _, s := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGUSR1} {
		if !signal.Ignored(s) {
			list = append(list, s)
		}
	}
	return list
}

var app = cli.App{
	Name: "sppovm",
	Doc:  "sppovm runs training jobs that sppoc compiled.",
	Commands: []cli.Command{
		{
			Name: "run", Args: "FILE [--steps K] [--json] [--save DIR [--save-every 10m]] [--resume CHECKPOINT|auto]", MinArgs: 1, MaxArgs: 1, Setup: run, Files: cli.JobFiles,
			Doc: "train",
			Details: "FILE is a program (.sppb or .sppir), a spec or a plan; specs and plans are compiled first. Progress goes to standard\n" +
				"error. With --json, one object per line is written to standard output: for each step\n" +
				"{\"step\",\"loss\",\"tokens_per_s\",\"step_s\",\n" +
				"\"grad_norm\",\"lr\",\"split\":{\"compute\",\"exposed_copies\",\"exposed_communication\",\"bubble\"},\"grad_norms\"}, for each\n" +
				"validation {\"step\",\"eval_loss\",\"loss_by_position\"}, at the end\n" +
				"{\"done\":true,\"steps\",\"final_loss\",\"device_peak_bytes\",\"host_peak_bytes\", \"bubble_ratio\"}. The memory peaks are the\n" +
				"highest of any rank. bubble_ratio is the measured bubble, defined as in sppoc plan: the idle time of all ranks divided\n" +
				"by their busy time, from the start of a step to its last task. The split gives the shares of the whole step's time,\n" +
				"including the optimizer, over all ranks. A rank that waits for a processor core is treated as busy. On GPUs, only the\n" +
				"second step and every hundredth step are measured.\n\n" +
				"--record appends the same objects to a file, with an additional object for each start of the run (\"run\") and each\n" +
				"event (\"note\"); sppovm report draws them. --tensorboard writes event files. --prometheus serves metrics on this\n" +
				"computer only. With any of these flags, the program is simulated first, and a warning is printed if the steps differ\n" +
				"from the prediction by more than 25% in time or 10 percentage points in a share. --grad-norms adds the gradient norm\n" +
				"of each layer, and --position-losses the validation loss by position in the sequence. If process 0 cannot write one of\n" +
				"these outputs, the run continues without it.\n\n" +
				"With --device sim, nothing is computed and no data is read: the same instructions run in virtual time on the cluster\n" +
				"for which the program was compiled. Every line is marked as simulated, and every object has \"simulated\":true.\n\n" +
				"With --device cuda, ranks are assigned to the GPUs in turn; several ranks may share a GPU. SPPO_CUDA_PATH lists the\n" +
				"folders that are searched first for libraries; sppovm devices lists the other folders and the missing libraries.\n" +
				"SPPO_CUDA_SYNC=1 waits after every instruction, so that an error names the instruction that caused it; this is slow.\n" +
				"SPPO_CUDA_PORTABLE=1 disables kernels written for one architecture. In a profiler with NVTX, such as Nsight Systems,\n" +
				"the thread of each rank shows the phase, microbatch, subsequence, layer and stage that the rank is issuing.\n\n" +
				"--profile measures the start and end of every instruction of the last step, with GPU events or the CPU's clock, and\n" +
				"writes a trace for viewers such as Perfetto; sppoc view FILE TRACE shows it below the simulation. At the end, the run\n" +
				"prints the measured and the simulated time of each opcode.\n\n" +
				"A job can run in several processes, on one or more hosts. Each process runs an equal, contiguous block of ranks.\n" +
				"Start the same command everywhere with torchrun --no-python, srun or mpirun, or by hand with --processes, --process\n" +
				"and --rendezvous. Process 0 listens at MASTER_ADDR and MASTER_PORT, or on Slurm's first node, and the others connect\n" +
				"to it. All processes need the same program, version and data. Only process 0 prints. On CPUs, ranks of different\n" +
				"processes communicate over TCP; losses and weights are bitwise equal to those of a single process. On GPUs, they use\n" +
				"NCCL, with one GPU for each rank. If a process fails or is lost, all others exit with an error that\n" +
				"names it. If no rank makes progress in a step for --stall-timeout, the job ends and reports what each rank is waiting\n" +
				"for. If SPPO_JOB_SECRET is set, only processes with the same secret can join the job.\n\n" +
				"With --weights, the run starts from the weights of a Hugging Face model folder (safetensors). Its config.json must\n" +
				"describe the program's model. Each rank reads only its own parts of the weights. Tensors in the folder that the model\n" +
				"does not need are listed and ignored.\n\n" +
				"--save writes checkpoints named step-N to a folder: at the end of the run and, with --save-every, also during training.\n" +
				"--keep sets how many of them are kept. A checkpoint is either complete or absent. A run can continue from a checkpoint\n" +
				"with any other division of the same model over ranks and processes, if all processes can see the folder. With --resume\n" +
				"auto, the same command starts a run and, after a crash, continues it.\n\n" +
				"Ctrl-C finishes the current step, writes a checkpoint if --save is given, and stops; a second Ctrl-C aborts. Ctrl-C in\n" +
				"one process stops all of them. SIGTERM, SIGHUP and SIGUSR1 do the same; with --signal=USR1@120, Slurm sends SIGUSR1\n" +
				"two minutes before the time limit.",
			Examples: []string{
				"sppovm run examples/tiny.sppo",
				"sppovm run out/gpt-docs.sppb --steps 50 --json",
				"sppovm run examples/tiny.sppo --steps 5 --save tiny.ckpt",
				"sppovm run job.sppo --save run1 --save-every 10m --resume auto",
				"sppovm run examples/tiny.sppo --resume tiny.ckpt",
				"sppovm run llama-docs.sppo --weights Llama-3.1-8B --save tuned.ckpt",
				"sppovm run examples/tiny.sppo --profile tiny.json",
				"sppovm run examples/tiny.sppo --tensorboard runs/tiny --record tiny.jsonl",
				"sppovm run examples/paper/gpt-7b-512k.sppo --device sim",
				"sppovm run examples/tiny.sppo --device sim --steps 20 --jitter 0.05 --slow 3=1.2",
				"srun --nodes 2 --ntasks-per-node 2 sppovm run examples/tiny.sppo",
				"sppovm run examples/tiny.sppo --processes 2 --process 0 --rendezvous node1:29500",
			},
		},
		{
			Name: "launch", Args: "[-n PROCESSES] [--restart N] run FILE ...", MinArgs: 2, MaxArgs: -1, Setup: launchProcesses, Files: cli.JobFiles,
			Doc: "start the processes of a job on this host, and restart them when one dies",
			Details: "launch starts sppovm run with the given arguments in several processes, which find each other through the environment\n" +
				"variables of torchrun. When one dies or fails, the others also end. With --restart, all are restarted and continue\n" +
				"from the newest checkpoint, unless the input is wrong (exit code 2) or the job does not fit (3). Ctrl-C and SIGTERM\n" +
				"are passed on to the processes. torchrun, srun, mpirun and Kubernetes restart processes themselves; use sppovm run\n" +
				"--resume auto with them.",
			Examples: []string{"sppovm launch -n 2 --restart 10 run job.sppo --save run1 --save-every 10m --resume auto"},
		},
		{
			Name: "eval", Args: "FILE (--weights DIR | --resume CHECKPOINT) [--split all|train|validation]", MinArgs: 1, MaxArgs: 1, Setup: evaluate, Files: cli.JobFiles,
			Doc: "compute the loss and perplexity of a set of weights on the data",
			Details: "The data is read once, in non-overlapping windows of one sequence each. Tokens at the end that do not fill a\n" +
				"window are not used; their number is reported. The result does not depend on how the job is divided, except for\n" +
				"rounding. Losses are also reported by position in the window, in buckets of doubling width: a model that uses long\n" +
				"context has lower losses in later buckets. eval can run in several processes, which are started as for run.\n\n" +
				"--token-losses writes the loss of each token after the first as little-endian float32, in the order of the data:\n" +
				"number i is the loss of token i+1 of the split. The file appears only when it is complete.\n\n" +
				"With --json: {\"split\",\"loss\",\"perplexity\",\"windows\",\"tokens\",\"tokens_left\",\"sequence\",\"step\",\"loss_by_position\":\n" +
				"[{\"first\",\"last\",\"loss\",\"tokens\"}]}; positions count from 0, and last is included.",
			Examples: []string{"sppovm eval job.sppo --weights Llama-3.1-8B", "sppovm eval job.sppo --resume tuned.ckpt --split validation --json"},
		},
		{
			Name: "sample", Args: "(--weights DIR | --resume CHECKPOINT) (--prompt TEXT | --prompt-file FILE)", MaxArgs: 0, Setup: sampling,
			Doc: "continue a text using the weights in a folder or a checkpoint",
			Details: "The continuation is written to standard output as it is generated. It ends at the model's end token, after\n" +
				"--max-tokens, or at the longest sequence that the model supports. Each token is sampled with --temperature, --top-k\n" +
				"and --top-p, in this order; temperature 0 selects the most probable token. The same weights, prompt and --seed give\n" +
				"the same text on the same kind of processor.\n\n" +
				"The tokenizer comes from --tokenizer, from the model folder, or from the folder that the checkpoint's run started\n" +
				"from. Without a tokenizer, the tokens of a model with a vocabulary of 256 are bytes.\n\n" +
				"sample runs on the CPU, one token at a time, with a cache of keys and values. This is enough for a quick look at a\n" +
				"model. To serve a model, export it; see docs/hub.md.",
			Examples: []string{
				`sppovm sample --resume tiny.ckpt --prompt "A spec is "`,
				"sppovm sample --weights Llama-3.2-1B --prompt-file story.txt --max-tokens 500 --temperature 0.8 --top-p 0.95",
			},
		},
		{
			Name: "audit", Args: "FILE --from CHECKPOINT --to CHECKPOINT [--set schedule.pp=1]", MinArgs: 1, MaxArgs: 1, Setup: audit, Files: cli.JobFiles,
			Doc: "recompute the steps between two checkpoints and compare",
			Details: "FILE is the job that wrote the checkpoints, or the same job divided differently. The number of stages or processes,\n" +
				"offload and recomputation do not change any bit on the same kind of device, so differing bits indicate faulty hardware\n" +
				"or a faulty kernel. If the order of sums differs (because of sp, subsequences, mux or the device), values may differ\n" +
				"within --tolerance. The exit code is 0 if the checkpoints agree, and 1 otherwise.",
			Examples: []string{"sppovm audit job.sppo --from run1/step-100 --to run1/step-110 --set schedule.pp=1"},
		},
		{
			Name: "export", Args: "CHECKPOINT -o DIR [--from DIR] [--dtype f32|bf16|f16]", MinArgs: 1, MaxArgs: 1, Setup: export,
			Doc: "write the weights of a checkpoint as a folder that transformers loads",
			Details: "The config, the tokenizer, and the names and types of tensors come from the folder that the run started from, or from\n" +
				"--from. --dtype changes the type of the weights. DIR must not exist, or must be empty; it appears only when the export\n" +
				"is complete.",
			Examples: []string{"sppovm export tuned.ckpt -o tuned", "sppovm export tuned.ckpt -o tuned --from Llama-3.1-8B --dtype bf16"},
		},
		{
			Name: "report", Args: "RUN -o PAGE.html", MinArgs: 1, MaxArgs: 1, Setup: report, Files: []string{"jsonl"},
			Doc: "render a run as a web page",
			Details: "RUN is a file that run --record wrote, or the output of run --json. The run may still be in progress. The page shows\n" +
				"curves, the time of steps by activity next to the prediction, gradient norms by layer if recorded, memory and events.\n" +
				"It works offline and needs no other file. Steps that were repeated after a restart are drawn once.",
			Examples: []string{"sppovm report tiny.jsonl -o tiny.html"},
		},
		{Name: "devices", Setup: devices, Doc: "list available devices, and what is missing for GPUs"},
		{
			Name: "probe", Args: "[-o CLUSTER.sppo] [--device cpu|cuda]", Setup: probeMachine,
			Doc: "measure this machine and write a cluster file",
			Details: "probe runs each instruction many times, in the same way as training: matmuls and attention of several sizes,\n" +
				"memory-bound kernels, copies, messages. The cluster file, which specs import, contains the resulting figures and their\n" +
				"origins. Peak rates of GPUs with a shipped cluster come from the data sheet; other peak rates are the highest ones\n" +
				"measured. Measure on an otherwise idle machine. If other work disturbed many measurements, a note in the file says so.\n" +
				"With --json, each measurement is an object {\"item\",\"op\",\"ranks\",\"copies\",\"seconds\",\"spread\", \"flop_per_s\" or\n" +
				"\"bytes_per_s\"}, and at the end {\"done\":true,\"machine\",\"notes\",\"disturbed\"}.",
			Examples: []string{"sppovm probe -o here.sppo --name here", "sppovm probe --device cuda -o cluster.sppo"},
		},
	},
}
