package cli

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/hf"
	"sppo.dev/lang"
)

// clusterPrefix is the start of the override that names the cluster of a job whose model comes from a folder.
const clusterPrefix = "cluster="

// FolderFlags adds flags that define a job for a model folder. Because there is no spec, the flags must give the
// machines and the number of tokens. FolderFlags returns a function that appends the equivalent overrides to those
// from --set.
func FolderFlags(flags *pflag.FlagSet) func(set []string) ([]string, error) {
	cluster := flags.String("cluster", "", "for a model folder: a built-in `CLUSTER`, such as h100 or 'h200(gpus_per_node = 1)'")
	nodes := flags.Int("nodes", 0, "for a model folder: the number of nodes in the cluster")
	sequence := flags.String("sequence", "", "for a model folder: the number of `TOKENS` per sequence, such as 1M; default: the maximum that the model's config supports")
	return func(set []string) ([]string, error) {
		if *sequence != "" {
			set = append(set[:len(set):len(set)], "train.sequence="+*sequence)
		}
		if *cluster == "" {
			if flags.Changed("nodes") {
				return nil, Usagef("--nodes needs --cluster")
			}
			return set, nil
		}
		name, arguments, ok := strings.Cut(strings.TrimSuffix(*cluster, ")"), "(")
		if ok != strings.HasSuffix(*cluster, ")") {
			return nil, Usagef("--cluster %s: write a name, or a name with arguments, such as h200(gpus_per_node = 1)", *cluster)
		}
		if flags.Changed("nodes") {
			arguments = strings.TrimPrefix(arguments+", nodes = "+strconv.Itoa(*nodes), ", ")
		}
		return append(set[:len(set):len(set)], clusterPrefix+name+"("+arguments+")"), nil
	}
}

// isFolder reports whether a path names a folder.
func isFolder(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// loadFolder makes a spec for the model in a folder.
func loadFolder(dir string, set []string) (*lang.Spec, error) {
	cluster := ""
	var others []string
	for _, s := range set {
		if c, ok := strings.CutPrefix(s, clusterPrefix); ok {
			cluster = c
		} else {
			others = append(others, s)
		}
	}
	if cluster == "" {
		return nil, Usagef("%s is a folder: specify the machines to train its model on, for example --cluster h100 --nodes 1", dir)
	}
	model, err := hf.ReadModel(dir)
	if err != nil {
		return nil, Wrong(err)
	}
	sequence := model.Context()
	if sequence == 0 {
		sequence = 1 // an override replaces it
		if !overrides(others, "train.sequence") {
			return nil, Usagef("%s does not give the length of sequences: use --sequence", dir)
		}
	}
	name, arguments, _ := strings.Cut(strings.TrimSuffix(cluster, ")"), "(")
	spec, err := sppo.Parse(dir, []byte(model.Spec(name, arguments, fmt.Sprint(sequence))), others...)
	return spec, Wrong(err)
}

func overrides(set []string, key string) bool {
	for _, s := range set {
		if name, _, _ := strings.Cut(s, "="); strings.TrimSpace(name) == key {
			return true
		}
	}
	return false
}
