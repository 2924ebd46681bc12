package lang

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/alecthomas/participle/v2/lexer"
)

// StrategyCSV is the strategy whose order of tasks a file states.
const StrategyCSV = "csv"

// taskFile is an order of tasks as a file states it: one in the format that PyTorch's pipeline schedules read as
// compute_only. Each line is a pipeline rank, and each cell an action or an idle time.
type taskFile struct {
	Name         string     // of the file
	Ranks        [][]action // [pipeline rank]: first to last
	Stages       int        // number of virtual stages of all ranks together
	Microbatches int
	Folded       bool // virtual stages are placed on the ranks in a V, not round-robin
}

// action is a task in a taskFile. Its kinds are PyTorch's: F is a forward, B a whole backward, I the gradient of the input
// alone, W that of the weights.
type action struct {
	Stage      int // virtual stage
	Kind       byte
	Microbatch int
}

func (a action) as(kind byte) action {
	a.Kind = kind
	return a
}

func (a action) text() string { return fmt.Sprintf("%d%c%d", a.Stage, a.Kind, a.Microbatch) }

// maxTaskBytes is the maximum size of a file that states an order of tasks.
const maxTaskBytes = 4 << 20

var (
	actionWord  = regexp.MustCompile(`^([0-9]{1,6})([FBIW])([0-9]{1,6})$`)
	overlapWord = regexp.MustCompile(`^\(([^;]*);([^;]*)\)OVERLAP_F_B$`)
	commsWord   = regexp.MustCompile(`^[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD|((WAIT_)?SEND|RECV)_[FB][0-9]+)$`)
	oldWord     = regexp.MustCompile(`^[0-9]+BW[0-9]+$`)
)

// readTasks reads the file that schedule.strategy names, if it names one, and pins what the file decides: pp and
// virtual_stages. Unless the spec says otherwise, each of the file's microbatches is one task of whole sequences.
func (l *loader) readTasks() {
	v, written := l.spec.source.given["schedule.strategy"]
	if !written || v.kind != isCall {
		return
	}
	if len(v.list) > 1 {
		l.fail(BadArgument, v.list[1].at, "write one file for each spec", "`%s` takes one file", v.name)
		return
	}
	item := v.list[0]
	text, name, shipped, err := l.readNamed(item.at.src, item.text, strings.HasPrefix(item.at.src.name, ShippedPrefix), maxTaskBytes)
	if err != nil {
		l.fail(BadSchedule, item.at, cmp.Or(l.shippedHint(item.text, "*/*.csv"), "paths are relative to the folder of the file that contains them"), "cannot read %q: %v", item.text, plainError(err))
		return
	}
	v.shipped = shipped
	l.spec.source.given["schedule.strategy"] = v
	r := &taskReader{file: &taskFile{Name: strings.TrimPrefix(name, ShippedPrefix)}, src: &sourceText{name: name, text: string(text)}, loader: l}
	r.src.hidden = !shipped && item.at.src.name != flagName && !l.isInside(name)
	if r.read(); r.wrong > 0 {
		return
	}
	l.spec.source.cells = r.cells
	l.spec.Schedule.Tasks = r.file
	l.pinTasks(r.file)
}

// pinTasks sets the sizes that a file decides, and refuses others.
func (l *loader) pinTasks(f *taskFile) {
	s := &l.spec.Schedule
	for _, size := range []struct {
		key   string
		value *int
		file  int
		words string
	}{
		{"pp", &s.PP, len(f.Ranks), "lines, one for each pipeline rank"},
		{"virtual_stages", &s.VirtualStages, f.Stages / len(f.Ranks), "virtual stages on each line"},
	} {
		if given := *size.value; given != 0 && given != size.file {
			l.report(l.spec.Diagnose("schedule."+size.key, Conflict, "%s = %d, but %s has %d %s", size.key, given, f.Name, size.file, size.words).
				WithHint("%s = %d, or omit it", size.key, size.file))
		}
		*size.value = size.file
	}
	if s.Subsequences.Count == 0 {
		s.Subsequences = Subsequences{Count: 1}
	}
	if n := s.Subsequences.Count; f.Microbatches%n != 0 {
		l.report(l.spec.Diagnose("schedule.subsequences", Indivisible, "%s has %d microbatches, which cannot be %d subsequences each: a subsequence counts as a microbatch", f.Name, f.Microbatches, n).
			WithHint("subsequences = %s", nearDivisors(f.Microbatches, n)))
	}
}

