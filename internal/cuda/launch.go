package cuda

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/cuda/nvrtc"
)

// codeSource provides the machine code of a kernel source for an architecture.
type codeSource interface {
	image(source string, arch int) ([]byte, error)
	// compiled is like image but ignores precompiled images. It is called when the driver has refused one.
	compiled(source string, arch int) ([]byte, error)
	// knowsHopper reports whether kernels for Hopper are available.
	knowsHopper() bool
}

// kernel returns a kernel, loading its source's module on first use.
func (d *Device) kernel(source, name string) (driver.Func, error) {
	module, ok := d.modules[source]
	if !ok {
		image, err := d.machine.code.image(source, d.gpu.arch())
		if err != nil {
			return 0, err
		}
		if module, err = d.api.LoadModule(image); err != nil {
			if module, err = d.loadCompiled(source, err); err != nil {
				return 0, fmt.Errorf("%s: %w", source, err)
			}
		}
		d.modules[source] = module
		d.later(func() error { return d.api.UnloadModule(module) })
		if err := d.recordWaits(module, source); err != nil {
			return 0, fmt.Errorf("%s: %w", source, err)
		}
	}
	key := [2]string{source, name}
	if f, ok := d.functions[key]; ok {
		return f, nil
	}
	f, err := d.api.Function(module, name)
	if err == nil {
		d.functions[key] = f
	}
	return f, err
}

// loadCompiled compiles and loads a source after the driver has refused its precompiled image.
func (d *Device) loadCompiled(source string, refused error) (driver.Module, error) {
	image, err := d.machine.code.compiled(source, d.gpu.arch())
	if err != nil {
		return 0, errors.Join(refused, err)
	}
	d.machine.notes.add("%s was compiled here, because the driver refused its precompiled image: %v", source, refused)
	return d.api.LoadModule(image)
}

// KernelsVariable is the environment variable that names a folder of compiled kernels, as written by KeepKernels.
// Images in that folder take precedence over compilation, so a machine needs no compiler to run them.
const KernelsVariable = "SPPO_CUDA_KERNELS"

// CheckVariable is the environment variable that sets Options.Check.
const CheckVariable = "SPPO_CUDA_CHECK"

// compiler compiles sources with NVRTC, which it opens on first use, and caches the results in a folder. The
// ranks of a process share one compiler.
type compiler struct {
	folder  string // empty: the user's cache
	carried string // a folder of images compiled elsewhere; empty: none
	check   bool   // limit waits
	images  once[string, []byte]
	made    once[string, []byte]

	opened  sync.Once
	api     *nvrtc.API
	version string
	archs   []int
	err     error

	askedHopper sync.Once
	hopper      bool
}

func (c *compiler) open() error {
	c.opened.Do(func() {
		if c.api, c.err = nvrtc.Open(); c.err != nil {
			return
		}
		if c.version, c.err = c.api.Version(); c.err != nil {
			return
		}
		c.archs, c.err = c.api.Archs()
	})
	return c.err
}

// oldestForHopper is the first compiler release that supports sm_90a.
const oldestForHopper = 12

// knowsHopper answers once, because every instruction of a program asks, and reading an image takes milliseconds.
func (c *compiler) knowsHopper() bool {
	c.askedHopper.Do(func() { c.hopper = c.findsHopper() })
	return c.hopper
}

func (c *compiler) findsHopper() bool {
	for _, source := range kernels.Sources() {
		if target := kernels.Target(source); target != "" && c.carriedImage(source, target) != nil {
			return true
		}
	}
	if c.open() != nil {
		return false
	}
	major, _, _ := strings.Cut(c.version, ".")
	release, err := strconv.Atoi(major)
	return err == nil && release >= oldestForHopper
}

func (c *compiler) image(source string, arch int) ([]byte, error) {
	return c.images.get(fmt.Sprint(source, " ", arch), func() ([]byte, error) {
		target := kernels.Target(source)
		if target == "" {
			target = strconv.Itoa(arch)
		}
		if image := c.carriedImage(source, target); image != nil {
			return image, nil
		}
		return c.compiled(source, arch)
	})
}

func (c *compiler) compiled(source string, arch int) ([]byte, error) {
	return c.made.get(fmt.Sprint(source, " ", arch), func() ([]byte, error) {
		if err := c.open(); err != nil {
			return nil, err
		}
		option, err := architecture(c.archs, arch)
		if target := kernels.Target(source); target != "" {
			option, err = "--gpu-architecture=sm_"+target, nil
		}
		if err != nil {
			return nil, err
		}
		src, options := sourceOf(source), c.options(source, option)
		file := c.file(src, options)
		if image, err := os.ReadFile(file); err == nil && len(image) > 0 {
			return image, nil
		}
		out, err := c.api.Compile(src, options...)
		if err != nil {
			return nil, fmt.Errorf("compiling %s: %w", source, err)
		}
		keep(file, out.Image)
		return out.Image, nil
	})
}

// options returns the compiler options for a source, starting with the given architecture option. Only kernels
// written for one architecture contain waits that can be limited.
func (c *compiler) options(source, architecture string) []string {
	out := []string{architecture, "--std=c++17", "--fmad=true"}
	if c.check && kernels.Target(source) != "" {
		out = append(out, "-DBOUNDED_WAITS")
	}
	return out
}

