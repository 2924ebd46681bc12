// Package sppo_test checks rules for the whole repository: which package may import which, how long a function may
// be, which words documents must avoid, and that no file names the machine it was written on. The tables below
// define the rules.
package sppo_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"sppo.dev"
)

// levels lists which of our packages each package may import; every package must be listed. "*" means every
// package at a lower level, and every package inside the folder itself. Test files and test helpers may import
// any package, except that only files in cmd may import commands.
var levels = []struct {
	folder  string
	level   int
	imports string
}{
	{"internal/infile", 0, ""},
	{"internal/near", 0, ""},
	{"lang", 0, "internal/infile internal/near ir"},
	{"ir", 0, "internal/infile internal/near"},
	{"internal/data/tokenizer", 0, "internal/infile"},
	{"internal/data/corpus", 1, "internal/infile internal/data/tokenizer"},
	{"internal/data/corpus/prepare", 2, "internal/infile internal/data/corpus internal/data/tokenizer"},
	{"internal/vm/cpu/simd", 0, "internal/vm/cpu/simd/internal"},
	{"internal/vm/cpu/simd/internal", 0, ""},
	{"internal/cost", 1, "ir"},
	{"internal/graph", 1, "lang ir"},
	{"internal/meaning", 1, "internal/near ir"},
	{"internal/schedule", 1, ""},
	{"internal/passes/words", 0, ""},
	{"internal/passes/plan", 2, "lang ir internal/graph internal/schedule"},
	{"internal/passes/walk", 3, "internal/passes/plan ir internal/graph internal/schedule"},
	{"internal/passes/strategy", 3, "internal/passes/plan internal/passes/words lang"},
	{"internal/passes/memory", 4, "internal/passes/plan internal/passes/walk internal/passes/strategy ir internal/graph internal/schedule"},
	{"internal/passes/estimate", 5, "internal/passes/plan internal/passes/walk internal/passes/memory lang ir internal/cost internal/graph internal/schedule"},
	{"internal/passes/pass", 6, "internal/passes/plan internal/passes/walk internal/passes/estimate ir lang internal/graph"},
	{"internal/passes/report", 6, "internal/passes/plan internal/passes/memory internal/passes/words ir lang"},
	{"internal/passes/partition", 7, "internal/passes/plan internal/passes/estimate internal/passes/pass internal/passes/words lang ir"},
	{"internal/passes/mux", 7, "internal/passes/plan internal/passes/strategy internal/passes/pass lang"},
	{"internal/passes/lifespan", 7, "internal/passes/plan internal/passes/pass ir internal/graph"},
	{"internal/passes/order", 8, "internal/passes/plan internal/passes/walk internal/passes/strategy internal/passes/pass internal/passes/mux lang"},
	{"internal/passes/offload", 8, "internal/passes/plan internal/passes/memory internal/passes/estimate internal/passes/pass internal/passes/mux ir internal/cost internal/graph"},
	{"internal/passes/search", 8, "internal/passes/plan internal/passes/walk internal/passes/strategy internal/passes/memory internal/passes/estimate internal/passes/pass internal/passes/partition internal/passes/mux internal/passes/order " +
		"internal/passes/words lang ir internal/cost internal/graph"},
	{"internal/passes", 9, "internal/passes/plan internal/passes/estimate internal/passes/pass internal/passes/partition internal/passes/order internal/passes/lifespan " +
		"internal/passes/mux internal/passes/offload internal/passes/search lang"},
	{"internal/vm", 2, "ir"},
	{"internal/train/store", 2, "internal/infile ir internal/data/corpus internal/data/safetensors"},
	{"internal/train", 3, "internal/infile ir internal/data/corpus internal/vm internal/train/store"},
	{"internal/codegen", 10, "lang internal/passes internal/passes/plan internal/passes/strategy internal/passes/walk internal/schedule internal/graph ir"},
	{"internal/vm/cpu", 3, "internal/vm ir internal/vm/cpu/simd"},
	{"internal/sample", 4, "lang ir internal/graph internal/data/tokenizer internal/vm internal/vm/cpu internal/vm/cpu/simd"},
	{"internal/train/world", 4, "internal/train internal/vm ir"},
	{"internal/train/probe", 4, "internal/train internal/vm ir internal/cost"},
	{"internal/vm/sim", 3, "internal/vm ir internal/cost"},
	{"internal/vm/field", 3, "internal/near internal/vm ir"},
	{"internal/cuda/kernels", 3, "internal/vm ir"},
	{"internal/cuda/library", 0, ""},
	{"internal/cuda/driver", 1, "internal/cuda/library"},
	{"internal/cuda/nvrtc", 1, "internal/cuda/library"},
	{"internal/cuda/cublas", 1, "internal/cuda/library"},
	{"internal/cuda/nccl", 1, "internal/cuda/library"},
	{"internal/cuda/nvtx", 0, ""},
	{"internal/cuda", 3, "internal/vm ir internal/cuda/library internal/cuda/driver internal/cuda/nvrtc internal/cuda/cublas internal/cuda/nccl internal/cuda/nvtx internal/cuda/kernels"},
	{"internal/shipped", 0, ""},
	{"internal/data/safetensors", 0, "internal/infile"},
	{"internal/hf", 1, "internal/infile internal/near lang ir internal/shipped internal/data/safetensors"},
	{"internal/compile", 10, "lang ir internal/passes internal/passes/plan internal/codegen internal/meaning"},
	{".", 11, "lang ir internal/codegen internal/compile internal/passes internal/passes/plan internal/passes/pass internal/passes/estimate internal/shipped internal/train internal/vm " +
		"internal/vm/cpu internal/vm/cpu/simd internal/vm/sim internal/cuda"},
	{"cmd/internal/cli", 12, "*"},
	{"cmd/internal/trace", 12, "*"},
	{"bench/external", 13, "*"},
	{"bench/gpu", 13, "*"},
	{"cmd/sppoc", 13, "*"},
	{"cmd/sppovm", 13, "*"},
	{"cmd/sppovm/internal/watch", 12, "*"},
	{"tools/paper", 13, "*"},
	{"tools/records", 13, "*"},
	{"tools/ways", 13, "*"},
	{"tools/release", 13, "*"},
}

