package ir

import (
	"fmt"
	"strings"
)

// Model is the network that a program trains. It travels in the program's header and in checkpoints, because the names and shapes of
// tensors do not say what is computed with them. Its fields equal those of lang.Model, which converts to it directly: the
// compiler reports any drift between the two. That of a program that nobody compiled may be empty.
type Model struct {
	Name      string  `json:"name"`
	Family    string  `json:"family"`
	Layers    int     `json:"layers"`
	Hidden    int     `json:"hidden"`
	Heads     int     `json:"heads"`
	KVHeads   int     `json:"kv_heads"`
	HeadDim   int     `json:"head_dim"`
	FFN       int     `json:"ffn"`
	Vocab     int     `json:"vocab"`
	DType     string  `json:"dtype"`
	Tied      bool    `json:"tied"`
	Positions string  `json:"positions"`
	RopeTheta float64 `json:"rope_theta"`
	NormEps   float64 `json:"norm_eps"`
	InitStd   float64 `json:"init_std"`
}

// identity is what makes a network the function of its weights that it is, by the language's keys: neither its name, nor how weights
// were drawn. A base of rotary frequencies is none where nothing rotates.
func (m *Model) identity() [][2]string {
	theta := "none"
	if m.Positions == "rope" {
		theta = fmt.Sprint(m.RopeTheta)
	}
	return [][2]string{
		{"family", m.Family}, {"layers", fmt.Sprint(m.Layers)}, {"hidden", fmt.Sprint(m.Hidden)}, {"heads", fmt.Sprint(m.Heads)},
		{"kv_heads", fmt.Sprint(m.KVHeads)}, {"head_dim", fmt.Sprint(m.HeadDim)}, {"ffn", fmt.Sprint(m.FFN)}, {"vocab", fmt.Sprint(m.Vocab)},
		{"dtype", m.DType}, {"tied", fmt.Sprint(m.Tied)}, {"positions", m.Positions}, {"rope_theta", theta}, {"norm_eps", fmt.Sprint(m.NormEps)},
	}
}

// Difference says in what two networks are different functions, as each has it: "heads = 2, norm_eps = 1e-05" and
// "heads = 4, norm_eps = 1e-06". Both are empty where they are one.
func (m *Model) Difference(other *Model) (mine, others string) {
	var a, b []string
	theirs := other.identity()
	for i, trait := range m.identity() {
		if trait != theirs[i] {
			a, b = append(a, trait[0]+" = "+trait[1]), append(b, trait[0]+" = "+theirs[i][1])
		}
	}
	return strings.Join(a, ", "), strings.Join(b, ", ")
}
