package passes

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// WriteJSON writes the plan in a form that ReadJSON reads back exactly. Lists of plain values stand on few lines.
func (p *Plan) WriteJSON(w io.Writer) error {
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fmt.Errorf("plan %s: %w", p.Name, err)
	}
	_, err = w.Write(append(joinLists(text), '\n'))
	return err
}

// ReadJSON reads a plan, edited or not; Verify says whether it can be compiled. A key that plans do not have is an
// error, since it would change nothing.
func ReadJSON(r io.Reader) (*Plan, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	p := new(Plan)
	if err := d.Decode(p); err != nil {
		return nil, fmt.Errorf("plan, line %d: %w", 1+bytes.Count(text[:errorOffset(err, d)], []byte("\n")), err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("plan: there is more behind its end")
	}
	return p, nil
}

func errorOffset(err error, d *json.Decoder) int64 {
	var syntax *json.SyntaxError
	var wrongType *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		return syntax.Offset
	case errors.As(err, &wrongType):
		return wrongType.Offset
	}
	return d.InputOffset()
}

const jsonWidth = 120 // columns to which joined lists are broken

// joinLists takes out the line breaks of indented JSON inside lists that hold neither lists nor objects.
func joinLists(text []byte) []byte {
	var out bytes.Buffer
	from, open, quoted := 0, -1, false // open: the last list begun since a list or object began or ended
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '[':
			open = i
		case c == '{' || c == '}':
			open = -1
		case c == ']' && open >= 0:
			out.Write(text[from:open])
			writeList(&out, text[open:i+1])
			from, open = i+1, -1
		}
	}
	out.Write(text[from:])
	return out.Bytes()
}

// writeList puts the items of an indented list behind one another, as many on a line as fit.
func writeList(out *bytes.Buffer, text []byte) {
	lines := bytes.Split(text, []byte("\n"))
	if len(lines) < 3 {
		out.Write(text)
		return
	}
	items := lines[1 : len(lines)-1]
	margin := items[0][:len(items[0])-len(bytes.TrimLeft(items[0], " "))]
	column := len(margin)
	out.WriteByte('[')
	for i, item := range items {
		item = bytes.TrimLeft(item, " ")
		if column+1+len(item) > jsonWidth {
			out.WriteByte('\n')
			out.Write(margin)
			column = len(margin)
		} else if i > 0 {
			out.WriteByte(' ')
		}
		out.Write(item)
		column += 1 + len(item)
	}
	out.WriteByte(']')
}
