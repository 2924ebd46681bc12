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

// clusterPrefix marks, among overrides, the cluster of a job whose model comes from a folder.
const clusterPrefix = "cluster="

// FolderFlags adds flags that make a job of the folder of a model: without a spec, something else must say on which machines and
// on how many tokens. The function returns what follows for --set, appended to that.
func FolderFlags(flags *pflag.FlagSet) func(set []string) ([]string, error) {
	cluster := flags.String("cluster", "", "of a folder: a shipped `CLUSTER`, as in h100, or 'h200(gpus_per_node = 1)'")
	nodes := flags.Int("nodes", 0, "of a folder: how many nodes the cluster has, where it is not one")
	sequence := flags.String("sequence", "", "of a folder: `TOKENS` of a sequence, as in 1M; what the model's config has otherwise")
	return func(set []string) ([]string, error) {
		if *sequence != "" {
			set = append(set[:len(set):len(set)], "train.sequence="+*sequence)
		}
		if *cluster == "" {
			if flags.Changed("nodes") {
				return nil, Usagef("--nodes goes with --cluster")
			}
			return set, nil
		}
		name, arguments, ok := strings.Cut(strings.TrimSuffix(*cluster, ")"), "(")
		if ok != strings.HasSuffix(*cluster, ")") {
			return nil, Usagef("--cluster %s: it is a name, or a name with arguments as in h200(gpus_per_node = 1)", *cluster)
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

// loadFolder makes a spec of the model in a folder.
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
		return nil, Usagef("%s is a folder: --cluster says on which machines its model is to be trained, as in --cluster h100 --nodes 1", dir)
	}
	model, err := hf.ReadModel(dir)
	if err != nil {
		return nil, Wrong(err)
	}
	sequence := model.Context()
	if sequence == 0 {
		sequence = 1 // and the override has the right one
		if !overrides(others, "train.sequence") {
			return nil, Usagef("%s does not say how long its sequences are: give --sequence", dir)
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
