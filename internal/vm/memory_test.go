package vm

import (
	"os"
	"path/filepath"
	"testing"

	"sppo.dev/ir"
)

// Free memory is what the kernel calls available, with free swap space, and what the limits of all control groups leave. Caches
// of files count as free.
func TestFreeMemory(t *testing.T) {
	const gib = 1 << 30
	info := "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nSwapFree:        2097152 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  FreeMemory
	}{
		"unknown":  {nil, FreeMemory{Unlimited, Unlimited}},
		"no group": {map[string]string{"proc/meminfo": info}, FreeMemory{10 * gib, Unlimited}},
		"no limit": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n", "sys/fs/cgroup/a/memory.current": "1\n",
		}, FreeMemory{10 * gib, Unlimited}},
		"limit of a parent": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "1:name=systemd:/x\n0::/a/b\n",
			"sys/fs/cgroup/a/b/memory.max": "17179869184\n", "sys/fs/cgroup/a/b/memory.current": "1073741824\n",
			"sys/fs/cgroup/a/memory.max": "4294967296\n", "sys/fs/cgroup/a/memory.current": "3221225472\n",
			"sys/fs/cgroup/a/memory.stat":     "anon 1073741824\ninactive_file 1073741824\nactive_file 536870912\n",
			"sys/fs/cgroup/a/memory.swap.max": "0\n", "sys/fs/cgroup/a/memory.swap.current": "0\n",
		}, FreeMemory{10 * gib, 5 * gib / 2}},
		"swap of a group": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "4294967296\n", "sys/fs/cgroup/a/memory.current": "3221225472\n",
			"sys/fs/cgroup/a/memory.swap.max": "max\n",
		}, FreeMemory{10 * gib, 3 * gib}},
		"first version, in a container": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "4:cpu,memory:/docker/1\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "3221225472\n",
			"sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1073741824\n",
		}, FreeMemory{10 * gib, 4 * gib}},
		"first version, no limit": {map[string]string{
			"proc/self/cgroup":                           "4:memory:/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
		}, FreeMemory{Unlimited, Unlimited}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, text := range c.files {
				path = filepath.Join(root, path)
				if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
					t.Fatal(err)
				}
			}
			if got := freeMemory(root); got != c.want {
				t.Errorf("%s and %s, want %s and %s", got.Host, got.Groups, c.want.Host, c.want.Groups)
			}
		})
	}
	if free := ReadFreeMemory(); free.Bytes() < ir.Bytes(os.Getpagesize()) {
		t.Errorf("this computer: %s", free)
	}
}
