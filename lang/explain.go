package lang

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
)

// Explain describes a key ("schedule.offload", or "offload" for all keys of that name), a block ("model"), the
// code of a diagnostic ("lengths-sum"), a glossary term ("bubble") or a value of a key ("ulysses"). For "" it
// lists the topics. For an unknown word it returns an error that names the nearest topic.
func Explain(word string) (string, error) {
	if word == "" {
		return explainAll(), nil
	}
	block, key := findBlock(word), FindKey(word)
	switch {
	case key != nil && block != nil: // a key whose value is a call, and the arguments of the call
		return explainKey(key) + "\n" + explainBlock(block), nil
	case key != nil:
		return explainKey(key), nil
	case block != nil:
		return explainBlock(block), nil
	}
	var matches []string
	for _, k := range Keys {
		if k.Name == word {
			matches = append(matches, explainKey(k))
		}
	}
	if t := findTerm(word); t != nil && len(matches) > 0 {
		matches = append([]string{t.explain()}, matches...)
	}
	if len(matches) > 0 {
		return strings.Join(matches, "\n"), nil
	}
	for _, c := range Codes {
		if string(c.Code) == word {
			return explainCode(c), nil
		}
	}
	if c := callOf(word); c != nil {
		return c.explain(), nil
	}
	if t := findTerm(word); t != nil {
		return t.explain(), nil
	}
	if text := explainValue(word); text != "" {
		return text, nil
	}
	if near := nearestTopic(word); near != "" {
		return "", fmt.Errorf("unknown word %q; did you mean %q?", word, near)
	}
	return "", fmt.Errorf("unknown word %q", word)
}

// ExplainShipped describes the shipped block of any kind with a name, or returns "". The text is the comment at the start of its
// file, followed by the rest of the file.
func ExplainShipped(files fs.FS, name string) string {
	for _, kind := range sortedKeys(shippedFolders) {
		if !slices.Contains(Shipped(files, kind), name) {
			continue
		}
		file, err := fs.ReadFile(files, shippedFolders[kind]+"/"+name+".sppo")
		if err != nil {
			continue
		}
		comment, block := headComment(string(file))
		return fmt.Sprintf("%s %s\n%s\n%s", kind, name, comment, block)
	}
	return ""
}

// headComment splits a file into the comment at its start, laid out for a terminal, and the rest. Lines of the comment that are
// indented by several spaces are code.
func headComment(file string) (comment, rest string) {
	var prose []string
	end := func() {
		if len(prose) > 0 {
			comment += wrap(strings.Join(prose, " "), "    ")
		}
		prose = nil
	}
	for rest = file; strings.HasPrefix(rest, "#"); {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		switch line = strings.TrimPrefix(line, "#"); {
		case strings.TrimSpace(line) == "":
			end()
			comment += "\n"
		case strings.HasPrefix(line, "  "):
			end()
			comment += "   " + line + "\n"
		default:
			prose = append(prose, line)
		}
	}
	end()
	return comment, rest
}

// nearestTopic returns the topic most similar to a word. It tries the bare names of keys first, so that a
// misspelled bare name finds its key.
func nearestTopic(word string) string {
	var paths []string
	byName := map[string]string{}
	for _, k := range Keys {
		byName[k.Name] = k.Path()
		paths = append(paths, k.Path())
	}
	for _, b := range Blocks {
		paths = append(paths, b.Name)
	}
	for _, c := range Codes {
		paths = append(paths, string(c.Code))
	}
	paths = append(paths, termNames()...)
	for _, k := range Keys {
		paths = append(paths, k.values()...)
	}
	if near := nearest(word, sortedKeys(byName)); near != "" {
		return byName[near]
	}
	return nearest(word, paths)
}

// callOf finds a call with named arguments, or returns nil.
func callOf(name string) *callType {
	for _, k := range Keys {
		if c := k.takes.call(name); c != nil && c.block != "" {
			return c
		}
	}
	return nil
}

func explainAll() string {
	var b strings.Builder
	b.WriteString("A spec consists of blocks, which contain keys:\n")
	for _, block := range Blocks {
		fmt.Fprintf(&b, "\n%s\n", block.Name)
		b.WriteString(wrap(keyNames(block.Name), "    "))
	}
	b.WriteString("\nterms\n" + wrap(strings.Join(termNames(), ", "), "    "))
	b.WriteString("\n" + wrap("sppoc explain WORD explains a block (model), a key (schedule.offload), a value of "+
		"a key (ulysses), a term (bubble) or an error code (lengths-sum).", ""))
	return b.String()
}

