//go:build !linux

package safetensors

import "os"

// setDirect reports that writes cannot bypass the page cache.
func setDirect(*os.File, bool) bool { return false }
