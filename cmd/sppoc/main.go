// Command sppoc compiles specifications: it checks and formats them, plans jobs, and builds programs for
// sppovm.
//
//	main.go     the table of subcommands
//	spec.go     check, fmt, explain
//	import.go   import, init
//	plan.go     plan, passes
//	fit.go      suggests changes for a plan that does not fit
//	longest.go  the longest sequence that fits; fewest.go the fewest GPUs
//	program.go  build, asm, verify, dump
//	compare.go  compare; table.go writes its table
//	trace.go    trace
//	export.go   export; exporttitan.go and exporttrl.go its flags of torchtitan and TRL
//	view.go     view; the page is in page/
//	svg.go      figures for printing
//	reduce.go   reduce; shrink.go makes a text smaller
//	tokenize.go train-tokenizer, tokenize
//	diff.go     diff, and lines.go the comparison of texts
//	manual.go   the manual page of the language
//
// The packages lang, passes, codegen and ir do the compilation itself.
package main

import (
	"os"

	"sppo.dev/cmd/internal/cli"
)

func main() { cli.Run(&app, os.Interrupt) }

var app = cli.App{
	Name: "sppoc",
	Doc:  "sppoc compiles the specification of a training job (.sppo) into a program for sppovm (.sppb).",
	Commands: []cli.Command{
		{
			Name: "check", Args: "FILE... [--set KEY=VALUE]", MinArgs: 1, MaxArgs: -1, Setup: check, Files: cli.SpecFiles,
			Doc: "check a spec and report its errors",
			Details: "If there are no errors, check prints nothing, or only a short message if standard output is a\n" +
				"terminal. Errors that depend on how the job is planned are reported by sppoc plan. If FILE is -,\n" +
				"check reads standard input.",
			Examples: []string{"sppoc check examples/tiny.sppo", "sppoc check examples/tiny.sppo --set schedule.offload=none"},
		},
		{
			Name: "fmt", Args: "[-w | -l] FILE...", MinArgs: 1, MaxArgs: -1, Setup: format, Files: cli.SpecFiles,
			Doc:      "format a spec in the standard style",
			Details:  "If FILE is -, fmt formats standard input.",
			Examples: []string{"sppoc fmt mine.sppo", "sppoc fmt -w examples/*.sppo", "sppoc fmt -l examples/*.sppo"},
		},
		{
			Name: "explain", Args: "[KEY | VALUE | TERM | CLUSTER | SCHEDULE | OPCODE | PASS | CODE]", MaxArgs: -1, Setup: explain, Words: explained,
			Doc:      "explain a key, a value, a term, a shipped cluster or schedule, an opcode, a pass or an error code",
			Examples: []string{"sppoc explain", "sppoc explain schedule.offload", "sppoc explain attention", "sppoc explain bubble", "sppoc explain fpdt"},
		},
		{
			Name: "import", Args: "DIR [-o FILE.sppo] [--force]", MinArgs: 1, MaxArgs: 1, Setup: importModel,
			Doc: "write the model block for a Hugging Face model folder",
			Details: "DIR contains a config.json written by transformers 4 or 5. A comment on each key in the block names the config key\n" +
				"from which it is derived. A config key that sppo does not support is an error.",
			Examples: []string{"sppoc import Llama-3.1-8B -o llama.sppo", "sppoc import Qwen3-4B"},
		},
		{
			Name: "init", Args: "DIR --cluster CLUSTER [--nodes N] [--sequence TOKENS] [-o FILE.sppo]", MinArgs: 1, MaxArgs: 1, Setup: initSpec,
			Doc: "write a spec for a Hugging Face model folder",
			Details: "The spec contains the model block that sppoc import writes, the cluster and the run. It runs as it is, on random tokens;\n" +
				"to train on a corpus, change train.data. DIR need not contain weights.",
			Examples: []string{"sppoc init Llama-3.1-8B --cluster h100 --sequence 1M -o job.sppo"},
		},
		{
			Name: "plan", Args: "FILE [--json] [--set KEY=VALUE]", MinArgs: 1, MaxArgs: 1, Setup: planJob, Files: cli.PlanFiles,
			Doc: "plan a job, and report sizes, memory, predicted time and the reason for each decision",
			Details: "FILE is a spec, a plan written by --json, or a Hugging Face model folder. For a folder, --cluster is required; the\n" +
				"folder need not contain weights. For a spec, --cluster replaces the spec's cluster. If the job does not fit, the plan\n" +
				"is printed with suggested changes that would make it fit, and the exit code is 3. --long prints all decisions with\n" +
				"their reasons, memory by use and the critical path; --section prints only some of these parts. Ctrl-C ends a search:\n" +
				"the best result found so far is printed, and the exit code is 130. A second Ctrl-C, or one during other work, aborts\n" +
				"the command. With -o, --max-sequence and --min-gpus write a spec that plans to their answer.\n\n" +
				"Times are taken from a simulation of the program, as in compare, view and sppovm run --device sim. Of a long step\n" +
				"whose sequences run one after another, only three microbatches are placed and simulated, because each of the others\n" +
				"takes the same memory and the same time. The times of alternatives and rejected choices are the search's estimates.\n" +
				"--time-passes prints how long each pass took; that of solve includes the passes that the search runs on candidates.\n" +
				"The bubble is the time during which ranks have nothing to run, divided by the time during which they are busy, from\n" +
				"the start of a step to the end of its last task. The critical path is a chain of work that spans the entire step and\n" +
				"in which each part waits for the previous one. The parts of a peak add up to its total.",
			Examples: []string{
				"sppoc plan examples/tiny.sppo",
				"sppoc plan examples/tiny.sppo --section memory,why",
				"sppoc plan examples/paper/gpt-7b-1m.sppo --json",
				"sppoc plan Llama-3.1-8B --cluster h100 --nodes 1 --sequence 1M",
				"sppoc plan examples/tiny.sppo --why-idle",
				"sppoc plan examples/tiny.sppo --set schedule.subsequences=8 --set train.sequence=256",
				"sppoc plan examples/tiny.sppo --stop-after partition --print-after partition",
				"sppoc plan examples/paper/gpt-7b-1m.sppo --max-sequence -o longest.sppo",
				"sppoc plan examples/paper/gpt-7b-1m.sppo --min-gpus --set schedule.pp=auto",
			},
		},
		{
			Name: "build", Args: "FILE [-o PROGRAM] [--force]", MinArgs: 1, MaxArgs: 1, Setup: build, Files: cli.PlanFiles,
			Doc: "compile a spec or a plan into a verified program",
			Details: "The extension of the output file determines its format: .sppir is text, and any other extension is binary. Without -o, the\n" +
				"output is written to the current folder and is named after FILE, with the extension .sppb. If the job does not fit in\n" +
				"the cluster's memory, build fails with exit code 3 unless --force is given. If all ranks together have at most a million\n" +
				"instructions, build also proves that the program computes what its model is, as verify --meaning does.",
			Examples: []string{"sppoc build examples/tiny.sppo -o tiny.sppb", "sppoc build plan.json -o tiny.sppir"},
		},
		{
			Name: "dump", Args: "FILE [--rank R] [--section NAME] [--after PASS] [--format text|json|actions]", MinArgs: 1, MaxArgs: 1, Setup: dump, Files: cli.JobFiles,
			Doc: "print a program, or the result of a pass",
			Details: "FILE is a program, a spec or a plan; specs and plans are compiled first. With --rank, dump prints the code of one\n" +
				"rank, with the rank's constants filled in and with each instruction's number and addresses. With --format actions, dump\n" +
				"prints the schedule of every pipeline rank: its tasks in order, each with its actions (internal/schedule/ACTIONS.md).",
			Examples: []string{
				"sppoc dump examples/tiny.sppo --rank 0 --section step",
				"sppoc dump tiny.sppb",
				"sppoc dump examples/tiny.sppo --after partition",
				"sppoc dump examples/tiny.sppo --after place --rank 0",
				"sppoc dump tiny.sppb --rank 0 --format json",
				"sppoc dump examples/tiny.sppo --format actions",
			},
		},
		{
			Name: "asm", Args: "PROGRAM.sppir -o PROGRAM.sppb", MinArgs: 1, MaxArgs: 1, Setup: asm, Files: cli.ProgramFiles,
			Doc:      "convert a program between text and binary form",
			Details:  "The program is verified first.",
			Examples: []string{"sppoc asm tiny.sppir -o tiny.sppb", "sppoc asm tiny.sppb -o tiny.sppir"},
		},
		{
			Name: "verify", Args: "PROGRAM [--meaning]", MinArgs: 1, MaxArgs: 1, Setup: verify, Files: cli.ProgramFiles,
			Doc: "prove that a program has no races, invalid accesses or unmatched messages",
			Details: "With --meaning, also prove that the program computes the loss, the gradient and the update of the model in its header, up to\n" +
				"the order of additions: that each gradient contains every token of every sequence of every replica exactly once, and that\n" +
				"each parameter is updated once. A refusal names the first instruction at which this fails. docs/verify.md says more.",
			Examples: []string{"sppoc verify tiny.sppb", "sppoc verify --meaning tiny.sppb"},
		},
		{
			Name: "reduce", Args: "FILE [--at STAGE] [-o FILE] [-- COMMAND]", MinArgs: 1, MaxArgs: -1, Setup: reduce, Files: append(cli.SpecFiles[:1:1], cli.ProgramFiles...),
			Doc: "make a spec or a program that fails as small as possible, so that it still fails in the same way",
			Details: "FILE fails at the first of these stages that reports an error, or at the one that --at names: check, plan, verify and\n" +
				"meaning are those of the commands; run is one step on the CPU, and estimate fails if the time that is predicted for a step\n" +
				"differs from its simulation by more than 2%. Another spec fails in the same way if it has the same error code there, breaks\n" +
				"the same rule of the verifier, or loses its meaning at the same opcode. With a COMMAND, which gets the name of a file in\n" +
				"place of {} or as its last argument, it fails in the same way if the exit code is the same, and the output matches --match.\n" +
				"The command runs beside the result, on a hidden file that is removed afterwards.\n\n" +
				"Keys, lines, items of lists and arguments are removed, and numbers made smaller, until none can be; the order is always\n" +
				"the same. What changed and how the result fails goes to standard error. The result imports no file of yours. Ctrl-C ends\n" +
				"the work with the smallest result so far. A program only loses lines. One that the verifier accepts cannot lose many, so\n" +
				"reduce its spec instead.",
			Examples: []string{"sppoc reduce job.sppo -o small.sppo", "sppoc reduce job.sppo --at estimate", "sppoc reduce broken.sppir -o small.sppir",
				"sppoc reduce job.sppo --match 'loss +NaN' -- sppovm run {} --steps 3"},
		},
		{
			Name: "diff", Args: "A B", MinArgs: 2, MaxArgs: 2, Setup: diff, Files: cli.JobFiles,
			Doc: "print the differences between two plans or two programs",
			Details: "Specs and plans (.sppo, .json) are compared as plans, unless --programs is given. Programs are compared as text. If\n" +
				"there are no differences, nothing is printed. The exit code is 0 whether or not there are differences.",
			Examples: []string{
				"sppoc diff examples/tiny.sppo examples/tiny.sppo --set-b schedule.offload=none",
				"sppoc diff old.sppb new.sppb",
			},
		},
		{
			Name: "compare", Args: "FILE... [--sweep KEY=V1,V2,...] [--format text|csv|json|svg]", MinArgs: 1, MaxArgs: -1, Setup: compareJobs, Files: cli.JobFiles,
			Doc: "simulate several jobs and compare them in a table",
			Details: "Each FILE is a spec, a plan or a program. One step of each is simulated. If a job cannot be compiled, the output gives\n" +
				"the reason. A job that does not fit its cluster is simulated anyway, and its peak is marked. Settings that all lines\n" +
				"share are listed after the table. --baselines compares each job with the schedules of other systems whose sizes the\n" +
				"compiler chooses. --sweep compares those whose sizes are parameters, such as fpdt.",
			Examples: []string{
				"sppoc compare examples/tiny.sppo --sweep schedule.subsequences=2,4,8",
				"sppoc compare examples/tiny.sppo --sweep schedule.strategy=sppo,gpipe --sweep schedule.offload=none,full --format csv",
				"sppoc compare examples/paper/gpt-7b-*.sppo",
				"sppoc compare Llama-3.1-8B --cluster h100 --sequence 256K --baselines",
				"sppoc compare Llama-3.1-8B --cluster h100 --sequence 256K --sweep 'schedule=fpdt(sp = 8, chunks = 16),megatron-cp()'",
			},
		},
		{
			Name: "view", Args: "FILE [FILE | TRACE] -o OUT.html|OUT.svg [--ranks LIST]", MinArgs: 1, MaxArgs: 2, Setup: view, Files: cli.JobFiles,
			Doc: "simulate one or two programs and draw their timelines",
			Details: "Each FILE is a program, a spec or a plan. The output is a single HTML file that works offline. It shows the streams\n" +
				"of one rank per stage and its memory by use on a common time axis, with zoom, search and the spec line for every\n" +
				"instruction. A red line marks the capacity, unless the memory in use is less than a third of it.\n" +
				"If two programs have the same ranks, each rank of the second is drawn below the same rank of the first. TRACE is a\n" +
				"measured timeline of FILE, written by sppovm run --profile; it is drawn below the simulation. If OUT ends in .svg, the\n" +
				"output is a figure of one program, suitable for printing; --theme dark suits a dark page.",
			Examples: []string{
				"sppoc view examples/tiny.sppo -o tiny.html",
				"sppoc view old.sppb new.sppb -o both.html --ranks 0,2",
				"sppoc view tiny.sppb measured.json -o measured.html",
				"sppoc view examples/paper/gpt-7b-512k.sppo -o 7b.svg",
			},
		},
		{
			Name: "trace", Args: "FILE -o OUT.json [--ranks LIST]", MinArgs: 1, MaxArgs: 1, Setup: writeTrace, Files: cli.JobFiles,
			Doc: "simulate a program and write its timeline for Perfetto",
			Details: "FILE is a program, a spec or a plan. The output is trace-event JSON, which ui.perfetto.dev can open. It contains a\n" +
				"process for each rank, a thread for each stream, an arrow for each message and a counter for the memory of each arena.\n" +
				"Times are simulated.",
			Examples: []string{
				"sppoc trace examples/tiny.sppo -o tiny.json",
				"sppoc trace examples/paper/gpt-7b-512k.sppo -o 7b.json --ranks stages",
			},
		},
		{
			Name: "export", Args: "FILE --to torch-csv|torchtitan|trl [-o OUT]", MinArgs: 1, MaxArgs: 1, Setup: export, Files: cli.PlanFiles,
			Doc: "write a plan in a format of another system",
			Details: "FILE is a spec or a plan. torch-csv is the order of tasks as torch.distributed.pipelining reads it (compute_only): a line\n" +
				"for each pipeline rank, with cells such as 0F1: virtual stage, F, B, I or W, and microbatch. The same file can be given to\n" +
				"strategy = csv(\"FILE\"). torchtitan and trl are the flags of torchtitan 0.3 and of trl sft, TRL 1.16, that come nearest to the plan. What a format cannot say of the plan is listed on standard error (docs/schedules.md).",
			Examples: []string{"sppoc export examples/tiny.sppo --to torch-csv -o tiny.csv", "sppoc export examples/tiny.sppo --to torchtitan"},
		},
		{
			Name: "train-tokenizer", Args: "IN... -o DIR [--vocab N]", MinArgs: 1, MaxArgs: -1, Setup: trainTokenizer,
			Doc: "train a byte-level BPE tokenizer on text",
			Details: "Each IN is a file or a folder, as for tokenize. The tokenizer is written to DIR as tokenizer.json and\n" +
				"tokenizer_config.json, which Hugging Face's libraries can also read. Text is split the same way as in Llama 3. The\n" +
				"vocabulary contains all bytes, so any text can be tokenized. Token 0, <|endoftext|>, marks the end of a\n" +
				"document.",
			Examples: []string{"sppoc train-tokenizer corpus/ -o tokenizer --vocab 32768"},
		},
		{
			Name: "tokenize", Args: "IN... -o DIR --tokenizer DIR|FILE [--field NAME] [--append-eos]", MinArgs: 1, MaxArgs: -1, Setup: tokenize,
			Doc: "tokenize text, jsonl and parquet files into a folder for data = tokens(...)",
			Details: "Each IN is a file, or a folder with files at any depth. Files are read as jsonl (.jsonl, .ndjson), as parquet\n" +
				"(.parquet), or otherwise as text with one document per file; .gz and .zst files are decompressed. Token IDs are\n" +
				"exactly those that Hugging Face's tokenizers produce, without special tokens around a document.\n\n" +
				"tokenize writes flat files of little-endian tokens, the lengths of the documents and, at the end, manifest.json to\n" +
				"DIR. With --prompt or --segments it also writes masks, so that a run can train only on answers. If tokenize is\n" +
				"interrupted, repeat the command to continue. Interruptions and --workers do not affect the result.",
			Examples: []string{
				"sppoc tokenize corpus/ -o tokens --tokenizer tokenizer --append-eos",
				"sppoc tokenize data/*.jsonl.zst -o tokens --tokenizer Llama-3.1-8B --field content",
				"sppoc tokenize chats.jsonl -o tokens --tokenizer tokenizer --prompt question --field answer",
			},
		},
		{
			Name: "check-data", Args: "DATA... [--vocab N] [--type uint16|uint32] [--field NAME]", MinArgs: 1, MaxArgs: -1, Setup: checkData,
			Doc: "check a corpus for damage",
			Details: "Each DATA is what data = tokens(...) reads, a folder from sppoc tokenize, a Megatron data set or a flat file, or what\n" +
				"tokenize reads: text, jsonl or parquet, plain or compressed. All of it is read. check-data checks the checksums that\n" +
				"tokenize wrote, indexes and masks, that every token is in the vocabulary, and that documents can be read. Each damage\n" +
				"is printed in one line with the file and the place, and the exit code is then 1. Only folders from tokenize have\n" +
				"checksums; in the other formats, a changed token that is in the vocabulary cannot be found.",
			Examples: []string{"sppoc check-data tokens", "sppoc check-data data/*.bin --vocab 50257 --type uint16"},
		},
		{Name: "passes", Setup: listPasses, Doc: "list the passes in the order in which they run"},
	},
	Aliases: map[string][]string{"--list-passes": {"passes"}},
	Pages:   []cli.Page{languagePage},
}