func keyNames(block string) string {
	var out []string
	for _, k := range KeysOf(block) {
		out = append(out, k.Name)
	}
	return strings.Join(out, ", ")
}

func explainBlock(block *Block) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n%s\n", block.Name, wrap(block.Doc, "    "))
	b.WriteString(listKeys(KeysOf(block.Name)))
	return b.String()
}

// explain lists the arguments of a call.
func (c *callType) explain() string {
	var keys []*Key
	for _, name := range c.arguments() {
		keys = append(keys, FindKey(c.block+"."+name))
	}
	return fmt.Sprintf("%s(...)\n%s\n%s", c.name, wrap(strings.ToUpper(c.doc[:1])+c.doc[1:]+".", "    "), listKeys(keys))
}

// listKeys returns a line for each key, with its default.
func listKeys(keys []*Key) string {
	var b strings.Builder
	widest := 0
	for _, k := range keys {
		widest = max(widest, len(k.Name))
	}
	for _, k := range keys {
		fmt.Fprintf(&b, "    %-*s  %s\n", widest, k.Name, k.defaultWords())
	}
	return b.String()
}

// defaultWords describes the default of a key.
func (k *Key) defaultWords() string {
	switch {
	case k.Derived != "":
		return "default: " + k.Derived
	case k.Default != "":
		return "default: " + k.Default
	}
	return "must be given"
}

func explainKey(k *Key) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", k.Path())
	b.WriteString(wrap(k.Doc, "    "))
	b.WriteString("\n")
	b.WriteString(labelled("takes:", k.takes.withRange()))
	for _, c := range k.takes.calls {
		b.WriteString(labelled("", fmt.Sprintf("%s(...): %s", c.name, c.doc)))
	}
	switch {
	case k.Derived != "":
		b.WriteString(labelled("default:", k.Derived))
	case k.Default != "":
		b.WriteString(labelled("default:", k.Default))
	default:
		b.WriteString("    must be given\n")
	}
	b.WriteString(labelled("example:", k.Name+" = "+k.Example))
	if k.Path() == "model.family" {
		for _, f := range Families {
			b.WriteString("\n    " + f.Name + "\n" + wrap(f.Doc+". "+f.defaultsInWords(), "        "))
		}
	}
	return b.String()
}

// withRange describes the type, and also its bounds if they say more than the type does.
func (t valueType) withRange() string {
	words := t.String()
	n := t.number
	if n == nil || n.dim == dimCount && n.max == 1 {
		return words
	}
	if n.max >= maxRanks {
		least := showNumber(n.min, n.dim)
		if n.above {
			return words + ", above " + least
		}
		return words + ", at least " + least
	}
	return words + ", " + n.rangeWords()
}

func explainCode(c CodeInfo) string {
	var b strings.Builder
	fmt.Fprintf(&b, "error [%s]\n%s\n    for example:\n\n", c.Code, wrap(c.Doc, "    "))
	for _, l := range strings.Split(strings.TrimRight(c.Example, "\n"), "\n") {
		b.WriteString(strings.TrimRight("        "+l, " ") + "\n")
	}
	return b.String()
}

// labelled returns a label followed by an indented paragraph.
func labelled(label, text string) string {
	indent := fmt.Sprintf("%13s", "")
	return "    " + fmt.Sprintf("%-9s", label) + strings.TrimPrefix(wrap(text, indent), indent)
}

var backquotes = regexp.MustCompile("`([^`]*)`")

// wrap breaks text into lines for a terminal. It removes backquotes, which only the reference pages need.
func wrap(text, indent string) string {
	const width = 88
	text = backquotes.ReplaceAllString(text, "$1")
	var b strings.Builder
	line := indent
	empty := true
	for _, word := range strings.Fields(text) {
		if !empty && len(line)+1+len(word) > width {
			b.WriteString(line + "\n")
			line, empty = indent, true
		}
		if !empty {
			line += " "
		}
		line, empty = line+word, false
	}
	return b.String() + line + "\n"
}
