package corpus

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

const (
	maxLine = 1 << 28 // bytes of a line of jsonl
	// maxPiece is the most text that is tokenized at a time. A longer file of text is cut after a line end: a token
	// never spans the cut.
	maxPiece = 16 << 20
)

// Document is a text that is tokenized as a whole. If Ends is set, a document ends with it.
type Document struct {
	Text string
	Ends bool
}

// Text reads a file of text, one document, in pieces.
func Text(in io.Reader, yield func(Document) error) error {
	r := bufio.NewReaderSize(in, 1<<16)
	buf := make([]byte, 0, 1<<16)
	for {
		n := min(cap(buf)-len(buf), maxPiece-len(buf))
		got, err := io.ReadFull(r, buf[len(buf):len(buf)+n])
		buf = buf[:len(buf)+got]
		switch {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return yield(Document{string(buf), true})
		case err != nil:
			return err
		case len(buf) < maxPiece:
			buf = append(make([]byte, 0, min(maxPiece, 2*cap(buf))), buf...)
			continue
		}
		end := bytes.LastIndexByte(buf, '\n') + 1
		if end == 0 {
			end = len(buf)
		}
		if err := yield(Document{string(buf[:end]), false}); err != nil {
			return err
		}
		buf = buf[:copy(buf, buf[end:])]
	}
}

// Lines reads jsonl: each line that is not blank is an object whose field is the text of a document. Errors name the
// line and its byte.
func Lines(in io.Reader, field string, yield func(Document) error) error {
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
			text, err := fieldOf(line, field)
			if err != nil {
				return fmt.Errorf("line %d, at byte %d: %w", number, offset, err)
			}
			if err := yield(Document{text, true}); err != nil {
				return err
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

func fieldOf(line []byte, field string) (string, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		return "", fmt.Errorf("it is no JSON object: %w", err)
	}
	raw, ok := object[field]
	if !ok {
		return "", fmt.Errorf("the object has no field %q", field)
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil || raw[0] != '"' {
		return "", fmt.Errorf("field %q is not a text", field)
	}
	return text, nil
}
