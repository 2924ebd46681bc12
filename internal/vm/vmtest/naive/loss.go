package naive

import "math"

// CrossEntropy returns every row's -log softmax(logits)[label] and the logarithm of its softmax's denominator.
// Each row has a logit for every token of the vocabulary.
func CrossEntropy(logits []float64, labels []int32, vocab int) (losses, logSumExp []float64) {
	return CrossEntropyJoin(CrossEntropyStats(logits, labels, vocab, vocab, 0), len(labels))
}

// CrossEntropyGrad returns the gradient of scale * (sum of the rows' losses) with respect to logits over a part
// of the vocabulary, laid out as for CrossEntropyStats. Before scaling, it is the softmax, with 1 subtracted at
// the label; for padding and in rows with a negative label, it is 0. logSumExp covers whole rows, not only the
// part.
func CrossEntropyGrad(logits []float64, labels []int32, logSumExp []float64, width, valid, first int, scale float64) []float64 {
	dlogits := make([]float64, len(logits))
	for i, value := range logits {
		row, column := i/width, i%width
		if column >= valid || labels[row] < 0 {
			continue
		}
		dlogits[i] = scale * math.Exp(value-logSumExp[row])
		if int(labels[row])-first == column {
			dlogits[i] -= scale
		}
	}
	return dlogits
}

// CrossEntropyStats returns the contribution of a part of the vocabulary to the loss of each row, as [rows, 3]:
// the largest logit, the sum of exp(logit - largest), and the label's logit, or 0 if the label is in another
// part. Rows have `width` columns. The first `valid` columns are the tokens that start at token `first`; the
// rest is padding.
func CrossEntropyStats(logits []float64, labels []int32, width, valid, first int) []float64 {
	var stats []float64
	for row, label := range labels {
		values := logits[row*width:][:valid]
		largest, sum, target := math.Inf(-1), 0.0, 0.0
		for _, value := range values {
			largest = math.Max(largest, value)
		}
		for _, value := range values {
			sum += math.Exp(value - largest)
		}
		if at := int(label) - first; at >= 0 && at < valid {
			target = values[at]
		}
		stats = append(stats, largest, sum, target)
	}
	return stats
}

// CrossEntropyJoin computes the loss of every row from the statistics of all parts of the vocabulary, [parts,
// rows, 3].
func CrossEntropyJoin(stats []float64, rows int) (losses, logSumExp []float64) {
	losses, logSumExp = make([]float64, rows), make([]float64, rows)
	for row := range rows {
		var logs []float64
		label := 0.0
		for at := 3 * row; at < len(stats); at += 3 * rows {
			logs = append(logs, stats[at]+math.Log(stats[at+1]))
			label += stats[at+2]
		}
		logSumExp[row] = logOfSumOfExp(logs)
		losses[row] = logSumExp[row] - label
	}
	return losses, logSumExp
}
