package cuda

import (
	"fmt"
	"math"
	"strings"
)

// The blocks into which differs divides a result: rows, and columns of a head. They are the tiles of a warpgroup and
// the columns of an accumulator.
const blockRows, blockCols = 64, 8

// mostLines is the maximum number of lines of wrong blocks that differs lists.
const mostLines = 4

// differs returns "" if the norm of the difference between two results [rows, cols] is at most the tolerance times
// the norm of the second. Otherwise, it describes where they differ: the first wrong element, and a map of the wrong
// blocks. Columns are those of heads of the given dimension side by side, or else one for each head.
func differs(got, want []float32, cols, dim int64, tolerance float64) string {
	difference, size := 0.0, 0.0
	for i := range want {
		d := float64(got[i]) - float64(want[i])
		difference, size = difference+d*d, size+float64(want[i])*float64(want[i])
	}
	off := math.Sqrt(difference / size)
	if off <= tolerance { // not if it is NaN
		return ""
	}
	if cols%dim != 0 {
		dim = 1
	}
	mean := math.Sqrt(size / float64(len(want))) // the size of an element
	text, lines := fmt.Sprintf("is off by %.2g of its norm", off), []string{}
	rows := int64(len(want)) / cols
	for row := int64(0); row < rows; row += blockRows {
		for head := range cols / dim {
			line := ""
			for col := int64(0); col < dim; col += blockCols {
				sum, n, first := 0.0, 0, int64(-1)
				for r := row; r < min(row+blockRows, rows); r++ {
					for c := head*dim + col; c < head*dim+min(col+blockCols, dim); c++ {
						d := float64(got[r*cols+c]) - float64(want[r*cols+c])
						sum, n = sum+d*d, n+1
						if !(math.Abs(d) <= 5*tolerance*mean) && first < 0 {
							first = r*cols + c
						}
					}
				}
				e := math.Sqrt(sum/float64(n)) / mean
				if line += mark(e, 2*tolerance); !(e <= 2*tolerance) && first >= 0 && len(lines) == 0 {
					text += fmt.Sprintf("; the first wrong block begins at row %d, column %d of head %d, where row %d, column %d is %g instead of %g",
						row, col, head, first/cols, first%cols-head*dim, got[first], want[first])
					lines = append(lines, "errors in blocks of 64 rows and 8 columns, in tenths (+: above 1; NaN: ?)")
				}
			}
			if strings.Trim(line, ".") != "" {
				lines = append(lines, fmt.Sprintf("rows %d-%d of head %d: %s", row, min(row+blockRows, rows)-1, head, line))
			}
		}
	}
	if more := len(lines) - 1 - mostLines; more > 0 {
		lines = append(lines[:1+mostLines], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(append([]string{text}, lines...), "; ")
}

// mark returns a character for a block with a relative error: "." if the error is at most the tolerance.
func mark(e, tolerance float64) string {
	switch {
	case math.IsNaN(e):
		return "?"
	case e <= tolerance:
		return "."
	case e > 1:
		return "+"
	}
	return fmt.Sprint(min(9, int(e*10)))
}
