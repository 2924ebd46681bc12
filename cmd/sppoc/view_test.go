package main

import (
	"bytes"
	"encoding/xml"
	"html"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/cmd/internal/trace"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// viewOf runs view and returns the path of the page.
func viewOf(t *testing.T, args ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "view.html")
	env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: io.Discard}
	if code := app.Main(env, append([]string{"view", "-o", out}, args...)); code != cli.Done {
		t.Fatalf("exit %d", code)
	}
	return out
}

// A page is a single file that loads nothing else.
func TestViewIsAlone(t *testing.T) {
	data, err := os.ReadFile(viewOf(t, "testdata/base/tiny.sppo"))
	if err != nil {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`(src|href)=|https?://|@import|\{\{`).Find(data); m != nil {
		t.Errorf("the page has %q", m)
	}
}

// detail is a script that defines a function that returns the page's description of the selected item.
const detail = `const detail = () => document.getElementById("detail").textContent;`

// In a real browser, a page loads without errors, a link shows the instruction that it leads to together with that
// instruction's spec line, and user actions have their effects.
func TestViewInBrowser(t *testing.T) {
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no chromium: the page is not tried in a browser")
	}
	tiny := []string{"testdata/base/tiny.sppo"}
	for _, c := range []struct {
		args []string
		link string
		acts string // a script of user actions; its calls of says add to the text that is checked
		want []string
	}{
		{tiny, "find=activation_grad+s2&theme=dark", "", []string{`data-theme="dark"`, "activation_grad s2", "rank 0, compute, pc", "subsequence 2", "task B0.2@0", "sppo:", "1 of "}},
		{tiny, "find=F1.3@1+layernorm", "", []string{"layernorm s3 l1", "microbatch 1", "task F1.3@1"}},
		{[]string{"testdata/base/tiny.sppo", "testdata/base/small.sppo"}, "find=nonsense", "", []string{"tiny and small", "nothing", `data-spans=`}},
		{tiny, "", `key("w"); says("zoomed", shown().width < whole.width * 0.8); const before = shown().from; key("d"); says("panned", shown().from > before);
			const begin = shown().from; drag(300, 200); says("dragged", shown().from > begin); key("0"); says("back", shown().width === whole.width);
			mouse("wheel", 700, 60, { deltaY: -200, ctrlKey: true }); says("wheeled", shown().width < whole.width); key("0");
			drag(170, 170); says("task", document.getElementById("detail").textContent); key("f"); says("framed", shown().width < whole.width / 20)`,
			[]string{"zoomed true", "panned true", "dragged true", "back true", "wheeled true", "task F0.0@0", "of its time: forward", "framed true"}},
		{tiny, "find=adamw", `const [, took, from, to] = document.getElementById("detail").textContent.match(/([\d.]+) us, from ([\d.]+) ms to ([\d.]+) ms/);
			says("digits", Math.abs((to - from) * 1000 / took - 1) < 0.01)`, []string{"digits true"}}, // times have enough digits, even late in the step
		{tiny, "", `drag(300, 500, { shiftKey: true });
			says("range", document.getElementById("detail").textContent); key("Escape"); says("free", document.getElementById("detail").textContent)`,
			[]string{"shares of it, on the compute streams:", "rank 2: ", "bubble ", "free Click an instruction"}},
		{tiny, "find=wait+F0.1@1", detail + `says("first", detail()); document.getElementById("cause").onclick(); says("second", detail()); key("c"); says("third", detail());
			key("b"); says("fourth", detail())`,
			[]string{"waits for rank 2, recv_prev, pc", "second recv s1", "begins after rank 0, compute, pc", "third add s1 l0", "fourth recv s1"}},
		{tiny, "path=1&theme=dark", detail + `says("path", detail()); key("x"); says("without", detail())`,
			[]string{"path critical path of the step, 4.24", "collectives 3.", "stage 1 ", "without Click an instruction"}},
		{tiny, "table=1", `const sums = () => document.getElementById("sums").textContent; says("all", sums()); drag(300, 500, { shiftKey: true }); says("part", sums())`,
			[]string{"all 2 ranks, the whole step", "computematmul312", "part 2 ranks, ", "us, from "}},
		{tiny, "", detail + `for (let y = 40; y < 600 && !detail().includes("at the peak"); y += 8) { mouse("pointerdown", 700, y); mouse("pointerup", 700, y); }
			says("memory", detail())`, []string{"at the peak, in forward microbatch 1 subsequence 1 stage 0 layer 0: weights 45.2 KiB, optimizer 90.4 KiB", "gaps 7.20 KiB", "embed.m (optimizer) 16.0 KiB"}},
		// The uses of memory add up to the bytes in use, which never exceed the highest placed byte.
		{tiny, "", `const tip = document.getElementById("tip"), open = () => tip.style.display === "block"; let y = 40;
			const over = () => { mouse("pointermove", 700, y, { pointerType: "mouse" }); return open(); };
			const bytes = text => { const [n, u] = text.split(" "); return n * 1024 ** ["B", "KiB", "MiB"].indexOf(u); };
			while (y < 900 && !(over() && tip.textContent.includes("device memory"))) y += 4;
			const [head, uses, placed] = tip.textContent.split("\n"); says("tip", tip.textContent);
			const [, now, most] = head.match(/: ([\d.]+ \w+) in use, at most ([\d.]+ \w+)/), sum = uses.split(", ").reduce((s, u) => s + bytes(u.match(/[\d.]+ \w+$/)[0]), 0);
			says("sum", Math.abs(sum / bytes(now) - 1) < 0.01 && bytes(now) <= bytes(most)); says("placed", bytes(most) <= bytes(placed.match(/byte: ([\d.]+ \w+)/)[1]));
			for (const close of [() => mouse("pointerleave", 700, y), () => key("Escape"), () => mouse("pointercancel", 700, y), () => key("w"), () => dispatchEvent(new Event("blur")),
				() => mouse("pointerdown", 700, y, { pointerType: "touch" }), () => mouse("wheel", 700, y, { deltaY: -10, ctrlKey: true })]) { over(); const was = open(); close(); says("closed", was && !open()); mouse("pointerup", 700, y); key("0"); }
			mouse("pointermove", 700, y, { pointerType: "touch" }); says("touched", open())`,
			[]string{"tip rank 0, device memory at ", "weights 45.2 KiB, optimizer 90.4 KiB", "placed byte: 231 KiB of 1.00 GiB", "sum true", "placed true",
				"closed true; closed true; closed true; closed true; closed true; closed true; closed true; touched false"}},
		// Rows fill the page.
		{append(tiny, "--ranks", "0"), "", `const [rows, room] = canvas.dataset.rows.split(" "); says("filled", rows <= room && rows > room - 12); says("legend", document.getElementById("legend").textContent)`, []string{"filled true", "legend forward", "memoryweights", "saved activations"}},
	} {
		page := viewOf(t, c.args...)
		act(t, page, c.acts)
		var out, errs bytes.Buffer
		cmd := exec.CommandContext(t.Context(), browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
			"--user-data-dir="+t.TempDir(), "--window-size=1280,800", "--virtual-time-budget=4000", "--dump-dom", "file://"+page+"#"+c.link)
		cmd.Stdout, cmd.Stderr = &out, &errs
		cmd.WaitDelay = time.Second
		if err := cmd.Run(); err != nil {
			t.Skipf("chromium does not run here: %v", err)
		}
		if strings.Contains(errs.String(), "CONSOLE") {
			t.Errorf("the page has errors:\n%s", errs.String())
		}
		text := html.UnescapeString(out.String())
		if before, after, ok := strings.Cut(text, `<script type="application/json"`); ok { // the text of the page without its data
			_, rest, _ := strings.Cut(after, "</body>")
			text = before + rest
		}
		for _, w := range c.want {
			if !strings.Contains(text, w) {
				title, _, _ := strings.Cut(text, "</title>")
				t.Errorf("%s: the page does not say %q:\n%s\n%.3000s", c.link, w, title, text[strings.LastIndex(text, "<header>"):])
			}
		}
	}
}

