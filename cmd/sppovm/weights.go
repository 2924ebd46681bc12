package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/data/tokenizer"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// openWeights opens the folder of initial weights and checks that the weights belong to the program's model. It
// returns nil if --weights is not given.
func (f *runFlags) openWeights(p *ir.Program) (_ *startWeights, err error) {
	switch {
	case f.adapter != "" && f.weights == "":
		return nil, cli.Usagef("--adapter needs --weights: the folder of the model that the adapter belongs to")
	case f.adapter != "" && p.Model.Adapter == "":
		return nil, cli.Usagef("--adapter: the program trains no adapter; its spec needs train.adapter = lora(...)")
	case f.weights == "":
		return nil, nil
	}
	model, err := readModel(f.weights)
	if err != nil {
		return nil, cli.Wrong(err)
	}
	changed, err := sameModel(model, &p.Model, p.Run.Sequence, "the program")
	if err != nil {
		return nil, cli.Wrong(err)
	}
	w := &startWeights{}
	if changed != "" {
		w.notices = append(w.notices, changed)
	}
	if beyond := model.Beyond(p.Run.Sequence); beyond != "" {
		w.notices = append(w.notices, beyond+"; the export will have the new limit")
	}
	if note := model.Quantized(); note != "" {
		w.notices = append(w.notices, note)
	}
	defer func() {
		if err != nil {
			w.Close()
		}
	}()
	if w.Weights, err = model.OpenWeights(hf.OfAdapter(p.Tensors, false)); err != nil {
		return nil, cli.Wrong(err)
	}
	if f.adapter != "" {
		of, before := lang.Model(p.Model), len(model.Notices)
		if w.adapter, err = model.OpenAdapter(f.adapter, p.Tensors, &of); err != nil {
			return nil, cli.Wrong(err)
		}
		w.notices = append(w.notices, model.Notices[before:]...)
	}
	for i := range p.Tensors {
		if name := p.Tensors[i].Name; !f.cast && !hf.IsAdapter(name) && w.Wider(name, train.Precision(p, i)) {
			return nil, cli.Usagef("%s: the program stores %s only as bf16, which rounds the folder's values; --cast allows this",
				f.weights, name)
		}
	}
	return w, nil
}

// readModel reads the model in the folder of --weights.
func readModel(dir string) (*hf.Model, error) {
	model, err := hf.ReadModel(dir)
	if err != nil && cli.IsCheckpoint(dir) {
		return nil, fmt.Errorf("--weights %s: it is a checkpoint, which --resume takes; sppovm export %[1]s -o FOLDER writes its weights to "+
			"the folder of a model, which --weights takes", dir)
	}
	return model, err
}

// startWeights are the initial weights of a run: those of a folder and possibly those of an adapter. An adapter
// that is not loaded from a folder keeps the initial values that the program's init section sets.
type startWeights struct {
	*hf.Weights
	adapter *hf.Weights // nil: none
	notices []string    // about positions and about the adapter
}

// Has reports whether there are values for a tensor.
func (w *startWeights) Has(tensor string) bool { return w.adapter != nil || !hf.IsAdapter(tensor) }

// Read implements vm.Weights.
func (w *startWeights) Read(tensor string, row, col, rows, cols int64, out []float32) error {
	if hf.IsAdapter(tensor) {
		return w.adapter.Read(tensor, row, col, rows, cols, out)
	}
	return w.Weights.Read(tensor, row, col, rows, cols, out)
}

// Describe implements vm.Weights.
func (w *startWeights) Describe() string {
	if w.adapter == nil {
		return w.Weights.Describe()
	}
	return w.Weights.Describe() + ", adapter of " + w.adapter.Describe()
}

// Close closes the files.
func (w *startWeights) Close() error {
	var errs []error
	for _, part := range []*hf.Weights{w.Weights, w.adapter} {
		if part != nil {
			errs = append(errs, part.Close())
		}
	}
	return errors.Join(errs...)
}

