package plan

// Stream is how K and V pass through the device.
type Stream struct {
	Caches []string `json:"caches"` // of k and v those that do not stay on it
	Block  int64    `json:"block"`  // tokens of a block
	Early  int      `json:"early"`  // blocks that are on their way, or there, before they are needed
}

// Streams reports whether K, V or both pass by.
func (p *Plan) Streams() bool { return len(p.Stream.Caches) > 0 }

// Streamable are K and V by the names that specs and the dataflow have for them.
var Streamable = []string{"k", "v"}
