package cuda

import (
	"errors"
	"fmt"
	"strings"

	"sppo.dev/internal/cuda/cublas"
	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/library"
	"sppo.dev/internal/cuda/nccl"
	"sppo.dev/internal/cuda/nvrtc"
	"sppo.dev/ir"
)

// Report describes the GPUs and the libraries found, with versions and paths, and explains how to install
// missing ones. It also reports incomplete installations, such as a compiler without a GPU.
func Report() []string {
	var out []string
	say := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	found := func(w *library.Wanted, version, path string, err error) {
		if err != nil {
			say("%v", err)
			return
		}
		say("%s %s, %s", w.Name, version, path)
	}
	api, err := driver.Open()
	if err == nil {
		version, versionErr := api.Version()
		found(&driver.Wanted, "for CUDA "+version, api.Path, versionErr)
		for _, g := range reportedGPUs(api, say) {
			say("GPU %d: %s, sm_%d, %d multiprocessors, %s, at %s", g.index, g.name, g.arch(), g.sms, ir.Bytes(g.total), g.bus)
		}
	} else {
		say("%v", noDriver(err))
	}
	if api, err := nvrtc.Open(); err != nil {
		say("%v", err)
	} else {
		version, err := api.Version()
		found(&nvrtc.Wanted, version, api.Path, err)
	}
	if api, err := cublas.Open(); err != nil {
		say("%v", err)
	} else {
		found(&cublas.Wanted, api.Version(), api.Path, nil)
	}
	if api, err := nccl.Open(); err != nil {
		say("%v", err)
	} else {
		version, err := api.Version()
		found(&nccl.Wanted, version, api.Path, err)
	}
	if strings.Contains(strings.Join(out, "\n"), " is missing") {
		say("looked in: %s", library.Order)
	}
	return out
}

func reportedGPUs(api *driver.API, say func(string, ...any)) []*gpu {
	all, err := findGPUs(api)
	switch {
	case err != nil:
		say("%v", err)
	case len(all) == 0:
		say("the driver finds no GPU")
	}
	return all
}

// noDriver adds an explanation to the error of a driver that finds no GPU.
func noDriver(err error) error {
	if e := (*driver.Error)(nil); errors.As(err, &e) && e.Code == driver.NoDevice {
		return fmt.Errorf("the NVIDIA driver is installed, but finds no GPU: %w", err)
	}
	return err
}
