package cost

import (
	"slices"
	"sort"

	"sppo.dev/ir"
)

// Way is a direction of copies between a device and its host.
type Way int

// Ways.
const (
	Out Way = iota // to the host
	Back
	numWays
)

// HostLink simulates a device's copies. Each direction runs one copy at a time, in the order of requests. On a
// half-duplex machine, only one copy runs at a time, whatever its direction. A copy begins in the first gap
// that is long enough, so a copy that is requested early but ready late does not delay copies in the other
// direction.
type HostLink struct {
	half  bool
	until [numWays]ir.Seconds
	taken []interval // for half duplex: ordered and disjoint
}

type interval struct{ begin, end ir.Seconds }

// HostLink returns the link of one device, before any copy.
func (c Model) HostLink() HostLink { return HostLink{half: c.machine.HalfDuplex()} }

// Until returns the time at which all requested copies of a direction are done.
func (l *HostLink) Until(w Way) ir.Seconds { return l.until[w] }

// Copy requests a copy that can begin at time ready and takes d, and returns its end.
func (l *HostLink) Copy(w Way, ready, d ir.Seconds) ir.Seconds {
	begin := max(ready, l.until[w])
	if l.half {
		l.forget()
		for i := l.after(begin); i < len(l.taken) && l.taken[i].begin < begin+d; i++ {
			begin = l.taken[i].end
		}
		l.take(begin, begin+d)
	}
	l.until[w] = begin + d
	return l.until[w]
}

// Copies requests many copies that take d in total, and returns the end of the last. Each is small enough to
// fit into any gap.
func (l *HostLink) Copies(w Way, ready, d ir.Seconds) ir.Seconds {
	at := max(ready, l.until[w])
	if l.half {
		l.forget()
		for i := l.after(at); i < len(l.taken) && l.taken[i].begin < at+d; i = l.after(at) {
			next := l.taken[i]
			if next.begin > at {
				l.take(at, next.begin)
				d -= next.begin - at
			}
			at = next.end
		}
		l.take(at, at+d)
	}
	l.until[w] = at + d
	return l.until[w]
}

// Hold keeps the next copy of a direction from beginning before the given time.
func (l *HostLink) Hold(w Way, until ir.Seconds) { l.until[w] = max(l.until[w], until) }

// forget drops intervals that end before any future copy can begin.
func (l *HostLink) forget() {
	l.taken = slices.Delete(l.taken, 0, l.after(min(l.until[Out], l.until[Back])))
}

// after returns the index of the first interval that ends after time t.
func (l *HostLink) after(t ir.Seconds) int {
	return sort.Search(len(l.taken), func(i int) bool { return l.taken[i].end > t })
}

// take marks a gap, or part of one, as taken.
func (l *HostLink) take(begin, end ir.Seconds) {
	if end <= begin {
		return
	}
	i := l.after(begin)
	if i > 0 && l.taken[i-1].end == begin {
		l.taken[i-1].end = end
		return
	}
	l.taken = slices.Insert(l.taken, i, interval{begin, end})
}
