// Package store reads and writes checkpoint folders.
//
//	manifest.go  the contents of a checkpoint, and the checksums of its files
//	write.go     writes shards and completes checkpoints
//	folder.go    a folder of checkpoints: steps, retention, remains of killed runs
//	read.go      an open checkpoint: checks, and reading any rectangle of a tensor
//	damage.go    which errors show that a checkpoint is damaged
//
// A folder contains one folder per checkpoint:
//
//	step-120/
//	  manifest.json           written last
//	  rank-00000.safetensors  the parts of tensors that a rank wrote
//	  rank-00001.safetensors
//
// A checkpoint is written to a temporary folder, synced to disk and renamed, so it is complete or absent, even
// after a power failure. Every element of every tensor is in exactly one shard. The header of a shard gives the
// place of each part in its tensor, in the format of torch.distributed.checkpoint, whose HuggingFaceStorageReader
// can read the folder (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
//
// The package does not depend on programs or the memory of ranks.
package store
