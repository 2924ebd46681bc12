package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/lang"
)

// try runs an app whose only command returns the given error or panics with it.
func try(t *testing.T, err error, panics bool) (code int, stdout, stderr string) {
	t.Helper()
	app := App{Name: "app", Doc: "app does things.", Commands: []Command{{Name: "do", Doc: "do it", Setup: func(*pflag.FlagSet) Action {
		return func(*Env, []string) error {
			if panics {
				panic(err)
			}
			return err
		}
	}}}}
	var out, errs bytes.Buffer
	code = app.Main(&Env{Context: t.Context(), Stdout: &out, Stderr: &errs}, []string{"do"})
	return code, out.String(), errs.String()
}

func TestExitCodes(t *testing.T) {
	failed := errors.New("it broke")
	diagnostic := func(code lang.Code) error { return &lang.Diagnostic{Code: code, Message: "m"} }
	for _, c := range []struct {
		err    error
		code   int
		stderr string
	}{
		{nil, Done, ""},
		{failed, Failed, "app: it broke\n"},
		{Wrong(failed), BadInput, "app: it broke\n"},
		{fmt.Errorf("while doing it: %w", Wrong(failed)), BadInput, "app: while doing it: it broke\n"},
		{DoesNotFit(failed), NoFit, "app: it broke\n"},
		{Silent(Failed), Failed, ""},
		{Wrong(fmt.Errorf("x: %w", &sppo.BugError{Err: failed})), Failed, "app: x: " + (&sppo.BugError{Err: failed}).Error() + "\n"},
		{diagnostic(lang.WrongType), BadInput, "error: m [wrong-type]\n"},
		{diagnostic(lang.DoesNotFit), NoFit, "error: m [does-not-fit]\n"},
	} {
		code, _, stderr := try(t, c.err, false)
		if code != c.code || stderr != c.stderr {
			t.Errorf("%v: exit %d and %q, want %d and %q", c.err, code, stderr, c.code, c.stderr)
		}
	}
}

func TestPanicIsReported(t *testing.T) {
	code, _, stderr := try(t, errors.New("internal: impossible"), true)
	if code != Failed || !strings.HasPrefix(stderr, "app: internal error: internal: impossible\nThis is a bug.") || !strings.Contains(stderr, "cli_test.go") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
}

// If a result cannot be completed, the old file is unchanged and no temporary file remains.
func TestWriteFileIsAllOrNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "result")
	if err := os.WriteFile(path, []byte("before"), 0o644); err != nil {
		t.Fatal(err)
	}
	err := WriteFile(path, func(w io.Writer) error {
		if _, err := w.Write([]byte("half")); err != nil {
			return err
		}
		return errors.New("out of paper")
	})
	if err == nil {
		t.Error("no error")
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || string(text) != "before" || len(entries) != 1 {
		t.Errorf("%q, %d files, %v", text, len(entries), err)
	}
}

// A link stays a link, a file keeps its permissions, and a device is written to, not replaced.
func TestWriteFileKeepsWhatThePathIs(t *testing.T) {
	dir := t.TempDir()
	path, link := filepath.Join(dir, "result"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(path, []byte("before"), 0o600), os.Symlink("result", link)); err != nil {
		t.Fatal(err)
	}
	after := func(w io.Writer) error { _, err := w.Write([]byte("after")); return err }
	if err := WriteFile(link, after); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	info, lerr := os.Lstat(link)
	mode, serr := os.Stat(path)
	if err := errors.Join(err, lerr, serr); err != nil || string(text) != "after" || info.Mode()&os.ModeSymlink == 0 || mode.Mode().Perm() != 0o600 {
		t.Errorf("%q, %v, %v, %v", text, info.Mode(), mode.Mode(), err)
	}
	if err := WriteFile(os.DevNull, after); err != nil {
		t.Error(err)
	}
	if info, err := os.Stat(os.DevNull); err != nil || info.Mode().IsRegular() {
		t.Fatalf("%s is %v now: %v", os.DevNull, info.Mode(), err)
	}
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("no /dev/full")
	}
	if err := WriteFile("/dev/full", after); err == nil || !strings.Contains(err.Error(), "/dev/full: no space left") {
		t.Errorf("onto a full disk: %v", err)
	}
}

// Output that could not be written is a failure, even if the command does not check for write errors.
func TestLostResults(t *testing.T) {
	app := App{Name: "app", Commands: []Command{{Name: "do", Setup: func(*pflag.FlagSet) Action {
		return func(env *Env, _ []string) error { fmt.Fprintln(env.Stdout, "a line"); return nil }
	}}}}
	out, in := io.Pipe()
	out.CloseWithError(errors.New("nobody reads"))
	var errs bytes.Buffer
	if code := app.Main(&Env{Context: t.Context(), Stdout: in, Stderr: &errs}, []string{"do"}); code != Failed || errs.String() != "app: nobody reads\n" {
		t.Errorf("exit %d and %q", code, errs.String())
	}
}

func TestShort(t *testing.T) {
	for v, want := range map[float64]string{12: "12", 1234: "1.23 K", 56_000_000: "56 M", 7.1e9: "7.1 B"} {
		if got := Short(v); got != want {
			t.Errorf("%g is %q, want %q", v, got, want)
		}
	}
}
