// Package prepare creates corpora: it tokenizes text, jsonl and parquet files, plain or compressed, into a folder that
// package corpus reads, and trains tokenizers.
//
//	prepare.go   a job: its inputs and outputs, and how it resumes after being stopped
//	pipeline.go  one reader, several workers, one writer in order
//	shard.go     the files of a shard and their record
//	input.go     documents in files of any format
//	pages.go     checks the pages of parquet files
//	check.go     reads all documents to find damage
//	train.go     counts words for a tokenizer
package prepare

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/data/tokenizer"
	"sppo.dev/internal/infile"
)

// Job tokenizes files into a folder. The final contents of the folder depend on the files, the tokenizer and the options
// of the job, but not on Workers or on how often it was stopped and continued.
type Job struct {
	Inputs    []Input
	Dir       string
	Tokenizer *tokenizer.Tokenizer
	Field     string // field of jsonl or column of parquet with the text
	Prompt    string // jsonl field of the preceding text, whose labels do not count; empty: none
	Segments  string // jsonl field listing texts, instead of Field and Prompt; see corpus.Fields; empty: none
	EOS       int64  // token after each document; -1: none
	Workers   int    // 0: one for each processor
	ShardText int64  // a shard ends after the document that brings it to this many bytes of text; 0: 256 MiB

	Progress func(Progress) // called from time to time, from one goroutine; may be nil
	pace     time.Duration  // shortest time between calls; 0: 100 ms
}

// Progress is the progress of a job.
type Progress struct {
	Read, Size int64 // bytes of the files, before decompression
	Text       int64 // bytes of text tokenized by this run
	Tokens     int64 // tokens in the shards
}

const shardText = 256 << 20

// Run tokenizes the missing shards and returns the manifest, which it writes last. If it is stopped, the complete
// shards remain, and the next Run continues after them.
func (j *Job) Run(ctx context.Context) (*corpus.Manifest, error) {
	if j.Workers <= 0 {
		j.Workers = runtime.GOMAXPROCS(0)
	}
	if j.ShardText <= 0 {
		j.ShardText = shardText
	}
	if j.pace == 0 {
		j.pace = 100 * time.Millisecond
	}
	if err := os.MkdirAll(j.Dir, 0o777); err != nil {
		return nil, err
	}
	m := j.manifest()
	if err := j.begin(m); err != nil {
		return nil, err
	}
	records, err := (&run{Job: j}).all(ctx)
	if err != nil && len(records) == 0 { // nothing to continue from
		err = errors.Join(err, os.Remove(filepath.Join(j.Dir, jobName)))
	}
	if err != nil {
		return nil, err
	}
	for _, r := range records {
		m.Shards = append(m.Shards, r.Shard)
		m.Tokens += r.Tokens
		m.Documents += r.Documents
		m.Highest = max(m.Highest, r.Highest)
	}
	if m.Tokens == 0 {
		return nil, errors.New("there is no text in the files")
	}
	if err := m.Write(j.Dir); err != nil {
		return nil, err
	}
	return m, j.clean()
}

func (j *Job) manifest() *corpus.Manifest {
	m := &corpus.Manifest{Type: "uint16", Highest: -1, Tokenizer: j.Tokenizer.Hash(), Vocab: j.Tokenizer.Size(), EOS: j.EOS, Field: j.Field, Masks: j.fields().Masks()}
	if j.width() == 4 {
		m.Type = "uint32"
	}
	return m
}

func (j *Job) fields() corpus.Fields {
	return corpus.Fields{Text: j.Field, Prompt: j.Prompt, Segments: j.Segments}
}

// width returns the bytes per token.
func (j *Job) width() int {
	if j.Tokenizer.Size() > 1<<16 {
		return 4
	}
	return 2
}

// jobName is the file that identifies the job of an unfinished folder.
const jobName = "job.json"

// identity holds the properties that must not have changed if a job is to continue.
type identity struct {
	Tokenizer string   `json:"tokenizer"`
	Field     string   `json:"field"`
	Prompt    string   `json:"prompt,omitempty"`
	Segments  string   `json:"segments,omitempty"`
	EOS       int64    `json:"eos"`
	ShardText int64    `json:"shard_text"`
	Inputs    []string `json:"inputs"` // a hash of each file's name, size and time
	names     []string
}

func (j *Job) identity() identity {
	id := identity{Tokenizer: j.Tokenizer.Hash(), Field: j.Field, Prompt: j.Prompt, Segments: j.Segments, EOS: j.EOS, ShardText: j.ShardText}
	for _, in := range j.Inputs {
		sum := sha256.Sum256(fmt.Appendf(nil, "%q %d %d", in.Name, in.size, in.modified))
		id.Inputs = append(id.Inputs, hex.EncodeToString(sum[:8]))
		id.names = append(id.names, in.Name)
	}
	return id
}

// begin checks that the folder is new or belongs to this job.
func (j *Job) begin(m *corpus.Manifest) error {
	if _, err := os.Lstat(filepath.Join(j.Dir, corpus.ManifestName)); err == nil {
		return fmt.Errorf("%s: the folder already contains a corpus: remove it first, or write to another folder", j.Dir)
	}
	mine := j.identity()
	path := filepath.Join(j.Dir, jobName)
	data, err := infile.Read(path, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		entries, err := os.ReadDir(j.Dir)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") {
				return fmt.Errorf("%s: the folder is not empty: it contains %s", j.Dir, e.Name())
			}
		}
		return writeJSON(path, mine)
	}
	if err != nil {
		return err
	}
	var theirs identity
	if err := json.Unmarshal(data, &theirs); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	other := ""
	switch {
	case theirs.Tokenizer != mine.Tokenizer:
		other = "with another tokenizer"
	case theirs.Field != mine.Field || theirs.Prompt != mine.Prompt || theirs.Segments != mine.Segments || theirs.EOS != mine.EOS || theirs.ShardText != mine.ShardText:
		other = "with other options"
	case len(theirs.Inputs) != len(mine.Inputs):
		other = fmt.Sprintf("of %d files rather than %d", len(theirs.Inputs), len(mine.Inputs))
	case !slices.Equal(theirs.Inputs, mine.Inputs):
		i := slices.IndexFunc(mine.Inputs, func(s string) bool { return !slices.Contains(theirs.Inputs, s) })
		other = fmt.Sprintf("before %s changed", mine.names[max(0, i)])
	}
	if other != "" {
		return fmt.Errorf("%s: the unfinished corpus in it was begun %s; remove it first, or write to another folder", j.Dir, other)
	}
	return j.removeTemporaries()
}

func (j *Job) removeTemporaries() error {
	names, err := filepath.Glob(filepath.Join(j.Dir, "*"+temporary))
	for _, name := range names {
		err = errors.Join(err, os.Remove(name))
	}
	return err
}

// clean removes the files that only an unfinished job needs.
func (j *Job) clean() error {
	names, err := filepath.Glob(filepath.Join(j.Dir, "*"+recordEnding))
	for _, name := range append(names, filepath.Join(j.Dir, jobName)) {
		err = errors.Join(err, os.Remove(name))
	}
	return err
}

func writeJSON(path string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return corpus.Replace(path, append(text, '\n'))
}
