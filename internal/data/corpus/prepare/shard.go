package prepare

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/infile"
)

const (
	temporary    = ".tmp"
	recordEnding = ".shard"
)

// place is a position between documents of a job.
type place struct {
	Input int   `json:"input"` // index of the file
	Skip  int64 `json:"skip"`  // number of its documents before the position
}

// record states that a shard is complete, and where the next one begins.
type record struct {
	corpus.Shard
	Next place `json:"next"`
	Last bool  `json:"last"` // the job ends with it
}

// shardName returns the name of shard k, without a suffix.
func shardName(k int) string { return fmt.Sprintf("%05d", k) }

// maxRecord is the size limit in bytes of a file that describes a job or a shard.
const maxRecord = 64 << 20

// readRecords returns the records of the complete shards, first to last.
func (j *Job) readRecords() ([]record, error) {
	var out []record
	for {
		name := shardName(len(out))
		data, err := infile.Read(filepath.Join(j.Dir, name+recordEnding), maxRecord)
		if errors.Is(err, fs.ErrNotExist) {
			return out, nil
		}
		var r record
		if err == nil {
			err = json.Unmarshal(data, &r)
		}
		if err == nil && r.Name != name {
			err = fmt.Errorf("it is the record of %q", r.Name)
		}
		if err == nil && (r.Next.Input < 0 || r.Next.Skip < 0 || r.Tokens < 0 || r.Documents < 0) {
			err = fmt.Errorf("%d tokens in %d documents, continued at document %d of file %d, are impossible", r.Tokens, r.Documents, r.Next.Skip, r.Next.Input)
		}
		if err == nil {
			var info fs.FileInfo
			if info, err = os.Stat(filepath.Join(j.Dir, name+".bin")); err == nil && info.Size() != r.Tokens*int64(j.width()) {
				err = fmt.Errorf("%s.bin has %d bytes, but its record says %d tokens of %d bytes", name, info.Size(), r.Tokens, j.width())
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", filepath.Join(j.Dir, name+recordEnding), err)
		}
		if out = append(out, r); r.Last {
			return out, nil
		}
	}
}

// shard is a shard that is being written.
type shard struct {
	record
	job      *Job
	files    []*os.File // tokens, lengths of documents, the mask if there is one
	to       []*bufio.Writer
	sums     []*corpus.Sums
	document int64 // tokens of the current document
	buf      []byte
}

// endings lists the suffixes of a shard's files.
func (j *Job) endings() []string {
	if j.fields().Masks() {
		return []string{".bin", ".idx", corpus.MaskEnding}
	}
	return []string{".bin", ".idx"}
}

func (j *Job) newShard(k int) (*shard, error) {
	s := &shard{job: j, record: record{Shard: corpus.Shard{Name: shardName(k), Highest: -1}}}
	for _, ending := range j.endings() {
		f, err := os.Create(filepath.Join(j.Dir, s.Name+ending+temporary))
		if err != nil {
			return nil, errors.Join(err, s.drop())
		}
		sum := &corpus.Sums{}
		s.files, s.sums = append(s.files, f), append(s.sums, sum)
		s.to = append(s.to, bufio.NewWriterSize(io.MultiWriter(f, sum), 1<<18))
	}
	return s, nil
}

// add appends the tokens of a text.
func (s *shard) add(ids []uint32, d corpus.Document) error {
	s.buf = s.buf[:0]
	for _, id := range ids {
		s.Highest = max(s.Highest, int64(id))
		if s.job.width() == 2 {
			s.buf = binary.LittleEndian.AppendUint16(s.buf, uint16(id))
		} else {
			s.buf = binary.LittleEndian.AppendUint32(s.buf, id)
		}
	}
	s.Tokens += int64(len(ids))
	s.document += int64(len(ids))
	if _, err := s.to[0].Write(s.buf); err != nil {
		return err
	}
	if len(s.to) > 2 {
		counts := byte(1)
		if d.Masked {
			counts = 0
		}
		if _, err := s.to[2].Write(bytes.Repeat([]byte{counts}, len(ids))); err != nil {
			return err
		}
	}
	if !d.Ends {
		return nil
	}
	s.Documents++
	_, err := s.to[1].Write(binary.LittleEndian.AppendUint64(s.buf[:0], uint64(s.document)))
	s.document = 0
	return err
}

// finish completes the shard: data first, then its record.
func (s *shard) finish(last bool) error {
	s.Last = last
	for x, f := range s.files {
		if err := errors.Join(s.to[x].Flush(), f.Sync()); err != nil {
			return errors.Join(err, s.drop())
		}
	}
	s.Seal(s.sums)
	for x, f := range s.files {
		s.files[x] = nil
		if err := errors.Join(f.Close(), os.Rename(f.Name(), filepath.Join(s.job.Dir, s.Name+s.job.endings()[x]))); err != nil {
			return errors.Join(err, s.drop())
		}
	}
	return writeJSON(filepath.Join(s.job.Dir, s.Name+recordEnding), s.record)
}

// drop closes and removes the shard's files.
func (s *shard) drop() error {
	var err error
	for _, f := range s.files {
		if f != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}
	return err
}
