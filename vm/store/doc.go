// Package store keeps checkpoints in folders.
//
//	manifest.go  what a checkpoint holds, and the checksums of its files
//	write.go     shards, and how a checkpoint becomes complete
//	folder.go    a folder of checkpoints: steps, retention, remains of killed runs
//	read.go      an open checkpoint: checks, and any rectangle of a tensor
//
// A folder has one folder per checkpoint:
//
//	step-120/
//	  manifest.json           written last
//	  rank-00000.safetensors  the parts of tensors that a rank wrote
//	  rank-00001.safetensors
//
// A checkpoint is written to a temporary folder, brought to the disk and renamed, so it is complete or absent, also after a
// power failure. Every element of every tensor is in exactly one shard. Where a part lies in its tensor is in the header
// of the shard, in the form of torch.distributed.checkpoint, whose HuggingFaceStorageReader reads the folder
// (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
//
// The package knows no ranks' memory and no programs.
package store
