// Package corpus reads the tokens that a run trains on: flat files, folders that `sppoc tokenize` writes,
// Megatron's indexed files, or text with a tokenizer.
//
//	corpus.go        a corpus: parts with weights, each a stream of tokens
//	window.go        the tokens, documents and labels of a sequence
//	borders.go       where the documents in a file start, and mask files
//	stream.go        files that follow each other, read by position
//	sums.go          checksums of the blocks of a file, checked when they are first read
//	check.go         reads all of a corpus to find damage
//	flat.go          flat files, with llm.c's header or none
//	megatron.go      .bin with .idx
//	manifest.go      a folder with a manifest
//	live.go          text and jsonl, tokenized when they are opened
//	document.go      documents in text and jsonl
//	fingerprint.go   detects changed files
//	order.go         order of sequences
//
// The tokens of sequence number g are a pure function of the files, the options and g. A run can therefore stop
// anywhere and resume with any number of processes, however the data is divided among them. Memory use does not
// grow with the size of token files, because only the required ranges are read.
package corpus

import (
	"errors"
	"fmt"
	"hash/crc32"
)

// Options sets how files are read.
type Options struct {
	Type      string    `json:"type"`       // auto | uint16 | uint32; for flat files
	Header    string    `json:"header"`     // auto | none | llmc; for flat files
	Shuffle   bool      `json:"shuffle"`    // windows in random order, each once per epoch; otherwise in order
	Weights   []float64 `json:"weights"`    // share of the sequences for each pattern; empty: one stream
	Tokenizer string    `json:"tokenizer"`  // file or folder, for text and jsonl
	Field     string    `json:"field"`      // jsonl field with the text
	AppendEOS bool      `json:"append_eos"` // add the end-of-sequence token to each document of text and jsonl
	Documents string    `json:"documents"`  // off | index | ID of the token that ends a document
	Pack      string    `json:"pack"`       // cut | whole: whether documents are cut at the end of a sequence
	Masks     string    `json:"masks"`      // off | on | ignore: which labels count
}

// Corpus is a set of parts. It is safe for concurrent use.
type Corpus struct {
	parts []part
	picks []pick // distribution of sequences over parts
	order Order

	documents bool // sequences may contain several documents
	masked    bool // some labels do not count
	cache     startCache

	prints []Fingerprint
}

// Order defines the order of sequences.
type Order struct {
	Sequence int64   // tokens per sequence; a window has one more, the last label
	Seed     int64   // seed of the shuffle
	Holdout  float64 // share of each part, at its end, for validation
	Held     int64   // windows per validation; 0: none
}

// part is a stream with its division into training and validation.
type part struct {
	stream
	train    int64 // tokens for training; the rest is held out
	shuffled bool
	seed     uint64

	packs, heldPacks *packs // nil: documents are cut at the end of a sequence
}

// Open opens the files that each pattern of a spec names. vocab is the number of IDs that the model accepts.
func Open(patterns [][]string, o Options, order Order, vocab int) (*Corpus, error) {
	if len(patterns) == 0 {
		return nil, errors.New("no files")
	}
	if len(o.Weights) > 0 && len(o.Weights) != len(patterns) {
		return nil, fmt.Errorf("%d weights for %d patterns of files", len(o.Weights), len(patterns))
	}
	c := &Corpus{order: order, documents: o.Documents != "" && o.Documents != "off", masked: o.Masks == "on"}
	r := reader{Options: o, vocab: vocab}
	for i, files := range patterns {
		if i == 0 || len(o.Weights) > 0 {
			c.parts = append(c.parts, part{})
		}
		p := &c.parts[len(c.parts)-1]
		for _, name := range files {
			if err := r.open(&p.stream, name); err != nil {
				return nil, errors.Join(err, c.Close())
			}
		}
		for j := range p.files {
			if err := r.openDocuments(&p.files[j]); err != nil {
				return nil, errors.Join(err, c.Close())
			}
		}
	}
	for i := range c.parts {
		if err := c.divide(i, o.Shuffle); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	if o.Pack == "whole" {
		if err := c.packParts(); err != nil {
			return nil, errors.Join(err, c.Close())
		}
	}
	c.picks = deal(o.Weights)
	for i := range c.parts {
		for j := range c.parts[i].files {
			print, err := c.parts[i].files[j].fingerprint()
			if err != nil {
				return nil, errors.Join(err, c.Close())
			}
			c.prints = append(c.prints, print)
		}
	}
	return c, nil
}

// divide holds out the end of a part for validation.
func (c *Corpus) divide(i int, shuffle bool) error {
	p, window := &c.parts[i], c.order.Sequence+1
	total := p.tokens()
	held := int64(float64(total) * c.order.Holdout)
	p.train = total - held
	p.shuffled, p.seed = shuffle, scramble(scramble(uint64(c.order.Seed))+uint64(i))
	which := ""
	if len(c.parts) > 1 {
		which = fmt.Sprintf(" of part %d, %s,", i+1, p.files[0].name)
	}
	if p.train < window {
		return fmt.Errorf("%d tokens%s to train on (%d held out) are fewer than the %d of one sequence and its last label",
			p.train, which, held, window)
	}
	if c.order.Held > 0 && held < window {
		return fmt.Errorf("%d of %d tokens%s are held out for validation, fewer than the %d of one sequence and its last label; "+
			"set holdout to %.3g or more", held, total, which, window, float64(window)/float64(total)+0.0005)
	}
	return nil
}

// Tokens returns the total number of tokens in all parts.
func (c *Corpus) Tokens() int64 {
	var n int64
	for i := range c.parts {
		n += c.parts[i].tokens()
	}
	return n
}

// Describe identifies the corpus by its numbers of tokens and files, and a checksum of file sizes and samples.
func (c *Corpus) Describe() string {
	sum := crc32.New(castagnoli)
	for _, p := range c.prints {
		fmt.Fprintln(sum, p.Size, p.Tokens, p.Samples)
	}
	return fmt.Sprintf("%d tokens in %d files with checksum %08x", c.Tokens(), len(c.prints), sum.Sum32())
}

// Close closes the files.
func (c *Corpus) Close() error {
	var errs []error
	for i := range c.parts {
		for j := range c.parts[i].files {
			errs = append(errs, c.parts[i].files[j].close())
		}
	}
	return errors.Join(errs...)
}
