package emu

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"
)

// faults are kernels with errors that a GPU does not always show, and a correct one.
const faults = `
#include "common.cuh"
#include "hopper.cuh"

// mirror is right with a barrier: each thread doubles what its mirror image stored. With and without a barrier, threads store
// other numbers, so that what an earlier launch left in shared memory is not right by chance.
KERNEL(mirror, (int *y, i64 barrier)) {
    SHARED(int, held, 256);
    held[threadIdx.x] = (int)(threadIdx.x + barrier);
    if (barrier) __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = 2 * (held[blockDim.x - 1 - threadIdx.x] - (int)barrier);
}
KERNEL(diverge, (int *y, i64 unused)) {
    int x = (int)threadIdx.x;
    if (threadIdx.x % 32 < 7) x = __shfl_xor_sync(ALL, x, 1);
    else __syncthreads();
    y[threadIdx.x] = x;
}
KERNEL(leave, (int *y, i64 unused)) {
    if (threadIdx.x < 32) return;
    __syncthreads();
    y[threadIdx.x] = 1;
}
// phases: one warp waits for a phase that another warp ends only if told is not 0.
KERNEL(phases, (int *y, i64 told)) {
    SHARED(u64, barrier, 1);
    SHARED(int, held, 32);
    if (threadIdx.x == 0) barrier_init(barrier, 32);
    __syncthreads();
    if (threadIdx.x >= 32) {
        held[threadIdx.x - 32] = 5;
        if (told) barrier_arrive(barrier);
        if (told == 2) barrier_arrive(barrier);
    } else {
        barrier_wait(barrier, 0);
        y[blockIdx.x * blockDim.x + threadIdx.x] = held[threadIdx.x];
    }
}
KERNEL(overtake, (int *y, i64 unused)) {
    if (threadIdx.x == 3) __syncwarp();
    const int x = __shfl_sync(ALL, (int)threadIdx.x, 0);
    if (threadIdx.x != 3) __syncwarp();
    y[threadIdx.x] = x;
}
`

// compiled compiles the faulty kernels once for all tests.
var compiled = sync.OnceValues(func() (*Library, error) {
	folder, err := os.MkdirTemp("", "emu-test")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(folder) // an open library needs no file
	return BuildSources(folder, map[string]string{"faults.cu": faults})
})

func library(t *testing.T) *Library {
	t.Helper()
	l, err := compiled()
	if errors.Is(err, ErrNoCompiler) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// launch runs a kernel with two blocks of 64 threads and returns its output.
func launch(l *Library, kernel string, barrier uint64, seed uint64) ([]int32, error) {
	out := make([]int32, 128)
	var pins runtime.Pinner
	defer pins.Unpin()
	pins.Pin(&out[0])
	err := l.Launch(kernel, [3]int64{2, 1, 1}, 64, 0, []uint64{uint64(uintptr(unsafe.Pointer(&out[0]))), barrier}, seed)
	return out, err
}

func mirrored(out []int32) bool {
	for i, v := range out {
		if v != int32(2*(63-i%64)) {
			return false
		}
	}
	return true
}

func TestRight(t *testing.T) {
	l := library(t)
	for seed := range uint64(5) {
		if out, err := launch(l, "mirror", 1, seed); err != nil || !mirrored(out) {
			t.Errorf("seed %d: %v %v", seed, out, err)
		}
	}
}

// A thread that waits for a phase continues when the phase is over, and not before.
func TestPhases(t *testing.T) {
	l := library(t)
	for seed := range uint64(5) {
		out, err := launch(l, "phases", 1, seed)
		if err != nil || out[0] != 5 || out[31] != 5 || out[64] != 5 {
			t.Errorf("seed %d: %v %v", seed, out, err)
		}
		const want = "barrier_wait and at nothing that would end it"
		if _, err := launch(l, "phases", 0, seed); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("seed %d: %v, want %q", seed, err, want)
		}
	}
	// A second phase ends before the waiting warp checks, so it waits for the end of the third, which never comes.
	if _, err := launch(l, "phases", 2, 0); err == nil || !strings.Contains(err.Error(), "nothing that would end it") {
		t.Errorf("two phases: %v", err)
	}
}

// A missing barrier shows in some order of lanes and warps.
func TestMissingBarrier(t *testing.T) {
	l := library(t)
	shown := false
	for seed := range uint64(5) {
		out, err := launch(l, "mirror", 0, seed)
		shown = shown || err != nil || !mirrored(out)
	}
	if !shown {
		t.Error("a missing barrier went unseen")
	}
}

func TestFaults(t *testing.T) {
	l := library(t)
	for kernel, want := range map[string]string{
		"diverge":  "warp 0 are at __shfl_xor_sync and at __syncthreads",
		"leave":    "warp 1 are at its end and at __syncthreads",
		"overtake": "warp 0 are at __shfl_sync and at __syncwarp",
		"absent":   "no source has a kernel absent",
	} {
		if _, err := launch(l, kernel, 0, 0); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", kernel, err, want)
		}
	}
	if _, err := launch(l, "mirror", 1, 0); err != nil {
		t.Errorf("after faults: %v", err)
	}
	if err := l.Launch("mirror", [3]int64{1, 70000, 1}, 64, 0, []uint64{0, 1}, 0); err == nil {
		t.Error("a grid that is too large went through")
	}
}
