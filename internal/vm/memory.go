package vm

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"sppo.dev/ir"
)

// FreeMemory is the memory that a process on this computer can still allocate. Unlimited stands for a figure that the
// operating system does not report.
type FreeMemory struct {
	Host   ir.Bytes // available without removing other programs, including free swap space
	Groups ir.Bytes // left by the limits of the control groups of this process, including their swap space
}

// Unlimited is a figure of FreeMemory without a limit.
const Unlimited ir.Bytes = math.MaxInt64

// ReadFreeMemory asks the operating system.
func ReadFreeMemory() FreeMemory { return freeMemory("/") }

// Bytes returns the smaller of both figures.
func (f FreeMemory) Bytes() ir.Bytes { return min(f.Host, f.Groups) }

// String names the figures that are limits.
func (f FreeMemory) String() string {
	switch {
	case f.Bytes() == Unlimited:
		return "an unknown amount is free"
	case f.Groups == Unlimited:
		return fmt.Sprintf("%s are free", f.Host)
	case f.Host == Unlimited:
		return fmt.Sprintf("the limits of the control group (cgroup) leave %s", f.Groups)
	}
	return fmt.Sprintf("%s are free, and the limits of the control group (cgroup) leave %s", f.Host, f.Groups)
}

// freeMemory reads the files of Linux under a root folder.
func freeMemory(root string) FreeMemory {
	free := FreeMemory{Unlimited, Unlimited}
	info := figures(filepath.Join(root, "proc/meminfo"))
	if available, ok := info["MemAvailable:"]; ok {
		free.Host = (available + info["SwapFree:"]) << 10
	}
	text, _ := os.ReadFile(filepath.Join(root, "proc/self/cgroup")) // without it, there is no limit
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) < 3 {
			continue
		}
		swap := info["SwapFree:"] << 10
		switch {
		case fields[0] == "0":
			free.Groups = min(free.Groups, groupsLeave(filepath.Join(root, "sys/fs/cgroup"), fields[2], &unified, swap))
		case strings.Contains(","+fields[1]+",", ",memory,"):
			free.Groups = min(free.Groups, groupsLeave(filepath.Join(root, "sys/fs/cgroup/memory"), fields[2], &legacy, swap))
		}
	}
	return free
}

// groupFiles names the files of a version of control groups.
type groupFiles struct {
	limit, usage         string
	caches               []string // lines of memory.stat: bytes that are freed when needed
	swapLimit, swapUsage string   // empty: not separate
}

var (
	unified = groupFiles{"memory.max", "memory.current", []string{"inactive_file", "active_file"}, "memory.swap.max", "memory.swap.current"}
	legacy  = groupFiles{limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", caches: []string{"total_inactive_file", "total_active_file"}}
)

// groupsLeave returns the smallest amount that a group or one of its parents leaves. Inside a container, the path of a group
// may be one of the host's, so folders that do not exist are skipped.
func groupsLeave(mount, group string, f *groupFiles, swap ir.Bytes) ir.Bytes {
	left := Unlimited
	for dir := filepath.Clean("/" + group); ; dir = filepath.Dir(dir) {
		at := filepath.Join(mount, dir)
		limit, limited := figure(filepath.Join(at, f.limit))
		usage, known := figure(filepath.Join(at, f.usage))
		if limited && known {
			stat := figures(filepath.Join(at, "memory.stat"))
			for _, name := range f.caches {
				usage -= stat[name]
			}
			more := swap
			if f.swapLimit != "" {
				if most, ok := figure(filepath.Join(at, f.swapLimit)); ok {
					used, _ := figure(filepath.Join(at, f.swapUsage))
					more = min(more, max(0, most-used))
				}
			}
			left = min(left, max(0, limit-max(0, usage))+more)
		}
		if dir == "/" {
			return left
		}
	}
}

// figure reads a file that contains one number. It reports false if there is none, as in the file of a group without a limit.
func figure(path string) (ir.Bytes, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return ir.Bytes(n), err == nil && n < 1<<60 // older kernels write a number close to 1<<63 if there is no limit
}

// figures reads a file whose lines contain a name and a number.
func figures(path string) map[string]ir.Bytes {
	out := map[string]ir.Bytes{}
	text, _ := os.ReadFile(path) // without it, nothing is known
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) >= 2 {
			if n, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				out[fields[0]] = ir.Bytes(n)
			}
		}
	}
	return out
}
