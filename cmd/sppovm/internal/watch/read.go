package watch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Log is the history of a run according to its records, across stops and restarts. If a run repeated a step
// after a restart, the log has the later record.
type Log struct {
	Runs        []*Run // starts of the run, first to last; empty for the output of --json
	Steps       []*Step
	Validations []*Validation
	Notes       []*Note
	Done        *Done // nil: since its last start, the run has not ended, or it was killed
}

// maxRecord is the maximum length of a line in bytes.
const maxRecord = 4 << 20

// Read reads JSON lines. The last line of the file and the last line before the record of a start may be incomplete,
// because a run may have been killed. Notes on the checkpoint that a run continues from come before its start.
func Read(r io.Reader) (*Log, error) {
	l := &Log{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxRecord)
	var broken error
	known := 0
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		record, err := parse(lines.Bytes())
		switch record.(type) {
		case *Run:
			broken = nil
		case *Note:
		default:
			if broken != nil {
				return nil, broken
			}
		}
		if err != nil {
			broken = fmt.Errorf("line %d is not a record of a run: %w", n, err)
			continue
		}
		if record != nil {
			known++
			l.add(record)
		}
	}
	err := lines.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		err = fmt.Errorf("a line has more than %d MiB", maxRecord>>20)
	}
	switch {
	case err != nil:
		return nil, err
	case known == 0 && broken != nil:
		return nil, broken
	case known == 0:
		return nil, errors.New("it has no records of a run")
	}
	return l, nil
}

// parse returns the record in a line, or nil if its kind is unknown.
func parse(line []byte) (Record, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(line, &members); err != nil {
		return nil, err
	}
	var record Record
	switch has := func(key string) bool { _, ok := members[key]; return ok }; {
	case has("simulated"):
		return nil, errors.New("it is the log of a simulation, not of a training run")
	case has("run"):
		record = &Run{}
	case has("note"):
		record = &Note{}
	case has("done"):
		record = &Done{}
	case has("eval_loss"):
		record = &Validation{}
	case has("loss"):
		record = &Step{}
	default:
		return nil, nil
	}
	return record, json.Unmarshal(line, record)
}

func (l *Log) add(r Record) {
	switch r := r.(type) {
	case *Run:
		l.Runs = append(l.Runs, r)
		l.Done = nil
		for n := len(l.Steps); n > 0 && l.Steps[n-1].Step > r.First; n-- {
			l.Steps = l.Steps[:n-1]
		}
		for n := len(l.Validations); n > 0 && (l.Validations[n-1].Step > r.First || r.First == 0); n-- {
			l.Validations = l.Validations[:n-1]
		}
	case *Step:
		if n := len(l.Steps); n > 0 && l.Steps[n-1].Step >= r.Step {
			return // steps must ascend
		}
		l.Steps = append(l.Steps, r)
	case *Validation:
		l.Validations = append(l.Validations, r)
	case *Note:
		l.Notes = append(l.Notes, r)
	case *Done:
		l.Done = r
	}
}

// Run returns the record of the last start, or an empty record if there is none.
func (l *Log) Run() *Run {
	if n := len(l.Runs); n > 0 {
		return l.Runs[n-1]
	}
	return &Run{}
}
