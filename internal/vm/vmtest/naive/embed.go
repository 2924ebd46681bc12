package naive

// Embed looks up tokens in a table whose rows are tokens `first`, `first`+1 and so on. A token outside the
// table gives zeros, so that the lookups in the parts of a divided vocabulary add up to the lookup in the
// entire table.
func Embed(table []float64, tokens []int32, hidden, first int) []float64 {
	y := make([]float64, len(tokens)*hidden)
	for row, token := range tokens {
		if at := int(token) - first; at >= 0 && at < len(table)/hidden {
			copy(y[row*hidden:], table[at*hidden:][:hidden])
		}
	}
	return y
}

// EmbedGrad returns the gradient of Embed with respect to its table, which holds tokens first .. first+rows-1.
func EmbedGrad(tokens []int32, dy []float64, hidden, first, rows int) []float64 {
	dtable := make([]float64, rows*hidden)
	for row, token := range tokens {
		if at := int(token) - first; at >= 0 && at < rows {
			addTo(dtable[at*hidden:][:hidden], dy[row*hidden:][:hidden])
		}
	}
	return dtable
}
