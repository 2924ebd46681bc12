package simd

import "unsafe"

// packed identifies the part of op(a) that a scratch holds: the product that it belongs to, its rows, and the k at
// which it ends.
type packed struct {
	number     uint64 // number of the product; 0: none
	i, m, upTo int
}

// packA gathers a block of op(a), m rows by kn columns, into scratch. It does not transpose the block, because
// the micro-kernel accepts any strides of a.
func (g *gemmJob) packA(s *scratch, i, m, k, kn int) {
	words := g.words(kn)
	t, at, room := &s.tile, 0, m*words
	if g.number > 0 {
		at, room = m*g.words(k), m*g.words(g.k) // after the elements with smaller k, which are kept
	}
	buf := s.floats(0, room+1)[at:]
	t.a, t.aRow, t.aK = unsafe.Pointer(&buf[0]), 4*words, 4
	if g.transA {
		t.aRow, t.aK = 4, 4*m
	}
	if p := &s.packed; g.number == 0 || p.number != g.number || p.i != i || p.m != m {
		*p = packed{number: g.number, i: i, m: m}
	}
	if k+kn <= s.packed.upTo {
		return
	}
	s.packed.upTo = k + kn
	switch {
	case kn == 0:
	case g.perWord == 2 && g.transA:
		g.a.at(k, i).pairsAcross(buf, m, kn, m)
	case g.perWord == 2:
		g.a.at(i, k).pairsAlong(buf, words, m, kn)
	case g.transA:
		g.a.at(k, i).load(buf, m, kn, m)
	default:
		g.a.at(i, k).load(buf, kn, m, kn)
	}
}

// packB gathers one sliver of op(b). Columns past the last keep stale values, which the micro-kernel ignores.
func (g *gemmJob) packB(s *scratch, j, n, k, kn int) {
	t, nr := &s.tile, active.nr
	buf := s.floats(1, nr*kcMax)
	t.b, t.bK = unsafe.Pointer(&buf[0]), 4*nr
	if kn == 0 {
		return
	}
	from := rowsAndColumns(g.b, g.transB, k, j)
	switch {
	case g.perWord == 2 && !g.transB:
		from.pairsAcross(buf, nr, kn, n)
	case g.perWord == 2:
		words := g.words(kn)
		rows := s.floats(3, nr*kcMax)
		from.pairsAlong(rows, words, n, kn)
		active.packT(buf, rows, words, n, words)
	case !g.transB:
		from.load(buf, nr, kn, n)
	case from.BF16 != nil:
		wide := s.floats(3, nr*kcMax)
		from.load(wide, kn, n, kn)
		active.packT(buf, wide, kn, n, kn)
	default:
		active.packT(buf, from.F32, from.Ld, n, kn)
	}
}

// rowsAndColumns returns the part of m that starts at the given row and column of op(m).
func rowsAndColumns(m Mat, transposed bool, row, col int) Mat {
	if transposed {
		return m.at(col, row)
	}
	return m.at(row, col)
}

// lookAhead is the list of a sliver's cache lines, as offsets from its first element. While one
// sliver is in use, the micro-kernel prefetches the next, so that packing does not wait for memory.
type lookAhead struct {
	lines     []int
	end       int // index of the kcMax zeros that follow the list
	ld, kc    int
	elemBytes int
	transB    bool
	isa       *kernelSet
}

func (l *lookAhead) plan(b Mat, transB bool, kc int) {
	now := lookAhead{lines: l.lines, end: l.end, ld: b.Ld, kc: kc, elemBytes: 4, transB: transB, isa: active}
	if b.BF16 != nil {
		now.elemBytes = 2
	}
	if l.ld == now.ld && l.kc == kc && l.elemBytes == now.elemBytes && l.transB == transB && l.isa == active {
		return
	}
	*l = now
	rows, bytes := kc, active.nr*l.elemBytes
	if transB {
		rows, bytes = active.nr, kc*l.elemBytes
	}
	l.lines = l.lines[:0]
	for i := range rows {
		for at := 0; at < bytes; at += 64 {
			l.lines = append(l.lines, i*l.ld*l.elemBytes+at)
		}
	}
	l.end = len(l.lines)
	l.lines = append(l.lines, make([]int, kcMax)...)
}

// point makes the micro-kernel prefetch the sliver at the start of next.
func (l *lookAhead) point(t *tile, next Mat) {
	t.ahead, t.aheadEnd = unsafe.Pointer(&l.lines[0]), unsafe.Pointer(&l.lines[l.end])
	if next.BF16 != nil {
		t.aheadBase = unsafe.Pointer(&next.BF16[0])
	} else {
		t.aheadBase = unsafe.Pointer(&next.F32[0])
	}
}

// nothing is an empty prefetch list: it holds only the zeros that must follow every list.
var nothing [1024]int

// noAhead disables prefetching in the micro-kernel.
func (t *tile) noAhead() {
	t.ahead, t.aheadEnd, t.aheadBase = unsafe.Pointer(&nothing), unsafe.Pointer(&nothing), t.b
}