// taskReader reads a taskFile and the positions of its actions.
type taskReader struct {
	*loader
	file  *taskFile
	src   *sourceText
	cells [][]span // [rank]: of each action, and then the end of the line
	wrong int      // number of errors
}

// wrongAt reports an error at a cell, unless there have been many.
func (r *taskReader) wrongAt(at span, hint, format string, args ...any) {
	if r.wrong++; r.wrong <= maxSyntaxErrors {
		r.fail(BadSchedule, at, hint, format, args...)
	}
}

func (r *taskReader) read() {
	text := strings.TrimSuffix(r.src.text, "\n")
	start := 0
	for rank, line := range strings.Split(text, "\n") {
		r.line(rank, start, strings.TrimSuffix(line, "\r"))
		start += len(line) + 1
	}
	for _, check := range []func(){r.checkStages, r.checkPlaces, r.checkTasks} {
		if r.wrong == 0 {
			check()
		}
	}
}

// line reads the actions of a rank.
func (r *taskReader) line(rank, start int, line string) {
	r.file.Ranks, r.cells = append(r.file.Ranks, nil), append(r.cells, nil)
	at := func(from, to int) span {
		column := 1 + utf8.RuneCountInString(line[:from])
		first := lexer.Position{Filename: r.src.name, Offset: start + from, Line: rank + 1, Column: column}
		end := first
		end.Advance(line[from:to])
		return span{r.src, first, end}
	}
	for from := 0; from <= len(line); {
		to := len(line)
		if i := strings.IndexByte(line[from:], ','); i >= 0 {
			to = from + i
		}
		word := strings.TrimSpace(line[from:to])
		begin := from + strings.Index(line[from:to], word)
		r.cell(rank, word, func(i, n int) span { return at(begin+i, begin+i+n) })
		from = to + 1
	}
	r.cells[rank] = append(r.cells[rank], at(len(line), len(line)))
	if strings.Trim(line, ", \t") == "" {
		r.wrongAt(at(0, len(line)), "remove the line: each line is a pipeline rank", "rank %d has no tasks", rank)
	}
}

// cell reads one cell; at returns the position of a part of it.
func (r *taskReader) cell(rank int, word string, at func(from, n int) span) {
	if word == "" { // idle
		return
	}
	if pair := overlapWord.FindStringSubmatchIndex(word); pair != nil { // two actions, which run one after the other here
		for i := 2; i < len(pair); i += 2 {
			r.action(rank, word[pair[i]:pair[i+1]], at(pair[i], pair[i+1]-pair[i]))
		}
		return
	}
	r.action(rank, word, at(0, len(word)))
}

func (r *taskReader) action(rank int, word string, at span) {
	if m := actionWord.FindStringSubmatch(word); m != nil {
		stage, _ := strconv.Atoi(m[1])
		microbatch, _ := strconv.Atoi(m[3])
		a := action{stage, m[2][0], microbatch}
		r.file.Ranks[rank] = append(r.file.Ranks[rank], a)
		r.cells[rank] = append(r.cells[rank], at)
		r.file.Stages, r.file.Microbatches = max(r.file.Stages, stage+1), max(r.file.Microbatches, microbatch+1)
		return
	}
	hint := "write virtual stage, F, B, I or W, and microbatch, as in 0F1"
	switch {
	case commsWord.MatchString(word):
		hint = "write a file of computations alone (compute_only): sppo adds all communication"
	case oldWord.MatchString(word):
		hint = "files of early versions of PyTorch write BW for what is now B, and B for what is now I"
	}
	shown := "`" + word + "`"
	if r.src.hidden {
		shown = "this"
	}
	r.wrongAt(at, hint, "%s is not a computation of rank %d", shown, rank)
}

