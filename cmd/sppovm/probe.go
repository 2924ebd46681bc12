package main

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// probeFlags are the flags of probe.
type probeFlags struct {
	run   runFlags // the device and its options
	out   string
	name  string
	ranks int
	span  time.Duration
	scale probe.Scale

	rounds int // number of rounds on the CPU; 0: cpuRounds
}

func probeMachine(flags *pflag.FlagSet) cli.Action {
	var f probeFlags
	cli.Choice(flags, &f.run.device, "device", "cpu", "cpu, or cuda (NVIDIA GPUs)", "cpu", "cuda")
	flags.StringVarP(&f.out, "output", "o", "", "write the cluster to this file instead of standard output")
	flags.StringVar(&f.name, "name", "measured", "name of the cluster")
	cli.Files(flags, "output", cli.SpecFiles...)
	flags.IntVar(&f.ranks, "ranks", 0, "number of ranks per node; 0: one per GPU or, on the CPU, 4 that share its cores")
	flags.DurationVar(&f.span, "span", 50*time.Millisecond, "repeat each measurement for at least this long")
	flags.BoolVar(&f.run.json, "json", false, "write one JSON object per measurement to standard output, followed by the figures")
	flags.BoolVarP(&f.run.quiet, "quiet", "q", false, "show no progress")
	cli.Choice(flags, &f.run.blas, "blas", "go", "cpu: compute matrix products with go (built in) or openblas (if installed)", blasNames...)
	flags.IntVar(&f.run.threads, "threads", 0, "cpu: number of threads that the ranks share; 0: one per processor core")
	flags.BoolVar(&f.run.nccl, "nccl", false, "cuda: connect ranks through NCCL instead of copying between their memories")
	flags.BoolVar(&f.run.tune, "tune", false, "cuda: use the fastest cuBLASLt algorithm for each matrix product")
	return func(env *cli.Env, args []string) error {
		if err := f.check(); err != nil {
			return err
		}
		return f.measure(env)
	}
}

func (f *probeFlags) check() error {
	if err := f.run.check(); err != nil {
		return err
	}
	if f.ranks < 0 || f.span < 0 {
		return cli.Usagef("probe: --ranks and --span must not be negative")
	}
	if _, err := lang.Format("--name", []byte("cluster "+f.name+" {}\n")); err != nil {
		return cli.Usagef("--name %s: use letters, digits, - and _, starting with a letter", f.name)
	}
	if f.out == "" {
		return nil
	}
	return cli.CheckOutput(f.out)
}

func (f *probeFlags) measure(env *cli.Env) error {
	b, err := f.open()
	if err != nil {
		return err
	}
	defer b.close()
	show := &progress{text: env.Stderr, loud: env.Stderr}
	if f.run.quiet {
		show.text = io.Discard
	}
	if f.run.json {
		show.json = env.Stdout
	}
	show.rewrite = cli.IsTerminal(show.text)
	show.say("device %s", b.about)
	b.Begin = show.measuring
	b.Say = func(t probe.Timing) { sayTiming(show, t) }
	figures, err := b.Probe(env.Context, b.facts, b.scale)
	if err != nil {
		return err
	}
	show.line(probedLine{true, figures.Machine, figures.Notes, figures.Disturbed})
	head := fmt.Sprintf("%s, measured by sppovm probe on %s", b.about, time.Now().Format(time.DateOnly))
	if figures.Disturbed > mostDisturbed {
		disturbed := fmt.Sprintf("other work slowed down %.0f%% of the measurements", 100*figures.Disturbed)
		show.warn("%s: measure again on an idle machine for reliable figures", disturbed)
		head += "; " + disturbed
	}
	text, err := clusterText(f.name, head, figures)
	if err != nil {
		return err
	}
	if f.out != "" {
		return cli.WriteFile(f.out, func(w io.Writer) error { _, err := w.Write(text); return err })
	}
	if !f.run.json {
		_, err = env.Stdout.Write(text)
	}
	return err
}

// bench is the device to measure, with what is known about it.
type bench struct {
	probe.Bench
	facts probe.Facts
	scale probe.Scale
	about string // description
	close func()
}

// mostDisturbed is the share of disturbed measurements above which probe prints a warning.
const mostDisturbed = 0.1

// cpuRounds is the number of rounds over which the measurements of a CPU are spread, because its speed varies
// from second to second under the load of other programs.
const cpuRounds = 15

