package world

import (
	"fmt"
	"sync"
	"time"

	"sppo.dev/internal/train"
)

// inspections are questions to other processes about what they are doing. They bypass a job's orders, so that a
// process can answer while it carries out an order.
type inspections struct {
	mu      sync.Mutex
	answer  func() []byte // answers for this process; nil before its job is open
	asked   int
	waiting map[string]chan []byte // by question
	writing map[int]bool           // processes to which a question is being written
}

// OnInspect implements train.Crew.
func (w *World) OnInspect(answer func() []byte) {
	w.inspections.mu.Lock()
	w.inspections.answer = answer
	w.inspections.mu.Unlock()
}

// Inspect implements train.Crew.
func (w *World) Inspect(wait time.Duration) []train.Inspection {
	first, end := 1, w.options.Processes
	if !w.Leads() {
		first, end = 0, 1
	}
	answers := make([]<-chan []byte, end)
	for process := first; process < end; process++ {
		answers[process] = w.inspect(process)
	}
	var all []train.Inspection
	over := time.After(wait)
	for process := first; process < end; process++ {
		x := train.Inspection{Name: w.name(process)}
		select {
		case x.State = <-answers[process]:
		case <-over:
			late := make(chan time.Time)
			close(late)
			over = late
			select {
			case x.State = <-answers[process]:
			default:
			}
		}
		all = append(all, x)
	}
	return all
}

// inspect asks one process. It does not wait, not even until the question has been sent.
func (w *World) inspect(process int) <-chan []byte {
	q := &w.inspections
	answer := make(chan []byte, 1)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.writing[process] {
		return answer // the process has not even read the previous question
	}
	q.asked++
	name := fmt.Sprint(q.asked)
	if q.waiting == nil || len(q.waiting) > maxWaiting {
		q.waiting = map[string]chan []byte{} // drop questions that were never answered
	}
	if q.writing == nil {
		q.writing = map[int]bool{}
	}
	q.waiting[name], q.writing[process] = answer, true
	go func() {
		_ = w.conns[process].write(message{Kind: kindInspect, Text: name}, nil) // the goroutine that reads from the process notices if the process is lost
		q.mu.Lock()
		q.writing[process] = false
		q.mu.Unlock()
	}()
	return answer
}

// maxWaiting is the number of unanswered questions above which the next question discards them all.
const maxWaiting = 1 << 16

// inspected answers a question from another process.
func (w *World) inspected(process int, question string) {
	w.inspections.mu.Lock()
	answer := w.inspections.answer
	w.inspections.mu.Unlock()
	state := []byte("null")
	if answer != nil {
		state = answer()
	}
	_ = w.conns[process].write(message{Kind: kindState, Text: question}, state) // as above
}

// stated passes the answer to a question from this process to the caller that waits for the answer.
func (w *World) stated(question string, state []byte) {
	w.inspections.mu.Lock()
	answer := w.inspections.waiting[question]
	delete(w.inspections.waiting, question)
	w.inspections.mu.Unlock()
	if answer != nil {
		answer <- state
	}
}

// Down implements train.Crew.
func (w *World) Down() <-chan struct{} { return w.failed }