// helpers are packages that only tests may import, at any level.
var helpers = []string{"internal/irtest", "internal/passes/plantest", "internal/vm/vmtest", "internal/cuda/emu", "cmd/internal/clitest", "interop/torch/torchtest"}

// libraries lists where each external package may be imported; "test" means any test file or test helper.
var libraries = map[string]string{
	"github.com/alecthomas/participle/v2": "lang",
	"github.com/spf13/pflag":              "cmd tools",
	"github.com/google/go-cmp":            "test",
	"github.com/ebitengine/purego":        "internal/vm/cpu/simd internal/cuda",
	"gonum.org/v1/plot":                   "tools/paper",
	"github.com/dlclark/regexp2/v2":       "internal/data/tokenizer",
	"github.com/klauspost/compress":       "internal/data/corpus/prepare",
	"github.com/parquet-go/parquet-go":    "internal/data/corpus/prepare",
	"golang.org/x/text":                   "internal/data/tokenizer",
	"google.golang.org/protobuf":          "internal/data/tokenizer cmd/sppovm/internal/watch",
	"github.com/creack/pty":               "test",
	"github.com/prometheus/client_golang": "cmd/sppovm/internal/watch",
	"golang.org/x/sys":                    "internal/train internal/vm/cpu internal/vm/cpu/simd internal/cuda cmd",
}

const (
	module       = "sppo.dev/"
	longestLines = 70
)

// source is one parsed Go file.
type source struct {
	path   string // from the root, with slashes
	folder string
	test   bool
	text   string
	set    *token.FileSet
	file   *ast.File
}

// sources parses every Go file of the repository.
func sources(t *testing.T) []source {
	t.Helper()
	var out []source
	for _, name := range files(t) {
		if path.Ext(name) != ".go" {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, name, text, parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, source{name, path.Dir(name), strings.HasSuffix(name, "_test.go"), string(text), set, f})
	}
	return out
}

