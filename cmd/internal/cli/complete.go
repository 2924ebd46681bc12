package cli

import (
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// The scripts call the hidden command __complete with the words typed so far, the last of which is to be
// completed. It prints one line for each candidate, "word<TAB>description", and a last line that starts with
// ":" and may tell the shell what else to do: ":files EXTENSION..." to offer files, ":nospace" to add no space
// because the word continues.
var (
	//go:embed completion/bash.sh
	bashScript string
	//go:embed completion/zsh.zsh
	zshScript string
	//go:embed completion/fish.fish
	fishScript string
)

const completeCommand = "__complete"

var shells = map[string]string{"bash": bashScript, "zsh": zshScript, "fish": fishScript}

var shellNames = []string{"bash", "zsh", "fish"}

func (a *App) completionCommand() Command {
	return Command{
		Name: "completion", Args: "bash|zsh|fish", MinArgs: 1, MaxArgs: 1, Words: func() []string { return shellNames },
		Doc: "print the completion script for a shell",
		Details: fmt.Sprintf("The script completes commands, flags and their values, --set keys, and files. It asks %s for them, so it stays\n"+
			"correct when %s is updated. Install it where the shell looks for completions, or load it in every session:\n\n"+
			"  bash  %[1]s completion bash > ~/.local/share/bash-completion/completions/%[1]s\n"+
			"  zsh   %[1]s completion zsh > \"${fpath[1]}/_%[1]s\"\n"+
			"  fish  %[1]s completion fish > ~/.config/fish/completions/%[1]s.fish", a.Name, a.Name),
		Examples: []string{"source <(" + a.Name + " completion bash)"},
		Setup: func(*pflag.FlagSet) Action {
			return func(env *Env, args []string) error {
				script, ok := shells[args[0]]
				if !ok {
					return Usagef("completion %s: available shells are %s", args[0], listed(shellNames))
				}
				_, err := io.WriteString(env.Stdout, strings.ReplaceAll(script, "PROGRAM", a.Name))
				return err
			}
		},
	}
}

// candidates are the possible words at a position.
type candidates struct {
	words   []string
	docs    map[string]string // one-line descriptions by word
	files   bool
	endings []string // file extensions; none: any
}

// complete prints the candidates for the last word.
func (a *App) complete(env *Env, words []string) error {
	if len(words) == 0 {
		words = []string{""}
	}
	current := words[len(words)-1]
	c := a.candidates(words[:len(words)-1], current)
	directive := ":"
	if c.files {
		directive = strings.TrimSpace(":files " + strings.Join(c.endings, " "))
	}
	var b strings.Builder
	done := map[string]bool{}
	for _, word := range c.words {
		if !strings.HasPrefix(word, current) {
			continue
		}
		if at := strings.IndexByte(word, '='); at >= len(current) { // offer one part at a time
			word = word[:at+1]
		}
		if done[word] || word == current && strings.HasSuffix(word, "=") {
			continue
		}
		done[word] = true
		if strings.HasSuffix(word, "=") {
			directive = ":nospace" // the value follows
		}
		b.WriteString(strings.TrimSuffix(word+"\t"+c.docs[word], "\t") + "\n")
	}
	_, err := io.WriteString(env.Stdout, b.String()+directive+"\n")
	return err
}

// candidates returns the candidates for the word that follows the given ones. The first of these is a command.
func (a *App) candidates(before []string, current string) candidates {
	if len(before) == 0 || len(before) == 1 && before[0] == "help" {
		c := candidates{words: []string{}, docs: map[string]string{}}
		for _, command := range a.commands() {
			c.words, c.docs[command.Name] = append(c.words, command.Name), command.Doc
		}
		if len(before) == 0 {
			c.words, c.docs["help"] = append(c.words, "help", "--version", "--help"), "print flags and examples of a command"
		}
		return c
	}
	command, err := a.find(before[0])
	if err != nil {
		return candidates{}
	}
	flags, _ := a.setup(command)
	var pending *pflag.Flag // its value comes next
	onlyFiles := false
	for _, word := range before[1:] {
		if pending != nil {
			pending = nil
			continue
		}
		onlyFiles = onlyFiles || word == "--"
		if !onlyFiles {
			pending = awaits(flags, word)
		}
	}
	name, _, assigned := strings.Cut(strings.TrimPrefix(current, "--"), "=")
	switch {
	case pending != nil:
		return valuesOf(pending, "", current)
	case !onlyFiles && strings.HasPrefix(current, "--") && assigned:
		if f := flags.Lookup(name); f != nil {
			return valuesOf(f, "--"+name+"=", current)
		}
		return candidates{}
	case !onlyFiles && strings.HasPrefix(current, "-"):
		return flagNames(flags)
	}
	c := candidates{files: len(command.Files) > 0, endings: command.Files}
	if command.Words != nil {
		c.words = command.Words()
	}
	return c
}

// awaits returns the flag that a word names if the next word must be the value of that flag, and otherwise nil.
func awaits(flags *pflag.FlagSet, word string) *pflag.Flag {
	var f *pflag.Flag
	if name, long := strings.CutPrefix(word, "--"); long {
		f = flags.Lookup(name)
	} else if len(word) == 2 && word[0] == '-' {
		f = flags.ShorthandLookup(word[1:])
	}
	if f == nil || f.NoOptDefVal != "" {
		return nil
	}
	return f
}

func flagNames(flags *pflag.FlagSet) candidates {
	c := candidates{docs: map[string]string{}}
	flags.VisitAll(func(f *pflag.Flag) {
		_, c.docs["--"+f.Name] = pflag.UnquoteUsage(f)
		c.words = append(c.words, "--"+f.Name)
	})
	return c
}

// valuesOf returns the possible values of a flag, each preceded by a prefix. In a list, only the element after
// the last comma is completed.
func valuesOf(f *pflag.Flag, prefix, current string) candidates {
	c := candidates{words: slices.Clone(f.Annotations[wordsAnnotation])}
	if one, ok := f.Value.(*choice); ok {
		c.words = slices.Clone(one.words)
	}
	c.endings, c.files = f.Annotations[filesAnnotation] // no extension: any file
	if f.Value.Type() == "stringSlice" {
		prefix = current[:max(len(prefix), strings.LastIndexByte(current, ',')+1)]
	}
	for i := range c.words {
		c.words[i] = prefix + c.words[i]
	}
	return c
}
