package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"
)

// touched is the share of the requested memory that touch uses, and its pace: some virtual machines get memory only
// when it is used, and kill processes that use it faster.
const (
	touched  = 0.8
	pace     = 200 * time.Millisecond // per piece
	pieceLen = 1 << 30
)

// touch writes to a share of the given size of memory, such as 100GiB, page by page, and reports the available memory
// before and afterwards.
func touch(size string, out io.Writer) error {
	var gib float64
	if n, err := fmt.Sscanf(size+"\n", "%gGiB\n", &gib); n != 1 || err != nil || !(gib >= 0 && gib < 1<<20) {
		return fmt.Errorf("%s=%s is not a size such as 100GiB", memoryVariable, size)
	}
	before := available()
	all := int64(touched * gib * (1 << 30))
	for at := int64(0); at < all; at += pieceLen {
		piece, err := syscall.Mmap(-1, 0, int(min(pieceLen, all-at)), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
		if err != nil {
			return fmt.Errorf("after %d bytes: %w", at, err)
		}
		for i := 0; i < len(piece); i += os.Getpagesize() {
			piece[i] = 1
		}
		if at/pieceLen%10 == 9 {
			fmt.Fprintf(out, "%d GiB of host memory are in use\n", at>>30+1)
		}
		time.Sleep(pace)
	}
	fmt.Fprintf(out, "%d bytes of host memory touched; available: %s, then %s\n", all, before, available())
	return nil
}

// available returns the line of the system's memory report.
func available() string {
	text, _ := os.ReadFile("/proc/meminfo") // without it, the line is empty
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}
