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
	c, left := make([]float64, m*n), make([]float64, k)
	for i := range m {
		row := c[i*n : i*n+n]
		for p := range left {
			left[p] = a[i*rowA+p*columnA]
		}
		if transB {
			for j := range row {
				sum := 0.0
				for p, y := range b[j*k:][:len(left)] {
					sum += left[p] * y
				}
				row[j] = sum
			}
		} else { // the same sums, but with b read in memory order
			for p, x := range left {
				for j, y := range b[p*n:][:len(row)] {
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
