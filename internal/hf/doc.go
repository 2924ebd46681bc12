// Package hf converts between Hugging Face model folders and the language: config.json becomes the keys of a
// model, weights become the tensors of a program, and a checkpoint becomes a folder again.
//
//	config.go     config.json: typed access that remembers which keys were read
//	keys.go       the keys that the config classes of transformers declare, one row each
//	arch.go       the architectures, one row each
//	rope.go       rotary positions in both formats that transformers has used
//	model.go      the keys of a model and their text
//	tensors.go    which tensor in a folder contains which of ours, and how
//	weights.go    values for a run
//	export.go     a folder from a checkpoint
//
// A config means what transformers makes of it. If the language cannot express it, it is refused with the name of the
// unsupported key, so that no model is trained as a different one.
package hf
