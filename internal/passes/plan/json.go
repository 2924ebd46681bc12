package plan

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strings"
	"unicode/utf8"

	"sppo.dev/lang"
)

// WriteJSON writes the plan in a format that ReadJSON reads back exactly. Lists of plain values are written on
// as few lines as possible.
func (p *Plan) WriteJSON(w io.Writer) error {
	text, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return fmt.Errorf("plan %s: %w", p.Name, err)
	}
	_, err = w.Write(append(joinLists(text), '\n'))
	return err
}

// ReadJSON reads a plan, which may have been edited. Verify decides whether it can be compiled.
// Unknown keys are errors, because they would have no effect.
func ReadJSON(r io.Reader) (*Plan, error) {
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	p := new(Plan)
	if err := d.Decode(p); err != nil {
		return nil, wrongJSON(text, err)
	}
	end := d.InputOffset()
	switch _, err := d.Token(); {
	case err != io.EOF:
		end += int64(len(text[end:]) - len(bytes.TrimLeft(text[end:], " \t\r\n")))
		return nil, complain(lang.Syntax, text, end, "there is text after the end of the plan")
	case string(bytes.TrimSpace(text)) == "null":
		return nil, complain(lang.WrongType, text, 0, "a plan is an object, found null")
	}
	return p, nil
}

// wrongJSON rewords a decoder error for people who edit plans.
func wrongJSON(text []byte, err error) *lang.Diagnostic {
	var syntax *json.SyntaxError
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return complain(lang.Syntax, text, int64(len(bytes.TrimRight(text, " \t\r\n"))), "the plan is incomplete")
	case errors.As(err, &syntax):
		return complain(lang.Syntax, text, max(0, syntax.Offset-1), "%v", err)
	case errors.As(err, &wrong) && wrong.Field == "":
		return complain(lang.WrongType, text, max(0, wrong.Offset-1), "a plan is an object, found %s", wrong.Value)
	case errors.As(err, &wrong):
		return complain(lang.WrongType, text, valueAt(text, wrong.Offset), "%s needs %s, found %s", wrong.Field, kindOf(wrong.Type), wrong.Value)
	}
	// The decoder gives no position for unknown keys and invalid tasks, but its message quotes them.
	quoted := quotation.FindString(err.Error())
	at := int64(max(0, bytes.Index(text, []byte(quoted))))
	if key, unknown := strings.CutPrefix(err.Error(), "json: unknown field "); unknown {
		return complain(lang.UnknownKey, text, at, "there is no key %s here", key)
	}
	return complain(lang.WrongType, text, at, "%v", err)
}

var quotation = regexp.MustCompile(`"[^"]*"`)

// valueAt returns the start of a value that the decoder rejected, given its end or its opening bracket.
func valueAt(text []byte, end int64) int64 {
	before := text[:end]
	if value := valueEnd.FindIndex(before); value != nil {
		return int64(value[0])
	}
	return max(0, end-1)
}

var valueEnd = regexp.MustCompile(`("[^"]*"|[-+.\w]+)$`)

func kindOf(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number"
	case reflect.Float64, reflect.Float32:
		return "a number"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.String:
		return "a string"
	}
	return "an object"
}

// complain returns a diagnostic that points at a byte of the text.
func complain(code lang.Code, text []byte, offset int64, format string, args ...any) *lang.Diagnostic {
	before, after := text[:offset], text[offset:]
	first := bytes.LastIndexByte(before, '\n') + 1
	rest, _, _ := bytes.Cut(after, []byte("\n"))
	return &lang.Diagnostic{
		Code: code, Message: fmt.Sprintf(format, args...), Source: string(before[first:]) + string(rest), Width: 1,
		Pos: lang.Pos{File: "plan", Line: 1 + bytes.Count(before, []byte("\n")), Column: 1 + utf8.RuneCount(before[first:]), Offset: int(offset)},
	}
}

const jsonWidth = 120 // line width of joined lists

// joinLists removes the line breaks of indented JSON inside lists that contain neither lists nor objects.
func joinLists(text []byte) []byte {
	var out bytes.Buffer
	from, open, quoted := 0, -1, false // open: start of the list that may still be joined, or -1
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

// writeList writes the items of an indented list on as few lines as possible.
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
