package main

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
)

// torchtitan's own loader reads the flags that export writes.
func TestFlagsOfTorchtitan(t *testing.T) {
	python := os.Getenv("SPPO_PYTHON")
	if python == "" {
		t.Skip("SPPO_PYTHON is not set: a Python with torchtitan 0.3 is needed")
	}
	if out, err := exec.Command(python, "-c", "import torchtitan").CombinedOutput(); err != nil {
		t.Skipf("%s has no torchtitan: %s", python, out)
	}
	const load = `import sys
from torchtitan.config import ConfigManager
c = ConfigManager().parse_args(["--module=llama3", "--config=llama3_debugmodel", *sys.stdin.read().split()])
p, t = c.parallelism, c.training
print("read", p.pipeline_parallel_degree, p.tensor_parallel_degree, p.context_parallel_degree, p.data_parallel_shard_degree, t.seq_len, t.local_batch_size)`
	for _, c := range []struct{ set, want string }{
		{"schedule.sp=2", "read 2 2 1 1 64 2\n"},
		{"schedule.sp_mode=ulysses", "read 2 1 2 1 64 2\n"},
		{"schedule.pp=1", "read 1 2 1 1 64 2\n"},
	} {
		var flags, errs bytes.Buffer
		env := &cli.Env{Name: "sppoc", Stdout: &flags, Stderr: &errs}
		if code := app.Main(env, []string{"export", "testdata/base/tiny.sppo", "--to", "torchtitan", "--set", c.set}); code != cli.Done {
			t.Fatalf("%s: exit %d: %s", c.set, code, &errs)
		}
		command := exec.Command(python, "-c", load)
		command.Stdin = &flags
		if out, err := command.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), c.want) {
			t.Errorf("%s: %v: %s\nwant %s", c.set, err, out, c.want)
		}
	}
}
