package library

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// PathVariable is the environment variable that lists the folders to search first, separated by colons.
const PathVariable = "SPPO_CUDA_PATH"

// Order describes the search order of Candidates, for documentation and messages.
const Order = PathVariable + ", the loader's path, toolkit folders ($CUDA_HOME, $CUDA_PATH, /usr/local/cuda*, /opt/cuda), " +
	"the folder of the driver in containers (/usr/local/nvidia), NVIDIA's Python packages ($VIRTUAL_ENV, $CONDA_PREFIX, " +
	"the user's, the system's, and virtual environments in /opt)"

// toolkits and pythons are patterns that match folders. Variables in them are expanded; patterns with unset
// variables are skipped.
var (
	toolkits = []string{"$CUDA_HOME", "$CUDA_PATH", "/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda", "/usr/local/nvidia"}
	inside   = []string{"lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"}
	pythons  = []string{
		"$VIRTUAL_ENV/lib/python3*/site-packages", "$CONDA_PREFIX/lib/python3*/site-packages",
		"$HOME/.local/lib/python3*/site-packages",
		"/usr/local/lib/python3*/*-packages", "/usr/lib/python3*/*-packages", "/opt/*/lib/python3*/site-packages",
		"/opt/*/*/lib/python3*/site-packages", "/opt/*/.venv/lib/python3*/site-packages",
	}
)

// Candidates lists what to try to open, in order. The loader searches its own path for file names without a folder.
func Candidates(w *Wanted) []string {
	var out []string
	add := func(folder string) {
		for _, file := range w.Files {
			if path := filepath.Join(folder, file); exists(path) && !slices.Contains(out, path) {
				out = append(out, path)
			}
		}
	}
	// wheel looks in a folder of Python packages such as nvidia/. Since CUDA 13, one subfolder contains the
	// libraries of several packages.
	wheel := func(folder string) {
		if w.Wheel == "" {
			return
		}
		add(filepath.Join(folder, w.Wheel, "lib"))
		for _, newer := range expand([]string{filepath.Join(folder, "cu1*", "lib")}) {
			add(newer)
		}
	}
	for _, folder := range filepath.SplitList(os.Getenv(PathVariable)) {
		add(folder)
		for _, sub := range inside {
			add(filepath.Join(folder, sub))
		}
		wheel(folder)
	}
	out = append(out, w.Files...)
	for _, folder := range expand(toolkits) {
		for _, sub := range inside {
			add(filepath.Join(folder, sub))
		}
	}
	for _, folder := range expand(pythons) {
		wheel(filepath.Join(folder, "nvidia"))
	}
	return out
}

// expand returns the folders that match patterns, newest version first.
func expand(patterns []string) []string {
	var out []string
	for _, pattern := range patterns {
		unset := false
		pattern = os.Expand(pattern, func(name string) string {
			value := os.Getenv(name)
			unset = unset || value == ""
			return value
		})
		if unset {
			continue
		}
		matches, _ := filepath.Glob(pattern) // fails only for malformed patterns
		slices.SortFunc(matches, func(a, b string) int { return strings.Compare(b, a) })
		out = append(out, matches...)
	}
	return out
}

func exists(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir()
}
