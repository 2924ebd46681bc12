package plan

// Stream describes how K and V pass through the device.
type Stream struct {
	Caches []string `json:"caches"` // the ones of k and v that do not stay on the device
	Block  int64    `json:"block"`  // tokens of a block
	Early  int      `json:"early"`  // blocks that are loaded or in transfer before they are needed
}

// Streams reports whether K, V or both stream.
func (p *Plan) Streams() bool { return len(p.Stream.Caches) > 0 }

// Streamable lists K and V by the names of specs and dataflow.
var Streamable = []string{"k", "v"}
