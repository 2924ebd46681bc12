package main

import (
	"bytes"
	"html"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"sppo/cmd/internal/cli"
)

// viewOf writes a page of the tiny job.
func viewOf(t *testing.T, args ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "view.html")
	env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: io.Discard}
	if code := app.Main(env, append([]string{"view", "-o", out}, args...)); code != cli.Done {
		t.Fatalf("exit %d", code)
	}
	return out
}

// A page is one file: it loads nothing from anywhere.
func TestViewIsAlone(t *testing.T) {
	data, err := os.ReadFile(viewOf(t, "testdata/base/tiny.sppo"))
	if err != nil {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`(src|href)=|https?://|@import|\{\{`).Find(data); m != nil {
		t.Errorf("the page has %q", m)
	}
}

// In a real browser a page loads without an error, and what a link asks for is found and shown with its spec line.
func TestViewInBrowser(t *testing.T) {
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no chromium: the page is not tried in a browser")
	}
	for _, c := range []struct {
		args []string
		link string
		want []string
	}{
		{[]string{"testdata/base/tiny.sppo"}, "find=gelu_grad+s2&theme=dark", []string{`data-theme="dark"`, "gelu_grad s2", "rank 0, compute, pc", "subsequence 2", "sppo:", "1 of "}},
		{[]string{"testdata/base/tiny.sppo", "testdata/base/small.sppo"}, "find=nonsense", []string{"tiny and small", "nothing", `data-spans=`}},
	} {
		var out, errs bytes.Buffer
		cmd := exec.CommandContext(t.Context(), browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
			"--user-data-dir="+t.TempDir(), "--virtual-time-budget=4000", "--dump-dom", "file://"+viewOf(t, c.args...)+"#"+c.link)
		cmd.Stdout, cmd.Stderr = &out, &errs
		cmd.WaitDelay = time.Second
		if err := cmd.Run(); err != nil {
			t.Skipf("chromium does not run here: %v", err)
		}
		if strings.Contains(errs.String(), "CONSOLE") {
			t.Errorf("the page has errors:\n%s", errs.String())
		}
		text := html.UnescapeString(out.String())
		if before, after, ok := strings.Cut(text, `<script type="application/json"`); ok { // what the page says, not what it holds
			_, rest, _ := strings.Cut(after, "</body>")
			text = before + rest
		}
		for _, w := range c.want {
			if !strings.Contains(text, w) {
				t.Errorf("%s: the page does not say %q:\n%.3000s", c.link, w, text[strings.LastIndex(text, "<header>"):])
			}
		}
	}
}
