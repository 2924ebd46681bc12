package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// NVIDIA's tools find errors that results do not show, and say what limits a kernel. Their output is in the log; the
// report has the lines that sum it up. On a machine without a tool, or whose kernel does not support it, the task is
// skipped, which is no failure.

// sanitized matches the tests that compute-sanitizer watches: small attention in both ways to load tiles, its building
// blocks, and attention in the conformance suite.
const sanitized = "^TestGPU(Attention|Primitives|Conformance)$/^(for_the_card|primitive|own_products)/^attention(_grad)?$"

// sanitizers lists the tools of compute-sanitizer and the line that each must print. racecheck prints hazards that are
// none, because it does not know all barriers of the copy engine: its line is reported, but may be any.
var sanitizers = []struct{ tool, must string }{
	{"memcheck", "ERROR SUMMARY: 0 errors"}, {"synccheck", "ERROR SUMMARY: 0 errors"}, {"racecheck", "RACECHECK SUMMARY: "},
}

// profiled lists the attention kernels for the card whose two launches ncu measures.
var profiled = []struct{ name, kernel, test string }{
	{"forward", "attention_bulk_128_b", "^attention_bf16"},
	{"dk and dv", "attention_bulk_dkv_128", "^attention_grad_bf16"},
	{"dq", "attention_bulk_dq_128_b", "^attention_grad_bf16"},
}

// refusals are parts of lines with which a tool says that it does not work on this machine.
var refusals = regexp.MustCompile(`Device not supported|Failed to initialize the profiler|ERR_NVGPUCTRPERM|LibraryNotLoaded|No supported GPU|is not supported on (this|the) (device|system)`)

// toolFolders are searched after PATH.
var toolFolders = []string{"/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/nsight-compute/*", "/opt/nvidia/*/bin"}

func toolTasks(string) (tasks []task) {
	watch, profiler := findTool("compute-sanitizer"), findTool("ncu")
	for _, s := range sanitizers {
		argv := []string{watch, "--tool", s.tool, "--print-limit", "20", "{files}/cuda.test", "-test.v", "-test.run", sanitized}
		tasks = append(tasks, tool(s.tool, 60*time.Second, s.must, regexp.MustCompile(`^=========`), argv))
	}
	for _, p := range profiled {
		argv := []string{profiler, "--set", "detailed", "--clock-control", "none", "-k", "regex:^" + p.kernel + "$", "-c", "2",
			"{files}/cuda.test", "-test.v", "-test.run", "^TestGPUFigures$/^attention$/^for_the_card$/" + p.test}
		t := tool("ncu, "+p.name, 40*time.Second, p.kernel, profileLine, argv)
		t.env = append(t.env, figuresVariable+"="+figureSize())
		tasks = append(tasks, t)
	}
	return tasks
}

// profileLine matches the lines of ncu's report that are kept.
var profileLine = regexp.MustCompile(`^\s+(attention_|Duration|SM Frequency|DRAM Frequency|(Compute \(SM\)|Memory|DRAM|L1/TEX Cache|L2 Cache) Throughput|` +
	`L2 Hit Rate|Executed Ipc|Issue Slots Busy|No Eligible|Eligible Warps|Registers Per Thread|Dynamic Shared Memory|Achieved Occupancy|.*Est\. )`)

// tool returns a task that runs one of NVIDIA's tools and keeps the matching lines of its output.
func tool(name string, limit time.Duration, must string, keep *regexp.Regexp, argv []string) task {
	return task{name: name, limit: limit, argv: argv, must: must, cause: "=", env: []string{checked}, optional: true,
		first: func(c *check) (map[string][]any, error) {
			if _, err := os.Stat(filepath.Join(c.files, argv[0])); err != nil && !strings.Contains(argv[0], "/") {
				return nil, fmt.Errorf("%w: %s is neither in PATH nor in %s", errSkipped, argv[0], strings.Join(toolFolders, ", "))
			}
			return nil, nil
		},
		found: func(_ *check, line string) (string, any) {
			if keep.MatchString(line) && strings.Trim(line, "= ") != "" {
				return kindTool, strings.TrimSpace(line)
			}
			return "", nil
		},
		refused: refusals,
	}
}

// findTool returns the path of a tool, or its name if the machine does not have it.
func findTool(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, folder := range toolFolders {
		if found, _ := filepath.Glob(filepath.Join(folder, name)); len(found) > 0 { // only a bad pattern is an error
			return found[len(found)-1]
		}
	}
	return name
}
