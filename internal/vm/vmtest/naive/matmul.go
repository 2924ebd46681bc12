package naive

// MatMul returns A*B + bias, where A is [m, k] and B is [k, n] after any transposition: with transA the slice a
// is stored as [k, m], with transB the slice b as [n, k]. bias is nil or has n values, which are added to every
// row.
func MatMul(a, b, bias []float64, m, n, k int, transA, transB bool) []float64 {
	demand(len(a) == m*k && len(b) == k*n, "matmul of %d by %d values as m=%d n=%d k=%d", len(a), len(b), m, n, k)
	rowA, columnA := k, 1 // distances in a between adjacent rows and columns of A
	if transA {
		rowA, columnA = 1, m
	}
	c := make([]float64, m*n)
	for i := range m {
		row := c[i*n : i*n+n]
		if transB {
			for j := range row {
				for p := range k {
					row[j] += a[i*rowA+p*columnA] * b[j*k+p]
				}
			}
		} else { // the same sums, but with b read in memory order
			for p := range k {
				x := a[i*rowA+p*columnA]
				for j, y := range b[p*n : p*n+n] {
					row[j] += x * y
				}
			}
		}
		if bias != nil {
			for j := range row {
				row[j] += bias[j]
			}
		}
	}
	return c
}
