package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"

	"github.com/spf13/pflag"

	"sppo.dev"
)

// Version names a command's release, its build and the Go release that compiled it. Builds of the same source
// have the same version, and builds that may behave differently have different versions. The processes of a
// job compare versions.
func Version(name string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return fmt.Sprintf("%s %s (%s, %s)", name, sppo.Version, buildOf(info, executableHash), runtime.Version())
}

// buildOf identifies the source of a build by the checksum of the module that go install fetched or by the
// commit of an unmodified checkout. Otherwise it uses a hash of the executable, which also depends on
// platform and paths.
func buildOf(info *debug.BuildInfo, executable func() (string, error)) string {
	if info.Main.Sum != "" {
		return fmt.Sprintf("module %s %s", info.Main.Version, info.Main.Sum)
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if commit := settings["vcs.revision"]; len(commit) >= 12 && settings["vcs.modified"] == "false" {
		return "commit " + commit[:12]
	}
	hash, err := executable()
	if err != nil {
		return "unknown build"
	}
	return "build " + hash
}

// executableHash returns the start of the SHA-256 of the running executable, in hexadecimal.
func executableHash() (string, error) {
	f, err := openExecutable()
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(sum.Sum(nil)[:6]), nil
}

// openExecutable opens the file of the running program. On Linux, /proc/self/exe refers to that file even after it
// has been replaced on disk. Elsewhere, the file is found by os.Executable or else by the command name.
func openExecutable() (*os.File, error) {
	if f, err := os.Open("/proc/self/exe"); err == nil {
		return f, nil
	}
	path, err := os.Executable()
	if err != nil {
		path, err = exec.LookPath(os.Args[0])
	}
	if err != nil {
		return nil, err
	}
	return os.Open(path)
}

// versionCommand returns the version command, which every program has.
func (a *App) versionCommand() Command {
	return Command{Name: "version", Doc: "print the version and build", Setup: func(*pflag.FlagSet) Action {
		return func(env *Env, _ []string) error {
			_, err := fmt.Fprintln(env.Stdout, Version(a.Name))
			return err
		}
	}}
}
