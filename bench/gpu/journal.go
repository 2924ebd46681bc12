package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Result is a line of the journal.
type Result struct {
	Time  time.Time       `json:"time"`
	Stage string          `json:"stage"`
	Task  string          `json:"task"`
	Kind  string          `json:"kind"` // kind of the data: one of the constants below
	Data  json.RawMessage `json:"data"`
}

// Kinds of results.
const (
	kindDevice  = "device"  // a line of text from sppovm devices
	kindHost    = "host"    // a line from gpu touch
	kindTest    = "test"    // Test
	kindFigure  = "figure"  // Figure
	kindCPU     = "cpu"     // a line from sppovm run --json on the cpu
	kindRun     = "run"     // the same on the GPU
	kindSim     = "sim"     // the same in virtual time
	kindProgram = "program" // Facts about the program that the task runs
	kindProbe   = "probe"   // a line from sppovm probe --json
	kindPeer    = "peer"    // Peer
	kindTool    = "tool"    // a line of text from one of NVIDIA's tools
	kindClocks  = "clocks"  // Clocks
	kindEnd     = "end"     // End
)

// Test is the result of a test that has ended, on its own or because its process ended.
type Test struct {
	Name   string `json:"name"`
	Result string `json:"result"` // pass, skip, fail, crash, or hang
}

// End is the end of a task.
type End struct {
	Status  string  `json:"status"` // ok, skipped, failed
	Seconds float64 `json:"seconds"`
	Why     string  `json:"why,omitempty"`

	Portable string `json:"portable,omitempty"` // head dimensions whose kernels for the card were not used, because they failed a test; 1: all
}

// Files in the results folder.
const (
	journalFile = "results.jsonl"
	logFile     = "log.txt"      // output of the processes, up to mostLog
	clusterFile = "cluster.sppo" // cluster file of this machine, written by probe
	mostLog     = 12 << 20
)

// journal appends results to a file. Each is written immediately and completely.
type journal struct {
	mu     sync.Mutex
	file   *os.File
	log    *os.File
	logged int64
	err    error // the first one
}

func openJournal(folder string) (*journal, error) {
	path := filepath.Join(folder, journalFile)
	if err := carry(folder, os.Getenv(beforeVariable)); err != nil {
		return nil, err
	}
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	j := &journal{}
	if j.file, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
		return nil, err
	}
	if j.log, err = os.OpenFile(filepath.Join(folder, logFile), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644); err != nil {
		return nil, err
	}
	if info, err := j.log.Stat(); err == nil {
		j.logged = info.Size()
	}
	if len(before) > 0 && before[len(before)-1] != '\n' { // its writer was killed in the middle of a line
		_, err = j.file.Write([]byte("\n"))
	}
	return j, err
}

// carry copies the results of earlier stages from their folder, unless the results folder has its own.
func carry(folder, from string) error {
	if from == "" {
		return nil
	}
	for _, name := range []string{clusterFile, journalFile} {
		if _, err := os.Stat(filepath.Join(folder, name)); err == nil {
			continue
		}
		text, err := os.ReadFile(filepath.Join(from, name))
		if errors.Is(err, fs.ErrNotExist) && name == clusterFile { // no probe has run
			continue
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(folder, name), text, 0o644)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", beforeVariable, err)
		}
	}
	return nil
}

func (j *journal) close() error { return errors.Join(j.err, j.file.Close(), j.log.Close()) }

// add writes a result.
func (j *journal) add(stage, task, kind string, data any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	text, err := json.Marshal(data)
	if err == nil {
		text, err = json.Marshal(Result{time.Now().UTC().Truncate(time.Millisecond), stage, task, kind, text})
	}
	if err == nil {
		_, err = j.file.Write(append(text, '\n'))
	}
	if j.err == nil {
		j.err = err
	}
}

// say adds a line to the log.
func (j *journal) say(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.logged += int64(len(line)) + 1; j.logged <= mostLog {
		_, _ = j.log.WriteString(line + "\n") // results do not depend on it
	}
}

// failedKernels returns a test that failed with the kernels for the card when it last ran, and the value of
// SPPO_CUDA_PORTABLE that disables the kernels of all failed tests: their head dimensions, or 1 if one is unknown. It
// returns "" if none failed.
func (c *check) failedKernels() (test, portable string) {
	results, _, _ := readJournal(c.folder) // without a journal, no failure is known
	last := map[string]string{}
	for _, r := range results {
		var t Test
		if r.Kind == kindTest && json.Unmarshal(r.Data, &t) == nil && kernelTests.MatchString(t.Name) {
			last[t.Name] = t.Result
		}
	}
	var dims []string
	for _, name := range slices.Sorted(maps.Keys(last)) {
		if slices.Contains([]string{"pass", "skip"}, last[name]) {
			continue
		}
		test = cmp.Or(test, name)
		dim := "1"
		if m := headsOf.FindStringSubmatch(name); m != nil {
			dim = m[1]
		}
		if !slices.Contains(dims, dim) {
			dims = append(dims, dim)
		}
	}
	if slices.Contains(dims, "1") {
		return test, "1"
	}
	return test, strings.Join(dims, ",")
}

// headsOf matches the head dimension in the name of a test.
var headsOf = regexp.MustCompile(`heads_of_(\d+)`)

// kernelTests matches the tests of the attention kernels for the card, however the kernels load tiles.
var kernelTests = regexp.MustCompile(`^TestGPUAttention(/for_the_card|OfManyTokens)|^TestGPUBits`)

// readJournal reads all results in a folder and counts incomplete lines.
func readJournal(folder string) (results []Result, broken int, err error) {
	text, err := os.ReadFile(filepath.Join(folder, journalFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, nil
	}
	for line := range bytes.Lines(text) {
		var r Result
		switch line = bytes.TrimSpace(line); {
		case len(line) == 0:
		case json.Unmarshal(line, &r) != nil:
			broken++
		default:
			results = append(results, r)
		}
	}
	return results, broken, err
}
