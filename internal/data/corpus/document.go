package corpus

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"unicode/utf8"

	"sppo.dev/internal/data/tokenizer"
)

const (
	maxLine = 1 << 28 // bytes of a line of jsonl
	// Text cuts a text file into pieces of this many bytes, or of up to maxPiece bytes if it finds no place to cut.
	usualPiece = 1 << 20
	maxPiece   = 16 << 20
)

// Document is a document or a part of one. Each part is tokenized on its own, but see Before. Ends is set for the
// last part.
type Document struct {
	Text   string
	Before string // if not empty, the text follows a cut by Cut, and this is the character before it
	Ends   bool
	Masked bool // the labels of its tokens do not count
}

// Encode appends the IDs of the document to ids.
func (d *Document) Encode(ids []uint32, t *tokenizer.Tokenizer) ([]uint32, error) {
	if d.Before == "" {
		return t.Encode(ids, d.Text, false)
	}
	return t.EncodeNext(ids, d.Before, d.Text)
}

// Fields names the fields of a document in jsonl: a text, and a prompt before it, whose labels do not count. A
// document may have segments instead: a list of objects, each with a text and a flag that is set if the labels of
// the text count, such as {"text": "...", "train": true}.
type Fields struct{ Text, Prompt, Segments string }

// Masks reports whether some labels do not count.
func (f Fields) Masks() bool { return f.Prompt != "" || f.Segments != "" }

// Text reads a text file, which is one document, in pieces. The function cut returns the last place where a text can be
// cut without a change to its tokens, or 0, like the method Cut of tokenizers. If there is none in 16 MiB of text, the
// text is cut after its last line break, so that no token spans the cut.
func Text(in io.Reader, cut func([]byte) int, yield func(Document) error) error {
	buf, want, before := []byte(nil), usualPiece, ""
	for {
		have := len(buf)
		buf = slices.Grow(buf, want-have)[:want]
		got, err := io.ReadFull(in, buf[have:])
		buf = buf[:have+got]
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return yield(Document{Text: string(buf), Before: before, Ends: true})
		case err != nil:
			return err
		}
		end, next := cut(buf), ""
		switch {
		case end > 0:
			_, n := utf8.DecodeLastRune(buf[:end])
			next = string(buf[end-n : end])
		case want < maxPiece:
			want *= 2
			continue
		default:
			if end = bytes.LastIndexByte(buf, '\n') + 1; end == 0 {
				return errUncut
			}
		}
		if err := yield(Document{Text: string(buf[:end]), Before: before}); err != nil {
			return err
		}
		buf, want, before = append(make([]byte, 0, usualPiece), buf[end:]...), max(usualPiece, 2*(len(buf)-end)), next
	}
}

var errUncut = fmt.Errorf("%d MiB of text have no line break and no place where this tokenizer allows cutting them without "+
	"changing tokens: add line breaks, or store the text as several documents in jsonl", maxPiece>>20)

// Lines reads jsonl: each line that is not blank is an object with the fields of one document. Errors name the
// line and the byte at which it starts.
func Lines(in io.Reader, fields Fields, yield func(Document) error) error {
	r := bufio.NewReaderSize(in, 1<<20)
	offset := int64(0)
	for number := 1; ; number++ {
		line, err := readLine(r)
		if len(line) == 0 && errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("line %d, at byte %d: %w", number, offset, err)
		}
		if len(bytes.TrimSpace(line)) > 0 {
			parts, err := fields.of(line)
			if err != nil {
				return fmt.Errorf("line %d, at byte %d: %w", number, offset, err)
			}
			for _, part := range parts {
				if err := yield(part); err != nil {
					return err
				}
			}
		}
		offset += int64(len(line))
	}
}

func readLine(r *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		if line = append(line, part...); len(line) > maxLine {
			return nil, fmt.Errorf("the line has more than %d bytes", maxLine)
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return line, err
		}
	}
}

// of returns the parts of the document in a line, in order.
func (f Fields) of(line []byte) ([]Document, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		return nil, fmt.Errorf("it is not a JSON object: %w", err)
	}
	if f.Segments != "" {
		return segmentsOf(object, f.Segments)
	}
	text, err := textOf(object, f.Text)
	if err != nil || f.Prompt == "" {
		return []Document{{Text: text, Ends: true}}, err
	}
	prompt, err := textOf(object, f.Prompt)
	return []Document{{Text: prompt, Masked: true}, {Text: text, Ends: true}}, err
}

func segmentsOf(object map[string]json.RawMessage, field string) ([]Document, error) {
	raw, ok := object[field]
	if !ok {
		return nil, fmt.Errorf("the object has no field %q", field)
	}
	var segments []struct {
		Text  *string `json:"text"`
		Train *bool   `json:"train"`
	}
	if err := json.Unmarshal(raw, &segments); err != nil || len(segments) == 0 {
		return nil, fmt.Errorf("field %q is not a list of segments such as {\"text\": \"...\", \"train\": true}", field)
	}
	out := make([]Document, len(segments))
	for i, s := range segments {
		if s.Text == nil || s.Train == nil {
			return nil, fmt.Errorf("field %q: segment %d needs a text and a flag that selects it for training", field, i)
		}
		out[i] = Document{Text: *s.Text, Masked: !*s.Train, Ends: i == len(segments)-1}
	}
	return out, nil
}

func textOf(object map[string]json.RawMessage, field string) (string, error) {
	raw, ok := object[field]
	if !ok {
		return "", fmt.Errorf("the object has no field %q", field)
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil || raw[0] != '"' {
		return "", fmt.Errorf("field %q is not a string", field)
	}
	return text, nil
}
