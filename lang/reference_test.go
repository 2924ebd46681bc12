package lang

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// keysPage returns KEYS.md: the reference of all keys, from the table.
func keysPage() string {
	var b strings.Builder
	b.WriteString("# Keys\n\nThis page is generated from the table in keys.go, and `sppoc explain` prints the same text. Write `key = value` in the block of\n" +
		"the key's section, or override it with `--set section.key=value`.\n")
	b.WriteString("\n| dimension | units |\n| --- | --- |\n")
	for _, d := range dimensions {
		fmt.Fprintf(&b, "| %s | %s |\n", d.name, strings.Join(quoted(unitsOf(d.dim)), " "))
	}
	for i := range Blocks {
		block := &Blocks[i]
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n", block.Name, block.Doc)
		b.WriteString("| key | takes | default | |\n| --- | --- | --- | --- |\n")
		for _, k := range KeysOf(block.Name) {
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s Example: `%s` |\n", k.Name, k.takes.withRange(), defaultCell(k), keyDoc(k), k.Example)
		}
		if block.Name == blockModel {
			b.WriteString("\nA family provides these defaults:\n\n| family | models | defaults |\n| --- | --- | --- |\n")
			for _, f := range Families {
				fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.Name, f.Doc, f.defaultsInWords())
			}
		}
	}
	return b.String()
}

func defaultCell(k *Key) string {
	switch {
	case k.Derived != "":
		return k.Derived
	case k.Default != "":
		return "`" + k.Default + "`"
	}
	return "must be given"
}

func keyDoc(k *Key) string {
	doc := k.Doc
	for _, c := range k.takes.calls {
		doc += fmt.Sprintf(" `%s(...)`: %s.", c.name, c.doc)
	}
	return doc
}

// errorsPage returns ERRORS.md: the meaning of each code, with a text that fails and its diagnostic.
func errorsPage() string {
	var b strings.Builder
	b.WriteString("# Errors\n\nThis page is generated from the table in codes.go, and a test checks its examples. The examples import this `base.sppo`; blocks in\n" +
		"an example take precedence over imported ones.\n\n```\n" + exampleBase + "```\n")
	for _, c := range Codes {
		fmt.Fprintf(&b, "\n## %s\n\n%s\n\n```\n%s```\n", c.Code, c.Doc, c.Example)
		if err := runExample(c); err != nil {
			fmt.Fprintf(&b, "\n```\n%s\n```\n", err)
		} else {
			b.WriteString("\nThe error is reported at the value when the job is planned.\n")
		}
	}
	return b.String()
}

// grammarPage returns GRAMMAR.md: the parser's grammar, and its tokens.
func grammarPage() string {
	var b strings.Builder
	b.WriteString("# Grammar\n\nThis page is generated from grammar.go. Literals are in quotes, tokens are in angle brackets, and `(?= ...)` looks ahead without consuming input.\n\n```\n")
	b.WriteString(strings.ReplaceAll(fileParser.String(), "Node", "") + "\n```\n\n")
	b.WriteString("Comments and white space can appear anywhere. A newline (`<nl>`) ends a value, except inside `( )` and `[ ]`, where it counts as\n" +
		"white space. If `-` or `.` appears between two characters of a name, it is part of the name, so write spaces around the minus\n" +
		"sign of a subtraction. Names such as `1f1b` may start with a digit. A unit follows its number without a space.\n\n| token | pattern |\n| --- | --- |\n")
	for _, r := range tokenRules {
		if r.Name != "OpenString" && r.Name != "Stray" {
			fmt.Fprintf(&b, "| %s | `%s` |\n", strings.ToLower(r.Name), strings.ReplaceAll(r.Pattern, "|", `\|`))
		}
	}
	return b.String()
}

var update = flag.Bool("update", false, "rewrite golden files and reference pages")

// golden compares got with a file, or rewrites the file if -update is set.
func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; run the test with -update", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s is stale (-file +now); run the test with -update\n%s", file, diff)
	}
}

func TestPages(t *testing.T) {
	golden(t, "KEYS.md", keysPage())
	golden(t, "ERRORS.md", errorsPage())
	golden(t, "GRAMMAR.md", grammarPage())
}

// runExample loads the example of a code, which may import exampleBase.
func runExample(c CodeInfo) error {
	files := map[string]string{"example.sppo": c.Example, "base.sppo": exampleBase}
	_, err := Load("example.sppo", Options{ReadFile: readFrom(files), Shipped: shipped})
	return err
}

func readFrom(files map[string]string) func(string) ([]byte, error) {
	return func(name string) ([]byte, error) {
		if text, ok := files[name]; ok {
			return []byte(text), nil
		}
		return nil, fs.ErrNotExist
	}
}

func TestCodes(t *testing.T) {
	seen := map[Code]bool{}
	for _, c := range Codes {
		if seen[c.Code] {
			t.Errorf("%s stands twice in the table", c.Code)
		}
		seen[c.Code] = true
		err := runExample(c)
		var d Diagnostics
		switch {
		case c.Later && err != nil:
			t.Errorf("the example of %s should pass here:\n%v", c.Code, err)
		case !c.Later && !errors.As(err, &d):
			t.Errorf("the example of %s fails with %v", c.Code, err)
		case !c.Later && (len(d) != 1 || d[0].Code != c.Code):
			t.Errorf("the example of %s should fail with it, once:\n%v", c.Code, err)
		case !c.Later && d[0].Hint == "" && c.Code != Duplicate && c.Code != WrongType && c.Code != Syntax:
			t.Errorf("%s has no hint", c.Code)
		}
		formatted, err := Format("example.sppo", []byte(c.Example))
		if err == nil && string(formatted) != c.Example {
			t.Errorf("the example of %s is not in the standard style:\n%s", c.Code, formatted)
		}
	}
	for _, name := range codesDeclared(t) {
		if !seen[Code(name)] {
			t.Errorf("code %s is not in the table", name)
		}
	}
}

// codesDeclared returns the constants of type Code in the source, to check that none is missing from the table.
func codesDeclared(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("codes.go")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, m := range regexp.MustCompile(`(?m)^\t\w+ +Code = "([^"]+)"$`).FindAllSubmatch(text, -1) {
		out = append(out, string(m[1]))
	}
	if len(out) < 20 {
		t.Fatalf("found %d codes only", len(out))
	}
	return out
}