// checkStages checks that each virtual stage is on one rank, and that all ranks have equally many.
func (r *taskReader) checkStages() {
	homes, counts := map[int]int{}, make([]int, len(r.file.Ranks))
	for rank, actions := range r.file.Ranks {
		for i, a := range actions {
			home, known := homes[a.Stage]
			if !known {
				homes[a.Stage] = rank
				counts[rank]++
			} else if home != rank {
				r.wrongAt(r.cells[rank][i], fmt.Sprintf("move all of virtual stage %d to one line", a.Stage), "%s is on rank %d, but virtual stage %d is also on rank %d", a.text(), rank, a.Stage, home)
				return
			}
		}
	}
	each := (r.file.Stages + len(counts) - 1) / len(counts)
	for rank, n := range counts {
		if n != each {
			r.wrongAt(r.end(rank), fmt.Sprintf("write %d on each line", each), "rank %d has %d of the %d virtual stages, but %d ranks share them equally", rank, n, r.file.Stages, len(counts))
			return
		}
	}
}

// end returns the position of a rank's last action.
func (r *taskReader) end(rank int) span { return r.cells[rank][len(r.file.Ranks[rank])-1] }

// checkPlaces finds out how the virtual stages are placed, and reports the first that is elsewhere.
func (r *taskReader) checkPlaces() {
	ranks := len(r.file.Ranks)
	isSecond := func(a action) bool { return a.Stage == ranks }
	r.file.Folded = ranks > 1 && slices.ContainsFunc(r.file.Ranks[ranks-1], isSecond)
	for rank, actions := range r.file.Ranks {
		for i, a := range actions {
			home := a.Stage % ranks
			if r.file.Folded && a.Stage/ranks%2 == 1 {
				home = ranks - 1 - home
			}
			if home != rank {
				way := "round-robin"
				if r.file.Folded {
					way = "in a V"
				}
				r.wrongAt(r.cells[rank][i], fmt.Sprintf("move it to line %d, that of rank %d", home+1, home), "virtual stage %d is on rank %d, but with the others %s it belongs on rank %d", a.Stage, rank, way, home)
				return
			}
		}
	}
}

// checkTasks checks that each virtual stage has, for each microbatch, one forward and either a whole backward or its two
// parts.
func (r *taskReader) checkTasks() {
	for rank, actions := range r.file.Ranks {
		seen, stages := map[action]bool{}, map[int]bool{}
		for i, a := range actions {
			other := a.as(map[byte]byte{'F': 'F', 'B': 'I', 'I': 'B', 'W': 'B'}[a.Kind])
			switch {
			case seen[a]:
				r.wrongAt(r.cells[rank][i], "remove it", "%s is on rank %d twice", a.text(), rank)
				return
			case seen[other], a.Kind == 'B' && seen[a.as('W')]:
				r.wrongAt(r.cells[rank][i], fmt.Sprintf("write either %s, or both %s and %s", a.as('B').text(), a.as('I').text(), a.as('W').text()),
					"%s repeats a part of the whole backward %s", a.text(), a.as('B').text())
				return
			}
			seen[a], stages[a.Stage] = true, true
		}
		if missing, hint := r.missing(seen, stages); missing != "" {
			r.wrongAt(r.end(rank), hint, "rank %d has no %s", rank, missing)
			return
		}
	}
}

// missing returns a task that a rank with these tasks and virtual stages lacks, and what to write.
func (r *taskReader) missing(seen map[action]bool, stages map[int]bool) (task, hint string) {
	for stage := range r.file.Stages {
		for m := range r.file.Microbatches {
			a := action{stage, 'F', m}
			if !stages[stage] {
				break
			}
			f, b, i, w := a.text(), a.as('B').text(), a.as('I').text(), a.as('W').text()
			switch input, weights := seen[a.as('I')], seen[a.as('W')]; {
			case !seen[a]:
				return f, fmt.Sprintf("write %s: every virtual stage has every microbatch, 0 to %d", f, r.file.Microbatches-1)
			case input && !weights:
				return w, fmt.Sprintf("write %s, or %s instead of %s", w, b, i)
			case weights && !input:
				return i, fmt.Sprintf("write %s, or %s instead of %s", i, b, w)
			case !input && !seen[a.as('B')]:
				return b, fmt.Sprintf("write %s, or %s and %s", b, i, w)
			}
		}
	}
	return "", ""
}
