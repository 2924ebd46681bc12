package main

import (
	"bytes"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/ir"
	"sppo.dev/lang"
	"sppo.dev/passes"
)

func check(flags *pflag.FlagSet) cli.Action {
	set := cli.JobFlags(flags)
	return func(env *cli.Env, files []string) error {
		return each(env, files, func(file string) error {
			_, err := cli.LoadSpec(file, set())
			if err == nil && cli.IsTerminal(env.Stdout) {
				fmt.Fprintf(env.Stdout, "%s: ok\n", file)
			}
			return err
		})
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
			if err := cli.IsSpec(file); err != nil {
				return err
			}
			before, err := lang.ReadFile(file)
			if err != nil {
				return cli.Wrong(err)
			}
			after, err := lang.FormatFile(file, before)
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
		word := ""
		if len(args) > 0 {
			word = args[0]
		}
		text, err := explanation(word)
		if err != nil {
			return cli.Wrong(err)
		}
		_, err = io.WriteString(env.Stdout, text)
		return err
	}
}

func explanation(word string) (string, error) {
	spec, err := lang.Explain(word)
	if word == "" {
		return spec + "\npasses\n" + cli.Wrap(strings.Join(passes.Names(), ", "), "    ") +
			"\nopcodes\n" + cli.Wrap(strings.Join(ir.Opcodes(), ", "), "    "), err
	}
	opcode, _ := ir.Explain(word)
	var found []string
	for _, text := range []string{spec, wrapped(passes.Explain(word)), opcode} {
		if text != "" {
			found = append(found, strings.TrimRight(text, "\n")+"\n")
		}
	}
	if len(found) > 0 {
		return strings.Join(found, "\n"), nil
	}
	if near := lang.Nearest(word, explained()); near != "" {
		return "", fmt.Errorf("unknown word %q; did you mean %q?", word, near)
	}
	return "", fmt.Errorf("unknown word %q; sppoc explain lists the known words", word)
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
