package main

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"sppo.dev"
)

const root = "../.."

// copyModule copies the sources, and everything else that is packed, to a temporary folder and returns its
// path.
func copyModule(t *testing.T) string {
	t.Helper()
	to := t.TempDir()
	err := eachFile(func(name string) error {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return err
		}
		at := filepath.Join(to, name)
		return errors.Join(os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, text, 0o644))
	})
	if err != nil {
		t.Fatal(err)
	}
	return to
}

// eachFile calls visit with the path of each file of the module, except hidden files and build outputs.
func eachFile(visit func(name string) error) error {
	return fs.WalkDir(os.DirFS(root), ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name != "." && strings.HasPrefix(d.Name(), "."), name == "out", name == "bin":
			if d.IsDir() {
				return fs.SkipDir
			}
			return nil
		case d.IsDir():
			return nil
		}
		return visit(name)
	})
}

// Packing the same files always gives the same bytes, whatever the order of the map.
func TestPackIsExact(t *testing.T) {
	f := files{}
	for _, name := range []string{"b", "a", "c/d", "c/a", "z"} {
		f[name] = file{[]byte("the file " + name), 0o644}
	}
	first, err := f.pack("folder")
	for range 20 {
		again, againErr := f.clone().pack("folder")
		if err := errors.Join(err, againErr); err != nil || !bytes.Equal(first, again) {
			t.Fatalf("packed again, the bytes differ: %v", err)
		}
	}
}

// The archive is complete, and its programs are static and run where no other files exist. In the long tests,
// copies of the sources in different folders give identical archives.
func TestArchive(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("SKIPPED: the archive that this looks into is for Linux")
	}
	t.Setenv("GOFLAGS", "-buildvcs=false")
	p := platform{runtime.GOOS, runtime.GOARCH, true}
	archives := make([][]byte, 1)
	if os.Getenv("SPPO_LONG") != "" {
		archives = make([][]byte, 2)
	}
	for i := range archives {
		out := t.TempDir()
		if err := release(copyModule(t), out, []platform{p}, io.Discard); err != nil {
			t.Fatal(err)
		}
		var err error
		if archives[i], err = os.ReadFile(filepath.Join(out, p.name()+".tar.gz")); err != nil {
			t.Fatal(err)
		}
		sums, err := os.ReadFile(filepath.Join(out, "SHA256SUMS"))
		if want := checksum(archives[i]) + "  " + p.name() + ".tar.gz\n"; err != nil || string(sums) != want {
			t.Errorf("the checksums are %q, want %q: %v", sums, want, err)
		}
	}
	if !bytes.Equal(archives[0], archives[len(archives)-1]) {
		t.Error("two builds of the same sources differ")
	}
	folder := unpack(t, archives[0])
	for _, name := range []string{"LICENSE", "licenses/go", "licenses/github.com-spf13-pflag", "licenses/github.com-prometheus-client_golang-NOTICE", "README.md", "Containerfile", "bin/sppoc", "bin/sppovm",
		"share/man/man1/sppovm.1", "share/man/man5/sppo.5", "share/bash-completion/completions/sppoc", "internal/shipped/clusters/local.sppo", "examples/cluster/slurm.sh", "examples/cluster/jobset.yaml", "docs/tour.md", "docs/timeline.svg"} {
		if info, err := os.Stat(filepath.Join(folder, p.name(), name)); err != nil || info.Size() == 0 {
			t.Errorf("the archive has no %s: %v", name, err)
		}
	}
	for name := range commands {
		program := filepath.Join(folder, p.name(), "bin", name)
		f, err := elf.Open(program)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
			t.Errorf("%s is not static", name)
		}
		text, err := exec.Command(program, "--version").CombinedOutput()
		if err != nil || !strings.HasPrefix(string(text), name+" "+sppo.Version+" (") {
			t.Errorf("%s --version: %v: %s", name, err, text)
		}
	}
	alone := exec.Command("/bin/sppovm", "run", "/examples/tiny.sppo", "--set", "train.steps=1")
	alone.SysProcAttr = &syscall.SysProcAttr{Chroot: filepath.Join(folder, p.name())}
	alone.Dir = "/"
	if os.Getuid() != 0 {
		t.Log("not run with nothing else around it: that needs root")
	} else if text, err := alone.CombinedOutput(); err != nil || !strings.Contains(string(text), "done: 1 step in") {
		t.Errorf("sppovm alone: %v: %s", err, text)
	}
}

func unpack(t *testing.T, archive []byte) string {
	t.Helper()
	folder := t.TempDir()
	z, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(z)
	for {
		h, err := r.Next()
		if err == io.EOF {
			return folder
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		at := filepath.Join(folder, h.Name)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, data, h.FileInfo().Mode())); err != nil {
			t.Fatal(err)
		}
	}
}

// go install fetches the module from a proxy and builds both commands, which report their release. Because this
// compiles everything again, it is a long test.
func TestGoInstall(t *testing.T) {
	if os.Getenv("SPPO_LONG") == "" {
		t.Skip("SKIPPED: SPPO_LONG is not set")
	}
	version := "v" + sppo.Version
	proxy, bin := t.TempDir(), t.TempDir()
	at := filepath.Join(proxy, "sppo.dev", "@v")
	var module bytes.Buffer
	z := zip.NewWriter(&module)
	err := eachFile(func(name string) error {
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return err
		}
		w, err := z.Create("sppo.dev@" + version + "/" + name)
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	})
	mod, modErr := os.ReadFile(filepath.Join(root, "go.mod"))
	err = errors.Join(err, modErr, z.Close(), os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, version+".mod"), mod, 0o644),
		os.WriteFile(filepath.Join(at, version+".zip"), module.Bytes(), 0o644), os.WriteFile(filepath.Join(at, "list"), []byte(version+"\n"), 0o644),
		os.WriteFile(filepath.Join(at, version+".info"), []byte(`{"Version":"`+version+`"}`), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	cache, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Fatal(err)
	}
	known := "file://" + filepath.ToSlash(filepath.Join(strings.TrimSpace(string(cache)), "cache", "download"))
	c := exec.Command("go", "install", "sppo.dev/cmd/sppoc@"+version, "sppo.dev/cmd/sppovm@"+version)
	c.Dir = t.TempDir()
	c.Env = append(os.Environ(), "GOPROXY=file://"+filepath.ToSlash(proxy)+","+known, "GONOSUMDB=*", "GOFLAGS=-modcacherw",
		"GOMODCACHE="+t.TempDir(), "GOBIN="+bin, "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("go install: %v\n%s", err, out)
	}
	for _, name := range []string{"sppoc", "sppovm"} {
		text, err := exec.Command(filepath.Join(bin, name), "--version").CombinedOutput()
		if want := name + " " + sppo.Version + " (module " + version + " h1:"; err != nil || !strings.HasPrefix(string(text), want) {
			t.Errorf("%s --version: %v: %s, want %s...", name, err, text, want)
		} else {
			t.Logf("%s", text)
		}
	}
}
