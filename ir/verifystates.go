package ir

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// This file verifies that ranks together hold every tensor exactly once, apart from copies. The layers of a model are usually divided
// alike, so each way of dividing a tensor is checked once: the time is proportional to the number of ranks, not to ranks times layers.

// rectangle is part of a tensor: rows row to endRow-1 and columns col to endCol-1.
type rectangle struct{ row, endRow, col, endCol int64 }

// held is the set of a tensor's rectangles that ranks hold in one role.
type held map[rectangle]bool

// share is the rectangle of a tensor that a state holds. Its place may depend on the constants of a rank.
type share struct {
	rows, cols      int64
	row0, col0, end Attr
}

// share returns the part of its tensor that a state holds.
func (s *State) share() share {
	rows, cols := s.extent()
	return share{rows, cols, s.Row0, s.Col0, s.End}
}

// division says how ranks divide a role of a tensor.
type division struct {
	tensor Tensor    // without its name
	shares [][]share // by code
}

// tensorRole is a role of a tensor.
type tensorRole struct {
	tensor int32
	role   Role
}

// divide returns the division of every role of every tensor. Equal divisions are the same pointer.
func divide(p *Program) map[tensorRole]*division {
	list := map[tensorRole]*division{}
	for c := range p.Codes {
		for i := range p.Codes[c].States {
			s := &p.Codes[c].States[i]
			k := tensorRole{s.Tensor, s.Role}
			if list[k] == nil {
				list[k] = &division{Tensor{Shape: p.Tensors[s.Tensor].Shape}, make([][]share, len(p.Codes))}
			}
			list[k].shares[c] = append(list[k].shares[c], s.share())
		}
	}
	first := map[string]*division{}
	for k, d := range list {
		text := fmt.Sprint(*d)
		if first[text] == nil {
			first[text] = d
		}
		list[k] = first[text]
	}
	return list
}

// verifyStates checks that the rectangles on all ranks cover each tensor exactly once in each role. Equal
// rectangles on several ranks are copies and count once. A rectangle inside another is a part that a rank keeps
// in addition to the whole.
func verifyStates(p *Program, all *findings) {
	divisions := divide(p)
	type verdict struct {
		twice int
		why   string
	}
	verdicts := map[*division]verdict{}
	for t := range p.Tensors {
		for role := range NumRoles {
			d := divisions[tensorRole{int32(t), role}]
			if d == nil && role != RoleWeight {
				continue
			}
			v, ok := verdicts[d]
			if !ok {
				v.twice, v.why = d.check(p)
				verdicts[d] = v
			}
			if v.twice != None {
				all.add(rankFinding(FindHeader, v.twice, "holds a part of %s of %s twice: one state is enough", role, p.Tensors[t].Name))
			}
			if v.why != "" {
				all.add(headerFinding("states %s of tensor %s %v %s: all ranks together must hold each element, in rectangles that do not overlap",
					role, p.Tensors[t].Name, p.Tensors[t].Shape, v.why))
			}
		}
	}
}

// check returns the first rank that holds a rectangle twice, or None, and the reason why the rectangles of all ranks do not cover the
// tensor exactly once, or "". A nil division has no rectangles.
func (d *division) check(p *Program) (twice int, why string) {
	if d == nil {
		return None, "are held by no rank"
	}
	twice = None
	parts := held{}
	var own []rectangle // including padding, which may be all that distinguishes a slice from the whole
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		own = own[:0]
		for _, s := range d.shares[rank.Code] {
			x := s.padded(rank.Consts)
			own = append(own, x)
			parts[x.within(&d.tensor, s.end.Int(rank.Consts))] = true
		}
		slices.SortFunc(own, rectangle.compare)
		if twice == None && len(slices.Compact(own)) < len(d.shares[rank.Code]) {
			twice = r
		}
	}
	return twice, parts.covers(&d.tensor)
}

// padded returns the rectangle that a rank holds with its padding: rows and columns beyond the tensor, which let ranks
// divide the tensor evenly.
func (s *share) padded(consts []int64) rectangle {
	row, col := s.row0.Int(consts), s.col0.Int(consts)
	return rectangle{row, Plus(row, s.rows), col, Plus(col, s.cols)}
}

// within returns a rectangle without its padding, given the attribute end of its state; the zero value if
// it is all padding.
func (x rectangle) within(t *Tensor, end int64) rectangle {
	x.endRow, x.endCol = min(x.endRow, t.EndOf(end)), min(x.endCol, t.Shape[1])
	if x.row >= x.endRow || x.col >= x.endCol {
		return rectangle{}
	}
	return x
}

func (x rectangle) compare(y rectangle) int {
	return cmp.Or(cmp.Compare(x.row, y.row), cmp.Compare(x.col, y.col), cmp.Compare(x.endRow, y.endRow), cmp.Compare(x.endCol, y.endCol))
}

func (x rectangle) area() int64 { return times(x.endRow-x.row, x.endCol-x.col) }

func (x rectangle) contains(y rectangle) bool {
	return x.row <= y.row && y.endRow <= x.endRow && x.col <= y.col && y.endCol <= x.endCol
}

func (x rectangle) overlaps(y rectangle) bool {
	return x.row < y.endRow && y.row < x.endRow && x.col < y.endCol && y.col < x.endCol
}

// outermost removes rectangles that lie inside others, such as the slice of a weight that a rank updates
// before the weight is gathered.
func (h held) outermost() []rectangle {
	all := slices.SortedFunc(maps.Keys(h), func(a, b rectangle) int { return cmp.Compare(b.area(), a.area()) })
	var out []rectangle
	for _, x := range all {
		if !slices.ContainsFunc(out, func(outer rectangle) bool { return outer.contains(x) }) {
			out = append(out, x)
		}
	}
	return out
}

// covers returns the reason why a role's rectangles do not cover a tensor exactly once, or "" if they do.
func (h held) covers(t *Tensor) string {
	if len(h) == 0 {
		return "are held by no rank"
	}
	if untiled(t, slices.Collect(maps.Keys(h))) == "" {
		return ""
	}
	return untiled(t, h.outermost())
}

// untiled returns the reason why rectangles do not tile a tensor, or "" if they do. They tile it if their areas
// add up to the tensor's area and every corner, except the tensor's own four, belongs to an even number of
// them.
func untiled(t *Tensor, rects []rectangle) string {
	area := int64(0)
	corners := map[[2]int64]bool{}
	for _, x := range rects {
		area = Plus(area, x.area())
		if x == (rectangle{}) {
			continue
		}
		for _, c := range [][2]int64{{x.row, x.col}, {x.row, x.endCol}, {x.endRow, x.col}, {x.endRow, x.endCol}} {
			if corners[c] {
				delete(corners, c)
			} else {
				corners[c] = true
			}
		}
	}
	tiles := len(corners) == 4 && corners[[2]int64{0, 0}] && corners[[2]int64{0, t.Shape[1]}] &&
		corners[[2]int64{t.Shape[0], 0}] && corners[t.Shape]
	switch {
	case area != t.elements():
		return fmt.Sprintf("cover %d of its %d elements", area, t.elements())
	case !tiles:
		return "leave elements out or hold them twice"
	}
	return ""
}
