// Package hf joins the folders of the Hugging Face hub to the language: config.json becomes the keys of a model, weights
// become the tensors of a program, and a checkpoint becomes a folder again.
//
//	config.go     config.json: typed access that remembers which keys were read
//	arch.go       the architectures, one row each
//	rope.go       rotary positions in both forms that transformers has had
//	model.go      the keys of a model and their text
//	tensors.go    which tensor of a folder holds which of ours, and how
//	weights.go    values for a run
//	export.go     a folder of a checkpoint
//
// What a config says and the language cannot is refused by the name of its key, so that no model is trained as another.
package hf
