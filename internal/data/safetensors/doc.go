// Package safetensors reads and writes safetensors files, in which the Hugging Face hub stores weights: one file,
// or several with an index.
//
//	format.go  types of values, the header and its checks
//	read.go    a folder's tensors, read in place
//	write.go   files of a folder, written as a stream
//	half.go    f16 and bf16
//
// A file consists of the length of its header (8 bytes, little-endian), the header (a JSON object with the type,
// shape and place of each tensor) and the values of all tensors without gaps
// (https://huggingface.co/docs/safetensors). Values are read by position, so a process holds only the bytes that
// it requests. A file that shrinks while it is open is reported as an error, whereas a mapped file would cause a
// fault.
//
// The package does not depend on models.
package safetensors
