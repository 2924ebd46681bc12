package main

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// build compiles the commands for a platform into a folder, without symbols or paths from the build machine.
func build(root, folder string, p platform) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	folder, err := filepath.Abs(folder)
	if err != nil {
		return err
	}
	args := []string{"build", "-trimpath", "-ldflags", "-s -w -buildid=", "-o", folder + string(filepath.Separator)}
	if p.static {
		args = append(args, "-tags", "static")
	}
	c := exec.Command("go", append(args, "./cmd/sppoc", "./cmd/sppovm")...)
	c.Dir = root
	c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+p.os, "GOARCH="+p.arch, "GOAMD64=v1", "GOARM64=v8.0")
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("building for %s/%s: %w\n%s", p.os, p.arch, err, out)
	}
	return nil
}

// sharedFiles returns the files that every archive contains: completions and manual pages, printed by the
// programs in a folder, and examples, documents and licenses.
func sharedFiles(root, programs string) (files, error) {
	all := files{}
	for name, pages := range commands {
		program := filepath.Join(programs, name)
		for at, args := range map[string][]string{
			"share/bash-completion/completions/" + name:         {"completion", "bash"},
			"share/zsh/site-functions/_" + name:                 {"completion", "zsh"},
			"share/fish/vendor_completions.d/" + name + ".fish": {"completion", "fish"},
		} {
			if err := all.print(at, program, args...); err != nil {
				return nil, err
			}
		}
		for _, page := range pages {
			title, section, _ := strings.Cut(page, ".")
			if err := all.print("share/man/man"+section+"/"+page, program, "man", title); err != nil {
				return nil, err
			}
		}
	}
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md", "Containerfile"} {
		if err := all.add(name, filepath.Join(root, name), 0o644); err != nil {
			return nil, err
		}
	}
	for folder, endings := range map[string][]string{"examples": {".sppo", ".sh", ".yaml", ".txt"}, "internal/shipped": {".sppo"}, "docs": {".md", ".svg"}} {
		for _, ending := range endings {
			if err := all.addTree(root, folder, ending); err != nil {
				return nil, err
			}
		}
	}
	return all, all.addLicenses(root)
}

// print adds a file with the output of a program.
func (f files) print(at, program string, args ...string) error {
	var errs bytes.Buffer
	c := exec.Command(program, args...)
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), err, errs.String())
	}
	f[at] = file{out, 0o644}
	return nil
}

// addTree adds the files with a given extension below a folder.
func (f files) addTree(root, folder, ending string) error {
	return fs.WalkDir(os.DirFS(root), folder, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || path.Ext(name) != ending {
			return err
		}
		mode := fs.FileMode(0o644)
		if ending == ".sh" {
			mode = 0o755
		}
		return f.add(name, filepath.Join(root, filepath.FromSlash(name)), mode)
	})
}

// addLicenses adds the licenses of Go and of every module in the programs, as these licenses require.
func (f files) addLicenses(root string) error {
	list := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}\t{{.Dir}}{{end}}{{end}}", "./cmd/sppoc", "./cmd/sppovm")
	goroot := exec.Command("go", "env", "GOROOT")
	list.Dir, goroot.Dir = root, root
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("listing modules: %w", err)
	}
	home, err := goroot.Output()
	if err != nil {
		return fmt.Errorf("finding Go: %w", err)
	}
	modules := append(strings.Fields(strings.ReplaceAll(string(out), "\t", "=")), "go="+strings.TrimSpace(string(home)))
	slices.Sort(modules)
	for _, m := range slices.Compact(modules) {
		name, folder, _ := strings.Cut(m, "=")
		found, err := licenseIn(folder)
		if err != nil {
			return fmt.Errorf("the license of %s: %w", name, err)
		}
		to := "licenses/" + strings.ReplaceAll(name, "/", "-")
		if err := f.add(to, found, 0o644); err != nil {
			return err
		}
		if notice := filepath.Join(folder, "NOTICE"); exists(notice) { // the Apache license requires that it be included
			if err := f.add(to+"-NOTICE", notice, 0o644); err != nil {
				return err
			}
		}
	}
	return nil
}

// licenseIn finds the license of a module. That of Go itself may be in the parent folder.
func licenseIn(folder string) (string, error) {
	for _, name := range []string{"LICENSE", "COPYING", "LICENSE.txt", "LICENSE.md", "../LICENSE"} {
		if at := filepath.Join(folder, name); exists(at) {
			return at, nil
		}
	}
	return "", fmt.Errorf("%s has none", folder)
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}