// act adds a simulated user to a page: a script of key and mouse events that runs once the page is drawn and
// reports its findings.
func act(t *testing.T, page, script string) {
	t.Helper()
	if script == "" {
		return
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	user := `<script>(async () => {
		const canvas = document.getElementById("view"), later = () => new Promise(done => setTimeout(done, 50));
		const shown = () => { const [from, to] = canvas.dataset.shown.split(" ").map(Number); return { from, width: to - from }; };
		const key = key => dispatchEvent(new KeyboardEvent("keydown", { key }));
		const mouse = (name, x, y, more) => { const box = canvas.getBoundingClientRect();
			canvas.dispatchEvent(new (name === "wheel" ? WheelEvent : PointerEvent)(name, { clientX: box.left + x, clientY: box.top + y, cancelable: true, ...more })); };
		const says = (what, value) => { document.title += "; " + what + " " + value; };
		const drag = (from, to, more) => { mouse("pointerdown", from, 60, more); mouse("pointermove", to, 60, more); mouse("pointerup", to, 60, more); };
		canvas.setPointerCapture = () => {};
		while (!document.body.dataset.spans) await later();
		const whole = shown();
		` + script + `
	})();</script></html>`
	if err := os.WriteFile(page, bytes.Replace(text, []byte("</html>"), []byte(user), 1), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A trace of the program is added to the page, rank by rank. A trace without a program, or of another program, is
// refused.
func TestViewOfATrace(t *testing.T) {
	job, err := cli.OpenProgram(nil, "testdata/base/tiny.sppo", nil)
	if err != nil {
		t.Fatal(err)
	}
	timeline, err := sim.Run(job.Program, ir.SectionStep, sim.Options{Spans: true, NoFold: true})
	if err != nil {
		t.Fatal(err)
	}
	timeline.Measured = "a device"
	var data bytes.Buffer
	if err := trace.Write(&data, job.Program, timeline, []int{0, 1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	measured := filepath.Join(t.TempDir(), "measured.json")
	if err := os.WriteFile(measured, data.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		files []string
		code  int
		says  string
	}{
		{[]string{"testdata/base/tiny.sppo", measured}, cli.Done, "1.000 times the simulated"},
		{[]string{measured}, cli.BadInput, "give the program that was run before it"},
		{[]string{"testdata/base/small.sppo", measured}, cli.BadInput, "it was measured on another program, tiny"},
	} {
		out := filepath.Join(t.TempDir(), "view.html")
		var errs bytes.Buffer
		env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: &errs}
		if code := app.Main(env, append([]string{"view", "-o", out}, c.files...)); code != c.code || !strings.Contains(errs.String(), c.says) {
			t.Errorf("%v: exit %d and %q, want %d and %q", c.files, code, errs.String(), c.code, c.says)
		}
		text, err := os.ReadFile(out)
		if done := c.code == cli.Done; done != (err == nil && strings.Contains(string(text), `"measured":true`)) {
			t.Errorf("%v: the page: %v", c.files, err)
		}
	}
}

// A figure is well-formed XML that shows every kind of span in the job, and no bar extends beyond the time axis.
func TestFigure(t *testing.T) {
	out := filepath.Join(t.TempDir(), "view.svg")
	env := &cli.Env{Context: t.Context(), Stdout: io.Discard, Stderr: io.Discard}
	if code := app.Main(env, []string{"view", "testdata/base/tiny.sppo", "--set", "schedule.strategy=zb-h1", "-o", out}); code != cli.Done {
		t.Fatalf("exit %d", code)
	}
	data, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	var svg struct {
		Rects []struct {
			X     float64 `xml:"x,attr"`
			Width string  `xml:"width,attr"`
			Fill  string  `xml:"fill,attr"`
		} `xml:"rect"`
		Paths []struct {
			D    string `xml:"d,attr"`
			Fill string `xml:"fill,attr"`
		} `xml:"path"`
		Texts []string `xml:"text"`
	}
	if err := xml.Unmarshal(data, &svg); err != nil {
		t.Fatal(err)
	}
	filled := map[string]bool{}
	for _, r := range svg.Rects {
		filled[r.Fill] = true
		width, err := strconv.ParseFloat(r.Width, 64)
		if err == nil && (r.X < figureLabels || r.X+width > figureLabels+figurePlot) && width > 9 {
			t.Errorf("a bar from %g, %g wide", r.X, width)
		}
	}
	move := regexp.MustCompile(`M(\d+) [\d.]+h(\d+)`)
	for _, p := range svg.Paths {
		filled[p.Fill] = true
		for _, m := range move.FindAllStringSubmatch(p.D, -1) {
			x, _ := strconv.Atoi(m[1])
			width, _ := strconv.Atoi(m[2])
			if x < figureLabels || x+width > figureLabels+figurePlot {
				t.Errorf("a bar from %d, %d wide", x, width)
			}
		}
	}
	f := &figure{theme: "light"}
	for kind := range showNames {
		if want := kind != showExposed; filled[f.fill(kind)] != want {
			t.Errorf("%s: drawn %v", showNames[kind][1], !want)
		}
	}
	text := strings.Join(svg.Texts, " ")
	for _, want := range []string{"simulated on", "device memory", "host memory", " KiB of 1.00 GiB", "saved activations"} {
		if !strings.Contains(text, want) {
			t.Errorf("the figure does not say %q", want)
		}
	}
	for _, part := range []ir.Part{ir.PartWeights, ir.PartOptimizer, ir.PartGradients, ir.PartKV, ir.PartSaved, ir.PartWorking} {
		if !filled[f.colour(useColour(part))] {
			t.Errorf("memory: no %s", part)
		}
	}
}

// A task's name consists of the properties that distinguish it from the other tasks of its rank.
func TestTaskNames(t *testing.T) {
	whole := []string{"schedule.subsequences=1", "schedule.offload=none"}
	for _, c := range []struct {
		set  []string
		want string // name of the last backward task of rank 2
	}{
		{[]string{"train.batch=1"}, "B0"},
		{nil, "B1.0"},
		{append(whole, "schedule.strategy=gpipe"), "B1"},
		{append(whole, "schedule.strategy=dualpipe-v", "schedule.virtual_stages=2", "model.layers=4", "train.batch=4"), "B3@1"},
		{[]string{"schedule.mux=left"}, "B1.0@0"},
	} {
		job, err := cli.OpenProgram(nil, "testdata/base/tiny.sppo", c.set)
		if err != nil {
			t.Fatal(err)
		}
		code := &job.Program.Codes[job.Program.Ranks[2].Code]
		names, got := taskNamesOf(code), ""
		for _, in := range code.Sections[ir.SectionStep] {
			if in.Stream == ir.Compute && in.Prov.Phase == ir.PhaseBackward && in.Prov.Subsequence >= 0 {
				got, _ = names.of(in.Prov)
			}
		}
		if got != c.want {
			t.Errorf("%v: the last backward is called %q, want %q", c.set, got, c.want)
		}
	}
}
