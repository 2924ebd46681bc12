package watch

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// linesOf returns records as lines of a log.
func linesOf(t *testing.T, records ...Record) string {
	t.Helper()
	var b bytes.Buffer
	l := &Lines{W: &b}
	for _, r := range records {
		if err := l.Observe(r); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// However a run is killed and resumed, its log has each step once, with the last result.
func TestReadAfterKills(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var text strings.Builder
		want := map[int]float64{}
		validated := map[int]bool{}
		done := 0
		starts := 1 + random.IntN(5)
		for start := range starts {
			first := random.IntN(done + 1)
			for step := range want {
				if step > first {
					delete(want, step)
				}
			}
			for step := range validated {
				if step > first || first == 0 {
					delete(validated, step)
				}
			}
			text.WriteString(linesOf(t, &Run{Name: "job", First: first, Steps: 50}))
			done = first
			for range random.IntN(20) {
				done++
				want[done] = random.Float64()
				text.WriteString(linesOf(t, &Step{Step: done, Loss: Number(want[done])}))
				if random.IntN(4) == 0 {
					validated[done] = true
					text.WriteString(linesOf(t, &Validation{Step: done, Loss: 1}, &Note{Note: "saved"}))
				}
			}
			if line := linesOf(t, &Step{Step: done + 1}); random.IntN(2) == 0 { // killed while writing
				text.WriteString(line[:1+random.IntN(len(line)-2)])
				if start < starts-1 {
					text.WriteString("\n")
				}
			}
		}
		l, err := Read(strings.NewReader(text.String()))
		if err != nil {
			t.Fatalf("%v\n%s", err, text.String())
		}
		if len(l.Steps) != len(want) || len(l.Validations) != len(validated) || len(l.Runs) != starts {
			t.Fatalf("%d steps, %d validations, %d starts; want %d, %d, %d\n%s", len(l.Steps), len(l.Validations), len(l.Runs), len(want), len(validated), starts, text.String())
		}
		for i, s := range l.Steps {
			if float64(s.Loss) != want[s.Step] || i > 0 && l.Steps[i-1].Step >= s.Step {
				t.Fatalf("step %d has loss %g, want %g", s.Step, s.Loss, want[s.Step])
			}
		}
		if err := Report(io.Discard, "x", l); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	good := linesOf(t, &Step{Step: 1, Loss: 2})
	noted := good + "{\"step\":\n" + linesOf(t, &Note{Note: "resumed from x", Step: 1})
	if _, err := Read(strings.NewReader(noted + linesOf(t, &Run{Name: "x"}) + good)); err != nil {
		t.Error("a note before the start:", err)
	}
	for text, want := range map[string]string{
		noted + good:          "line 2 is not a record of a run",
		"":                    "it has no records of a run",
		"{\"other\":1}\n":     "it has no records of a run",
		"words\n" + good:      "line 1 is not a record of a run: invalid character 'w'",
		good + "[1]\n" + good: "line 2 is not a record of a run",
		"{\"simulated\":true,\"step\":1,\"loss\":2}\n":        "line 1 is not a record of a run: it is the log of a simulation",
		"{\"step\":\"one\",\"loss\":2}\n" + good:              "line 1 is not a record of a run: json: cannot unmarshal string",
		good + strings.Repeat("x", maxRecord+1) + "\n" + good: "a line has more than 4 MiB",
	} {
		if _, err := Read(strings.NewReader(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
}

// pageOf returns the report on a run with the given records.
func pageOf(t *testing.T, records ...Record) string {
	t.Helper()
	l, err := Read(strings.NewReader(linesOf(t, records...)))
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := Report(&b, "file", l); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A start that finds no steps left does not use the planned memory, so the report does not compare the two.
func TestNothingLeft(t *testing.T) {
	records := whole()
	again := *records[0].(*Run)
	again.First = again.Steps
	page := pageOf(t, append(records, &again, &Done{Done: true, Steps: again.Steps, FinalLoss: Number(math.NaN()), DevicePeak: 1 << 20})...)
	if !strings.Contains(page, "3.00 MiB planned, of 4.00 MiB") {
		t.Error("the report does not give the planned memory alone")
	}
}

// whole returns the records of a run of 20,000 steps, including every kind of record.
func whole() []Record {
	split := &Split{0.5, 0.1, 0.15, 0.25}
	records := []Record{&Run{
		Name: "job <b>\"&</b></script><script>alert(1)</script>", Version: "sppovm 1", Time: time.Unix(1e9, 0), Device: "cpu", Machine: "here", Ranks: 4, DP: 1, PP: 2, SP: 2,
		Parameters: 5e6, Sequence: 1024, Batch: 2, Steps: 20_000, DeviceMemory: Memory{3 << 20, 4 << 20}, HostMemory: Memory{1 << 20, 0},
		Predicted: &Prediction{Seconds: 0.125, Split: split, Comparable: true},
	}}
	for step := 1; step <= 20_000; step++ {
		s := &Step{Step: step, Loss: Number(2 + 4/math.Sqrt(float64(step))), TokensPerSecond: 1000, Seconds: 0.25, GradNorm: 1, LR: 1e-3, Split: split}
		if step == 77 {
			s.Loss, s.Skipped = Number(math.NaN()), true
		}
		if step%1000 == 0 {
			s.GradNorms = map[string]Number{"embed": 1, "layer.0": Number(step), "<i>": 3}
			records = append(records, &Validation{Step: step, Loss: Number(3 - float64(step)/1e5), ByPosition: []Bucket{{0, 0, 9, 1}, {1, 1, 8, 1}, {2, 3, 7, 2}}})
		}
		records = append(records, s)
	}
	return append(records, &Note{Note: "saved <img src=x onerror=alert(1)>", Step: 20_000}, &Done{Steps: 20_000, FinalLoss: 2, DevicePeak: 2 << 20, HostPeak: 1 << 20})
}

// A report is a single file of bounded size that loads nothing else, whatever names occur in the run.
func TestReport(t *testing.T) {
	text := pageOf(t, whole()...)
	if len(text) > 400_000 {
		t.Errorf("%d bytes", len(text))
	}
	for _, want := range []string{
		"done after step 20000", "250 ms", "125 ms simulated on here", "2.0283", "after step 20000", "1 step without a finite value; the first values are higher than shown",
		"3.00 MiB planned, 2.00 MiB used, of 4.00 MiB", "<span>skipped steps</span><b>1</b>", "layer.0, step 20000: 2e+04", "saved &lt;img", "Validation loss by position", "<td>15.0%</td>",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q", want)
		}
	}
	bare := regexp.MustCompile(`(?s)<(style|script)>.*?</(style|script)>`).ReplaceAllString(text, "<$1>")
	found := map[string]int{}
	for _, tag := range regexp.MustCompile(`<([a-z0-9!]+)([^<>]*)>`).FindAllStringSubmatch(strings.ToLower(bare), -1) {
		found[tag[1]]++
		if m := regexp.MustCompile(`\s(src|href|on[a-z]+)=`).FindString(tag[2]); m != "" {
			t.Errorf("%s has%s", tag[1], m)
		}
	}
	if found["script"] != 1 || found["svg"] != 7 || found["img"]+found["link"]+found["iframe"]+found["object"] > 0 || strings.Count(bare, "<") != strings.Count(bare, ">") {
		t.Errorf("there are elements %v", found)
	}
	for _, m := range regexp.MustCompile(`data-lines="([^"]*)"`).FindAllStringSubmatch(text, -1) {
		if data := html.UnescapeString(m[1]); !json.Valid([]byte(data)) {
			t.Errorf("data-lines is %.80q", data)
		}
	}
	if regexp.MustCompile(`url\(|@import|NaN|Inf`).MatchString(text) {
		t.Error("the page loads something, or has coordinates that are no numbers")
	}
}

// A report can be drawn from very few records.
func TestSmallReports(t *testing.T) {
	for name, c := range map[string]struct {
		records []Record
		want    []string
	}{
		"only steps":     {[]Record{&Step{Step: 3, Loss: 2, GradNorm: 1, LR: 1, Seconds: 1, TokensPerSecond: 5}}, []string{"<h1>file</h1>", "step 3; running, or killed"}},
		"nothing finite": {[]Record{&Step{Step: 1, Loss: Number(math.Inf(1))}}, []string{"not finite"}},
		"started":        {[]Record{&Run{Name: "job", Steps: 5}}, []string{"step 0; running, or killed", "started"}},
		"stopped":        {[]Record{&Run{Name: "job", Steps: 5}, &Step{Step: 1}, &Done{Steps: 1}}, []string{"stopped after step 1"}},
		"failed":         {[]Record{&Run{Name: "job", Steps: 5}, &Step{Step: 1}, &Note{Note: "failed: no power"}}, []string{"failed after step 1", "failed: no power"}},
		"all zero":       {[]Record{&Step{Step: 1}, &Step{Step: 2}}, []string{"step 2; running"}},
	} {
		text := pageOf(t, c.records...)
		for _, want := range c.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s: no %q", name, want)
			}
		}
		if strings.Contains(text, "NaN") || strings.Contains(text, "%!") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// A thinned curve keeps the extremes, and omits values that are not finite.
func TestThin(t *testing.T) {
	var points []point
	sum := 0.0
	for i := range 12_345 {
		y := math.Sin(float64(i)) * float64(i)
		points, sum = append(points, point{X: float64(i), Y: y}), sum+y
	}
	low, high := math.Inf(1), math.Inf(-1)
	for _, p := range points {
		low, high = min(low, p.Y), max(high, p.Y)
	}
	thinned := thin(points)
	gotLow, gotHigh := math.Inf(1), math.Inf(-1)
	for _, p := range thinned {
		gotLow, gotHigh = min(gotLow, p.Low), max(gotHigh, p.High)
	}
	if len(thinned) > columns || gotLow != low || gotHigh != high {
		t.Errorf("%d points from %g to %g, want at most %d from %g to %g", len(thinned), gotLow, gotHigh, columns, low, high)
	}
	if got := fmt.Sprint(thin([]point{{X: 1, Y: math.NaN()}, {X: 2, Y: 3}})); got != "[{2 3 3 3}]" {
		t.Error(got)
	}
}

// A logarithmic axis has at least two labels, however narrow its range.
func TestTicksOfNarrowLogarithms(t *testing.T) {
	for _, s := range []scale{{low: 1.3, high: 2.6, log: true}, {low: 2.1, high: 4.9, log: true}, {low: 0.9, high: 70, log: true}} {
		ticks := s.ticks()
		for _, v := range ticks {
			if v < s.low*0.999 || v > s.high*1.001 {
				t.Errorf("%g is not from %g to %g", v, s.low, s.high)
			}
		}
		if len(ticks) < 2 {
			t.Errorf("from %g to %g there are only %v", s.low, s.high, ticks)
		}
	}
}

// In a real browser, a chart's tooltip stays within the window. It closes when the pointer leaves, on Escape, when the
// page scrolls and when the window loses the focus.
func TestTooltipInBrowser(t *testing.T) {
	browser, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("no chromium: the page is not tried in a browser")
	}
	log, err := Read(strings.NewReader(linesOf(t, &Run{Name: "job", Steps: 2}, &Step{Step: 1, Loss: 2}, &Step{Step: 2, Loss: 1})))
	if err != nil {
		t.Fatal(err)
	}
	var page bytes.Buffer
	if err := Report(&page, "job", log); err != nil {
		t.Fatal(err)
	}
	page.WriteString(`<script>
		const chart = document.querySelector("svg[data-lines]"), box = chart.getBoundingClientRect(), open = () => tip.style.display === "block";
		const over = y => chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 60, clientY: y }));
		over(innerHeight - 2);
		const inside = tip.getBoundingClientRect().bottom <= innerHeight, text = tip.textContent.replace(/\n/g, ", ");
		const closed = [() => chart.dispatchEvent(new PointerEvent("pointerleave")), () => dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" })),
			() => dispatchEvent(new Event("scroll")), () => dispatchEvent(new Event("blur")), () => dispatchEvent(new PointerEvent("pointercancel"))]
			.map(close => { over(box.top + 20); const was = open(); close(); return was && !open(); });
		document.title = [inside, text, ...closed].join("; ");
	</script>`)
	file := filepath.Join(t.TempDir(), "report.html")
	if err := os.WriteFile(file, page.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), browser, "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir="+t.TempDir(),
		"--window-size=900,700", "--virtual-time-budget=2000", "--dump-dom", "file://"+file)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("chromium does not run here: %v", err)
	}
	title := regexp.MustCompile(`<title>(.*?)</title>`).FindStringSubmatch(string(out))
	if want := "true; step 1, training: 2; true; true; true; true; true"; title == nil || title[1] != want {
		t.Errorf("the page reports %q, want %q", title, want)
	}
}
