package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train/store"
)

// flip changes one bit in the exponent of one value of a shard.
func flip(_ *store.Manifest, shard []byte) { shard[len(shard)-9] ^= 1 }

// rewrite copies a checkpoint and changes the manifest and the second shard of the copy. The checksums of the
// copy are correct, as if broken hardware had changed the values before they were written.
func rewrite(t *testing.T, from, to string, change func(m *store.Manifest, shard []byte)) {
	t.Helper()
	c, err := store.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	shard := filepath.Join(from, c.Shards[1].File)
	data, err := os.ReadFile(shard)
	if err != nil {
		t.Fatal(err)
	}
	folder, err := store.Create(filepath.Dir(to), 100, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	temporary, err := folder.Begin(c.Step)
	if err != nil {
		t.Fatal(err)
	}
	m := *c.Manifest
	change(&m, data)
	for i := range m.Shards {
		text := data
		if i != 1 {
			if text, err = os.ReadFile(filepath.Join(from, m.Shards[i].File)); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(temporary, m.Shards[i].File), text, 0o666); err != nil {
			t.Fatal(err)
		}
		m.Shards[i].CRC32C = store.Checksum(text)
	}
	if _, err := folder.Complete(temporary, &m); err != nil {
		t.Fatal(err)
	}
}

// Steps recomputed with a different number of stages and without offloading are bitwise equal. With a different
// number of ranks per stage, they differ only by rounding. A single flipped bit is detected.
func TestAudit(t *testing.T) {
	inBase(t)
	alone(t, "tiny.sppo", "-q", "--save", "dir", "--keep", "9", "--save-every", "1", "--save-wait")
	args := []string{"tiny.sppo", "-q", "--json", "--from", "dir/step-1", "--to", "dir/step-3"}
	check := func(want bool, more ...string) (found audited) {
		t.Helper()
		all := launchCommand(t, "audit", 1, func(int) []string { return append(args[:len(args):len(args)], more...) })
		out := end(t, all)
		if err := json.Unmarshal([]byte(out[0]), &found); err != nil {
			t.Fatalf("exit %d: %v\n%s", all[0].code, err, all[0].errs.String())
		}
		if found.Equal != want || (all[0].code == cli.Done) != want {
			t.Errorf("%v: exit %d, %s", more, all[0].code, out[0])
		}
		return found
	}
	if found := check(true, "--set", "schedule.pp=1", "--set", "schedule.offload=none"); found.Differing != 0 || found.Values == 0 || found.Reasons != nil {
		t.Errorf("%+v", found)
	}
	if found := check(true, "--set", "schedule.sp=1"); found.Differing == 0 || found.Tolerance != 0.001 || !slices.Contains(found.Reasons, "sp = 1 instead of 2") {
		t.Errorf("%+v", found)
	}
	check(false, "--set", "schedule.sp=1", "--tolerance", "1e-9")
	rewrite(t, "dir/step-3", "flipped/step-3", flip)
	for _, more := range [][]string{{"--set", "schedule.pp=1"}, {"--tolerance", "0.9"}} {
		found := check(false, append([]string{"--to", "flipped/step-3"}, more...)...)
		if found.Differing != 1 || !strings.Contains(found.Where, " is ") || found.Tolerance != 0 {
			t.Errorf("%v: %+v", more, found)
		}
	}
	rewrite(t, "dir/step-1", "reversed/step-1", func(m *store.Manifest, _ []byte) { slices.Reverse(m.Tensors) }) // other machines may have another order
	check(true, "--from", "reversed/step-1")
	rewrite(t, "dir/step-3", "elsewhere/step-3", func(m *store.Manifest, data []byte) {
		flip(m, data)
		m.Made.Devices = []string{"another device"}
	})
	found := check(true, "--to", "elsewhere/step-3", "--tolerance", "0.9")
	if found.Differing != 1 || len(found.Reasons) != 1 || !strings.HasSuffix(found.Reasons[0], " instead of another device") {
		t.Errorf("%+v", found)
	}
	all := launchCommand(t, "audit", 1, func(int) []string { return append(args[:len(args):len(args)], "--set", "train.optimizer.lr=2e-3") })
	end(t, all)
	if all[0].code != cli.Failed || !strings.Contains(all[0].errs.String(), "but the program has lr = 0.002") {
		t.Errorf("exit %d: %s", all[0].code, all[0].errs.String())
	}
	all = launchCommand(t, "audit", 1, func(int) []string { return []string{"tiny.sppo", "--from", "dir/step-3", "--to", "dir/step-1"} })
	end(t, all)
	if all[0].code != cli.BadInput || !strings.Contains(all[0].errs.String(), "dir/step-1 is of step 1, which is not after step 3 of dir/step-3") {
		t.Errorf("exit %d: %s", all[0].code, all[0].errs.String())
	}
}

// The commands in docs/checkpoints.md print the output shown there, except for values and counts that depend on
// rounding, and the name of the first tensor that differs only by rounding. -update rewrites the output in that file.
func TestAuditInDocs(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(root, "docs/checkpoints.md")
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	if err := os.Symlink(filepath.Join(root, "examples"), "examples"); err != nil {
		t.Fatal(err)
	}
	var now strings.Builder
	commands, skipping := 0, false
	for line := range strings.Lines(string(text)) {
		args, ok := strings.CutPrefix(line, "    $ sppovm ")
		if skipping = skipping && !ok && strings.HasPrefix(line, "    "); skipping {
			continue
		}
		now.WriteString(line)
		if !ok {
			continue
		}
		words := strings.Fields(args)
		if slices.Contains(words, "flipped/step-3") {
			rewrite(t, "run1/step-3", "flipped/step-3", flip)
		}
		all := launchCommand(t, words[0], 1, func(int) []string { return words[1:] })
		out := end(t, all)
		if all[0].code == cli.BadInput {
			t.Fatalf("%s: %s", line, &all[0].errs)
		}
		for shown := range strings.Lines(out[0]) {
			now.WriteString("    " + shown)
		}
		commands, skipping = commands+1, true
	}
	if *update {
		if err := os.WriteFile(page, []byte(now.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rounded := regexp.MustCompile(`-?\d+(\.\d+)?(e-?\d+)? (in the checkpoint|recomputed|relative to the change)|\d\d+ of|\w+ of layer\.\d\.bk`)
	want, got := rounded.ReplaceAllString(string(text), "-"), rounded.ReplaceAllString(now.String(), "-")
	if diff := cmp.Diff(want, got); diff != "" && !*update || commands != 4 {
		t.Errorf("%d commands, -page +run\n%s", commands, diff)
	}
}
