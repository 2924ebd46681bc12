package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/cmd/internal/cli"
)

// A spec can be read from standard input. Without a terminal, success prints nothing.
func TestCheckReadsStandardInput(t *testing.T) {
	spec, err := os.ReadFile("../../examples/tiny.sppo")
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("../../examples") // imports and data are relative to this folder
	for text, want := range map[string]string{string(spec): "", strings.Replace(string(spec), "train {", "train { stepps = 1", 1): "standard input:"} {
		file := filepath.Join(t.TempDir(), "in")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		in, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		before := os.Stdin
		os.Stdin = in
		var out, errs bytes.Buffer
		code := app.Main(&cli.Env{Context: t.Context(), Stdout: &out, Stderr: &errs}, []string{"check", "-"})
		os.Stdin = before
		if out.Len() > 0 || (code == cli.Done) != (want == "") || !strings.Contains(errs.String(), want) {
			t.Errorf("exit %d\n%s%s", code, &out, &errs)
		}
	}
}
