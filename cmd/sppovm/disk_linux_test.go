package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/internal/train/store"
)

// onDisk runs a script in a mount namespace in which the folder "disk" is a separate file system. In the script,
// "run ARGUMENTS" starts sppovm run on the job with further arguments, and "lines N" waits until the job has
// printed N lines.
func onDisk(t *testing.T, script string) string {
	t.Helper()
	if err := exec.Command("unshare", "-rm", "sh", "-c", "mount -t tmpfs tmpfs /mnt && setpriv --bounding-set -dac_override,-dac_read_search true").Run(); err != nil {
		t.Skip("needs unshare, mount and setpriv, and leave to mount file systems")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const before = `
mkdir -p disk && mount -t tmpfs -o size=4m tmpfs disk || exit 77
run() { "$sppovm" run tiny.sppo --json --save disk/dir "$@"; echo "exit $?"; }
lines() { n=0; until [ "$(grep -c loss out)" -ge "$1" ]; do sleep 0.02; n=$((n+1)); [ $n -lt 3000 ] || exit 1; done; }
set +e
`
	c := exec.Command("timeout", "120", "unshare", "-rm", "sh", "-c", before+script)
	c.Env = append(os.Environ(), asCommand+"=1", "sppovm="+self)
	text, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return string(text)
}

// has checks that a text contains the given parts in order.
func has(t *testing.T, text string, parts ...string) {
	t.Helper()
	rest := text
	for _, part := range parts {
		_, after, ok := strings.Cut(rest, part)
		if !ok {
			t.Errorf("%q is not there, or too early:\n%s", part, text)
			return
		}
		rest = after
	}
}

// If a disk fills up while checkpoints are written during training, each failure is reported once, the run
// continues, and the last good checkpoint stays. Only the end of the run fails, and the same command continues
// once there is space. All this also holds if several processes write shards.
func TestDiskFull(t *testing.T) {
	for _, launch := range []string{"", "launch -n 2 "} {
		t.Run(launch, func(t *testing.T) {
			inBase(t)
			text := onDisk(t, strings.ReplaceAll(`
run() { "$sppovm" LAUNCHrun tiny.sppo --set train.steps=8 --json --save disk/dir "$@"; echo "exit $?"; }
run --steps 1 >out
dd if=/dev/zero of=disk/rest bs=1k count=5000 2>/dev/null
dd if=/dev/zero of=disk/rest bs=1k count=$(( $(stat -c %s disk/rest) / 1024 - 100 )) 2>/dev/null
run --save-every 1 --resume auto --steps 8 >out
grep exit out; ls -A disk/dir
rm disk/rest
run --save-every 1 --resume auto --steps 8 >out
grep exit out; ls -A disk/dir
cp -r disk/dir again
`, "LAUNCH", launch))
			has(t, text, "resumed from disk/dir/step-1\n", "cannot save the checkpoint of step 2: ", "no space left on device; the run continues, and earlier checkpoints are unchanged\n",
				"sppovm: cannot save the checkpoint of step 8: ", "no space left on device\n", "exit 1\nstep-1\n", "resumed from disk/dir/step-1\n", "exit 0\nstep-", "step-8\n")
			alone(t, "tiny.sppo", "--set", "train.steps=8", "-q", "--save", "whole")
			same(t, "whole", "again")
		})
	}
}

// If the folder for checkpoints has no write permission, the run fails before training starts. A folder that
// becomes unwritable is handled like a full disk.
func TestReadOnlyFolder(t *testing.T) {
	inBase(t)
	text := onDisk(t, `
mkdir disk/dir && chmod 555 disk/dir
setpriv --bounding-set -dac_override,-dac_read_search "$sppovm" run tiny.sppo --save disk/dir -q; echo "exit $?"
setpriv --bounding-set -dac_override,-dac_read_search "$sppovm" run tiny.sppo --save disk/dir/new -q; echo "exit $?"
mount -o remount,ro disk
run -q
mount -o remount,rw disk
chmod 755 disk/dir
run --set train.steps=1000000 --save-every 300ms -q >out &
lines 4
until mount -o remount,ro disk 2>/dev/null; do sleep 0.01; done
lines 100
mount -o remount,rw disk
lines 200
for i in $(seq 200); do [ $(ls disk/dir | grep -c '^step-[0-9]*$') -ge 2 ] && break; sleep 0.05; done
kill -TERM $(cat /proc/$!/task/$!/children)
wait
grep exit out; ls -A disk/dir
cp -r disk/dir kept
`)
	has(t, text, "sppovm: --save: cannot write to disk/dir: permission denied; choose a folder that can be written to\nexit 2\n",
		"sppovm: --save: cannot create the folder disk/dir/new: permission denied; choose a folder that can be written to\nexit 2\n",
		"sppovm: --save: cannot write to disk/dir: read-only file system; choose a folder that can be written to\nexit 2\n", "exit 0\nstep-")
	steps, err := store.Steps("kept")
	if err != nil || len(steps) < 2 || len(steps) > 3 { // one more if nothing shows that the last one is good
		t.Errorf("kept are %v: %v", steps, err)
	}
	for _, step := range steps { // each of them is complete
		alone(t, "tiny.sppo", "--set", "train.steps=1000000", "--resume", filepath.Join("kept", store.StepName(step)), "--steps", fmt.Sprint(step), "-q")
	}
}
