package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/vm/store"
)

// rewrite copies a checkpoint with one bit of one value flipped and correct checksums, as broken hardware would
// write it.
func rewrite(t *testing.T, from, to string) {
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
	data[len(data)-9] ^= 1 // in the middle of a mantissa
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

// Recomputed steps are bitwise equal under another number of stages without offload. With another number of ranks
// per stage they differ only by rounding. One flipped bit is found.
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
	if found := check(true, "--set", "schedule.pp=1", "--set", "schedule.offload=none"); found.Differing != 0 || found.Values == 0 {
		t.Errorf("%+v", found)
	}
	if found := check(false, "--set", "schedule.sp=1"); found.Differing == 0 {
		t.Errorf("%+v", found)
	}
	check(true, "--set", "schedule.sp=1", "--tolerance", "0.1")
	rewrite(t, "dir/step-3", "flipped/step-3")
	found := check(false, "--to", "flipped/step-3", "--set", "schedule.pp=1")
	if found.Differing != 1 || !strings.Contains(found.Where, " is ") {
		t.Errorf("%+v", found)
	}
	check(false, "--to", "flipped/step-3")
	all := launchCommand(t, "audit", 1, func(int) []string { return []string{"tiny.sppo", "--from", "dir/step-3", "--to", "dir/step-1"} })
	end(t, all)
	if all[0].code != cli.BadInput || !strings.Contains(all[0].errs.String(), "dir/step-1 is of step 1, which is not after step 3 of dir/step-3") {
		t.Errorf("exit %d: %s", all[0].code, all[0].errs.String())
	}
}
