package cli

import (
	"sppo.dev/ir"
	"sppo.dev/passes"
)

// Peaks returns the highest peaks over all stages.
func Peaks(m *passes.Memory) (device, host ir.Bytes) {
	for _, b := range m.DevicePeakBytes {
		device = max(device, b)
	}
	for _, b := range m.HostPeakBytes {
		host = max(host, b)
	}
	return device, host
}
