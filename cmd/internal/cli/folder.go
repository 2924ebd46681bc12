package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/internal/data/corpus"
	"sppo.dev/internal/hf"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train/store"
	"sppo.dev/lang"
)

// JobFlags defines --set and the short forms of ShortFlags. It returns a function that gives all of them as overrides.
func JobFlags(flags *pflag.FlagSet) func() []string {
	set := SetFlag(flags, "set")
	short := ShortFlags(flags)
	return func() []string { return slices.Concat(*set, short()) }
}

// ShortFlags defines short forms of --set for what the folder of a model does not give: the cluster and the length of sequences.
func ShortFlags(flags *pflag.FlagSet) func() []string {
	cluster := flags.String("cluster", "", "use this `CLUSTER` instead of the spec's, for example h100 or 'h200(gpus_per_node = 1)'; required for a model folder")
	nodes := flags.String("nodes", "", "the `NUMBER` of nodes, like --set cluster.nodes=NUMBER")
	sequence := flags.String("sequence", "", "the number of `TOKENS` per sequence, such as 1M, like --set train.sequence=TOKENS; default for a model folder: the maximum that its config supports")
	Words(flags, "cluster", Clusters())
	return func() (set []string) {
		for _, f := range []struct{ key, value string }{{clusterKey, *cluster}, {nodesKey, *nodes}, {sequenceKey, *sequence}} {
			if f.value != "" {
				set = append(set, f.key+"="+f.value)
			}
		}
		return set
	}
}

// Overrides that describe a job for the model in a folder.
const (
	clusterKey  = "cluster"
	nodesKey    = "cluster.nodes"
	sequenceKey = "train.sequence"
)

// Clusters lists the shipped clusters.
func Clusters() []string { return lang.Shipped(shipped.Files, "cluster") }

// isFolder reports whether a path names a folder.
func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// exists explains how to get the folder of a model if neither a file nor a folder has the name of an input.
func exists(file string) error {
	ext := strings.TrimPrefix(strings.ToLower(filepath.Ext(file)), ".")
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) || file == "-" || slices.Contains(JobFiles, ext) {
		return nil
	}
	from := file
	if strings.Count(file, "/") != 1 || strings.HasPrefix(file, ".") || strings.HasPrefix(file, "/") {
		from = "OWNER/" + filepath.Base(file)
	}
	return Usagef("there is no file or folder %s; if you mean a model from the Hugging Face Hub, download its config first, for example with\n"+
		"  hf download %s config.json --local-dir %s", file, from, file)
}

// ModelSpec returns the text of a spec for the model in a folder, with the overrides of ShortFlags. Without a number of tokens
// per sequence, it is the maximum that the model's config supports.
func ModelSpec(dir string, set []string) (string, *hf.Model, error) {
	model, sequence, err := readFolder(dir, set)
	if err != nil {
		return "", nil, err
	}
	name, arguments, _ := strings.Cut(strings.TrimSuffix(valueOf(set, clusterKey), ")"), "(")
	if nodes := valueOf(set, nodesKey); nodes != "" {
		arguments = strings.TrimPrefix(arguments+", nodes = "+nodes, ", ")
	}
	return model.Spec(name, arguments, sequence), model, nil
}

// readFolder reads the model in a folder, and returns the number of tokens per sequence.
func readFolder(dir string, set []string) (model *hf.Model, sequence string, err error) {
	if corpus.IsFolder(dir) {
		return nil, "", Usagef("%s is a corpus of tokens, not a job: name it in a spec, as in data = tokens(%[1]q)", dir)
	}
	if _, err := os.Lstat(filepath.Join(dir, hf.ConfigFile)); err != nil && IsCheckpoint(dir) {
		return nil, "", Usagef("%s holds a checkpoint, not a job; to continue from it, give its job: sppovm run FILE --resume %[1]s", dir)
	}
	if model, err = hf.ReadModel(dir); err != nil {
		return nil, "", Wrong(err)
	}
	if valueOf(set, clusterKey) == "" {
		return nil, "", Usagef("%s is a folder: specify the machines to train its model on, for example --cluster h100 --nodes 1\n"+
			"the clusters are %s; sppovm probe measures this computer", dir, listed(Clusters()))
	}
	if sequence = valueOf(set, sequenceKey); sequence != "" {
		return model, sequence, nil
	}
	if model.Context() == 0 {
		return nil, "", Usagef("%s does not give the length of sequences: use --sequence", dir)
	}
	return model, fmt.Sprint(model.Context()), nil
}

// IsCheckpoint reports whether a folder is a checkpoint or holds checkpoints.
func IsCheckpoint(dir string) bool {
	if _, err := os.Lstat(filepath.Join(dir, store.ManifestFile)); err == nil {
		return true
	}
	steps, err := store.Steps(dir)
	return err == nil && len(steps) > 0
}

// loadFolder makes a spec for the model in a folder.
func loadFolder(dir string, set []string) (*lang.Spec, error) {
	model, sequence, err := readFolder(dir, set)
	if err != nil {
		return nil, err
	}
	if valueOf(set, sequenceKey) != "" {
		sequence = "1" // the override replaces it
	}
	spec, err := sppo.Parse(dir, []byte(model.Spec("", "", sequence)), set...)
	return spec, Wrong(err)
}

// NoteModel notes on stderr how training differs from the config of the model in a folder, and that the sequences of a job are
// longer than the config supports.
func NoteModel(env *Env, dir string, sequence int64) {
	if !isFolder(dir) {
		return
	}
	model, err := hf.ReadModel(dir)
	if err != nil { // the job was read before
		return
	}
	for _, notice := range model.Notices {
		fmt.Fprintf(env.Stderr, "note: %s\n", notice)
	}
	if beyond := model.Beyond(sequence); beyond != "" {
		fmt.Fprintf(env.Stderr, "note: %s; to extend its positions, set model.rope_theta or model.rope_scaling\n", beyond)
	}
}

// valueOf returns the value of the last override of a key, or "".
func valueOf(set []string, key string) (value string) {
	for _, s := range set {
		if name, v, _ := strings.Cut(s, "="); strings.TrimSpace(name) == key {
			value = v
		}
	}
	return value
}
