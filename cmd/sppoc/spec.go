package main

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/near"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

func check(flags *pflag.FlagSet) cli.Action {
	set := cli.JobFlags(flags)
	var options passes.Options
	timePasses(flags, &options)
	return func(env *cli.Env, files []string) error {
		defer options.Times.Write(env.Stderr)
		return each(env, files, func(file string) error {
			end := options.Times.Time("read")
			spec, err := cli.LoadSpec(file, set())
			end()
			if err == nil {
				noteData(env, spec)
			}
			if err == nil && cli.IsTerminal(env.Stdout) {
				fmt.Fprintf(env.Stdout, "%s: ok\n", file)
			}
			return err
		})
	}
}

// noteData says which data files do not exist or cannot be read. That is no error: a job may be planned elsewhere than where it runs.
func noteData(env *cli.Env, spec *lang.Spec) {
	if err := train.FindFiles(spec.Train.Data.Kind, spec.Train.Data.Files); err != nil {
		fmt.Fprintf(env.Stderr, "%s: note: %v; only a run needs the data\n", env.Name, err)
	}
}

// each calls do for every file, even after a failure, so that one run reports the errors of all files. The last
// error is returned, and the caller reports it like any other error.
func each(env *cli.Env, files []string, do func(file string) error) error {
	var last error
	for _, file := range files {
		err := do(file)
		if err == nil {
			continue
		}
		if last != nil {
			env.Report(last)
		}
		last = err
	}
	return last
}

func format(flags *pflag.FlagSet) cli.Action {
	write := flags.BoolP("write", "w", false, "rewrite the files instead of printing them")
	list := flags.BoolP("list", "l", false, "list files that are not in the standard style; exit with code 1 if there are any")
	return func(env *cli.Env, files []string) error {
		other := false
		err := each(env, files, func(file string) error {
			if file == "-" && *write {
				return cli.Usagef("-w rewrites files, but - is standard input")
			}
			before, err := cli.ReadSpec(file)
			if err != nil {
				return err
			}
			if file == "-" {
				file = "standard input"
			}
			after, err := lang.Format(file, before)
			if err != nil {
				return err
			}
			changed := !bytes.Equal(before, after)
			if *list && changed {
				other = true
				fmt.Fprintln(env.Stdout, file)
			}
			if *write && changed {
				return cli.WriteFile(file, func(w io.Writer) error { _, err := w.Write(after); return err })
			}
			if !*write && !*list {
				_, err = env.Stdout.Write(after)
			}
			return err
		})
		if err == nil && other && !*write {
			return cli.Silent(cli.Failed)
		}
		return err
	}
}

// explain looks up a word in every package that has a reference. A word may have several meanings: partition, for
// example, is both a key and a pass.
func explain(*pflag.FlagSet) cli.Action {
	return func(env *cli.Env, args []string) error {
		text, err := explanation(strings.Join(args, " "))
		if err != nil {
			return cli.Wrong(err)
		}
		_, err = io.WriteString(env.Stdout, text)
		return err
	}
}

func explanation(word string) (string, error) {
	if word == "" {
		spec, err := lang.Explain(word)
		return spec + "\nclusters\n" + cli.Wrap(strings.Join(cli.Clusters(), ", "), "    ") +
			"\nschedules\n" + cli.Wrap(strings.Join(lang.Shipped(shipped.Files, "schedule"), ", "), "    ") + "\npasses\n" + cli.Wrap(strings.Join(passes.Names(), ", "), "    ") +
			"\nopcodes\n" + cli.Wrap(strings.Join(ir.Opcodes(), ", "), "    "), err
	}
	for _, form := range forms(word) {
		spec, _ := lang.Explain(form)
		opcode, _ := ir.Explain(form)
		var found []string
		for _, text := range []string{spec, wrapped(passes.Explain(form)), opcode, lang.ExplainShipped(shipped.Files, form)} {
			if text != "" {
				found = append(found, strings.TrimRight(text, "\n")+"\n")
			}
		}
		if len(found) > 0 {
			return strings.Join(found, "\n"), nil
		}
	}
	if meant := near.Word(word, explained()); meant != "" {
		return "", fmt.Errorf("unknown word %q; did you mean %q?", word, meant)
	}
	if words := similar(word); len(words) > 0 {
		return "", fmt.Errorf("unknown word %q; similar words are %s", word, strings.Join(words, ", "))
	}
	return "", fmt.Errorf("unknown word %q; sppoc explain lists the known words", word)
}

// forms returns the forms in which a word or a phrase of a report may be explained: as it is, in small letters, with
// its words joined, in the singular, and at last its first word alone.
func forms(word string) []string {
	small := strings.ToLower(word)
	out := []string{word, small, strings.ReplaceAll(small, " ", "-"), strings.ReplaceAll(small, " ", "_")}
	for _, form := range out[1:] {
		out = append(out, strings.TrimSuffix(form, "s"), strings.TrimSuffix(form, "es"))
		if stem, ok := strings.CutSuffix(form, "ies"); ok {
			out = append(out, stem+"y")
		}
	}
	first, _, _ := strings.Cut(small, " ")
	return append(out, first, strings.TrimSuffix(first, "s"))
}

// similar lists the first of the known words that contain a word, or a part of it.
func similar(word string) (out []string) {
	const shortest, most = 3, 6
	for _, part := range append([]string{word}, strings.FieldsFunc(word, func(r rune) bool { return strings.ContainsRune(" -_/.", r) })...) {
		for _, known := range explained() {
			if len(part) >= shortest && strings.Contains(known, strings.ToLower(part)) && strings.Contains(part, ".") == strings.Contains(known, ".") && !slices.Contains(out, known) {
				out = append(out, known)
			}
		}
		if len(out) > 0 {
			break
		}
	}
	return out[:min(len(out), most)]
}

// wrapped breaks lines that are too long for a terminal.
func wrapped(text string) string {
	var b strings.Builder
	for _, line := range strings.SplitAfter(text, "\n") {
		if len(line) > 100 {
			line = cli.Wrap(line, "")
		}
		b.WriteString(line)
	}
	return b.String()
}
