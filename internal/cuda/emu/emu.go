// Package emu runs the CUDA kernels' own sources on the CPU, to test them without a GPU. It is for tests
// only.
//
//	cuemu.h        replaces the CUDA compiler's built-ins, for g++
//	scheduler.inc  the scheduler: a fiber for each thread of a block
//	emu.go         Build and Launch
//
// It detects wrong results, lanes that diverge at a warp operation, and barriers that some threads do not
// reach. By permuting the order of lanes and warps, it also detects missing barriers. Asynchronous copies and
// warpgroup products are delayed, which reveals missing waits and fences. It does not model time, register
// pressure, bank conflicts, or the memory ordering of plain accesses.
package emu

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"sppo.dev/internal/cuda/kernels"
)

//go:embed cuemu.h
var header string

//go:embed scheduler.inc
var scheduler string

// ErrNoCompiler is returned on machines without g++.
var ErrNoCompiler = errors.New("no g++ on this machine: it compiles the kernels for the CPU")

// Library holds the kernels compiled for the CPU.
type Library struct {
	Path                              string
	find, source, launch, omit, sites uintptr
}

// Folder returns the folder for libraries in the user's cache.
func Folder() (string, error) {
	folder, err := os.UserCacheDir()
	if err != nil {
		folder = os.TempDir()
	}
	folder = filepath.Join(folder, "sppo-emu")
	return folder, os.MkdirAll(folder, 0o755)
}

// cached returns the library in the user's cache, which each process opens or builds only once.
var cached = sync.OnceValues(func() (*Library, error) {
	folder, err := Folder()
	if err != nil {
		return nil, err
	}
	return Build(folder, nil)
})

