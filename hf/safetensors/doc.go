// Package safetensors reads and writes the files of that name in which the Hugging Face hub keeps weights: one file, or
// several with an index.
//
//	format.go  types of values, the header and its checks
//	read.go    a folder's tensors, read in place
//	write.go   files of a folder, written as a stream
//	half.go    f16 and bf16
//
// A file is the length of its header (8 bytes, little-endian), the header (a JSON object with the type, shape and place of
// each tensor) and the values of all tensors without gaps (https://huggingface.co/docs/safetensors). Values are read by
// position: a process holds the bytes that it asks for and no others, and a file that shrinks meanwhile is an error. A mapped
// file would be a fault there.
//
// The package knows no model.
package safetensors
