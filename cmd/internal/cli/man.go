package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev"
)

// Page is a page of the manual.
type Page struct {
	Name    string
	Section int
	Doc     string // one line, for NAME
	Write   func(m *Manual)
}

// Manual builds a page in roff's man macros, for man and mandoc.
type Manual struct{ b strings.Builder }

var roff = strings.NewReplacer(`\`, `\e`, `-`, `\-`, "`", `\(ga`, `'`, `\(aq`)

// line writes a line of text, escaped if roff would take it for a request.
func (m *Manual) line(text string) {
	text = roff.Replace(text)
	if strings.HasPrefix(text, ".") {
		text = `\&` + text
	}
	m.b.WriteString(text + "\n")
}

// Heading starts a section. Its title is in capitals, as usual.
func (m *Manual) Heading(title string) {
	fmt.Fprintf(&m.b, ".SH %s\n", roff.Replace(strings.ToUpper(title)))
}

// Under starts a subsection.
func (m *Manual) Under(title string) { fmt.Fprintf(&m.b, ".SS %s\n", roff.Replace(title)) }

// Text writes paragraphs separated by blank lines. Indented paragraphs are kept as they are.
func (m *Manual) Text(text string) {
	for i, paragraph := range strings.Split(strings.Trim(text, "\n"), "\n\n") {
		if i > 0 {
			m.b.WriteString(".PP\n")
		}
		if strings.HasPrefix(paragraph, "  ") {
			m.Literal(paragraph)
			continue
		}
		for line := range strings.Lines(paragraph) {
			m.line(strings.TrimSpace(line))
		}
	}
}

// Literal writes lines that are displayed unchanged.
func (m *Manual) Literal(text string) {
	m.b.WriteString(".nf\n")
	for line := range strings.Lines(text) {
		m.line(strings.TrimRight(line, "\n"))
	}
	m.b.WriteString(".fi\n")
}

// Term writes a list entry with its description.
func (m *Manual) Term(term, text string) {
	fmt.Fprintf(&m.b, ".TP\n\\fB%s\\fR\n", roff.Replace(term))
	m.Text(text)
}

// End ends a list.
func (m *Manual) End() { m.b.WriteString(".PP\n") }

// render returns the entire page.
func (p *Page) render() string {
	var m Manual
	fmt.Fprintf(&m.b, ".TH %s %d \"\" \"sppo %s\" \"sppo manual\"\n", strings.ToUpper(p.Name), p.Section, sppo.Version)
	m.Heading("name")
	m.line(p.Name + " - " + p.Doc)
	p.Write(&m)
	return m.b.String()
}

// pages returns the program's own page and the others.
func (a *App) pages() []Page {
	_, doc, _ := strings.Cut(strings.TrimSuffix(a.Doc, "."), " ")
	return append([]Page{{Name: a.Name, Section: 1, Doc: doc, Write: a.manual}}, a.Pages...)
}

// manual describes all commands, from the same table as help.
func (a *App) manual(m *Manual) {
	m.Heading("synopsis")
	all := a.commands()
	for i := range all {
		if i > 0 {
			m.b.WriteString(".br\n")
		}
		m.line(a.usage(&all[i]))
	}
	m.Heading("commands")
	for i := range all {
		c := &all[i]
		m.Under(c.Name)
		m.Literal(a.usage(c))
		m.Text(strings.ToUpper(c.Doc[:1]) + c.Doc[1:] + ".\n\n" + strings.TrimSpace(c.Details))
		flags, _ := a.setup(c)
		flags.VisitAll(func(f *pflag.Flag) {
			kind, usage := pflag.UnquoteUsage(f)
			m.Term(flagTerm(f, kind), usage+".")
		})
		if len(c.Examples) > 0 {
			m.End()
			m.Text("Examples:")
			m.b.WriteString(".PP\n")
			m.Literal("  " + strings.Join(c.Examples, "\n  "))
		}
	}
	m.Heading("exit status")
	for _, s := range []struct {
		code int
		what string
	}{{Done, "done"}, {Failed, "failed"}, {BadInput, "the input is wrong"}, {NoFit, "the job does not fit"}, {Interrupted, "interrupted by Ctrl-C"}} {
		m.Term(fmt.Sprint(s.code), s.what+".")
	}
	if len(a.Pages) > 0 {
		m.Heading("see also")
		for _, p := range a.Pages {
			m.line(fmt.Sprintf("%s(%d)", p.Name, p.Section))
		}
	}
}

// flagTerm writes a flag as it is typed.
func flagTerm(f *pflag.Flag, kind string) string {
	term := "--" + f.Name
	if f.Shorthand != "" {
		term = "-" + f.Shorthand + ", " + term
	}
	if kind != "" {
		term += " " + strings.ToUpper(kind)
	}
	return term
}

func (a *App) manCommand() Command {
	names := func() (names []string) {
		for _, p := range a.pages() {
			names = append(names, p.Name)
		}
		return names
	}
	args := ""
	if len(a.Pages) > 0 {
		args = "[" + strings.Join(names(), "|") + "]"
	}
	examples := []string{fmt.Sprintf("%s man > ~/.local/share/man/man1/%[1]s.1", a.Name)}
	for _, p := range a.Pages {
		examples = append(examples, fmt.Sprintf("%s man %s > ~/.local/share/man/man%d/%[2]s.%[3]d", a.Name, p.Name, p.Section))
	}
	return Command{
		Name: "man", Args: args, MaxArgs: 1, Words: names, Doc: "print the manual page", Examples: examples,
		Details: "The page is in roff format; man -l displays it.",
		Setup: func(*pflag.FlagSet) Action {
			return func(env *Env, args []string) error {
				for _, p := range a.pages() {
					if len(args) == 0 || args[0] == p.Name {
						_, err := io.WriteString(env.Stdout, p.render())
						return err
					}
				}
				return Usagef("man %s: available pages are %s", args[0], listed(names()))
			}
		},
	}
}
