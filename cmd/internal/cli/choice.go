package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/internal/shipped"
	"sppo.dev/lang"
)

// choice is a flag value that accepts one of several words.
type choice struct {
	value *string
	words []string
}

// Choice defines a flag that accepts one of the words. The default may be another value, such as "" for a
// flag that is not given.
func Choice(flags *pflag.FlagSet, to *string, name, value, usage string, words ...string) {
	*to = value
	flags.Var(&choice{to, words}, name, usage)
}

func (c *choice) String() string { return *c.value }
func (c *choice) Type() string   { return "string" }

func (c *choice) Set(value string) error {
	if !slices.Contains(c.words, value) {
		return fmt.Errorf("the choices are %s", listed(c.words))
	}
	*c.value = value
	return nil
}

// listed joins words, as in "a, b and c".
func listed(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " and " + words[last]
}

// Flag annotations, read by completion only.
const (
	wordsAnnotation = "words" // accepted words, or their beginnings
	filesAnnotation = "files" // file extensions; none: any
)

// Words declares the words that a flag accepts, for completion. For words of the form "KEY=VALUE", completion
// first offers the part up to "=".
func Words(flags *pflag.FlagSet, name string, words []string) {
	annotate(flags, name, wordsAnnotation, words)
}

// Files declares that a flag accepts a file with one of the extensions, or any file.
func Files(flags *pflag.FlagSet, name string, extensions ...string) {
	annotate(flags, name, filesAnnotation, extensions)
}

func annotate(flags *pflag.FlagSet, name, annotation string, values []string) {
	if err := flags.SetAnnotation(name, annotation, values); err != nil {
		panic("internal: " + err.Error())
	}
}

// KeyWords returns the beginnings of values for --set: for each key of a spec, "KEY=", and "KEY=WORD" for each word
// that the key accepts; and for each shipped block, "KIND=NAME".
func KeyWords() []string {
	var words []string
	for _, b := range lang.Blocks {
		for _, name := range lang.Shipped(shipped.Files, b.Name) {
			words = append(words, b.Name+"="+name)
		}
	}
	for _, k := range lang.Keys {
		words = append(words, k.Path()+"=")
		for _, name := range k.Words() {
			words = append(words, k.Path()+"="+name)
		}
	}
	return words
}
