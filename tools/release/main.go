// Command release builds the archives of a release: the commands for every platform, with manual pages,
// completions, examples and licenses. Archives are reproducible: the same sources, built with the same
// release of Go, give the same bytes.
//
//	main.go   platforms, and the files of an archive
//	build.go  runs the go command
//	pack.go   archives and checksums
//
// It does not import the compiler; it runs the binaries that it has built.
package main

import (
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"

	"github.com/spf13/pflag"

	"sppo.dev"
	"sppo.dev/ir"
)

// platform is the target of an archive.
type platform struct {
	os, arch string
	static   bool // sppovm needs no loader, but cannot use GPUs or OpenBLAS
}

// platforms lists the targets. Programs for macOS are never static.
var platforms = []platform{
	{"linux", "amd64", false}, {"linux", "amd64", true}, {"linux", "arm64", false}, {"linux", "arm64", true},
	{"darwin", "amd64", false}, {"darwin", "arm64", false},
}

// name returns the name of the archive and of the folder in it.
func (p platform) name() string {
	name := fmt.Sprintf("sppo-%s-%s-%s", sppo.Version, p.os, p.arch)
	if p.static {
		name += "-static"
	}
	return name
}

// mostBytes is the maximum size of an archive.
const mostBytes = 30 << 20

// commands lists the programs of an archive with their manual pages.
var commands = map[string][]string{"sppoc": {"sppoc.1", "sppo.5"}, "sppovm": {"sppovm.1"}}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := pflag.NewFlagSet("release", pflag.ContinueOnError)
	out := flags.StringP("output", "o", "out/release", "the folder for the archives")
	only := flags.String("only", "", "build only the archives whose names match this expression")
	if err := flags.Parse(args); err != nil {
		return err
	}
	wanted, err := regexp.Compile(*only)
	if err != nil {
		return err
	}
	var list []platform
	for _, p := range platforms {
		if wanted.MatchString(p.name()) {
			list = append(list, p)
		}
	}
	return release(".", *out, list, os.Stderr)
}

// release builds the archives of the module at root, and their checksums.
func release(root, out string, list []platform, progress io.Writer) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp("", "release")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	here := platform{runtime.GOOS, runtime.GOARCH, runtime.GOOS == "linux"}
	if err := build(root, filepath.Join(temp, here.name()), here); err != nil {
		return err
	}
	shared, err := sharedFiles(root, filepath.Join(temp, here.name()))
	if err != nil {
		return err
	}
	sums := map[string]string{}
	for _, p := range list {
		folder := filepath.Join(temp, p.name())
		if p != here {
			if err := build(root, folder, p); err != nil {
				return err
			}
		}
		files := shared.clone()
		for name := range commands {
			if err := files.add(path.Join("bin", name), filepath.Join(folder, name), 0o755); err != nil {
				return err
			}
		}
		archive := p.name() + ".tar.gz"
		data, err := files.pack(p.name())
		if err != nil {
			return err
		}
		if len(data) > mostBytes {
			return fmt.Errorf("%s has %d bytes, but the limit is %d", archive, len(data), mostBytes)
		}
		if err := ir.ReplaceFile(filepath.Join(out, archive), writes(data)); err != nil {
			return err
		}
		sums[archive] = checksum(data)
		fmt.Fprintf(progress, "%s: %.1f MB\n", archive, float64(len(data))/1e6)
	}
	return ir.ReplaceFile(filepath.Join(out, "SHA256SUMS"), writes(sumLines(sums)))
}
