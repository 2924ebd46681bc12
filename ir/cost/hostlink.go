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

// HostLink is a device's copies in virtual time. Each way has one copy at a time, in the order in which they are asked for. Where
// the machine is half-duplex both ways have one between them: a copy begins in the first gap that has room for it, so that one
// which is asked for early and waits long holds nobody up.
type HostLink struct {
	half  bool
	until [numWays]ir.Seconds
	taken []interval // of half duplex: in order and apart
}

type interval struct{ begin, end ir.Seconds }

// HostLink is that of one device, on which nothing has been copied yet.
func (c Model) HostLink() HostLink { return HostLink{half: c.machine.HalfDuplex()} }

// Until is when all copies of a way that were asked for are done.
func (l *HostLink) Until(w Way) ir.Seconds { return l.until[w] }

// Copy is the end of a copy that may begin when it is ready and takes d.
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

// Copies is the end of many copies that take d in all, so small that they fit into any gap.
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

// Hold keeps the next copy of a way from beginning before a time.
func (l *HostLink) Hold(w Way, until ir.Seconds) { l.until[w] = max(l.until[w], until) }

// forget drops what lies before anything that may still begin.
func (l *HostLink) forget() {
	l.taken = slices.Delete(l.taken, 0, l.after(min(l.until[Out], l.until[Back])))
}

// after is the first interval that ends behind a time.
func (l *HostLink) after(t ir.Seconds) int {
	return sort.Search(len(l.taken), func(i int) bool { return l.taken[i].end > t })
}

// take fills a gap, or a part of one.
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
