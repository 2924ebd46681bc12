package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/lang"
)

// choice is the value of a flag that takes one of several words.
type choice struct {
	value *string
	words []string
}

// Choice defines a flag that takes one of the words. The default may be another, such as "" for a flag that is not given.
func Choice(flags *pflag.FlagSet, to *string, name, value, usage string, words ...string) {
	*to = value
	flags.Var(&choice{to, words}, name, usage)
}

func (c *choice) String() string { return *c.value }
func (c *choice) Type() string   { return "string" }

func (c *choice) Set(value string) error {
	if !slices.Contains(c.words, value) {
		return fmt.Errorf("there are %s", listed(c.words))
	}
	*c.value = value
	return nil
}

// listed joins words as in "a, b and c".
func listed(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// Annotations of flags that only completion reads.
const (
	wordsAnnotation = "words" // what the flag takes, or what that begins with
	filesAnnotation = "files" // the extensions of its files; none: any
)

// Words tells completion what a flag takes. Of "KEY=VALUE" it offers the part up to "=" first.
func Words(flags *pflag.FlagSet, name string, words []string) {
	annotate(flags, name, wordsAnnotation, words)
}

// Files tells completion that a flag takes a file with one of the extensions, or any.
func Files(flags *pflag.FlagSet, name string, extensions ...string) {
	annotate(flags, name, filesAnnotation, extensions)
}

func annotate(flags *pflag.FlagSet, name, annotation string, values []string) {
	if err := flags.SetAnnotation(name, annotation, values); err != nil {
		panic("internal: " + err.Error())
	}
}

// KeyWords are the keys of a spec as --set takes them, each with "=", then with each word that may follow.
func KeyWords() []string {
	var words []string
	for _, k := range lang.Keys {
		words = append(words, k.Path()+"=")
		for _, name := range k.Words() {
			words = append(words, k.Path()+"="+name)
		}
	}
	return words
}
