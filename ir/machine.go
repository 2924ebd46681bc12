package ir

// CurvePoint is {size, share}: an operation with that many rows reaches that share of the peak.
type CurvePoint = [2]float64

// Machine holds the figures of a cluster from which costs are computed. It is part of the program's header, so
// that the simulator needs no spec.
type Machine struct {
	Name                 string       `json:"name"`
	Nodes                int          `json:"nodes"`
	GPUsPerNode          int          `json:"gpus_per_node"`
	DeviceMemory         int64        `json:"device_memory"`          // bytes of a GPU available to its arena
	HostMemory           int64        `json:"host_memory"`            // bytes of a node available to the host arenas of all its ranks
	PeakBF16             float64      `json:"peak_bf16"`              // FLOP/s, dense
	PeakF32              float64      `json:"peak_f32"`               // FLOP/s
	MemoryBandwidth      float64      `json:"memory_bandwidth"`       // bytes/s of device memory
	D2HBandwidth         float64      `json:"d2h_bandwidth"`          // bytes/s per GPU
	H2DBandwidth         float64      `json:"h2d_bandwidth"`          // bytes/s per GPU
	NodeCopyBandwidth    float64      `json:"node_copy_bandwidth"`    // bytes/s that all GPUs of a node share, each way; 0: no shared limit
	CopyDuplex           string       `json:"copy_duplex"`            // full | half: whether copies can run in both directions at the same time, or in only one
	Parallelism          float64      `json:"parallelism"`            // processors that the ranks of a node share; the other rates are then per processor. 0: each rank has its own device
	SpreadEfficiency     float64      `json:"spread_efficiency"`      // speedup of a kernel on n processors, divided by n
	NVLinkBandwidth      float64      `json:"nvlink_bandwidth"`       // bytes/s per GPU inside a node, each way
	NodeNetworkBandwidth float64      `json:"node_network_bandwidth"` // bytes/s per node, each way
	NVLinkLatency        float64      `json:"nvlink_latency"`         // seconds
	NetworkLatency       float64      `json:"network_latency"`        // seconds
	KernelLatency        float64      `json:"kernel_latency"`         // seconds from one kernel of a stream to the next
	MatmulEfficiency     []CurvePoint `json:"matmul_efficiency"`      // share of the peak, by number of rows; a single point means a constant share
	AttentionEfficiency  []CurvePoint `json:"attention_efficiency"`
	AttentionGradEff     []CurvePoint `json:"attention_grad_efficiency"`
	CopyEfficiency       float64      `json:"copy_efficiency"`       // share of MemoryBandwidth that memory-bound kernels reach
	CollectiveEfficiency float64      `json:"collective_efficiency"` // share of link bandwidth that collectives reach
	Contention           float64      `json:"contention,omitempty"`  // share of their speed that kernels lose beside a collective at NVLinkBandwidth
	Overhead             float64      `json:"overhead,omitempty"`    // share by which everything takes longer in a step than the other figures say
}

// HalfDuplex reports whether a device can copy in only one direction at a time.
func (m Machine) HalfDuplex() bool { return m.CopyDuplex == "half" }

// HostMemoryPerRank returns the share of a node's host memory that each of its ranks may use.
func (m Machine) HostMemoryPerRank() Bytes {
	if m.GPUsPerNode == 0 {
		return 0
	}
	return Bytes(m.HostMemory / int64(m.GPUsPerNode))
}
