package train

import (
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/infile"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// OpenData opens the data set of a run. Relative paths are resolved in dir.
func OpenData(run *ir.Run, dir string) (vm.Tokens, error) {
	switch run.DataKind {
	case "random":
		return &randomData{run: *run}, nil
	case "text":
		files, err := expand(run.DataFiles, dir)
		if err != nil {
			return nil, err
		}
		text, err := concatenate(files)
		if err != nil {
			return nil, err
		}
		return newTextData(run, text)
	case "tokens":
		return newTokenData(run, dir)
	}
	return nil, fmt.Errorf("unknown kind of data set %q; use text, tokens or random", run.DataKind)
}

// randomData provides random tokens: token t of a sequence is a function of seed, round, sequence and t.
type randomData struct{ run ir.Run }

// Tokens implements Tokens.
func (d *randomData) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&d.run, position, out, stride); err != nil {
		return err
	}
	name := "random tokens"
	if section == ir.SectionEval {
		// Validation sequences are numbered consecutively across sections, so they do not depend on a section's
		// size.
		name, round, sequence = "random validation tokens", 0, round*int64(d.run.EvalSequences)+sequence
	}
	r := vm.NewRandom(d.run.Seed, name, round, sequence)
	for i := 0; i < len(out); i += stride {
		out[i] = int32(r.Below(uint64(position), int64(d.run.Vocab)))
		position++
	}
	return nil
}

// textData provides bytes as tokens. The end of the text is held out for validation.
type textData struct {
	run         ir.Run
	train, held []byte
	windows     int64 // number of windows in a validation
}

func newTextData(run *ir.Run, text []byte) (*textData, error) {
	if len(text) == 0 {
		return nil, errors.New("the data is empty")
	}
	if highest := slices.Max(text); int(highest) >= run.Vocab {
		return nil, fmt.Errorf("the data contains byte %d, which is outside the vocabulary of %d; a vocabulary of 256 covers all text",
			highest, run.Vocab)
	}
	held := int(float64(len(text)) * run.Holdout)
	d := &textData{run: *run, train: text[:len(text)-held], held: text[len(text)-held:], windows: validationWindows(run)}
	window := run.Sequence + 1
	if int64(len(d.train)) < window {
		return nil, fmt.Errorf("%d bytes of training data (%d held out) are fewer than the %d of one sequence and its last label",
			len(d.train), held, window)
	}
	if d.windows > 0 && int64(held) < window {
		return nil, fmt.Errorf("%d of %d bytes are held out for validation, fewer than the %d of one sequence and its last label; set holdout to %.3g or more",
			held, len(text), window, float64(window)/float64(len(text))+0.0005)
	}
	return d, nil
}

// validationWindows returns the number of sequences in a validation, which consists of whole eval sections.
func validationWindows(run *ir.Run) int64 {
	if run.EvalBatch <= 0 || run.EvalSequences <= 0 {
		return 0
	}
	return int64((run.EvalBatch + run.EvalSequences - 1) / run.EvalSequences * run.EvalSequences)
}

// Describe identifies the text.
func (d *textData) Describe() string {
	table := crc32.MakeTable(crc32.Castagnoli)
	return fmt.Sprintf("%d bytes with checksum %08x", len(d.train)+len(d.held), crc32.Update(crc32.Checksum(d.train, table), table, d.held))
}

// Tokens implements Tokens.
func (d *textData) Tokens(section ir.Section, round, sequence, position int64, out []int32, stride int) error {
	if err := checkWindow(&d.run, position, out, stride); err != nil {
		return err
	}
	var text []byte
	if section == ir.SectionEval {
		start, err := d.validationOffset(round*int64(d.run.EvalSequences) + sequence)
		if err != nil {
			return err
		}
		text = d.held[start:]
	} else {
		text = d.train[d.offset(round, sequence):]
	}
	for i := 0; i < len(out); i += stride {
		out[i] = int32(text[position])
		position++
	}
	return nil
}

// offset returns the start of a sample: a random position that leaves room for a whole sample.
func (d *textData) offset(step, sequence int64) int64 {
	return vm.NewRandom(d.run.Seed, "text offset", step).Below(uint64(sequence), int64(len(d.train))-d.run.Sequence)
}

// validationOffset spreads the validation's windows evenly over the held-out text.
func (d *textData) validationOffset(window int64) (int64, error) {
	if window < 0 || window >= d.windows {
		return 0, fmt.Errorf("sequence %d of a validation of %d", window, d.windows)
	}
	if d.windows == 1 {
		return 0, nil
	}
	room := int64(len(d.held)) - d.run.Sequence - 1
	return window * room / (d.windows - 1), nil
}