// carriedImage returns a source's image for an architecture such as 90a, compiled elsewhere from the same text,
// or nil if there is none.
func (c *compiler) carriedImage(source, target string) []byte {
	if c.carried == "" {
		return nil
	}
	file, err := os.Open(carriedFile(c.carried, source, c.options(source, "--gpu-architecture=sm_"+target)))
	if err != nil {
		return nil
	}
	defer file.Close()
	packed, err := gzip.NewReader(file)
	if err != nil {
		return nil
	}
	image, err := io.ReadAll(packed)
	if err != nil || len(image) == 0 {
		return nil
	}
	return image
}

// carriedFile returns the path of a source's precompiled image, which is compressed.
func carriedFile(folder, source string, options []string) string {
	return filepath.Join(folder, imageName("", sourceOf(source), options)+".gz")
}

func writePacked(path string, image []byte) error {
	var packed bytes.Buffer
	w := gzip.NewWriter(&packed)
	_, err := w.Write(image)
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	return os.WriteFile(path, packed.Bytes(), 0o644)
}

// KeepKernels writes the machine code of every kernel for architectures such as 80 and 90a into a folder, for
// use with KernelsVariable. The function compile compiles a source; if it is nil, NVRTC does.
func KeepKernels(folder string, targets []string, compile func(source string, options []string) ([]byte, error)) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	c := &compiler{}
	if compile == nil {
		if err := c.open(); err != nil {
			return err
		}
		compile = func(source string, options []string) ([]byte, error) {
			file := c.file(sourceOf(source), options)
			if image, err := os.ReadFile(file); err == nil && len(image) > 0 {
				return image, nil
			}
			out, err := c.api.Compile(sourceOf(source), options...)
			if err != nil {
				return nil, err
			}
			keep(file, out.Image)
			return out.Image, nil
		}
	}
	for _, source := range kernels.Sources() {
		for _, target := range targets {
			own := kernels.Target(source)
			if own != target && (own != "" || strings.HasSuffix(target, "a")) {
				continue
			}
			for _, c.check = range []bool{false, true}[:1+min(len(own), 1)] {
				options := c.options(source, "--gpu-architecture=sm_"+target)
				image, err := compile(source, options)
				if err == nil {
					err = writePacked(carriedFile(folder, source, options), image)
				}
				if err != nil {
					return fmt.Errorf("%s for sm_%s: %w", source, target, err)
				}
			}
		}
	}
	return nil
}

// architecture returns the compiler option that selects the output for a card. If the compiler supports the
// card's architecture, the output is machine code; otherwise it is PTX, which the driver translates, for the
// newest older architecture that the compiler supports.
func architecture(known []int, arch int) (string, error) {
	best := 0
	for _, a := range known {
		if a == arch {
			return fmt.Sprintf("--gpu-architecture=sm_%d", arch), nil
		}
		if a < arch {
			best = max(best, a)
		}
	}
	if best < oldestArch {
		return "", fmt.Errorf("the GPU's architecture %d is not among those that NVRTC compiles for: %v", arch, known)
	}
	return fmt.Sprintf("--gpu-architecture=compute_%d", best), nil
}

// oldestArch is Ampere, whose instructions the kernels use.
const oldestArch = 80

// file returns the path of a cached image, or "" if there is no cache folder.
func (c *compiler) file(s nvrtc.Source, options []string) string {
	folder := cacheFolder(c.folder)
	if folder == "" {
		return ""
	}
	return filepath.Join(folder, imageName(c.version, s, options))
}

// imageName returns a name derived from everything that an image depends on: the compiler's release (unless it
// is ""), the options and the texts.
func imageName(version string, s nvrtc.Source, options []string) string {
	hash := sha256.New()
	for _, part := range append([]string{version, s.Name, s.Text}, options...) {
		fmt.Fprintf(hash, "%d %s\n", len(part), part)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Headers)) {
		fmt.Fprintf(hash, "%s %d %s\n", name, len(s.Headers[name]), s.Headers[name])
	}
	return strings.TrimSuffix(s.Name, ".cu") + "-" + hex.EncodeToString(hash.Sum(nil)[:16])
}

// cacheFolder returns the folder for expensive results: the given one, or one in the user's cache, or "" if the
// user has no cache folder.
func cacheFolder(given string) string {
	if given != "" {
		return given
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	return filepath.Join(cache, "sppo", "cubin")
}

// keep stores an image for later processes, either completely or not at all. A failure is not an error, because
// compiling again costs only a second.
func keep(file string, image []byte) {
	if file == "" || os.MkdirAll(filepath.Dir(file), 0o755) != nil {
		return
	}
	temporary, err := os.CreateTemp(filepath.Dir(file), ".new-*")
	if err != nil {
		return
	}
	_, err = temporary.Write(image)
	if err = errors.Join(err, temporary.Close()); err == nil {
		err = os.Rename(temporary.Name(), file)
	}
	if err != nil {
		if err := os.Remove(temporary.Name()); errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
}
