package main

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// sequencesFlags are the flags of the command sequences.
type sequencesFlags struct {
	out, dir     string
	first, steps int
	seed         int64
}

func sequences(flags *pflag.FlagSet) cli.Action {
	var f sequencesFlags
	flags.StringVarP(&f.out, "output", "o", "", "write to this `FOLDER`")
	flags.IntVar(&f.first, "first", 1, "the first `STEP`")
	flags.IntVar(&f.steps, "steps", 0, "the `NUMBER` of steps; 0: all that follow")
	flags.Int64Var(&f.seed, "seed", 0, "use this seed instead of the program's")
	flags.StringVar(&f.dir, "dir", "", dirHelp)
	set := cli.JobFlags(flags)
	cli.Files(flags, "output")
	return func(env *cli.Env, args []string) error {
		switch {
		case f.out == "":
			return cli.Usagef("sequences: give the folder to write to with --output")
		case f.first < 1 || f.steps < 0 || f.seed < 0:
			return cli.Usagef("sequences: --first must be 1 or more, --steps and --seed 0 or more")
		}
		job, err := openProgram(env, args[0], set())
		if err != nil {
			return err
		}
		run := job.Program.Run
		if flags.Changed("seed") {
			run.Seed = f.seed
		}
		if f.first > run.Steps {
			return cli.Usagef("sequences: --first %d: the program has %d steps", f.first, run.Steps)
		}
		if f.steps == 0 {
			f.steps = run.Steps
		}
		return f.write(&run)
	}
}

// write writes a file for each step, and one for the validation if there is any.
func (f *sequencesFlags) write(run *ir.Run) error {
	data, err := train.OpenData(run, f.dir)
	if err != nil {
		return cli.Wrong(err)
	}
	if closer, ok := data.(io.Closer); ok {
		defer closer.Close()
	}
	if err := os.MkdirAll(f.out, 0o777); err != nil {
		return cli.Wrong(err)
	}
	for step := f.first; step < f.first+f.steps && step <= run.Steps; step++ {
		a := array{data: data, section: ir.SectionStep, round: step, sections: 1, each: run.Batch, length: run.Sequence + 1}
		if err := a.write(filepath.Join(f.out, fmt.Sprintf("step-%d.npy", step))); err != nil {
			return err
		}
	}
	if run.EvalSequences == 0 || run.EvalBatch == 0 {
		return nil
	}
	a := array{data: data, section: ir.SectionEval, sections: (run.EvalBatch + run.EvalSequences - 1) / run.EvalSequences, each: run.EvalSequences, length: run.Sequence + 1}
	return a.write(filepath.Join(f.out, "validation.npy"))
}

// array is a file in NumPy's format: i32 [3, sequences, length], the tokens, labels and positions of sequences in one or more sections.
type array struct {
	data                  vm.Tokens
	section               ir.Section
	round, sections, each int // the first round, which has as many sequences as each other
	length                int64
}

func (a *array) write(name string) error {
	return cli.WriteFile(name, func(w io.Writer) error {
		out := bufio.NewWriterSize(w, 1<<20)
		header := fmt.Sprintf("{'descr': '<i4', 'fortran_order': False, 'shape': (3, %d, %d), }", a.sections*a.each, a.length)
		// The magic number, the version, the header's length and the header, which ends with a newline, take a multiple of 64 bytes.
		fmt.Fprintf(out, "\x93NUMPY\x01\x00\x76\x00%-117s\n", header)
		row := make([]int32, a.length)
		for _, as := range []int{ir.AsTokens, ir.AsLabels, ir.AsPositions} {
			for i := range a.sections * a.each {
				if err := a.read(as, int64(a.round+i/a.each), int64(i%a.each), row); err != nil {
					return err
				}
				if err := binary.Write(out, binary.LittleEndian, row); err != nil {
					return err
				}
			}
		}
		return out.Flush()
	})
}

// read reads one of the three kinds of numbers of a sequence. Data without documents and masks has a label for each token.
func (a *array) read(as int, round, sequence int64, row []int32) error {
	if marked, ok := a.data.(vm.Documents); ok && as != ir.AsTokens {
		return marked.Marks(as, a.section, round, sequence, 0, row, 1)
	}
	if as != ir.AsPositions {
		return a.data.Tokens(a.section, round, sequence, 0, row, 1)
	}
	for t := range row {
		row[t] = int32(t)
	}
	return nil
}
