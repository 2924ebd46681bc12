package lang

// Mixers of layers: the parts that read other tokens.
const (
	MixerAttention = "attention"
	MixerNone      = "none"
)

// Form is what a layer computes, apart from the window of its attention and the positions: a mixer and an MLP.
type Form struct {
	Mixer string
	FFN   int // width of the MLP; 0: none
}

// FormOf returns the form of a layer.
func (m *Model) FormOf(int) Form { return Form{MixerAttention, m.FFN} }
