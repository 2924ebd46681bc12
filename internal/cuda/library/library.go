// Package library finds NVIDIA's shared libraries at run time and looks up their functions, so that building needs
// no toolkit. On a machine without a GPU it reports what is missing and how to get it.
//
//	library.go  Open: one library and its table of functions
//	search.go   where libraries may be, in order
//
// Each binding passes the names of its own library.
package library

import (
	"errors"
	"fmt"
	"strings"

	"github.com/ebitengine/purego"
)

// Wanted describes a library: its possible names, and what to tell a user who lacks it.
type Wanted struct {
	Name  string   // for messages
	Files []string // file names, preferred ones first
	Wheel string   // its folder in NVIDIA's Python packages, as in nvidia/WHEEL/lib; empty: it has none
	Get   string   // how to get it, as a sentence
}

// Function is one entry of a binding's table.
type Function struct {
	Name     string
	Optional bool // newer than the oldest supported release
}

// Library is an open library. It is never closed: its threads may outlive any use of it.
type Library struct {
	Wanted *Wanted
	Path   string // as it was opened: a file's path, or a name found by the loader
	Addrs  []uintptr
}

// MissingError reports that a library was not found, or that those found are unusable.
type MissingError struct {
	Wanted *Wanted
	Tried  []string // one line per attempt
}

func (e *MissingError) Error() string {
	text := e.Wanted.Name + " is missing"
	if len(e.Tried) > 0 {
		text += " (" + e.Tried[0] + ")"
	}
	return text + ": " + e.Wanted.Get
}

// Open opens the first library found that has all required functions. The address of a missing optional
// function is 0.
func Open(w *Wanted, functions []Function) (*Library, error) {
	missing := &MissingError{Wanted: w}
	for _, path := range Candidates(w) {
		handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
		if err != nil {
			missing.Tried = append(missing.Tried, firstLine(err))
			continue
		}
		addrs, err := lookup(handle, functions)
		if err != nil {
			missing.Tried = append(missing.Tried, fmt.Sprintf("%s is too old: %v", path, err))
			continue
		}
		return &Library{Wanted: w, Path: path, Addrs: addrs}, nil
	}
	return nil, missing
}

func lookup(handle uintptr, functions []Function) ([]uintptr, error) {
	addrs := make([]uintptr, len(functions))
	for i, f := range functions {
		addr, err := purego.Dlsym(handle, f.Name)
		if err != nil && !f.Optional {
			return nil, errors.New("it lacks " + f.Name)
		}
		if err == nil {
			addrs[i] = addr
		}
	}
	return addrs, nil
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