// Need returns all kernels compiled for the CPU. On machines without g++ it skips the test.
func Need(t *testing.T) *Library {
	t.Helper()
	l, err := cached()
	if errors.Is(err, ErrNoCompiler) {
		t.Skip("SKIPPED: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Build compiles all kernel sources, and extra sources given by name and text, into a shared library that is
// cached in a folder.
func Build(folder string, extra map[string]string) (*Library, error) {
	sources := map[string]string{}
	for _, name := range kernels.Sources() {
		sources[name] = kernels.Text(name)
	}
	maps.Copy(sources, extra)
	return BuildSources(folder, sources)
}

// BuildSources is like Build, but compiles only the given sources. A name that ends in .cuh replaces a header.
func BuildSources(folder string, sources map[string]string) (*Library, error) {
	compiler, err := exec.LookPath("g++")
	if err != nil {
		return nil, ErrNoCompiler
	}
	texts := map[string]string{"cuemu.h": header, "scheduler.inc": scheduler}
	maps.Copy(texts, kernels.Headers())
	maps.Copy(texts, sources)
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(sources)), func(name string) bool { return filepath.Ext(name) == ".cuh" })
	return build(folder, compiler, texts, append(names, "scheduler.inc"))
}

// -O1 compiles in a quarter of -O2's time; the other options keep arithmetic as written.
var arguments = []string{"-fPIC", "-O1", "-std=c++20", "-ffp-contract=off", "-w", "-I", ".", "-include", "cuemu.h", "-x", "c++", "-c"}

// more lists further options: products of matrices run in the scheduler.
var more = map[string][]string{"scheduler.inc": {"-O3"}}

// build makes a library unless it exists. Processes that need the same library wait for the first.
func build(folder, compiler string, texts map[string]string, sources []string) (*Library, error) {
	sum := sha256.New()
	fmt.Fprintln(sum, compiler, arguments, more, texts, runtime.GOARCH) // maps print in the order of their keys
	path := filepath.Join(folder, "emu-"+hex.EncodeToString(sum.Sum(nil)[:8])+".so")
	lock, err := os.Create(path + ".lock")
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return nil, err
	}
	if _, err := os.Stat(path); err == nil {
		return open(path)
	}
	work, err := os.MkdirTemp(folder, "emu")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	for name, text := range texts {
		if err := os.WriteFile(filepath.Join(work, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	if err := compile(work, compiler, sources); err != nil {
		return nil, fmt.Errorf("compiling the kernels for the CPU: %w", err)
	}
	if err := os.Rename(filepath.Join(work, "new.so"), path); err != nil {
		return nil, err
	}
	return open(path)
}

// compile builds new.so from the sources in a folder, running one compiler per processor at a time.
func compile(folder, compiler string, sources []string) error {
	errs := make([]error, len(sources))
	limit := make(chan struct{}, runtime.NumCPU())
	objects := []string{"-shared", "-o", "new.so"}
	var done sync.WaitGroup
	for i, source := range sources {
		objects = append(objects, source+".o")
		limit <- struct{}{}
		done.Go(func() {
			defer func() { <-limit }()
			errs[i] = runIn(folder, compiler, slices.Concat(arguments, more[source], []string{source, "-o", source + ".o"}))
		})
	}
	done.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return runIn(folder, compiler, objects)
}

func runIn(folder, name string, arguments []string) error {
	command := exec.Command(name, arguments...)
	command.Dir = folder
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

func open(path string) (*Library, error) {
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, err
	}
	l := &Library{Path: path}
	for name, at := range map[string]*uintptr{"emu_find": &l.find, "emu_source": &l.source, "emu_launch": &l.launch, "emu_omit": &l.omit, "emu_sites": &l.sites} {
		if *at, err = purego.Dlsym(handle, name); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// Source returns the name of the file that defines a kernel, or "" if none does.
func (l *Library) Source(kernel string) string {
	if found := l.kernel(kernel); found != 0 {
		file, _, _ := purego.SyscallN(l.source, found)
		return text(file)
	}
	return ""
}

// Site is a place in a source that orders memory accesses: a wait, a fence or a barrier. Kind is the instruction.
type Site struct {
	Kind, Source string
	Line, Column int
}

// Omit makes all later launches skip a site, to show whether it is needed; the zero Site makes them skip none.
func (l *Library) Omit(s Site) {
	kind, source := append([]byte(s.Kind), 0), append([]byte(s.Source), 0)
	purego.SyscallN(l.omit, uintptr(unsafe.Pointer(&kind[0])), uintptr(unsafe.Pointer(&source[0])), uintptr(s.Line), uintptr(s.Column))
}

// Sites returns the sites that launches have reached since the last call, ordered by source and line. The first
// call returns none.
func (l *Library) Sites() (sites []Site) {
	found, _, _ := purego.SyscallN(l.sites)
	for line := range strings.Lines(text(found)) {
		var s Site
		if f := strings.Fields(strings.ReplaceAll(line, " ", "_")); len(f) == 4 {
			s.Kind, s.Source = f[0], filepath.Base(f[1])
			fmt.Sscan(f[2], &s.Line)
			fmt.Sscan(f[3], &s.Column)
			sites = append(sites, s)
		}
	}
	slices.SortFunc(sites, func(a, b Site) int {
		return cmp.Or(cmp.Compare(a.Source, b.Source), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column), cmp.Compare(a.Kind, b.Kind))
	})
	return sites
}

func (l *Library) kernel(name string) uintptr {
	c := append([]byte(name), 0)
	found, _, _ := purego.SyscallN(l.find, uintptr(unsafe.Pointer(&c[0])))
	return found
}

// Launch runs a kernel to its end. Each argument is 8 bytes. Memory that arguments point to must be pinned
// if it is Go memory. A seed other than 0 permutes the order in which lanes and warps run.
func (l *Library) Launch(kernel string, grid [3]int64, block, shared int64, args []uint64, seed uint64) error {
	found := l.kernel(kernel)
	if found == 0 {
		return fmt.Errorf("no source has a kernel %s", kernel)
	}
	var pins runtime.Pinner
	defer pins.Unpin()
	pins.Pin(&args[0])
	params := make([]unsafe.Pointer, len(args))
	for i := range args {
		params[i] = unsafe.Pointer(&args[i])
	}
	failure, _, _ := purego.SyscallN(l.launch, found, uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]), uintptr(block),
		uintptr(shared), uintptr(unsafe.Pointer(&params[0])), uintptr(seed))
	runtime.KeepAlive(params)
	if failure == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s", kernel, text(failure))
}

// text copies a C string.
func text(at uintptr) string {
	p := *(*unsafe.Pointer)(unsafe.Pointer(&at))
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
