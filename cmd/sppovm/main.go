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
// It knows no model and no schedule: the program determines what happens.
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

// stopping lists the signals that end a run after its step. They come from a user, a scheduler that reclaims the
// machine, a terminal that closes, or Slurm's early warning (--signal=USR1@120). A signal that the parent ignores,
// as nohup does, stays ignored.
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
			Details: "FILE is a program (.sppb or .sppir), a spec, or a plan; the last two are compiled first. Progress goes to standard\n" +
				"error. With --json, standard output has one object per line: for each step {\"step\",\"loss\",\"tokens_per_s\",\"step_s\",\n" +
				"\"grad_norm\",\"lr\",\"split\":{\"compute\",\"exposed_copies\",\"exposed_communication\",\"bubble\"},\"grad_norms\"}, for each\n" +
				"validation {\"step\",\"eval_loss\",\"loss_by_position\"}, at the end {\"done\":true,\"steps\",\"final_loss\",\"device_peak_bytes\",\"host_peak_bytes\",\n" +
				"\"bubble_ratio\"}. Peaks are those of the fullest rank. bubble_ratio is the measured bubble, defined as in sppoc plan: idle\n" +
				"time of the ranks divided by busy time, from the start of a step to its last task. The split divides the time of the\n" +
				"whole step, including the optimizer, into shares over all ranks. A rank that waits for a processor core counts as busy. On GPUs only the\n" +
				"second step and every hundredth are measured.\n\n" +
				"--record appends the same objects to a file, and one for each start of the run (\"run\") and for each event (\"note\"); sppovm\n" +
				"report draws them. --tensorboard writes event files, --prometheus serves metrics on this computer only. With any of the\n" +
				"three, the program is simulated first, and a warning is printed if the steps differ from the prediction by more than 25% in\n" +
				"time or 10 points in a share. --grad-norms adds the gradient norm of each layer, --position-losses the loss of\n" +
				"validations by position in the sequence. If process 0 cannot write one of these, the run continues without it.\n\n" +
				"With --device sim nothing is computed and no data is read: the same instructions run in virtual time on the cluster for\n" +
				"which the program was compiled. Every line says that it is simulated, and every object has \"simulated\":true.\n\n" +
				"With --device cuda ranks are assigned to the GPUs in turn; several may share one. Libraries are searched first in\n" +
				"SPPO_CUDA_PATH; sppovm devices lists the other folders and what is missing. SPPO_CUDA_SYNC=1 waits after every\n" +
				"instruction, so that an error names the instruction that caused it; this is slow. SPPO_CUDA_PORTABLE=1 disables kernels\n" +
				"written for one architecture. Under a profiler with NVTX, such as Nsight Systems, the thread of every rank shows what it\n" +
				"issues: phase, microbatch, subsequence, layer and stage.\n\n" +
				"--profile measures the start and end of every instruction of the last step, with events of the GPU or the CPU's clock,\n" +
				"and writes a trace for viewers such as Perfetto; sppoc view FILE TRACE shows it below the simulation. The run ends with\n" +
				"the measured and the simulated time of each opcode.\n\n" +
				"A job may run in several processes, on one or more hosts, each with an equal, contiguous part of the ranks. Start the same\n" +
				"command line everywhere with torchrun --no-python, srun or mpirun, or by hand with --processes, --process and --rendezvous.\n" +
				"Process 0 listens at MASTER_ADDR and MASTER_PORT, or on Slurm's first node, and the others connect to it. All need the same\n" +
				"program, version and data. Only process 0 prints. On CPUs, ranks of different processes connect by TCP; losses and weights\n" +
				"are bitwise those of a single process. On GPUs they connect by NCCL, with one GPU for each rank. If one process fails or is\n" +
				"lost, all others end and name it. If no rank makes progress in a step for --stall-timeout, the job ends with a report of\n" +
				"what each rank waits for. With a secret in SPPO_JOB_SECRET, only processes with the same secret can take part.\n\n" +
				"With --weights the run starts from the weights of a Hugging Face model folder (safetensors). Its config.json must\n" +
				"describe the program's model. Each rank reads only its own parts. Buffers of the folder that the model does not need are\n" +
				"listed and ignored.\n\n" +
				"--save writes checkpoints to a folder, as step-N: at the end and, with --save-every, also during training. The\n" +
				"newest --keep of them stay. A checkpoint is complete or absent. A run can continue from it under any other division of the same model, in\n" +
				"any number of processes, which must all see the folder. With --resume auto the same command line starts a run and, after a\n" +
				"crash, continues it.\n\n" +
				"Ctrl-C finishes the current step, writes a checkpoint if --save is given, and stops; a second Ctrl-C aborts. In any process\n" +
				"it stops all of them. SIGTERM, SIGHUP and SIGUSR1, which Slurm sends early with --signal=USR1@120, do the same.",
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
			Details: "Starts sppovm run with the given arguments in several processes, which connect by the variables that torchrun sets. When one\n" +
				"dies or fails, the others also end. With --restart, all are restarted and continue from the newest checkpoint, except after\n" +
				"an error in the input (exit code 2) or a job that does not fit (3). Ctrl-C and SIGTERM are passed on.\n" +
				"Under torchrun, srun, mpirun or Kubernetes, the launcher restarts processes, and sppovm run --resume auto continues there.",
			Examples: []string{"sppovm launch -n 2 --restart 10 run job.sppo --save run1 --save-every 10m --resume auto"},
		},
		{
			Name: "eval", Args: "FILE (--weights DIR | --resume CHECKPOINT) [--split all|train|validation]", MinArgs: 1, MaxArgs: 1, Setup: evaluate, Files: cli.JobFiles,
			Doc: "compute the loss and perplexity of a set of weights on the data",
			Details: "The data is read once, in windows of one sequence each that do not overlap. Tokens at the end that do not fill a window are\n" +
				"counted and reported. The result does not depend on how the job is divided, except for rounding. Losses are also reported by position\n" +
				"in the window, in buckets of doubling width: a model that uses long context has lower losses in later buckets. It may run in\n" +
				"several processes, started as for run.\n\n" +
				"--token-losses writes the loss of each token after the first as little-endian float32, in the order of the data: number i\n" +
				"is that of token i+1 of the split. The file appears only when complete.\n\n" +
				"With --json: {\"split\",\"loss\",\"perplexity\",\"windows\",\"tokens\",\"tokens_left\",\"sequence\",\"step\",\"loss_by_position\":\n" +
				"[{\"first\",\"last\",\"loss\",\"tokens\"}]}; positions count from 0, last included.",
			Examples: []string{"sppovm eval job.sppo --weights Llama-3.1-8B", "sppovm eval job.sppo --resume tuned.ckpt --split validation --json"},
		},
		{
			Name: "sample", Args: "(--weights DIR | --resume CHECKPOINT) (--prompt TEXT | --prompt-file FILE)", MaxArgs: 0, Setup: sampling,
			Doc: "continue a text using the weights in a folder or a checkpoint",
			Details: "The continuation is written to standard output as it is generated. It ends at the model's end token, after --max-tokens, or\n" +
				"at the longest sequence that the model supports. Each token is sampled with --temperature, --top-k and --top-p, in this order;\n" +
				"temperature 0 takes the most probable token. Equal weights, prompt and --seed give equal text on one kind of processor.\n\n" +
				"The tokenizer is that of --tokenizer, of the folder, or of the folder that the checkpoint's run\n" +
				"started from. Without one, the tokens of a model with a vocabulary of 256 are bytes.\n\n" +
				"It computes on the CPU, one token at a time, with a cache of keys and values: enough for a quick look at a\n" +
				"model. To serve a model, export it: see docs/hub.md.",
			Examples: []string{
				`sppovm sample --resume tiny.ckpt --prompt "A spec is "`,
				"sppovm sample --weights Llama-3.2-1B --prompt-file story.txt --max-tokens 500 --temperature 0.8 --top-p 0.95",
			},
		},
		{
			Name: "audit", Args: "FILE --from CHECKPOINT --to CHECKPOINT [--set schedule.pp=1]", MinArgs: 1, MaxArgs: 1, Setup: audit, Files: cli.JobFiles,
			Doc: "recompute the steps between two checkpoints and compare",
			Details: "FILE is the job that wrote the checkpoints, or the same job divided differently. The number of stages or processes,\n" +
				"offload and recomputation do not change any bit on the same kind of device, so differing bits mean faulty hardware or\n" +
				"a faulty kernel. Settings that change the order of sums (sp, subsequences, mux, another device) need --tolerance.\n" +
				"The exit code is 0 if the checkpoints agree, otherwise 1.",
			Examples: []string{"sppovm audit job.sppo --from run1/step-100 --to run1/step-110 --set schedule.pp=1"},
		},
		{
			Name: "export", Args: "CHECKPOINT -o DIR [--from DIR] [--dtype f32|bf16|f16]", MinArgs: 1, MaxArgs: 1, Setup: export,
			Doc: "write the weights of a checkpoint as a folder that transformers loads",
			Details: "Config, tokenizer, names and types of tensors come from the folder that the run started from, or from --from. Weights have\n" +
				"that folder's types unless --dtype sets another. DIR must be absent or empty; it appears only when complete.",
			Examples: []string{"sppovm export tuned.ckpt -o tuned", "sppovm export tuned.ckpt -o tuned --from Llama-3.1-8B --dtype bf16"},
		},
		{
			Name: "report", Args: "RUN -o PAGE.html", MinArgs: 1, MaxArgs: 1, Setup: report, Files: []string{"jsonl"},
			Doc: "draw a run as a web page",
			Details: "RUN is a file that run --record wrote, possibly of a run in progress, or the output of run --json. The page has curves, the\n" +
				"time of steps by activity next to the prediction, gradient norms by layer if recorded, memory and events. It needs no\n" +
				"network and no other file. Steps that were repeated after a restart count once.",
			Examples: []string{"sppovm report tiny.jsonl -o tiny.html"},
		},
		{Name: "devices", Setup: devices, Doc: "list available devices, and what is missing for GPUs"},
		{
			Name: "probe", Args: "[-o CLUSTER.sppo] [--device cpu|cuda]", Setup: probeMachine,
			Doc: "measure this machine and write a cluster file",
			Details: "Instructions are run one by one, many times, as training runs them: matmuls and attention by size, memory-bound\n" +
				"kernels, copies, messages. The cluster file has the resulting figures with their origins; specs import it. Peaks of GPUs\n" +
				"that have a shipped cluster come from the data sheet; all others are the best measurement. Measure on an otherwise idle\n" +
				"machine: if other work disturbed many measurements, a note in the file says so. With --json each\n" +
				"measurement is an object {\"item\",\"op\",\"ranks\",\"copies\",\"seconds\",\"spread\", \"flop_per_s\" or \"bytes_per_s\"}, and at\n" +
				"the end {\"done\":true,\"machine\",\"notes\",\"disturbed\"}.",
			Examples: []string{"sppovm probe -o here.sppo --name here", "sppovm probe --device cuda -o cluster.sppo"},
		},
	},
}
