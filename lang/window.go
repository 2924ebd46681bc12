package lang

import "slices"

// WindowOf returns the number of tokens that a query of a layer attends to, including its own; 0 means all.
func (m *Model) WindowOf(layer int) int64 {
	if len(m.Windows) == 0 {
		return 0
	}
	return m.Windows[layer%len(m.Windows)]
}

func setWindow(s *Spec, v value) {
	s.Model.Windows = nil
	for _, item := range v.items() {
		s.Model.Windows = append(s.Model.Windows, int64(item.num))
	}
}

// noWindow is the window of sliding layers if the spec does not give exactly one; the check reports it as an
// error.
const noWindow = -1

// items returns the items of a list, or the value itself if it is not a list.
func (v value) items() []value {
	if v.kind == isList {
		return v.list
	}
	return []value{v}
}

// normalizeWindows reduces Windows to the shortest equivalent list, so that equal models compare
// equal. The list is empty if no layer has a window.
func (m *Model) normalizeWindows() {
	if len(m.Windows) == 0 || m.Layers == 0 {
		return
	}
	if m.Windows = shortest(m.Windows, m.Layers); !m.hasWindow() {
		m.Windows = []int64{}
	}
}

// hasWindow reports whether any layer has a window.
func (m *Model) hasWindow() bool {
	return slices.ContainsFunc(m.Windows, func(w int64) bool { return w != 0 })
}
