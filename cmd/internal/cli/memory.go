package cli

import (
	"fmt"
	"strings"

	"sppo.dev/ir"
	"sppo.dev/passes"
)

// Lack names the stage that lacks most.
func Lack(m *passes.Memory) string {
	var out []string
	for _, a := range []struct {
		name     string
		peaks    []ir.Bytes
		capacity ir.Bytes
	}{{"device", m.DevicePeakBytes, m.DeviceCapacityBytes}, {"host", m.HostPeakBytes, m.HostCapacityBytes}} {
		stage := 0
		for i, peak := range a.peaks {
			if peak > a.peaks[stage] {
				stage = i
			}
		}
		if peak := a.peaks[stage]; peak > a.capacity {
			has := a.capacity.String()
			if has == peak.String() {
				has = fmt.Sprintf("%s less", peak-a.capacity)
			}
			out = append(out, fmt.Sprintf("a rank of stage %d needs %s of %s memory and has %s", stage, peak, a.name, has))
		}
	}
	return strings.Join(out, "; ")
}

// Peaks are the highest of all stages.
func Peaks(m *passes.Memory) (device, host ir.Bytes) {
	for _, b := range m.DevicePeakBytes {
		device = max(device, b)
	}
	for _, b := range m.HostPeakBytes {
		host = max(host, b)
	}
	return device, host
}
