// Package report writes a plan as text.
package report

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"sppo.dev/internal/passes/memory"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/words"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// rightInWords describes the keys that stages hold for other stages.
func rightInWords(p *plan.Plan) string {
	last := p.Parallel.PP - 1
	least, most := p.Train.Sequence, int64(0)
	for i := 1; i <= last; i++ {
		for j := range i {
			l := p.Lent(i, j)
			least, most = min(least, l.End-l.First), max(most, l.End-l.First)
		}
	}
	return fmt.Sprintf("right: stages 0-%d hold blocks of %d-%d keys of later stages and compute part of the attention "+
		"in the last tasks of those stages", last-1, least, most)
}

// Write writes all sections of the report of a plan. If the passes stopped before the end, sections on what they have not
// decided are empty.
func Write(w io.Writer, p *plan.Plan) error {
	var b strings.Builder
	for i := range Sections {
		Sections[i].write(p, &b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// table writes rows of cells in aligned columns.
func table(b *strings.Builder, rows func(line func(cells ...string))) {
	t := tabwriter.NewWriter(b, 0, 0, 2, ' ', 0)
	rows(func(cells ...string) {
		fmt.Fprintf(t, "  %s\n", strings.Join(cells, "\t"))
	})
	_ = t.Flush() // writing to a Builder cannot fail
}

// title writes what is trained, and on which cluster.
func title(p *plan.Plan, b *strings.Builder) {
	parameters := thousands(p.Parameters.Trained+p.Parameters.Frozen) + " parameters"
	if p.Parameters.Active > 0 {
		parameters += " (a token uses " + thousands(p.Parameters.Active) + ")"
	}
	fmt.Fprintf(b, "%s on %s: %s, %s tokens per sequence, %s per step\n\n", p.Model.Name, p.Cluster.Name, parameters, words.Tokens(p.Train.Sequence), words.Plural(p.Train.Batch, "sequence"))
}

func reportJob(p *plan.Plan, b *strings.Builder) {
	title(p, b)
	par, m := p.Parallel, p.Model
	table(b, func(line func(...string)) {
		line("model", fmt.Sprintf("%s, %s, hidden %d, %s of %d (%d KV heads), ffn %s, vocabulary %d, %s",
			m.Family, words.Plural(m.Layers, "layer"), m.Hidden, words.Plural(m.Heads, "head"), m.HeadDim, m.KVHeads, widthsInWords(&m), m.Vocab, m.DType))
		if p.Tuned() {
			line("training", trainedInWords(p))
		}
		line("cluster", ClusterInWords(p))
		line("ranks", ranksInWords(p))
		if par.Zero > 0 {
			line("zero", zeroInWords(p))
		}
		line("subsequences", subsequencesInWords(p))
		if p.LayerOrder() {
			line("order", OrderInWords(p))
		}
		if par.Microbatches > 1 || par.Microbatch > 1 {
			line("microbatches", fmt.Sprintf("%d of %s", par.Microbatches, words.Plural(par.Microbatch, "sequence")))
		}
		if p.Offload.Policy != "" {
			line("offload", offloadInWords(p))
		}
		if words := kvInWords(p); words != "" {
			line("K and V", words)
		}
		if _, _, recomputed := Shares(p); recomputed > 0 {
			line("recompute", fmt.Sprintf("%s: %.1f%% of the type-1 bytes are recomputed", p.Recompute, 100*recomputed))
		}
		if n := p.Schedule.LossChunk; n > 0 {
			line("loss head", fmt.Sprintf("chunks of at most %s", words.Plural(n, "token")))
		}
		line("mux", muxInWords(p))
		if copied := memory.CheckpointCopy(p); copied > 0 {
			line("checkpoints", fmt.Sprintf("%s of host memory per rank left for the copy of a checkpoint", copied))
		}
	})
	b.WriteByte('\n')
}

// ClusterInWords describes the memory of the cluster, and names the shipped file that assumes the host memory if the spec
// does not give it.
func ClusterInWords(p *plan.Plan) string {
	c := p.Cluster
	text := fmt.Sprintf("%s of %s of %s; %s of host memory per node", words.Plural(c.Nodes, "node"),
		words.Plural(c.GPUsPerNode, c.Unit()), ir.Bytes(c.DeviceMemory), ir.Bytes(c.HostMemory))
	if at, _, _ := strings.Cut(p.Lines["cluster.host_memory"], ": "); strings.HasPrefix(at, lang.ShippedPrefix) {
		text += ", assumed by " + at
	}
	return text
}

// zeroInWords says what ranks divide.
func zeroInWords(p *plan.Plan) string {
	shares, padding := p.Divided()
	text := fmt.Sprintf("stage %d: ranks that hold the same matrix divide the optimizer state of %s of the parameters", p.Parallel.Zero, percent(shares[0]))
	if p.Parallel.Zero >= plan.ZeroGradients {
		text += fmt.Sprintf(", the gradients of %s", percent(shares[plan.ZeroGradients-1]))
	}
	if p.Parallel.Zero >= plan.ZeroWeights {
		text += fmt.Sprintf(" and the weights of %s", percent(shares[plan.ZeroWeights-1]))
	}
	if padding > 0 {
		text += fmt.Sprintf("; padding adds %.2g%%", 100*padding)
	}
	if p.WholeTable() {
		text += fmt.Sprintf("; the position table is not divided, because a rank's rows in each subsequence are not divisible by dp = %d", p.Parallel.DP)
	}
	return text
}

// OrderInWords describes layer order, in which virtual stages are groups of layers.
func OrderInWords(p *plan.Plan) string {
	n := p.Parallel.VirtualStages
	return fmt.Sprintf("layer: all subsequences pass through one group of layers before any enters the next; virtual_stages = %d gives %s of %s",
		n, words.Plural(n, "group"), words.Plural((p.Model.Layers+n-1)/n, "layer"))
}

// trainedInWords describes the trained part of the model.
func trainedInWords(p *plan.Plan) string {
	text := fmt.Sprintf("%s parameters trained, %s frozen", thousands(p.Parameters.Trained), thousands(p.Parameters.Frozen))
	if m := &p.Model; m.Adapter != "" {
		text += fmt.Sprintf("; %s of rank %d, alpha %g on %s", m.Adapter, m.AdapterRank, m.AdapterAlpha, strings.Join(m.AdapterTargets, ", "))
		if m.AdapterDropout > 0 {
			text += fmt.Sprintf(", dropout %g", m.AdapterDropout)
		}
	}
	if p.Untrained > 0 {
		text += fmt.Sprintf("; no backward pass for the first %s", words.Plural(p.Untrained, "layer"))
	}
	return text
}

// thousands writes a whole number in groups of three digits: 8,030,261,248.
func thousands(n int64) string {
	digits := fmt.Sprint(n)
	for at := len(digits) - 3; at > 0; at -= 3 {
		digits = digits[:at] + "," + digits[at:]
	}
	return digits
}

// muxInWords describes the shared tasks and the stages that share them.
func muxInWords(p *plan.Plan) string {
	var words []string
	if p.Mux.Left {
		words = append(words, leftInWords(p))
	}
	if p.Mux.Right {
		words = append(words, rightInWords(p))
	}
	if len(words) == 0 {
		return "off"
	}
	return strings.Join(words, "; ")
}

func leftInWords(p *plan.Plan) string {
	least, most := p.Mux.Pieces[0][0], p.Mux.Pieces[0][0]
	for _, pieces := range p.Mux.Pieces {
		least, most = min(least, slices.Min(pieces)), max(most, slices.Max(pieces))
	}
	last := p.Parallel.PP - 1
	return fmt.Sprintf("left: subsequences 0-%d are cut into %d pieces of %d-%d tokens, which differ from equal "+
		"lengths by up to %.1f%%; each stage j of 1-%d runs piece j+1 of every task in progress until it has its own task",
		last-1, last+1, least, most, 100*worstRounding(p), last)
}

// worstRounding returns the largest relative deviation of a piece from an even share of its subsequence.
func worstRounding(p *plan.Plan) float64 {
	worst := 0.0
	for x, pieces := range p.Mux.Pieces {
		even := float64(p.Subsequences.Lengths[x]) / float64(len(pieces))
		for _, n := range pieces {
			worst = max(worst, math.Abs(float64(n)-even)/even)
		}
	}
	return worst
}

func subsequencesInWords(p *plan.Plan) string {
	sub := p.Subsequences
	switch {
	case sub.N == 1:
		return "1: the whole sequence"
	case len(sub.Lengths) == 0: // stopped before partition
		return fmt.Sprint(sub.N)
	}
	least, most := slices.Min(sub.Lengths), slices.Max(sub.Lengths)
	long := fmt.Sprintf("%d to %d", least, most)
	if least == most {
		long = fmt.Sprint(most)
	}
	return fmt.Sprintf("%d, each of %s tokens, on a grid of %d; the most expensive one takes %.2f%% more operations than the average",
		sub.N, long, sub.Align, 100*sub.Imbalance)
}

// streamedInWords explains why K and V take host memory.
func streamedInWords(p *plan.Plan) string {
	if p.Streams() {
		return ", because K and V and their gradients are kept there; keep = [k, v] keeps them on the device"
	}
	return ""
}

// kvInWords says where K and V are kept, if not on the device.
func kvInWords(p *plan.Plan) string {
	switch {
	case p.Streams():
		return fmt.Sprintf("%s on the host, streamed through the device in blocks of %s tokens", strings.Join(p.Stream.Caches, " and "), words.Tokens(p.Stream.Block))
	case p.Offload.Caches == plan.KVOnHost:
		return "one layer at a time on the device, the other layers on the host"
	case p.Offload.Caches == plan.KVRecomputed:
		return "one layer at a time on the device; the other layers are recomputed for the backward pass"
	}
	return ""
}

func offloadInWords(p *plan.Plan) string {
	least, most := 1.0, 0.0
	for _, stage := range p.Offload.Alpha {
		for _, a := range stage {
			least, most = min(least, a), max(most, a)
		}
	}
	switch {
	case most == 0:
		return p.Offload.Policy + ": all activations stay on the device"
	case least == 1:
		return p.Offload.Policy + ": all type-1 activations go to the host"
	case most-least < 0.005:
		return fmt.Sprintf("%s: %.1f%% of the type-1 bytes go to the host", p.Offload.Policy, 100*most)
	}
	return fmt.Sprintf("%s: from %.1f%% to %.1f%% of the type-1 bytes of each subsequence go to the host", p.Offload.Policy, 100*least, 100*most)
}

// reportStages lists the times of each stage and, once codegen has placed the plan, its memory.
func reportStages(p *plan.Plan, b *strings.Builder) {
	if len(p.Time.BusyS) == 0 {
		return
	}
	makespan := p.Time.StepS - p.Time.OptimizerS
	table(b, func(line func(...string)) {
		head := []string{"stage", "layers", "busy", "idle"}
		if p.Memory.Placed {
			head = append(head, "device memory", "host memory")
		}
		line(head...)
		for s := range p.Tasks {
			cells := []string{fmt.Sprint(s), layerRanges(p, s), p.Time.BusyS[s].String(),
				fmt.Sprintf("%.1f%%", 100*max(0, 1-float64(p.Time.BusyS[s]/max(makespan, 1e-12))))}
			if p.Memory.Placed {
				cells = append(cells, ofCapacity(p.Memory.DevicePeakBytes[s], p.Memory.DeviceCapacityBytes),
					ofCapacity(p.Memory.HostPeakBytes[s], p.Memory.HostCapacityBytes))
			}
			line(cells...)
		}
	})
	b.WriteByte('\n')
}

// layerRanges writes the layers of each virtual stage of a rank: "0-3 8-11". A stage without layers has the embedding or the
// head.
func layerRanges(p *plan.Plan, rank int) string {
	stages := p.StagesOf(rank)
	if p.LayerOrder() {
		return fmt.Sprintf("0-%d, one after another", p.Model.Layers-1)
	}
	words := make([]string, len(stages))
	for i, j := range stages {
		layers := p.Layers(j)
		switch n := len(layers); {
		case n == 0 && j == 0:
			words[i] = "embedding"
		case n == 0:
			words[i] = "head"
		case n == 1:
			words[i] = fmt.Sprint(layers[0])
		default:
			words[i] = fmt.Sprintf("%d-%d", layers[0], layers[n-1])
		}
	}
	return strings.Join(words, " ")
}

func ofCapacity(n, capacity ir.Bytes) string {
	if capacity <= 0 {
		return fmt.Sprintf("%s of %s", n, max(0, capacity)) // capacity is negative if more memory is to be left free for checkpoints than the rank has
	}
	return fmt.Sprintf("%s of %s (%.0f%%)", n, capacity, 100*float64(n)/float64(capacity))
}

func reportTotals(p *plan.Plan, b *strings.Builder) {
	if len(p.Time.BusyS) == 0 {
		return
	}
	t := p.Time
	table(b, func(line func(...string)) {
		source := "estimated"
		if t.Simulated {
			source = "simulated"
			if t.Microbatches > 0 {
				source = fmt.Sprintf("extrapolated from %d simulated microbatches of %d", t.Microbatches, p.Parallel.Microbatches)
			}
			source += fmt.Sprintf("; the search estimated %s", t.EstimateS)
		}
		line("step", fmt.Sprintf("%s, including %s for the optimizer (%s)", t.StepS, t.OptimizerS, source))
		if words := documentsInWords(p); words != "" {
			line("documents", words)
		}
		if p.ExpertsS > 0 {
			line("experts", fmt.Sprintf("%s of the step assume equal loads; a rank whose experts have more rows than the mean takes longer in proportion", p.ExpertsS))
		}
		line("bubble", fmt.Sprintf("%.1f%% of the busy time; stages are idle for %.1f%% of the pipeline's time", 100*max(0, t.BubbleRatio), 100*max(0, t.IdleShare)))
		line("exposed copies", durationOrNone(t.ExposedTransferS))
		line("throughput", fmt.Sprintf("%.0f tokens/s per %s, %.1f%% model FLOPs utilization (MFU)", p.Throughput.TGS, unitInUse(p), 100*p.Throughput.MFU))
	})
	b.WriteByte('\n')
}

// documentsInWords explains what the times mean if sequences have several documents.
func documentsInWords(p *plan.Plan) string {
	const bound = "times are upper bounds, for sequences without document boundaries"
	switch d := p.Documents; {
	case d != nil && d.Problem != "":
		return bound + "; how much shorter a step is cannot be determined: " + d.Problem
	case d != nil:
		unequal := ""
		if d.UnequalS > 0 {
			unequal = fmt.Sprintf(", %s of it because replicas get documents of unequal work", d.UnequalS)
		}
		return fmt.Sprintf("about %s per step (estimate)%s: attention inside documents computes %.1f%% of the query-key pairs of whole sequences, measured in the first %s; "+
			"all other "+bound, d.StepS, unequal, 100*d.Share, words.Plural(d.Sequences, "sequence"))
	case p.Split().Documents:
		return bound
	}
	return ""
}

// reportPath lists the kinds of work on the critical path of a step, longest first.
func reportPath(p *plan.Plan, b *strings.Builder) {
	path := p.Time.CriticalPath
	if len(path) == 0 {
		return
	}
	sums, stages := map[string]ir.Seconds{}, map[string][]ir.Seconds{}
	var works []string
	for _, c := range path {
		if sums[c.Work] == 0 {
			works = append(works, c.Work)
			stages[c.Work] = make([]ir.Seconds, len(p.Tasks))
		}
		sums[c.Work] += c.Seconds
		if c.Stage >= 0 {
			stages[c.Work][c.Stage] += c.Seconds
		}
	}
	slices.SortStableFunc(works, func(a, b string) int { return cmp.Compare(sums[b], sums[a]) })
	b.WriteString("Critical path of a step, by stage:\n")
	table(b, func(line func(...string)) {
		head := []string{"stage", "total", "share"}
		shown := min(len(p.Tasks), mostStages)
		for s := range shown {
			head = append(head, fmt.Sprint(s))
		}
		if shown < len(p.Tasks) {
			head = append(head, fmt.Sprintf("(%d more)", len(p.Tasks)-shown))
		}
		line(head...)
		for _, w := range works {
			cells := []string{w, sums[w].String(), fmt.Sprintf("%.1f%%", 100*float64(sums[w]/p.Time.StepS))}
			for _, t := range stages[w][:shown] {
				cells = append(cells, t.String())
			}
			line(cells...)
		}
	})
	b.WriteByte('\n')
}

// reportAllMemory lists what uses the memory of each stage, and reports whether it fits.
func reportAllMemory(p *plan.Plan, b *strings.Builder) {
	reportMemory(p, b)
	reportFit(p, b)
}

// reportMemory lists what uses the memory of each stage at its peak, and the largest buffers of the fullest
// stage.
func reportMemory(p *plan.Plan, b *strings.Builder) {
	for _, arena := range []struct {
		name  string
		peaks []ir.Peak
	}{{"device", p.Memory.Device}, {"host", p.Memory.Host}} {
		fullest := 0
		for s := range arena.peaks {
			if arena.peaks[s].Bytes > arena.peaks[fullest].Bytes {
				fullest = s
			}
		}
		if len(arena.peaks) == 0 || arena.peaks[fullest].Bytes == 0 {
			continue
		}
		fmt.Fprintf(b, "Peak %s memory, by stage:\n", arena.name)
		table(b, func(line func(...string)) { partRows(arena.peaks, line) })
		peak := &arena.peaks[fullest]
		fmt.Fprintf(b, "Largest buffers on stage %d, in %s:\n", fullest, peak.At)
		table(b, func(line func(...string)) {
			for _, h := range peak.Largest {
				line(h.Bytes.String(), h.Name, h.Part.String())
			}
		})
		b.WriteByte('\n')
	}
}

// mostStages is the maximum number of stages in a table of parts. JSON has all of them.
const mostStages = 8

// partRows writes a row for each part that occurs in one of the peaks, and a row of totals.
func partRows(peaks []ir.Peak, line func(cells ...string)) {
	shown := peaks[:min(len(peaks), mostStages)]
	row := func(name string, bytes func(*ir.Peak) ir.Bytes) {
		cells, any := []string{name}, false
		for s := range shown {
			n := bytes(&shown[s])
			cells, any = append(cells, n.String()), any || n > 0
		}
		if any {
			line(cells...)
		}
	}
	head := []string{"stage"}
	for s := range shown {
		head = append(head, fmt.Sprint(s))
	}
	if len(shown) < len(peaks) {
		head = append(head, fmt.Sprintf("(%d more)", len(peaks)-len(shown)))
	}
	line(head...)
	for part := range ir.NumParts {
		row(part.String(), func(p *ir.Peak) ir.Bytes { return p.Parts[part] })
	}
	row("total", func(p *ir.Peak) ir.Bytes { return p.Bytes })
}

func durationOrNone(t ir.Seconds) string {
	if t == 0 {
		return "none"
	}
	return t.String()
}

// reportFit reports the stages that do not fit, and what fills their memory.
func reportFit(p *plan.Plan, b *strings.Builder) {
	m := p.Memory
	if !m.Placed {
		return
	}
	if m.Fits {
		b.WriteString("It fits.\n")
		b.WriteString(checkpointInWords(&m) + "\n")
		return
	}
	b.WriteString("It does not fit:\n")
	bound := memory.FootprintOf(p)
	for s := range m.DevicePeakBytes {
		if over := m.DevicePeakBytes[s] - m.DeviceCapacityBytes; over > 0 {
			fmt.Fprintf(b, "  stage %d needs %s more on every device; its peak, in %s, consists of %s\n", s, over, bound.Device[s].Task, bound.Device[s].InWords())
		}
		if over := m.HostPeakBytes[s] - m.HostCapacityBytes; over > 0 {
			fmt.Fprintf(b, "  stage %d needs %s more host memory for every rank%s\n", s, over, streamedInWords(p))
		}
	}
	b.WriteByte('\n')
}

// checkpointInWords reports whether checkpoints can be written during training.
func checkpointInWords(m *plan.Memory) string {
	c := m.Checkpoint
	if c == nil {
		return ""
	}
	words := fmt.Sprintf("Checkpoints during training (--save-every): a copy of up to %s per rank ", slices.Max(c.Bytes))
	if c.Fits {
		return words + "also fits in host memory.\n"
	}
	return words + fmt.Sprintf("does not fit in host memory: stage %d needs %s more for every rank; schedule.checkpoint_copy = on leaves room for it, and --save-wait needs no copy.\n",
		c.ShortStage, c.ShortBytes)
}

// mostRejected is the maximum number of rejected values that the report lists per key; JSON has all of them.
const mostRejected = 6

// reportSearch lists the other candidates that solve has considered.
func reportSearch(p *plan.Plan, b *strings.Builder) {
	if len(p.Alternatives) > 0 {
		this := p.Search.StepS.String()
		if m := p.Memory; m.Placed {
			this += fmt.Sprintf(", %s device, %s host", slices.Max(m.DevicePeakBytes), slices.Max(m.HostPeakBytes))
		}
		b.WriteString("Next best plans, by estimated step time (this plan: " + this + "); memory figures are upper bounds:\n")
		table(b, func(line func(...string)) {
			for i := range p.Alternatives {
				a := &p.Alternatives[i]
				line(a.StepS.String(), a.DevicePeakBytes.String()+" device", a.HostPeakBytes.String()+" host", strings.Join(a.Set, " "))
			}
		})
		b.WriteByte('\n')
	}
	if len(p.Rejected) == 0 {
		return
	}
	fmt.Fprintf(b, "Rejected, with the best estimate of the plans tried (this plan: %s), a lower bound, or the smallest shortfall:\n", p.Search.StepS)
	table(b, func(line func(...string)) {
		for first := 0; first < len(p.Rejected); {
			end := first
			var words []string
			for end < len(p.Rejected) && p.Rejected[end].Key == p.Rejected[first].Key {
				r := &p.Rejected[end]
				words = append(words, fmt.Sprintf("%s (%s)", r.Value, r.InWords(p.Search.StepS)))
				end++
			}
			if more := len(words) - mostRejected; more > 0 {
				words = append(words[:mostRejected], fmt.Sprintf("%d more", more))
			}
			line(p.Rejected[first].Key, strings.Join(words, ", "))
			first = end
		}
	})
	b.WriteByte('\n')
}

func reportReasons(p *plan.Plan, b *strings.Builder) {
	b.WriteString("Why:\n")
	table(b, func(line func(...string)) {
		for _, d := range p.Decisions {
			line(d.Pass, d.What+" = "+d.Value, d.Why)
		}
	})
}

// widthsInWords returns the width of the MLPs, or the pattern of their widths, and those of experts.
func widthsInWords(m *lang.Model) string {
	if m.Experts > 0 {
		dense := *m
		dense.Experts = 0
		text := fmt.Sprintf("%d in each of %d experts (%d per token)", m.ExpertFFN, m.Experts, m.TopExperts)
		if m.SharedFFN > 0 {
			text += fmt.Sprintf(", %d in a shared one", m.SharedFFN)
		}
		if len(m.MLPs) > 0 {
			text += ", " + widthsInWords(&dense) + " in dense layers"
		}
		return text
	}
	if len(m.FFNs) > 0 {
		return fmt.Sprint(m.FFNs)
	}
	return fmt.Sprint(m.FFN)
}
