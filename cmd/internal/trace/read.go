package trace

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"slices"

	"sppo.dev/internal/infile"
	"sppo.dev/internal/vm/sim"
	"sppo.dev/ir"
)

// Is reports whether a file is a trace. It checks the first bytes, because plans are JSON too.
func Is(file string) bool {
	f, _, err := infile.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	begin := make([]byte, len(opening))
	_, err = io.ReadFull(f, begin)
	return err == nil && bytes.Equal(begin, []byte(opening))
}

// opening is the start of every file that Write produces.
const opening = `{"displayTimeUnit"`

// Read reads a measured timeline of the program p, which must have the same instructions as the program that
// was run.
func Read(r io.Reader, p *ir.Program) (*sim.Timeline, error) {
	var file struct {
		OtherData otherData
		Events    []struct {
			Phase string  `json:"ph"`
			Rank  int     `json:"pid"`
			Begin float64 `json:"ts"`
			Took  float64 `json:"dur"`
			Args  struct {
				PC *int `json:"pc"`
			}
		} `json:"traceEvents"`
	}
	if err := json.NewDecoder(r).Decode(&file); err != nil {
		return nil, fmt.Errorf("not a trace: %w", err)
	}
	o := &file.OtherData
	if o.Simulated {
		return nil, fmt.Errorf("it is a simulated trace; only one measured by sppovm run --profile can be shown below a program")
	}
	mine, err := fingerprint(p)
	if err != nil {
		return nil, err
	}
	if o.Fingerprint != mine {
		return nil, fmt.Errorf("it was measured on another program, %s, whose instructions differ from those of %s", o.Program, p.Name)
	}
	section := ir.Section(0)
	for section < ir.NumSections && section.String() != o.Section {
		section++
	}
	if section == ir.NumSections {
		return nil, fmt.Errorf("there is no section %q", o.Section)
	}
	spans := make([][]sim.Span, len(p.Ranks))
	for i := range spans {
		spans[i] = make([]sim.Span, len(p.Codes[p.Ranks[i].Code].Sections[section]))
	}
	for _, e := range file.Events {
		if e.Phase != "X" {
			continue
		}
		if e.Args.PC == nil || e.Rank < 0 || e.Rank >= len(spans) || *e.Args.PC < 0 || *e.Args.PC >= len(spans[e.Rank]) {
			return nil, fmt.Errorf("a slice of rank %d belongs to no instruction", e.Rank)
		}
		spans[e.Rank][*e.Args.PC] = sim.Span{Begin: ir.Seconds(e.Begin / 1e6), End: ir.Seconds((e.Begin + e.Took) / 1e6)}
	}
	t, err := sim.Measured(p, section, o.Device, spans)
	if err == nil {
		t.Round = o.Round
	}
	return t, err
}

// fingerprint identifies a program by its instructions, regardless of cluster, seed and number of steps.
func fingerprint(p *ir.Program) (string, error) {
	q := *p
	q.Machine, q.Run, q.Lines = ir.Machine{}, ir.Run{}, slices.Repeat([]string{""}, len(p.Lines))
	sum := sha256.New()
	if err := ir.Encode(sum, &q); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)[:12]), nil
}
