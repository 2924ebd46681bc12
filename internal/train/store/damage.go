package store

import (
	"fmt"
	"os"
	"slices"
)

// Damage reports that a file of a checkpoint is not the one that was written: its checksum or size is wrong, or it is
// missing from a folder that can be listed. No other error shows that a checkpoint is damaged. It may be undamaged but
// impossible to read at the moment, because of a permission, a limit or a network, or it may be of a later format.
type Damage struct {
	File string // name in the checkpoint's folder; a checkpoint that is a single file has its own name here
	What string // continues a sentence about the checkpoint, such as "is truncated: a has 3 bytes instead of 4"
}

func (d *Damage) Error() string { return d.What }

// Damaged returns the damage of a file, with a formatted text.
func Damaged(file, format string, args ...any) error {
	return &Damage{file, fmt.Sprintf(format, args...)}
}

// missing returns the damage of a file that was not found in a folder, or another error if the folder cannot be
// listed or does list the file.
func missing(dir, file, what string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(list, func(e os.DirEntry) bool { return e.Name() == file }) {
		return fmt.Errorf("%s is in the folder, but cannot be found", file)
	}
	return &Damage{file, what}
}
