package plan

// Stream describes how K and V pass through the device.
type Stream struct {
	Caches  []string `json:"caches"`            // k, v or both: the ones that do not stay on the device
	Block   int64    `json:"block"`             // tokens in a block
	Latents bool     `json:"latents,omitempty"` // K and V of latent attention are computed in each block, from latents that are cached
	Early   int      `json:"early"`             // number of blocks that are loaded or in transit before they are needed
}

// Streams reports whether K, V or both are streamed.
func (p *Plan) Streams() bool { return len(p.Stream.Caches) > 0 }

// Streamable lists K and V by their names in specs and dataflow.
var Streamable = []string{"k", "v"}
