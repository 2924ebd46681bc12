package pass

import (
	"fmt"
	"io"
	"sync"
	"text/tabwriter"
	"time"
)

// Times adds up the time of each pass. A nil *Times measures nothing.
type Times struct {
	mu    sync.Mutex
	start time.Time
	names []string // in the order in which they began
	spent map[string]time.Duration
}

// NewTimes returns Times whose total begins now.
func NewTimes() *Times { return &Times{start: time.Now(), spent: map[string]time.Duration{}} }

// Time begins to measure a pass, and returns the function that ends it. Passes may run at the same time.
func (t *Times) Time(name string) (end func()) {
	if t == nil {
		return func() {}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, known := t.spent[name]; !known {
		t.names, t.spent[name] = append(t.names, name), 0
	}
	began := time.Now()
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.spent[name] += time.Since(began)
	}
}

// Write prints the time of each pass and its share of the time since the start. Stages pass through lower, place and sync in
// parallel, so the sum may exceed the total.
func (t *Times) Write(w io.Writer) {
	if t == nil {
		return
	}
	total := time.Since(t.start)
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "seconds\tshare\t  pass\n")
	line := func(name string, d time.Duration) {
		fmt.Fprintf(table, "%.3f\t%.1f%%\t  %s\n", d.Seconds(), 100*d.Seconds()/total.Seconds(), name)
	}
	for _, name := range t.names {
		line(name, t.spent[name])
	}
	line("total", total)
	table.Flush()
}
