package cuda

import (
	"encoding/binary"
	"fmt"
	"strings"

	"sppo.dev/internal/cuda/driver"
	"sppo.dev/internal/cuda/kernels"
)

// If waits are limited, a kernel that has waited too long records the location of the wait in pinned memory and
// continues to its end with invalid results. Each kernel source has its own record.

// recordBytes is the size of a record: the wait's line in the source, the block, and the thread.
const recordBytes = 64

// recordWaits tells a source's module where its record is.
func (d *Device) recordWaits(module driver.Module, source string) error {
	if !d.machine.options.Check || kernels.Target(source) == "" {
		return nil
	}
	if d.records == nil {
		var err error
		if d.records, err = newPinned(d.api, int64(len(kernels.Sources()))*recordBytes, d.machine.piece, d.gpu.bus); err != nil {
			return err
		}
		d.later(d.records.close)
	}
	at, err := d.api.Global(module, "wait_record")
	if err != nil {
		return err
	}
	d.recorded = append(d.recorded, source)
	address := binary.LittleEndian.AppendUint64(nil, uint64(d.records.at(int64(len(d.recorded)-1)*recordBytes)))
	if err := d.api.ToDevice(at, address); err != nil {
		return err
	}
	return d.api.Synchronize(0) // as in Write
}

// gaveUp returns an error that names a wait at which a kernel gave up, or nil if none did.
func (d *Device) gaveUp() error {
	for i, source := range d.recorded {
		record := d.records.memory[i*recordBytes:]
		word := func(i int) uint64 { return binary.LittleEndian.Uint64(record[8*i:]) }
		lines := strings.Split(kernels.Text(source), "\n")
		if line := word(0); line > 0 && line <= uint64(len(lines)) {
			return fmt.Errorf("endless wait at %s:%d: %s, in thread %d of block (%d,%d,%d)", source, line,
				strings.TrimSpace(lines[line-1]), word(2)>>32, uint32(word(1)), word(1)>>32, uint32(word(2)))
		}
	}
	return nil
}
