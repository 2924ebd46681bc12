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

// Manual writes a page in the man macros of roff, which man and mandoc read.
type Manual struct{ b strings.Builder }

var roff = strings.NewReplacer(`\`, `\e`, `-`, `\-`, "`", `\(ga`, `'`, `\(aq`)

// line writes a line of text that is no request, whatever it begins with.
func (m *Manual) line(text string) {
	text = roff.Replace(text)
	if strings.HasPrefix(text, ".") {
		text = `\&` + text
	}
	m.b.WriteString(text + "\n")
}

// Heading begins a part, in capitals as manuals have them.
func (m *Manual) Heading(title string) {
	fmt.Fprintf(&m.b, ".SH %s\n", roff.Replace(strings.ToUpper(title)))
}

// Under begins a part of a part.
func (m *Manual) Under(title string) { fmt.Fprintf(&m.b, ".SS %s\n", roff.Replace(title)) }

// Text writes paragraphs, which blank lines part. Indented lines stay as they are.
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

// Literal writes lines as they are.
func (m *Manual) Literal(text string) {
	m.b.WriteString(".nf\n")
	for line := range strings.Lines(text) {
		m.line(strings.TrimRight(line, "\n"))
	}
	m.b.WriteString(".fi\n")
}

// Term writes an entry of a list, with what it means.
func (m *Manual) Term(term, text string) {
	fmt.Fprintf(&m.b, ".TP\n\\fB%s\\fR\n", roff.Replace(term))
	m.Text(text)
}

// End leaves a list.
func (m *Manual) End() { m.b.WriteString(".PP\n") }

// render is the whole page.
func (p *Page) render() string {
	var m Manual
	fmt.Fprintf(&m.b, ".TH %s %d \"\" \"sppo %s\" \"sppo manual\"\n", strings.ToUpper(p.Name), p.Section, sppo.Version)
	m.Heading("name")
	m.line(p.Name + " - " + p.Doc)
	p.Write(&m)
	return m.b.String()
}

// pages are the program's own page and the others.
func (a *App) pages() []Page {
	_, doc, _ := strings.Cut(strings.TrimSuffix(a.Doc, "."), " ")
	return append([]Page{{Name: a.Name, Section: 1, Doc: doc, Write: a.manual}}, a.Pages...)
}

// manual describes all commands by the rows that help reads.
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
	}{{Done, "done"}, {Failed, "failed"}, {BadInput, "the input is wrong"}, {NoFit, "the job does not fit"}} {
		m.Term(fmt.Sprint(s.code), s.what+".")
	}
	if len(a.Pages) > 0 {
		m.Heading("see also")
		for _, p := range a.Pages {
			m.line(fmt.Sprintf("%s(%d)", p.Name, p.Section))
		}
	}
}

// flagTerm is a flag as one types it.
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
		Name: "man", Args: args, MaxArgs: 1, Words: names, Doc: "write the manual page", Examples: examples,
		Details: "The page is in roff: man -l shows it.",
		Setup: func(*pflag.FlagSet) Action {
			return func(env *Env, args []string) error {
				for _, p := range a.pages() {
					if len(args) == 0 || args[0] == p.Name {
						_, err := io.WriteString(env.Stdout, p.render())
						return err
					}
				}
				return Usagef("man %s: there are %s", args[0], listed(names()))
			}
		},
	}
}