func checkWindow(run *ir.Run, position int64, out []int32, stride int) error {
	n := int64((len(out) + stride - 1) / stride)
	if position < 0 || position+n > run.Sequence+1 {
		return fmt.Errorf("tokens %d to %d of a sequence of %d", position, position+n-1, run.Sequence+1)
	}
	return nil
}

// maxText is the maximum size, in bytes, of data of kind text, which is held in memory in full.
const maxText int64 = 4 << 30

// concatenate joins the contents of files in order, with a newline between them.
func concatenate(files []string) ([]byte, error) {
	var text []byte
	for i, file := range files {
		b, err := infile.Read(file, maxText-int64(len(text)))
		switch {
		case errors.As(err, new(infile.TooLargeError)):
			return nil, fmt.Errorf("%s: more than %d GiB of text in total; tokenize it (sppoc tokenize) and read it with tokens(...)",
				file, maxText>>30)
		case err != nil:
			return nil, fmt.Errorf("reading the data: %w", err)
		}
		if i > 0 {
			text = append(text, '\n')
		}
		text = append(text, b...)
	}
	return text, nil
}

// expand returns the files that match patterns, sorted and without duplicates. In a pattern, ** matches any
// number of folders; everything else follows path.Match.
func expand(patterns []string, dir string) ([]string, error) {
	if len(patterns) == 0 {
		return nil, errors.New("text data without files")
	}
	var files []string
	for _, pattern := range patterns {
		found, err := glob(resolve(pattern, dir))
		if err != nil {
			return nil, fmt.Errorf("data: %w", err)
		}
		files = append(files, found...)
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

// FindFiles returns an error if one of the files that a spec names as data of a kind does not exist or is a folder that cannot be
// read, or if no file has a name that matches one of its patterns.
func FindFiles(kind string, patterns []string) error {
	for _, pattern := range patterns {
		name := resolve(pattern, "")
		info, err := os.Stat(name)
		if err == nil && info.IsDir() && kind == "tokens" {
			_, err = corpus.ManifestOf(name)
		} else {
			_, err = glob(name)
		}
		if err != nil {
			return fmt.Errorf("data: %w", err)
		}
	}
	return nil
}

// resolve joins a relative pattern to dir. The separators of the result are slashes.
func resolve(pattern, dir string) string {
	full := filepath.ToSlash(pattern)
	if filepath.IsAbs(pattern) {
		return full
	}
	return path.Join(filepath.ToSlash(cmp.Or(dir, ".")), full)
}

const special = `*?[\`

// glob searches the folder that precedes the pattern's first special character. A pattern without special
// characters must name a file.
func glob(pattern string) ([]string, error) {
	at := strings.IndexAny(pattern, special)
	if at < 0 {
		info, err := os.Stat(pattern)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = fmt.Errorf("there is no file %s", pattern)
		case err == nil && corpus.IsFolder(pattern):
			err = fmt.Errorf("%s is a corpus of tokens: use tokens(%q)", pattern, pattern)
		case err == nil && info.IsDir():
			err = fmt.Errorf("%s is a folder: append /** to read the files in it", pattern)
		}
		return []string{pattern}, err
	}
	root := cmp.Or(pattern[:strings.LastIndexByte(pattern[:at], '/')+1], ".")
	parts := strings.Split(pattern, "/")
	if _, err := path.Match(strings.ReplaceAll(pattern, "**", "*"), ""); err != nil {
		return nil, fmt.Errorf("%s: %w", pattern, err)
	}
	var files []string
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		name = filepath.ToSlash(name)
		if err == nil && entry.Type().IsRegular() && matches(parts, strings.Split(name, "/")) {
			files = append(files, name)
		}
		return err
	})
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = fmt.Errorf("there is no folder %s", strings.TrimSuffix(root, "/"))
	case err == nil && len(files) == 0:
		err = fmt.Errorf("no file matches %s", pattern)
	}
	return files, err
}

func matches(pattern, name []string) bool {
	for i, part := range pattern {
		if part == "**" {
			for skip := i; skip <= len(name); skip++ {
				if matches(pattern[i+1:], name[skip:]) {
					return true
				}
			}
			return false
		}
		if i >= len(name) {
			return false
		}
		if ok, _ := path.Match(part, name[i]); !ok {
			return false
		}
	}
	return len(pattern) == len(name)
}
