package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/passes"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// completions are command lines to complete at the last word, with the expected candidates. The folder holds
// job.sppo, job.sppb, notes.txt and the folder "more".
var completions = []struct {
	words []string
	want  []string
}{
	{[]string{"ve"}, []string{"verify", "version"}},
	{[]string{"help", "tra"}, []string{"trace", "train-tokenizer"}},
	{[]string{"nothing", "t"}, nil},
	{[]string{"plan", "--m"}, []string{"--max-sequence", "--min-gpus"}},
	{[]string{"plan", "--set", "schedule.part"}, []string{"schedule.partition="}},
	{[]string{"plan", "--set", "schedule.partition=f"}, []string{"schedule.partition=flops"}},
	{[]string{"plan", "--set=schedule.partition=f"}, []string{"--set=schedule.partition=flops"}},
	{[]string{"plan", "--print-after", "solve,pa"}, []string{"solve,partition"}},
	{[]string{"dump", "--after", "pl"}, []string{"place"}},
	{[]string{"dump", "--format=j"}, []string{"--format=json"}},
	{[]string{"explain", "attention_gr"}, []string{"attention_grad", "attention_grad_efficiency"}},
	{[]string{"plan", ""}, []string{"job.sppo", "more"}},
	{[]string{"verify", ""}, []string{"job.sppb", "more"}},
	{[]string{"reduce", ""}, []string{"job.sppb", "job.sppo", "more"}},
	{[]string{"reduce", "job.sppo", "--at", "me"}, []string{"meaning"}},
	{[]string{"build", "job.sppo", "-o", "j"}, []string{"job.sppb"}},
	{[]string{"plan", "--", "--j"}, nil},
	{[]string{"plan", "--cluster", "h"}, []string{"h100", "h20", "h200"}},
	{[]string{"plan", "--cluster=a"}, []string{"--cluster=a100-80g", "--cluster=a800"}},
	{[]string{"compare", "--sweep", "cluster=b"}, []string{"cluster=b200"}},
	{[]string{"man", "spp"}, []string{"sppo", "sppoc"}},
}

// The bash script offers the expected candidates. It receives words as bash splits them, which is also at "=".
func TestCompletionInBash(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	inFolder(t)
	path := commandFolder(t)
	for _, c := range completions {
		script := "source <(sppoc completion bash)\nCOMP_WORDS=(sppoc"
		n := 0
		for _, word := range c.words {
			for i, part := range strings.SplitAfter(strings.ReplaceAll(word, "=", "\x00=\x00"), "\x00") {
				if part = strings.Trim(part, "\x00"); part != "" || i == 0 {
					script += fmt.Sprintf(" '%s'", part)
					n++
				}
			}
		}
		if strings.HasSuffix(c.words[len(c.words)-1], "=") {
			script, n = script+" ''", n+1
		}
		script += fmt.Sprintf(")\nCOMP_CWORD=%d\n_sppoc\nprintf '%%s\\n' \"${COMPREPLY[@]}\"\n", n)
		got := strings.Fields(shell(t, path, bash, script))
		want := slices.Clone(c.want)
		if last := c.words[len(c.words)-1]; strings.Contains(last, "=") { // bash replaces only the text after the last =
			for i := range want {
				want[i] = strings.TrimPrefix(want[i], last[:strings.LastIndex(last, "=")+1])
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("sppoc %q: bash offers %q, want %q", c.words, got, want)
		}
	}
}

func TestCompletionInFish(t *testing.T) {
	fish, err := exec.LookPath("fish")
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	inFolder(t)
	path := commandFolder(t)
	script := "sppoc completion fish | source\n"
	for _, c := range completions {
		script += fmt.Sprintf("complete -C '%s'\necho --end--\n", strings.Join(append([]string{"sppoc"}, c.words...), " "))
	}
	answers := strings.Split(shell(t, path, fish, script), "--end--\n")
	for i, c := range completions {
		var got []string
		for line := range strings.Lines(answers[i]) {
			word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
			got = append(got, strings.TrimSuffix(word, "/"))
		}
		slices.Sort(got)
		if !slices.Equal(got, c.want) {
			t.Errorf("sppoc %q: fish offers %q, want %q", c.words, got, c.want)
		}
	}
}

func TestCompletionForZsh(t *testing.T) {
	zsh, err := exec.LookPath("zsh")
	if err != nil {
		t.Skip("SKIPPED: ", err)
	}
	shell(t, commandFolder(t), zsh, "source <(sppoc completion zsh | sed 's/^\\tcompdef.*/:/')\nwhence -f _sppoc > /dev/null")
}

// inFolder changes to a new folder with files that completion may offer.
func inFolder(t *testing.T) {
	t.Helper()
	t.Chdir(t.TempDir())
	for _, name := range []string{"job.sppo", "job.sppb", "notes.txt"} {
		if err := os.WriteFile(name, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir("more", 0o755); err != nil {
		t.Fatal(err)
	}
}

// shell runs a script and returns its output; any output on standard error fails the test.
func shell(t *testing.T, path, program, script string) string {
	t.Helper()
	c := exec.Command(program, "-c", script)
	var errs strings.Builder
	c.Env, c.Stderr = append(os.Environ(), "PATH="+path, "HOME="+t.TempDir()), &errs
	out, err := c.Output()
	if err != nil || errs.Len() > 0 {
		t.Fatalf("%s: %v: %s", program, err, errs.String())
	}
	return string(out)
}

// The manual describes every command, pass, opcode and key, and mandoc and man accept it.
func TestManual(t *testing.T) {
	path := commandFolder(t)
	own := shell(t, path, "sh", "sppoc man")
	language := shell(t, path, "sh", "sppoc man sppo")
	term := func(page, name string) {
		if name = strings.ReplaceAll(name, "-", `\-`); !strings.Contains(page, `\fB`+name+`\fR`) {
			t.Errorf("the manual does not describe %s", name)
		}
	}
	for _, c := range app.Commands {
		if !strings.Contains(own, ".SS "+strings.ReplaceAll(c.Name, "-", `\-`)+"\n") {
			t.Errorf("the manual does not describe %s", c.Name)
		}
	}
	for _, name := range slices.Concat(passes.Names(), ir.Opcodes()) {
		term(language, name)
	}
	for _, k := range lang.Keys {
		term(language, k.Path())
	}
	for _, reader := range [][]string{{"mandoc", "-T", "lint", "-W", "warning"}, {"man", "--warnings=all", "-Tutf8", "-l"}} {
		program, err := exec.LookPath(reader[0])
		if err != nil {
			t.Log("not read by ", reader[0], ": ", err)
			continue
		}
		for name, page := range map[string]string{"sppoc.1": own, "sppo.5": language} {
			file := filepath.Join(t.TempDir(), name)
			if err := os.WriteFile(file, []byte(page), 0o644); err != nil {
				t.Fatal(err)
			}
			c := exec.Command(program, append(reader[1:], file)...)
			c.Env = append(os.Environ(), "MANPAGER=cat", "MANWIDTH=200", "LC_ALL=C.UTF-8")
			var errs strings.Builder
			c.Stderr = &errs
			out, err := c.Output()
			found := errs.String()
			if reader[0] == "mandoc" { // pages have no date, so that identical programs have identical pages
				lines := slices.Collect(strings.Lines(string(out)))
				found += strings.Join(slices.DeleteFunc(lines, func(l string) bool { return strings.Contains(l, "missing date") }), "")
			} else if err != nil {
				found += err.Error()
			}
			if found != "" {
				t.Errorf("%s of %s:\n%s", reader[0], name, found)
			}
		}
	}
}