// files lists all files except build outputs and hidden ones; .ci counts as visible.
func files(t *testing.T) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		name = filepath.ToSlash(name)
		hidden := strings.HasPrefix(path.Base(name), ".") && name != "." && name != ".ci"
		if d != nil && d.IsDir() && (hidden || name == "bin" || name == "out") {
			return fs.SkipDir
		}
		if err == nil && !d.IsDir() && !hidden {
			out = append(out, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestImports(t *testing.T) {
	for _, s := range sources(t) {
		for _, spec := range s.file.Imports {
			name := strings.Trim(spec.Path.Value, `"`)
			if why := forbidden(s, name); why != "" {
				t.Errorf("%s: imports %s: %s", s.set.Position(spec.Pos()), name, why)
			}
		}
	}
}

// forbidden returns why a file must not import a package, or "" if it may.
func forbidden(s source, name string) string {
	if name+"/" == module {
		return forbiddenOurs(s, ".")
	}
	if ours, ok := strings.CutPrefix(name, module); ok {
		return forbiddenOurs(s, ours)
	}
	for library, where := range libraries {
		if name != library && !strings.HasPrefix(name, library+"/") {
			continue
		}
		if s.test && s.folder == "." || where == "test" && (s.test || isHelper(s.folder)) {
			return ""
		}
		for _, folder := range strings.Fields(where) {
			if within(s.folder, folder) {
				return ""
			}
		}
		return "only " + where + " may"
	}
	if first, _, _ := strings.Cut(name, "/"); strings.Contains(first, ".") {
		return "it is not one of our dependencies"
	}
	return ""
}

func isHelper(folder string) bool {
	return slices.ContainsFunc(helpers, func(h string) bool { return within(folder, h) })
}

func forbiddenOurs(s source, ours string) string {
	switch {
	case s.test || isHelper(s.folder):
		if within(ours, "cmd") && !within(s.folder, "cmd") {
			return "nobody imports a command"
		}
		return "" // tests may compare packages on different levels
	case isHelper(ours):
		return "it is for tests only"
	}
	for _, f := range levels {
		if f.folder != s.folder && !(strings.HasPrefix(s.folder, "internal/cuda/") && f.folder == "internal/cuda") && !(f.folder == "internal/vm/cpu/simd/internal" && within(s.folder, f.folder)) {
			continue
		}
		if f.imports == "*" {
			if g := levelOf(ours); g >= f.level && !within(ours, f.folder) {
				return "it is not at a lower level"
			}
			return ""
		}
		for _, allowed := range strings.Fields(f.imports) {
			if ours == allowed {
				return ""
			}
		}
		return f.folder + " may import of ours: " + f.imports
	}
	return "the folder " + s.folder + " has no row in the table of levels"
}

func levelOf(folder string) int {
	for _, f := range levels {
		if f.folder == folder {
			return f.level
		}
	}
	return 0
}

func within(folder, root string) bool { return folder == root || strings.HasPrefix(folder, root+"/") }

// The table lists only packages that exist, and does not let any of them import from a higher level.
func TestLevelsExist(t *testing.T) {
	for _, f := range levels {
		if _, err := os.Stat(f.folder); err != nil && f.folder != "internal/cuda" {
			t.Errorf("the table of levels names %s: %v", f.folder, err)
		}
		for _, i := range strings.Fields(f.imports) {
			if i != "*" && levelOf(i) > f.level {
				t.Errorf("%s on level %d may import %s on level %d", f.folder, f.level, i, levelOf(i))
			}
		}
	}
}

// A function fits on a screen, not counting composite literals. Tests may be longer.
func TestFunctionLength(t *testing.T) {
	for _, s := range sources(t) {
		if s.test || strings.Contains(s.path, "vmtest/") || generator(s) {
			continue
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			if n := codeLines(s.set, f.Body); n > longestLines {
				t.Errorf("%s: %s has %d lines, at most %d fit a screen", s.set.Position(f.Pos()), f.Name.Name, n, longestLines)
			}
		}
	}
}

// generator reports whether a file is a program that writes other files.
func generator(s source) bool {
	return strings.Contains(s.text, "//go:build ignore") || within(s.folder, "internal/vm/cpu/simd/internal")
}

// codeLines counts the lines of a body, except those inside composite literals, which are tables.
func codeLines(set *token.FileSet, body *ast.BlockStmt) int {
	line := func(p token.Pos) int { return set.Position(p).Line }
	n := line(body.Rbrace) - line(body.Lbrace)
	ast.Inspect(body, func(node ast.Node) bool {
		if lit, ok := node.(*ast.CompositeLit); ok {
			n -= line(lit.Rbrace) - line(lit.Lbrace)
			return false
		}
		return true
	})
	return n
}

// Every golden file has a test that compares it: the tests of a package name every folder in its testdata,
// or the files in that folder.
func TestNoOrphanGoldens(t *testing.T) {
	tests := map[string]string{} // by folder: the text of its tests
	for _, s := range sources(t) {
		if s.test {
			tests[s.folder] += s.text
		}
	}
	for _, name := range files(t) {
		folder, rest, ok := strings.Cut(name, "/testdata/")
		if !ok {
			continue
		}
		if strings.HasPrefix(rest, "fuzz/") {
			target, _, _ := strings.Cut(strings.TrimPrefix(rest, "fuzz/"), "/")
			if !strings.Contains(tests[folder], "func "+target+"(") {
				t.Errorf("%s: no fuzz target %s in %s", name, target, folder)
			}
			continue
		}
		topic, _, _ := strings.Cut(rest, "/")
		stem := strings.TrimSuffix(path.Base(name), path.Ext(name))
		if !strings.Contains(tests[folder], topic) && !strings.Contains(tests[folder], `"`+stem+`"`) {
			t.Errorf("%s: no test of %s names %s", name, folder, topic)
		}
	}
}

// machineWords matches file paths and registry hosts that are not available on every machine.
var machineWords = regexp.MustCompile(`/home/|/Users/|/wor[k]/|/tmp/[a-z]|/roo[t]/|proxy\.golang\.org|sum\.golang\.org|goproxy\.|registry\.npmjs|pypi\.org`)

// unfinishedWords matches words that mark unfinished work. The words are split here so that this file passes
// its own test.
var unfinishedWords = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X|HA` + `CK)\b`)

func TestWords(t *testing.T) {
	for _, name := range files(t) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if path.Ext(name) == ".test" || slices.Contains(text, 0) || strings.Contains(name, "testdata/fuzz/") {
			continue
		}
		for i, line := range strings.Split(string(text), "\n") {
			if m := machineWords.FindString(line); m != "" && name != "house_test.go" {
				t.Errorf("%s:%d: names %q, which is not everywhere", name, i+1, m)
			}
			if m := unfinishedWords.FindString(line); m != "" {
				t.Errorf("%s:%d: %s: finish it or leave it out", name, i+1, m)
			}
		}
	}
}

// clumsy lists phrases that read as if translated, and what to write instead.
var clumsy = []struct {
	phrases []string
	instead string
}{
	{[]string{"made again", "make again", "makes again"}, "recompute"},
	{[]string{"says whether", "tells whether"}, "reports whether"},
	{[]string{"whoever"}, "the name of the thing, or that"},
	{[]string{"of equals"}, "ties go to"},
	{[]string{"dearest", "dearer"}, "most expensive, more expensive"},
	{[]string{"for ever"}, "forever"},
	{[]string{"behind the step", "behind its step"}, "after the step"},
	{[]string{"the one style"}, "the standard style"},
	{[]string{"is no number"}, "is not a number"},
	{[]string{"put off"}, "deferred"},
	{[]string{"looks about"}, "spin, poll"},
	{[]string{"in vain"}, "wasted, never"},
}

func TestPhrases(t *testing.T) {
	for _, name := range files(t) {
		if !slices.Contains([]string{".go", ".md", ".sppo", ".js", ".html", ".cu", ".cuh"}, path.Ext(name)) || name == "house_test.go" {
			continue
		}
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text := prose(string(data))
		for _, c := range clumsy {
			for _, p := range c.phrases {
				if strings.Contains(text, " "+p+" ") {
					t.Errorf("%s: %q: write %s", name, p, c.instead)
				}
			}
		}
	}
}

// prose returns the words of a text in lower case, surrounded by single spaces and without punctuation or
// line breaks.
func prose(text string) string {
	words := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	return " " + strings.Join(words, " ") + " "
}

// The first entry of the changelog describes the version of this source.
func TestChangelogNamesVersion(t *testing.T) {
	text, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	_, entry, _ := strings.Cut(string(text), "\n## ")
	if !strings.HasPrefix(entry, "["+sppo.Version+"]") {
		first, _, _ := strings.Cut(entry, "\n")
		t.Errorf("the first entry of CHANGELOG.md is %q, and the version %s", first, sppo.Version)
	}
}

// list runs go list and returns its lines, without repetitions.
func list(t *testing.T, args ...string) []string {
	t.Helper()
	c := exec.Command("go", append([]string{"list"}, args...)...)
	c.Stderr = os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(out))
	slices.Sort(lines)
	return slices.Compact(lines)
}

// go install ./cmd/... installs the two commands, and nothing that only developers run.
func TestInstalledCommands(t *testing.T) {
	got := list(t, "-f", `{{if eq .Name "main"}}{{.ImportPath}}{{end}}`, "./cmd/...")
	if want := []string{module + "cmd/sppoc", module + "cmd/sppovm"}; !slices.Equal(got, want) {
		t.Errorf("installed: %v, want %v", got, want)
	}
}

// A module that plans, simulates or trains jobs needs few others. Those that only commands, tools and tests import, such as
// gonum, client_golang and pty, are neither compiled nor listed in its go.sum.
func TestModulesNeeded(t *testing.T) {
	planning := []string{module[:len(module)-1], "github.com/alecthomas/participle/v2"}
	training := append([]string{
		"github.com/dlclark/regexp2/v2", "github.com/ebitengine/purego", "golang.org/x/sys", "golang.org/x/text", "google.golang.org/protobuf",
	}, planning...)
	for _, c := range []struct{ packages, modules []string }{
		{[]string{"./lang", "./ir", "./internal/cost", "./internal/graph", "./internal/schedule", "./internal/passes/...", "./internal/codegen", "./internal/shipped"}, planning},
		{[]string{"."}, training},
	} {
		var packages []string
		for _, name := range list(t, append([]string{"-f", "{{.ImportPath}}"}, c.packages...)...) {
			if !isHelper(strings.TrimPrefix(name, module)) {
				packages = append(packages, name)
			}
		}
		got := list(t, append([]string{"-deps", "-f", "{{with .Module}}{{.Path}}{{end}}"}, packages...)...)
		for _, name := range got {
			if !slices.Contains(c.modules, name) {
				t.Errorf("%v need %s", c.packages, name)
			}
		}
		if len(got) < 2 {
			t.Errorf("%v need only %v", c.packages, got)
		}
	}
}