// sameModel compares the model of a folder with that of a program or a checkpoint. The two may store weights in
// different types, and have different position settings, which changed describes.
func sameModel(model *hf.Model, other *ir.Model, sequence int64, whose string) (changed string, err error) {
	l, err := model.Lang(sequence, other.DType)
	var d lang.Diagnostics
	if errors.As(err, &d) {
		return "", fmt.Errorf("%s: %w", model.Dir, d[0])
	}
	if err != nil {
		return "", err
	}
	mine, base := ir.Model(l), ir.Model(lang.Model(*other).Base())
	moved := mine.WithPositionsOf(&base)
	if a, b := moved.Difference(&base); a != "" {
		return "", fmt.Errorf("%s is a different model from %s: it has %s, but %s has %s", model.Dir, whose, a, whose, b)
	}
	if a, b := mine.Difference(&base); a != "" {
		changed = fmt.Sprintf("%s has %s, but %s has %s", model.Dir, a, whose, b)
	}
	return changed, nil
}

// load sets the weights to those in the folder and, if there is one, in the adapter.
func (r *training) load(ctx context.Context, w *startWeights) error {
	if len(w.Ignored) > 0 {
		r.show.warn("weights that the model does not need: %s", strings.Join(w.Ignored, ", "))
	}
	origin, err := filepath.Abs(r.f.weights)
	if err != nil {
		return err
	}
	if err := r.job.Load(ctx, origin); err != nil {
		return err
	}
	r.show.say("loaded %s", r.f.weights)
	if w.adapter != nil {
		r.show.say("loaded the adapter %s", r.f.adapter)
	}
	for _, notice := range w.notices {
		r.show.warn("note: %s", notice)
	}
	return nil
}

// exportFlags are the flags of export.
type exportFlags struct {
	out, from, dtype, tokenizer string
	sequence                    int64
	adapter, merge              bool
}

func export(flags *pflag.FlagSet) cli.Action {
	var f exportFlags
	flags.StringVarP(&f.out, "output", "o", "", "write to this `FOLDER`, which must be empty or must not exist")
	flags.StringVar(&f.from, "from", "", "take the config, the tokenizer and other files from this `FOLDER`, which has a whole model, instead of the one that the run started from")
	flags.StringVar(&f.tokenizer, "tokenizer", "", "take the tokenizer from this `FOLDER`, for example one that sppoc train-tokenizer wrote")
	flags.Int64Var(&f.sequence, "sequence", 0, "max_position_embeddings of the exported config, in `TOKENS`; default: that of the folder, or the length of the run's sequences if they are longer")
	cli.Choice(flags, &f.dtype, "dtype", "", "type of the weights (default: as in the --from folder or the folder that the run started from)", hf.ExportTypes...)
	flags.BoolVar(&f.adapter, "adapter", false, "write only the adapters, in PEFT format")
	flags.BoolVar(&f.merge, "merge", false, "write the entire model, with the adapters merged into its matrices")
	return func(env *cli.Env, args []string) error {
		if f.out == "" {
			return cli.Usagef("export: give the output folder with -o")
		}
		if f.adapter && (f.merge || f.dtype != "" || f.tokenizer != "") {
			return cli.Usagef("export: --adapter writes no weights of the model, so --merge, --dtype and --tokenizer do not apply")
		}
		if flags.Changed("sequence") && f.sequence <= 0 {
			return cli.Usagef("--sequence %d: it must be 1 or more", f.sequence)
		}
		if err := hf.CheckTarget(f.out); err != nil {
			return cli.Wrong(err)
		}
		c, err := train.OpenCheckpoint(args[0])
		if err != nil {
			return cli.Wrong(noCheckpoint("export", args[0], err))
		}
		defer c.Close()
		of := lang.Model(c.Model)
		e := hf.Export{Values: &hf.Merged{Values: c, Model: &of}, Tensors: hf.OfAdapter(c.Weights(), false), DType: f.dtype, Tokenizer: f.tokenizer}
		if err := f.checkTokenizer(env, c.Model.Vocab); err != nil {
			return cli.Wrong(err)
		}
		if f.from == "" && c.Origin == "" {
			e.From, e.Config, err = f.describe(c)
		} else {
			e.From, e.Edited, err = f.origin(c)
		}
		if err != nil {
			return cli.Wrong(err)
		}
		if err := f.write(env.Context, c, &e); err != nil {
			return err
		}
		fmt.Fprintf(env.Stderr, "wrote %s: the weights after step %d\n", f.out, c.Step)
		if note := e.From.Quantized(); note != "" && f.dtype == "" {
			fmt.Fprintf(env.Stderr, "note: %s\n", note)
		}
		if !f.adapter && !hf.HasTokenizer(f.out) {
			fmt.Fprintf(env.Stderr, "note: %s has no tokenizer, which programs need to read text: export with --tokenizer FOLDER to add one\n", f.out)
		}
		return nil
	}
}

