package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"sppo/cmd/internal/cli"
	"sppo/passes"
)

// report shows a plan to a reader: what it is for, what was decided and why, what each stage holds, how long a step takes.
// Passes that have not run leave their part out.
func report(w io.Writer, p *passes.Plan) {
	m, par := &p.Model, &p.Parallel
	fmt.Fprintf(w, "plan      %s of %s\n", p.Name, p.Spec)
	fmt.Fprintf(w, "model     %s: %s, %d layers, hidden %d, %d heads%s, ffn %d, vocabulary %d, %s\n",
		m.Name, m.Family, m.Layers, m.Hidden, m.Heads, kvHeads(p), m.FFN, m.Vocab, m.DType)
	fmt.Fprintf(w, "cluster   %s: %d x %d devices\n", p.Cluster.Name, p.Cluster.Nodes, p.Cluster.GPUsPerNode)
	fmt.Fprintf(w, "batch     %d sequences of %d tokens\n", p.Train.Batch, p.Train.Sequence)
	if par.Ranks() > 0 {
		fmt.Fprintf(w, "ranks     %d = %d replicas x %d stages x %d ranks a stage\n", par.Ranks(), par.DP, par.PP, par.SP)
	}
	if n := p.Subsequences.N; len(p.Subsequences.Lengths) == n && n > 0 {
		fmt.Fprintf(w, "cut       %s, imbalance %s\n", lengths(p.Subsequences.Lengths), percent(p.Subsequences.Imbalance))
	}
	units(w, p)
	stages(w, p)
	if p.Time.StepS > 0 {
		fmt.Fprintf(w, "\npredicted step %s, bubble %s of busy time (%s of all), exposed transfers %s,\n",
			p.Time.StepS, percent(p.Time.BubbleRatio), percent(p.Time.IdleShare), p.Time.ExposedTransferS)
		fmt.Fprintf(w, "          %s tokens a second and device, %s of peak FLOPS\n",
			cli.Short(p.Throughput.TGS), percent(p.Throughput.MFU))
	}
	decisions(w, p)
}

func kvHeads(p *passes.Plan) string {
	if p.Model.KVHeads == p.Model.Heads {
		return ""
	}
	return fmt.Sprintf(" on %d of keys and values", p.Model.KVHeads)
}

func percent(x float64) string { return strconv.FormatFloat(100*x, 'f', 1, 64) + "%" }

// lengths shows a long list by its ends.
func lengths(all []int64) string {
	const shown = 4
	var out []string
	for i, n := range all {
		if len(all) > 3*shown && i >= shown && i < len(all)-shown {
			if i == shown {
				out = append(out, "...")
			}
			continue
		}
		out = append(out, strconv.FormatInt(n, 10))
	}
	return fmt.Sprintf("%d subsequences of %s tokens", len(all), strings.Join(out, " "))
}

// units lists what a layer keeps between forward and backward.
func units(w io.Writer, p *passes.Plan) {
	if len(p.Units) == 0 {
		return
	}
	fmt.Fprintf(w, "\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "unit\ttype\tbytes a token\twritten by\tread again by\n")
	for _, u := range p.Units {
		if u.Type != passes.Type2 {
			fmt.Fprintf(t, "%s\t%d\t%.6g\t%s\t%s\n", u.Name, int(u.Type), u.BytesPerToken, u.Written, u.FirstBackward)
		}
	}
	t.Flush()
}

// stages is one line for each pipeline stage.
func stages(w io.Writer, p *passes.Plan) {
	if !p.Memory.Placed {
		return
	}
	fmt.Fprintf(w, "\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "stage\tlayers\ttasks\toffload\tdevice peak\tof\thost peak\tof\tbusy\t\n")
	for i := range p.Memory.DevicePeakBytes {
		offload := 0.0
		for _, a := range p.Offload.Alpha[i] {
			offload += a / float64(len(p.Offload.Alpha[i]))
		}
		busy := "-"
		if i < len(p.Time.BusyS) {
			busy = p.Time.BusyS[i].String()
		}
		fmt.Fprintf(t, "%d\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", i, p.LayersPerStage[i], len(p.Tasks[i]), percent(offload),
			p.Memory.DevicePeakBytes[i], p.Memory.DeviceCapacityBytes, p.Memory.HostPeakBytes[i], p.Memory.HostCapacityBytes, busy)
	}
	t.Flush()
}

func decisions(w io.Writer, p *passes.Plan) {
	if len(p.Decisions) == 0 {
		return
	}
	fmt.Fprintf(w, "\n")
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "pass\tdecision\t\twhy\n")
	for _, d := range p.Decisions {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", d.Pass, d.What, d.Value, d.Why)
	}
	t.Flush()
}
