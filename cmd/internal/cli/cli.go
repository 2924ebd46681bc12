// Package cli is shared by the two commands. It provides tables of subcommands with flags and examples, exit codes,
// and functions that open every kind of input file.
//
//	cli.go       the type of the table, dispatch, help
//	main.go      runs an app as a process
//	exit.go      exit codes and error reports
//	choice.go    flags that accept one of several words, and hints for completion
//	complete.go  completion of command lines; the shells' scripts are in completion/
//	man.go       manual pages
//	version.go   release and build
//	source.go    input files: spec, plan or program
//	memory.go    the highest peaks
//	words.go     text for a terminal
//	screen.go    keeps control characters from reaching a terminal
//	write.go     output files that are written completely or not at all
//
// Subcommands are in cmd/sppoc and cmd/sppovm.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/internal/near"
)

// Env is the environment of a command.
type Env struct {
	Context context.Context // ends when the user asks to stop
	Stdout  io.Writer       // results
	Stderr  io.Writer       // progress and errors
	Name    string          // name of the program, printed before errors; set by Main
}

// IsTerminal reports whether output goes to a terminal.
func IsTerminal(w io.Writer) bool {
	if r, ok := w.(*results); ok {
		w = r.w
	}
	if s, ok := w.(*screen); ok {
		w = s.w
	}
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Action runs a command after its flags have been parsed.
type Action func(env *Env, args []string) error

// Command is one subcommand.
type Command struct {
	Name     string
	Args     string // arguments in the usage line: "FILE [-o OUT]"
	Doc      string // one line
	Details  string // paragraphs, may be empty
	Examples []string
	MinArgs  int
	MaxArgs  int             // -1: any number
	Files    []string        // extensions of file arguments, for completion
	Words    func() []string // possible other arguments, for completion
	Setup    func(flags *pflag.FlagSet) Action
}

// App is one of the two programs.
type App struct {
	Name     string
	Doc      string
	Commands []Command           // excluding completion, man and version, which every App has
	Aliases  map[string][]string // first argument to the words that replace it: "--list-passes" to "passes"
	Pages    []Page              // manual pages besides the program's own
}

// commands returns all commands in the order in which help lists them.
func (a *App) commands() []Command {
	return append(slices.Clone(a.Commands), a.completionCommand(), a.manCommand(), a.versionCommand())
}

// Main runs the command that the arguments name and returns the exit code. A panic is a bug and is reported
// as such.
func (a *App) Main(env *Env, args []string) (code int) {
	out, messages := &results{w: env.Stdout}, &screen{w: env.Stderr}
	if IsTerminal(env.Stdout) {
		shown := &screen{w: env.Stdout}
		defer shown.flush()
		out.w = shown
	}
	defer messages.flush()
	env = &Env{Context: env.Context, Stdout: out, Stderr: messages, Name: a.Name}
	defer func() {
		if p := recover(); p != nil {
			fmt.Fprintf(env.Stderr, "%s: internal error: %v\n", a.Name, p)
			fmt.Fprintf(env.Stderr, "This is a bug. Please report it with the command line, the input and the following:\n\n%s", debug.Stack())
			code = Failed
		}
	}()
	err := a.dispatch(env, args)
	if err == nil {
		err = out.err
	}
	return env.Report(err)
}

// results is standard output. It remembers write errors, so that a command fails even if it does not check
// them.
type results struct {
	w   io.Writer
	err error
}

func (r *results) Write(data []byte) (int, error) {
	n, err := r.w.Write(data)
	if r.err == nil {
		r.err = err
	}
	return n, err
}

func (a *App) dispatch(env *Env, args []string) error {
	if len(args) > 0 {
		if long, ok := a.Aliases[args[0]]; ok {
			args = append(slices.Clone(long), args[1:]...)
		}
	}
	if len(args) == 0 {
		return Usagef("no command given\n\n%s", strings.TrimSpace(a.overview()))
	}
	switch args[0] {
	case "help", "-h", "--help":
		return a.help(env, args[1:])
	case "--version":
		args = append([]string{"version"}, args[1:]...)
	case completeCommand:
		return a.complete(env, args[1:])
	}
	c, err := a.find(args[0])
	if err != nil {
		return err
	}
	return a.run(env, c, args[1:])
}

func (a *App) run(env *Env, c *Command, args []string) error {
	flags, action := a.setup(c)
	if err := flags.Parse(args); errors.Is(err, pflag.ErrHelp) {
		return a.help(env, []string{c.Name})
	} else if err != nil {
		return Usagef("%s: %s\nusage: %s", c.Name, wrongFlag(flags, err), a.usage(c))
	}
	rest := flags.Args()
	if len(rest) < c.MinArgs || c.MaxArgs >= 0 && len(rest) > c.MaxArgs {
		return Usagef("%s: %s\nusage: %s", c.Name, countWords(len(rest), c.MinArgs), a.usage(c))
	}
	return action(env, rest)
}

// wrongFlag explains a flag error. For a bad value, it lists the accepted values; for an unknown flag, it suggests
// the most similar name.
func wrongFlag(flags *pflag.FlagSet, err error) string {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "" {
		var names []string
		flags.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
		if meant := near.Word(unknown.GetSpecifiedName(), names); meant != "" {
			return fmt.Sprintf("unknown flag --%s; did you mean --%s?", unknown.GetSpecifiedName(), meant)
		}
		return fmt.Sprintf("unknown flag --%s", unknown.GetSpecifiedName())
	}
	var bad *pflag.InvalidValueError
	if !errors.As(err, &bad) {
		return err.Error()
	}
	if c, ok := bad.GetFlag().Value.(*choice); ok {
		return fmt.Sprintf("--%s %s: it accepts %s", bad.GetFlag().Name, bad.GetValue(), listed(c.words))
	}
	wanted := map[string]string{"int": "a whole number", "int64": "a whole number", "uint64": "a whole number, 0 or more", "float64": "a number",
		"bool": "true or false", "duration": "a time such as 50ms"}
	want, ok := wanted[bad.GetFlag().Value.Type()]
	if !ok {
		return err.Error()
	}
	return fmt.Sprintf("--%s %s: it must be %s", bad.GetFlag().Name, bad.GetValue(), want)
}

func countWords(got, least int) string {
	if got < least {
		return "no file given"
	}
	return "too many arguments"
}

func (a *App) setup(c *Command) (*pflag.FlagSet, Action) {
	flags := pflag.NewFlagSet(c.Name, pflag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.SortFlags = false
	flags.Usage = func() {}
	action := c.Setup(flags)
	flags.VisitAll(func(f *pflag.Flag) {
		if f.DefValue == "-1" { // this default means that the flag was not given
			f.DefValue = "0"
		}
	})
	return flags, action
}

func (a *App) find(name string) (*Command, error) {
	var names []string
	for _, c := range a.commands() {
		if c.Name == name {
			return &c, nil
		}
		names = append(names, c.Name)
	}
	if meant := near.Word(name, names); meant != "" {
		return nil, Usagef("unknown command %q; did you mean %q?", name, meant)
	}
	return nil, Usagef("unknown command %q; %s help lists all", name, a.Name)
}

func (a *App) usage(c *Command) string {
	return strings.TrimSpace(a.Name + " " + c.Name + " " + c.Args)
}

// help describes one command, or lists all.
func (a *App) help(env *Env, args []string) error {
	if len(args) == 0 {
		_, err := io.WriteString(env.Stdout, a.overview())
		return err
	}
	c, err := a.find(args[0])
	if err != nil {
		return err
	}
	flags, _ := a.setup(c)
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n  %s\n", c.Doc, a.usage(c))
	if c.Details != "" {
		fmt.Fprintf(&b, "\n%s\n", strings.TrimSpace(c.Details))
	}
	if flags.HasFlags() {
		fmt.Fprintf(&b, "\nFlags:\n%s", flags.FlagUsagesWrapped(100))
	}
	if len(c.Examples) > 0 {
		b.WriteString("\nExamples:\n")
		for _, e := range c.Examples {
			fmt.Fprintf(&b, "  %s\n", e)
		}
	}
	_, err = io.WriteString(env.Stdout, b.String())
	return err
}

func (a *App) overview() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", a.Doc)
	all, widest := a.commands(), 0
	for i := range all {
		widest = max(widest, len(all[i].Name))
	}
	for i := range all {
		fmt.Fprintf(&b, "  %s %-*s  %s\n", a.Name, widest, all[i].Name, all[i].Doc)
	}
	fmt.Fprintf(&b, "\n%s help COMMAND prints flags and examples.\n", a.Name)
	fmt.Fprintf(&b, "Exit codes: %d success, %d failure, %d invalid input, %d job does not fit, %d interrupted by Ctrl-C.\n", Done, Failed, BadInput, NoFit, Interrupted)
	return b.String()
}