// checkTokenizer checks that --tokenizer names a folder whose tokenizer has the tokens of the model.
func (f *exportFlags) checkTokenizer(env *cli.Env, vocab int) error {
	if f.tokenizer == "" {
		return nil
	}
	if info, err := os.Stat(f.tokenizer); err == nil && !info.IsDir() {
		return fmt.Errorf("--tokenizer %s is a file: name the folder that contains the tokenizer", f.tokenizer)
	}
	t, err := tokenizer.Open(f.tokenizer)
	if err != nil {
		return fmt.Errorf("--tokenizer: %w", err)
	}
	note, err := ofModel(vocab, t, f.tokenizer)
	if note != "" {
		fmt.Fprintf(env.Stderr, "note: %s\n", note)
	}
	return err
}

// describe returns a model and its config for a run that did not start from a folder.
func (f *exportFlags) describe(c *train.Checkpoint) (*hf.Model, []byte, error) {
	sequence := cmp.Or(f.sequence, c.Sequence)
	switch {
	case c.Model.Positions == lang.PositionsLearned:
		sequence = sequenceOf(c)
	case sequence == 0:
		return nil, nil, errors.New("the run did not start from a folder: set the length of its sequences with --sequence, " +
			"or name a folder of the same model with --from, for config and tokenizer")
	}
	base := ir.Model(lang.Model(c.Model).Base())
	return hf.Describe(&base, sequence)
}

// write writes the requested folder.
func (f *exportFlags) write(ctx context.Context, c *train.Checkpoint, e *hf.Export) error {
	of := lang.Model(c.Model)
	switch adapts := of.Adapter != ""; {
	case !adapts && (f.adapter || f.merge):
		return cli.Usagef("export: the checkpoint has no adapters: omit --adapter and --merge")
	case adapts && !f.adapter && !f.merge:
		return cli.Usagef("export: the checkpoint has adapters: use --adapter to write only the adapters, or --merge to " +
			"write a model with the adapters merged")
	case f.adapter:
		return cli.Wrong(e.From.WriteAdapter(ctx, f.out, c, c.Weights(), &of))
	}
	return e.Write(ctx, f.out)
}

// origin returns the model of the folder that provides everything in the export except the values of tensors. If the run
// has changed position settings or the length of sequences, it also returns the config.json with these changes.
func (f *exportFlags) origin(c *train.Checkpoint) (*hf.Model, []byte, error) {
	dir := f.from
	if dir == "" {
		dir = c.Origin
	}
	switch _, err := os.Stat(dir); {
	case err != nil && f.from == "":
		return nil, nil, fmt.Errorf("the run started from %s, which does not exist: name a folder of the same model with --from", dir)
	case err != nil:
		return nil, nil, err
	}
	if _, err := os.Stat(filepath.Join(dir, hf.ConfigFile)); f.from != "" && errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("--from %s: the folder has no %s: name the folder of a whole model, with its config and its weights; "+
			"for a model that a spec describes, omit --from; a tokenizer alone is given with --tokenizer", dir, hf.ConfigFile)
	}
	model, err := hf.ReadModel(dir)
	if err != nil {
		return nil, nil, err
	}
	if _, err := sameModel(model, &c.Model, sequenceOf(c), "the checkpoint"); err != nil {
		return nil, nil, err
	}
	w, err := model.OpenWeights(hf.OfAdapter(c.Weights(), false)) // provides the types and names of tensors
	if err != nil {
		return nil, nil, err
	}
	if err := w.Close(); err != nil {
		return nil, nil, err
	}
	base := ir.Model(lang.Model(c.Model).Base())
	config, err := model.WithPositions(&base, cmp.Or(f.sequence, max(model.Context(), c.Sequence)))
	return model, config, err
}

// sequenceOf returns a sequence length that the checkpoint's model supports.
func sequenceOf(c *train.Checkpoint) int64 {
	for _, t := range c.Weights() {
		if t.Name == "pos" {
			return t.Shape[0]
		}
	}
	return 1 << 10
}
