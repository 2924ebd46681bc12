// Command sppovm runs programs built by sppoc, or specs, which it compiles first.
//
//	main.go      the table of subcommands
//	run.go       run: load, device, steps, report
//	start.go     launch: starts the processes of a job, and restarts them after a failure
//	launch.go    finds out from flags or the launcher which of several processes this is
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
//	sequences.go sequences
//	audit.go     audit: compares recomputed steps with a checkpoint
//	weights.go   run --weights, export: Hugging Face model folders
//	devices.go   lists available devices
//	probe.go     measures them; clusterfile.go writes the figures as a cluster file
//
// sppovm does not depend on models or schedules; the compiled program determines what it does.
package main

import (
	"os"
	"os/signal"
	"syscall"

	"sppo.dev/cmd/internal/cli"
)

func main() { cli.Run(&app, stopping()...) }

// stopping lists the signals that end a run after the current step. They come from a user, a scheduler that
// reclaims the machine, a terminal that closes, or Slurm's early warning (--signal=USR1@120). A signal that is
// already ignored when sppovm starts, as under nohup, stays ignored.
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
	Doc:  "sppovm runs training jobs compiled by sppoc.",
	Commands: []cli.Command{
		{
			Name: "run", Args: "FILE [--steps K] [--json] [--save DIR [--save-every 10m]] [--resume CHECKPOINT|auto]", MinArgs: 1, MaxArgs: 1, Setup: run, Files: cli.JobFiles,
			Doc: "train",
			Details: "FILE is a program (.sppb or .sppir), a spec or a plan; specs and plans are compiled first. Progress goes to standard\n" +
				"error. With --json, one object per line is written to standard output: for each step\n" +
				"{\"step\",\"loss\",\"tokens_per_s\",\"step_s\",\n" +
				"\"grad_norm\",\"lr\",\"split\":{\"compute\",\"exposed_copies\",\"exposed_communication\",\"bubble\"},\"grad_norms\"}, for each\n" +
				"validation {\"step\",\"eval_loss\",\"loss_by_position\"}, and at the end\n" +
				"{\"done\":true,\"steps\",\"final_loss\",\"device_peak_bytes\",\"host_peak_bytes\", \"bubble_ratio\"}. The memory peaks are the\n" +
				"highest of any rank. bubble_ratio is the measured bubble, defined as in sppoc plan: the idle time of all ranks divided\n" +
				"by their busy time, from the start of a step to the end of its last task. The split divides the time that all ranks\n" +
				"spend in a step, including the optimizer, into shares. A rank that is waiting for a processor core counts as busy. On\n" +
				"GPUs, only the second step, every hundredth step and the step given by --profile are measured.\n\n" +
				"--record appends the same objects to a file, with an additional object for each start of the run (\"run\") and each\n" +
				"event (\"note\"); sppovm report plots them. --tensorboard writes event files. --prometheus serves metrics on this\n" +
				"computer only. With any of these flags, the program is simulated first, and a warning is printed if the steps deviate\n" +
				"from the prediction by more than 25% in time or by more than 10 percentage points in any share. --grad-norms adds the\n" +
				"gradient norm of each layer, and --position-losses the validation loss by position in the sequence. If process 0\n" +
				"cannot write one of these outputs, the run continues without it.\n\n" +
				"With --device sim, nothing is computed and no data is read: the same instructions run in virtual time on the cluster\n" +
				"for which the program was compiled. Every line is marked as simulated, and every object has \"simulated\":true. If\n" +
				"sequences hold several documents, the simulation does not know their lengths, so attention takes as long as without\n" +
				"document boundaries; sppoc plan reads the data and estimates the time with them.\n\n" +
				"With --device cuda, ranks are assigned to the GPUs round-robin; several ranks may share a GPU. SPPO_CUDA_PATH lists\n" +
				"the folders to search first for libraries; sppovm devices lists the other folders and the missing libraries. With\n" +
				"SPPO_CUDA_SYNC=1, the run waits after every instruction, so that an error names the instruction that caused it; this\n" +
				"is slow. SPPO_CUDA_PORTABLE=1 disables kernels written for a specific architecture, SPPO_CUDA_PORTABLE=64,96 only those of\n" +
				"attention with heads of these dimensions. In a profiler that supports NVTX,\n" +
				"such as Nsight Systems, the thread of each rank shows the phase, microbatch, subsequence, layer and stage of the\n" +
				"instructions that the rank is issuing.\n\n" +
				"--profile measures the start and end of every instruction in the last step, with GPU events or the CPU's clock, and\n" +
				"writes a trace for viewers such as Perfetto; sppoc view FILE TRACE shows it below the simulation. At the end, the run\n" +
				"prints the measured and simulated times of each opcode.\n\n" +
				"A job can run in several processes, on one or more hosts. Each process runs a contiguous block of ranks; all blocks\n" +
				"have the same size. Start the same command in every process with torchrun --no-python, srun or mpirun, or by hand with\n" +
				"--processes, --process and --rendezvous. Process 0 listens on MASTER_ADDR:MASTER_PORT, or on the first node of the\n" +
				"Slurm job, and the others connect to it. All processes need the same program, data and version of sppovm, and the same\n" +
				"values of flags such as --steps, --save and --resume. Only process 0 prints. On CPUs, ranks in different processes\n" +
				"communicate over TCP; losses and weights are bitwise equal to those of a single process. On GPUs, ranks use NCCL, with\n" +
				"one GPU per rank. If a process fails or is lost, all others exit with an error that names it. If no rank makes progress\n" +
				"in a step for as long as --stall-timeout, the job ends and reports what each rank is waiting for. If SPPO_JOB_SECRET is\n" +
				"set, only processes with the same secret can join the job. Bytes that processes send each other over TCP carry a\n" +
				"CRC-32C; if it is wrong, the job ends.\n\n" +
				"With --weights, the run starts from the weights in a Hugging Face model folder (safetensors). The folder's config.json\n" +
				"must describe the program's model. Each rank reads only its own parts of the weights. Tensors in the folder that the\n" +
				"model does not need are listed and ignored.\n\n" +
				"--save writes checkpoints named step-N to a folder: at the end of the run and, with --save-every, also during\n" +
				"training. --keep sets how many of them are kept. A checkpoint is either complete or absent. A run can continue from a\n" +
				"checkpoint with the same model divided differently among ranks and processes, if all processes can access the folder.\n" +
				"With --resume auto, the same command starts a run and, after a crash, continues it. It passes over a damaged\n" +
				"checkpoint: one that has a file with a wrong checksum or size, or lacks a file. All processes must find the damage;\n" +
				"then the checkpoint is renamed to step-N.damaged. If all checkpoints are damaged, starting again from the beginning\n" +
				"needs --start-over. Any other error in reading a checkpoint ends the run.\n\n" +
				"After Ctrl-C, the run finishes the current step, writes a checkpoint if --save is given, and stops with exit code\n" +
				"130; a second Ctrl-C aborts it. Ctrl-C in one process stops all of them. SIGTERM, SIGHUP and SIGUSR1 have the same\n" +
				"effect, with exit code 0; with --signal=USR1@120, Slurm sends SIGUSR1 two minutes before the time limit.",
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
			Details: "launch starts sppovm run with the given arguments in several processes, which find each other through torchrun's\n" +
				"environment variables, and a secret that keeps others out (SPPO_JOB_SECRET, made anew unless it is set). When one dies or\n" +
				"fails, the others exit too. With --restart, all are restarted and continue from the newest checkpoint, unless the input\n" +
				"is invalid (exit code 2) or the job does not fit (3). Ctrl-C and SIGTERM are passed on to the processes. torchrun, srun,\n" +
				"mpirun and Kubernetes restart processes themselves; use sppovm run --resume auto with them.",
			Examples: []string{"sppovm launch -n 2 --restart 10 run job.sppo --save run1 --save-every 10m --resume auto"},
		},
		{
			Name: "eval", Args: "FILE (--weights DIR | --resume CHECKPOINT) [--split all|train|validation]", MinArgs: 1, MaxArgs: 1, Setup: evaluate, Files: cli.JobFiles,
			Doc: "compute the loss and perplexity of given weights on the data",
			Details: "The data is read once, in non-overlapping windows of one sequence each. Tokens at the end that do not fill a window\n" +
				"are not used; their number is reported. The result does not depend on how the job is divided, except for rounding.\n" +
				"Losses are also reported by position in the window, in buckets that double in width: a model that makes use of long\n" +
				"context has lower losses in later buckets. To run eval in several processes, see sppovm help run.\n\n" +
				"--token-losses writes the loss of each token after the first as little-endian float32, in data order: value i is the\n" +
				"loss of token i+1 of the split. The file appears only when it is complete.\n\n" +
				"With --json, the output is {\"split\",\"loss\",\"perplexity\",\"windows\",\"tokens\",\"tokens_left\",\"sequence\",\"step\",\n" +
				"\"loss_by_position\":[{\"first\",\"last\",\"loss\",\"tokens\"}]}. Positions are counted from 0, and last is inclusive.",
			Examples: []string{"sppovm eval job.sppo --weights Llama-3.1-8B", "sppovm eval job.sppo --resume tuned.ckpt --split validation --json"},
		},
		{
			Name: "sequences", Args: "FILE -o FOLDER [--first STEP] [--steps N]", MinArgs: 1, MaxArgs: 1, Setup: sequences, Files: cli.JobFiles,
			Doc: "write the sequences that a run would train on, for other programs",
			Details: "step-N.npy contains the sequences of step N, and validation.npy those of a validation, as NumPy arrays of 32-bit integers\n" +
				"[3, sequences, train.sequence + 1]: the tokens, the labels (each at the place of its token; -1 where it does not count) and\n" +
				"the positions of the tokens in their documents. sppo-torch --sequences reads such a folder (interop/torch/README.md).",
			Examples: []string{"sppovm sequences examples/tiny.sppo -o out/sequences --steps 2"},
		},
		{
			Name: "sample", Args: "(--weights DIR | --resume CHECKPOINT) (--prompt TEXT | --prompt-file FILE)", MaxArgs: 0, Setup: sampling,
			Doc: "continue a prompt using the weights in a folder or a checkpoint",
			Details: "The continuation is written to standard output as it is generated. It ends at the model's end token, after\n" +
				"--max-tokens tokens, or when the sequence is as long as the model supports. Each token is sampled with --temperature,\n" +
				"--top-k and --top-p, applied in that order; a temperature of 0 selects the most probable token. The same weights,\n" +
				"prompt and --seed give the same text on the same kind of processor.\n\n" +
				"The tokenizer comes from --tokenizer, from the model folder, or from the folder that the checkpoint's run started\n" +
				"from. Without a tokenizer, the tokens of a model with a vocabulary of 256 are bytes. If the tokenizer of --tokenizer\n" +
				"has more tokens than the model, or 128 or more fewer, a note is printed. Up to 127 fewer are common, because\n" +
				"vocabularies are padded. If the numbers differ by more than a tenth, and by more than 512, the tokenizer is refused.\n\n" +
				"sample runs on the CPU, one token at a time, with a cache of keys and values. This is enough for a quick look at a\n" +
				"model. To serve a model, export it; see docs/hub.md.",
			Examples: []string{
				`sppovm sample --resume tiny.ckpt --prompt "A spec is "`,
				"sppovm sample --weights Llama-3.2-1B --prompt-file story.txt --max-tokens 500 --temperature 0.8 --top-p 0.95",
			},
		},
		{
			Name: "audit", Args: "FILE --from CHECKPOINT --to CHECKPOINT [--set schedule.pp=1]", MinArgs: 1, MaxArgs: 1, Setup: audit, Files: cli.JobFiles,
			Doc: "recompute the steps between two checkpoints and compare the results",
			Details: "FILE is the job that wrote the checkpoints, or the same job divided differently. On the same kind of device, the\n" +
				"number of stages or processes, offload and recomputation do not affect a single bit of the results, so differing bits\n" +
				"indicate faulty hardware or a faulty kernel. If the order of summation differs (because of sp, subsequences, mux or\n" +
				"the device), values may differ within --tolerance. The exit code is 0 if the checkpoints agree, and 1 otherwise.",
			Examples: []string{"sppovm audit job.sppo --from run1/step-100 --to run1/step-110 --set schedule.pp=1"},
		},
		{
			Name: "export", Args: "CHECKPOINT -o DIR [--from DIR] [--tokenizer DIR] [--dtype f32|bf16|f16]", MinArgs: 1, MaxArgs: 1, Setup: export,
			Doc: "write the weights of a checkpoint to a folder that transformers can load",
			Details: "The config, the tokenizer, and the names and types of the tensors come from the folder that the run started from, or\n" +
				"from --from, a folder of the same model. If the run did not start from a folder, export writes a config, and the only\n" +
				"tokenizer is that of --tokenizer. --dtype changes the type of the weights. DIR must be empty or must not exist; it\n" +
				"appears only when the export is complete.",
			Examples: []string{"sppovm export tuned.ckpt -o tuned", "sppovm export run1 -o mine --tokenizer tokenizer", "sppovm export tuned.ckpt -o tuned --from Llama-3.1-8B --dtype bf16"},
		},
		{
			Name: "report", Args: "RUN -o PAGE.html", MinArgs: 1, MaxArgs: 1, Setup: report, Files: []string{"jsonl"},
			Doc: "render a run as a web page",
			Details: "RUN is a file written by run --record, or the output of run --json. The run may still be in progress. The page shows\n" +
				"training curves, step time by activity alongside the prediction, gradient norms by layer (if recorded), memory use and\n" +
				"events. It works offline and needs no other files. Steps that were repeated after a restart are drawn only once.",
			Examples: []string{"sppovm report tiny.jsonl -o tiny.html"},
		},
		{Name: "devices", Setup: devices, Doc: "list the available devices, and anything missing for GPU support"},
		{
			Name: "probe", Args: "[-o CLUSTER.sppo] [--device cpu|cuda]", Setup: probeMachine,
			Doc: "measure this machine and write a cluster file",
			Details: "probe runs each instruction many times, just as training runs it: matmuls and attention of several sizes,\n" +
				"memory-bound kernels, copies and messages. The cluster file, which specs can import, contains the resulting figures\n" +
				"and their origins. For GPUs with a built-in cluster file, peak rates come from the data sheet; all other peak rates\n" +
				"are the highest that were measured. Run probe on an otherwise idle machine. If other work disturbed many measurements,\n" +
				"a note in the file says so. With --json, probe writes an object for each measurement,\n" +
				"{\"item\",\"op\",\"ranks\",\"copies\",\"seconds\",\"spread\", \"flop_per_s\" or \"bytes_per_s\"}, and at the end\n" +
				"{\"done\":true,\"machine\",\"notes\",\"disturbed\"}.",
			Examples: []string{"sppovm probe -o here.sppo --name here", "sppovm probe --device cuda -o cluster.sppo"},
		},
	},
}
