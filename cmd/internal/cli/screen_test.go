//go:build linux

package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

func TestVisible(t *testing.T) {
	for text, want := range map[string]string{
		"plain\ttext\n": "plain\ttext\n", "größe 龍 🙂": "größe 龍 🙂", "\x1b[2J\x07\r": `\u001b[2J\u0007\u000d`,
		"\x9b31m": `\x9b31m`, "\u009b31m": `\u009b31m`, "a\u202eb": `a\u202eb`, "\xf0\x9f": `\xf0\x9f`, "\x00\x7f": `\u0000\u007f`,
	} {
		if got := string(visible([]byte(text))); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

// However a text is divided into writes, the screen shows the same text without control characters.
func FuzzScreen(f *testing.F) {
	f.Add([]byte("größe \x1b]0;title\x07 🙂\xf0\x9f\n"), 3)
	f.Fuzz(func(t *testing.T, text []byte, cut int) {
		if len(text) > 0 {
			cut = int(uint(cut) % uint(len(text)))
		} else {
			cut = 0
		}
		var b bytes.Buffer
		s := &screen{w: &b}
		for _, part := range [][]byte{text[:cut], text[cut:]} {
			if n, err := s.Write(part); n != len(part) || err != nil {
				t.Fatal(n, err)
			}
		}
		if err := s.flush(); err != nil {
			t.Fatal(err)
		}
		if want := visible(text); !bytes.Equal(b.Bytes(), want) {
			t.Errorf("%q cut at %d is %q, want %q", text, cut, b.Bytes(), want)
		}
		hostile := func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }
		if !utf8.Valid(b.Bytes()) || bytes.ContainsFunc(b.Bytes(), hostile) {
			t.Errorf("%q is shown as %q", text, b.Bytes())
		}
	})
}

// terminal opens a pseudoterminal and returns both sides: what is written to program can be read from screen.
func terminal(t *testing.T) (screen, program *os.File) {
	t.Helper()
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { screen.Close() })
	number, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		t.Skip(err)
	}
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { program.Close() })
	return screen, program
}

// File contents reach a terminal without control characters. Results written to a file or a pipe are unchanged.
func TestTerminalIsSafe(t *testing.T) {
	const hostile = "a\x1b[31mb\u009bc"
	app := App{Name: "app", Commands: []Command{{Name: "do", Setup: func(*pflag.FlagSet) Action {
		return func(env *Env, _ []string) error {
			fmt.Fprintln(env.Stdout, hostile)
			Overwrite(env.Stderr, hostile)
			return errors.New(hostile)
		}
	}}}}
	shown, program := terminal(t)
	app.Main(&Env{Context: t.Context(), Stdout: program, Stderr: program}, []string{"do"})
	fmt.Fprint(program, "end")
	var got strings.Builder
	for buf := make([]byte, 1000); !strings.HasSuffix(got.String(), "end"); {
		n, err := shown.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		got.Write(buf[:n])
	}
	const safe = `a\u001b[31mb\u009bc`
	if want := safe + "\r\n\r" + safe + "\x1b[Kapp: " + safe + "\r\nend"; got.String() != want {
		t.Errorf("the terminal gets %q, want %q", got.String(), want)
	}
	var out, errs bytes.Buffer
	app.Main(&Env{Context: t.Context(), Stdout: &out, Stderr: &errs}, []string{"do"})
	if out.String() != hostile+"\n" || strings.Contains(errs.String(), hostile+"\n") {
		t.Errorf("into files go %q and %q", out.String(), errs.String())
	}
}