func (f *probeFlags) open() (*bench, error) {
	b := &bench{Bench: probe.Bench{Span: f.span}, scale: probe.CPU, close: func() {}}
	b.facts = probe.Facts{Name: f.name, Ranks: f.ranks}
	if f.run.device == "cuda" {
		return b, f.openCUDA(b)
	}
	if b.facts.Ranks == 0 {
		b.facts.Ranks = 4
	}
	memory := hostMemory()
	b.facts.DeviceMemory, b.facts.HostMemory = memory/2/int64(b.facts.Ranks), memory/4
	if f.scale.Rows != nil {
		b.scale = f.scale
	}
	c, err := f.run.open(nil, nil)
	if err != nil {
		return nil, err
	}
	b.facts.Processors, b.Rounds, b.Pulse = c.threads, cmp.Or(f.rounds, cpuRounds), cpu.NewPulse(c.threads).Take
	b.about, b.close = fmt.Sprintf("%s, %s", c.name, count(b.facts.Ranks, "rank")), c.close
	b.Open = func(*ir.Program) (func(int) vm.Device, vm.Transport, error) { return c.device, c.transport, nil }
	return b, nil
}

// sheetOf returns the shipped cluster whose figures come from the data sheet of a GPU, or nil. Other variants of a
// GPU, such as its PCIe card, are slower and do not match.
func sheetOf(card string) *lang.Cluster {
	words := strings.Fields(strings.ToLower(card))
	files, err := shipped.Files.ReadDir("clusters")
	if err != nil {
		panic("internal: " + err.Error())
	}
	for _, file := range files {
		name := strings.TrimSuffix(file.Name(), ".sppo")
		model, _, _ := strings.Cut(name, "-")
		for i, word := range words {
			if word == model && !strings.Contains(strings.Join(words[i:], " "), "pcie") && !strings.Contains(strings.Join(words[i:], " "), "nvl") ||
				strings.HasPrefix(word, model+"-sxm") {
				return shippedCluster(name)
			}
		}
	}
	return nil
}

// shippedCluster returns the figures of a shipped cluster.
func shippedCluster(name string) *lang.Cluster {
	text := fmt.Sprintf("import \"clusters/%s.sppo\"\nmodel m { layers = 1 hidden = 64 heads = 1 vocab = 64 family = gpt dtype = bf16 }\ncluster it = %s()\n"+
		"train { sequence = 64 batch = 1 data = random() }\nschedule s { sp = 1 pp = 1 dp = 1 }\n", name, name)
	spec, err := lang.Parse("shipped", []byte(text), lang.Options{Shipped: shipped.Files})
	if err != nil {
		panic("internal: " + err.Error())
	}
	spec.Cluster.Name = name
	return &spec.Cluster
}

// hostMemory returns the memory of the machine, or a guess if it is unknown.
func hostMemory() int64 {
	text, err := os.ReadFile("/proc/meminfo")
	_, after, found := strings.Cut(string(text), "MemTotal:")
	if err != nil || !found {
		return 8 << 30
	}
	kib, err := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
	if err != nil {
		return 8 << 30
	}
	return kib << 10
}

func sayTiming(show *progress, t probe.Timing) {
	show.clear()
	rate := ""
	line := timingLine{Item: t.Item.Name, Op: ir.Ops[t.Item.Op].Name, Ranks: t.Ranks, Copies: t.Copies, Seconds: t.Seconds, Spread: t.Spread}
	if t.Work().Flops > 0 {
		line.Flops = t.Flops(0)
		rate = fmt.Sprintf(", %.4g GFLOPS", line.Flops/1e9)
	} else if t.Work().Bytes > 4096 {
		line.Bytes = t.Bytes(0)
		rate = fmt.Sprintf(", %.4g GB/s", line.Bytes/1e9)
	}
	show.say("%s on %s: %s%s; repeated measurements differ by %.0f%%", t.Item.Name, count(t.Ranks, "rank"), ir.Seconds(t.Seconds), rate, 100*t.Spread)
	show.line(line)
}

// The objects that --json prints.
type (
	timingLine struct {
		Item    string  `json:"item"`
		Op      string  `json:"op"`
		Ranks   int     `json:"ranks"`
		Copies  int     `json:"copies"`
		Seconds float64 `json:"seconds"`
		Spread  float64 `json:"spread"`
		Flops   float64 `json:"flop_per_s,omitempty"`
		Bytes   float64 `json:"bytes_per_s,omitempty"`
	}
	probedLine struct {
		Done      bool              `json:"done"`
		Machine   ir.Machine        `json:"machine"`
		Notes     map[string]string `json:"notes"`
		Disturbed float64           `json:"disturbed"` // share of measurements disturbed by other work
	}
)
