package cuda

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"sppo.dev/cuda/driver"
	"sppo.dev/cuda/kernels"
	"sppo.dev/cuda/nvrtc"
)

// codeSource gives the machine code of a kernel source for an architecture.
type codeSource interface {
	image(source string, arch int) ([]byte, error)
	// knows says whether sources for Hopper alone can be had.
	knowsHopper() bool
}

// kernel finds a kernel, loading its source's module when its first is asked for.
func (d *Device) kernel(source, name string) (driver.Func, error) {
	module, ok := d.modules[source]
	if !ok {
		image, err := d.machine.code.image(source, d.gpu.arch())
		if err != nil {
			return 0, err
		}
		if module, err = d.api.LoadModule(image); err != nil {
			return 0, fmt.Errorf("%s: %w", source, err)
		}
		d.modules[source] = module
		d.later(func() error { return d.api.UnloadModule(module) })
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

// compiler compiles sources with NVRTC, which it opens when it is first needed, and keeps what comes out in a folder. The
// ranks of a process share one.
type compiler struct {
	folder string // empty: the user's cache
	images once[string, []byte]

	opened  sync.Once
	api     *nvrtc.API
	version string
	archs   []int
	err     error
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

// oldestForHopper is the release of the compiler from which on it knows sm_90a.
const oldestForHopper = 12

func (c *compiler) knowsHopper() bool {
	if c.open() != nil {
		return false
	}
	major, _, _ := strings.Cut(c.version, ".")
	release, err := strconv.Atoi(major)
	return err == nil && release >= oldestForHopper
}

func (c *compiler) image(source string, arch int) ([]byte, error) {
	return c.images.get(fmt.Sprint(source, " ", arch), func() ([]byte, error) {
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
		src := sourceOf(source)
		file := c.file(src, option)
		if image, err := os.ReadFile(file); err == nil && len(image) > 0 {
			return image, nil
		}
		out, err := c.api.Compile(src, option, "--std=c++17", "--fmad=true")
		if err != nil {
			return nil, fmt.Errorf("compiling %s: %w", source, err)
		}
		keep(file, out.Image)
		return out.Image, nil
	})
}

// architecture is the option for a card: its own machine code where the compiler knows it, else PTX of the newest that
// it knows below, which the driver translates.
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

// oldestArch is Ampere: kernels use its instructions.
const oldestArch = 80

// file is where an image is kept: a name that everything it depends on has part in.
func (c *compiler) file(s nvrtc.Source, option string) string {
	hash := sha256.New()
	for _, part := range []string{c.version, option, s.Name, s.Text} {
		fmt.Fprintf(hash, "%d %s\n", len(part), part)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Headers)) {
		fmt.Fprintf(hash, "%s %d %s\n", name, len(s.Headers[name]), s.Headers[name])
	}
	folder := cacheFolder(c.folder)
	if folder == "" {
		return ""
	}
	return filepath.Join(folder, strings.TrimSuffix(s.Name, ".cu")+"-"+hex.EncodeToString(hash.Sum(nil)[:16]))
}

// cacheFolder is where what is costly to make is kept: a folder of the user's cache where none is given, or nowhere.
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

// keep stores an image for the next process, whole or not at all. That it cannot is no error: compiling again costs
// a second.
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
