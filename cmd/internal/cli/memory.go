package cli

import (
	"sppo.dev/internal/passes/plan"
	"sppo.dev/ir"
)

// Peaks returns the highest peaks of device and host memory over all stages.
func Peaks(m *plan.Memory) (device, host ir.Bytes) {
	for _, b := range m.DevicePeakBytes {
		device = max(device, b)
	}
	for _, b := range m.HostPeakBytes {
		host = max(host, b)
	}
	return device, host
}
