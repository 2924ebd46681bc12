package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
)

// pythonWith returns a Python that has a package.
func pythonWith(t *testing.T, pkg, version string) string {
	t.Helper()
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skipf("SPPO_PYTHON is not set: a Python with %s %s is needed", pkg, version)
	}
	if out, err := exec.Command(python, "-c", "import "+pkg).CombinedOutput(); err != nil {
		t.Skipf("%s has no %s: %s", python, pkg, out)
	}
	return python
}

// exported is a case: what a package's own loader reads in the flags that export writes for an example.
type exported struct{ set, want string }

// checkRead runs a script of Python, which gets the flags as its standard input.
func checkRead(t *testing.T, python, to, script string, cases []exported) {
	t.Helper()
	for _, c := range cases {
		var flags, errs bytes.Buffer
		env := &cli.Env{Name: "sppoc", Stdout: &flags, Stderr: &errs}
		args := []string{"export", "testdata/base/tiny.sppo", "--to", to}
		for _, set := range strings.Fields(c.set) {
			args = append(args, "--set", set)
		}
		if code := app.Main(env, args); code != cli.Done {
			t.Fatalf("%s: exit %d: %s", c.set, code, &errs)
		}
		command := exec.Command(python, "-c", script)
		command.Stdin = &flags
		if out, err := command.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), "read "+c.want+"\n") {
			t.Errorf("%s: %v: %s\nwant %s", c.set, err, out, c.want)
		}
	}
}

func TestFlagsOfTorchtitan(t *testing.T) {
	const load = `import sys
from torchtitan.config import ConfigManager
c = ConfigManager().parse_args(["--module=llama3", "--config=llama3_debugmodel", *sys.stdin.read().split()])
p, t = c.parallelism, c.training
print("read", p.pipeline_parallel_degree, p.tensor_parallel_degree, p.context_parallel_degree, p.data_parallel_shard_degree, t.seq_len, t.local_batch_size)`
	checkRead(t, pythonWith(t, "torchtitan", "0.3"), "torchtitan", load, []exported{
		{"schedule.sp=2", "2 2 1 1 64 2"},
		{"schedule.sp_mode=ulysses", "2 1 2 1 64 2"},
		{"schedule.pp=1", "1 2 1 1 64 2"},
	})
}

// TRL reads its own flags, and accelerate the rest, as the command "trl sft" does it.
func TestFlagsOfTRL(t *testing.T) {
	const load = `import sys
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from trl import ModelConfig, SFTConfig, TrlParser
flags = sys.stdin.read().split()
t, m, rest = TrlParser((SFTConfig, ModelConfig)).parse_args_and_config(["--output_dir=x", "--use_cpu", "--report_to=none", *flags], return_remaining_strings=True)
a = launch_command_parser().parse_args([*rest, "sft.py"])
p = ParallelismConfig(**{k + "_size": getattr(a, "parallelism_config_" + k + "_size") for k in ("dp_replicate", "dp_shard", "tp", "cp", "sp")})
print("read", a.num_processes, p.total_size, p.dp_shard_size, p.tp_size, p.cp_size, p.sp_size, a.use_fsdp, a.use_deepspeed, t.max_length,
    t.per_device_train_batch_size * t.gradient_accumulation_steps, t.lr_scheduler_type.value, t.activation_offloading, m.lora_target_modules)`
	checkRead(t, pythonWith(t, "trl", "1.16"), "trl", load, []exported{
		{"schedule.sp=2", "4 4 1 2 2 1 True False 64 2 cosine_with_min_lr True None"},
		{"schedule.sp_mode=ulysses", "4 4 1 1 1 4 False True 64 2 cosine_with_min_lr True None"},
		{"schedule.pp=1 schedule.dp=2 schedule.zero=3", "4 4 2 2 1 1 True False 64 1 cosine_with_min_lr True None"},
		{"schedule.pp=1 train.lr_schedule=constant schedule.offload=none train.adapter=lora(targets=[q_proj,v_proj])", "2 2 1 2 1 1 True False 64 2 constant False ['q_proj', 'v_proj']"},
	})
}
