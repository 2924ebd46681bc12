package kernels

import (
	"fmt"
	"slices"
	"strconv"
)

// tensorDims are the head widths that attention_tensor.cu serves, in bf16.
var tensorDims = []int64{64, 96, 128}

// maxHeadDim is the widest head of attention.cu.
const maxHeadDim = 256

// attentionShape is what the kernels of attention are told: its numbers, and how many keys there are.
type attentionShape struct {
	n, keys, heads, kvHeads, dim, batch int64
	args                                []any
	tensor                              bool // tensor cores serve
}

func (b *binder) attentionShape() attentionShape {
	r, _ := b.shape("q")
	s := attentionShape{heads: b.int("heads"), kvHeads: b.int("kv_heads"), dim: b.int("head_dim"), batch: b.int("batch")}
	s.n = r / s.batch
	s.keys = s.n + b.int("prefix")
	s.tensor = b.types("q") == "b" && slices.Contains(tensorDims, s.dim)
	s.args = []any{s.n, s.heads, s.kvHeads}
	if !s.tensor {
		s.args = append(s.args, s.dim)
	}
	s.args = append(s.args, s.batch, b.int("prefix"))
	if s.dim > maxHeadDim {
		b.err = fmt.Errorf("a head_dim of %d is more than the kernel's %d", s.dim, maxHeadDim)
	}
	return s
}

// attentionLaunch launches blocks of so many queries or keys, for each head and sequence.
func (b *binder) attentionLaunch(s attentionShape, name string, tokens, heads int64, args []any) {
	if !s.tensor {
		b.launch("attention"+name+"_"+b.types("q"), [3]int64{ceil(tokens, 8), heads, s.batch}, args...)
		return
	}
	l := b.launch("attention_tensor"+name+"_"+strconv.FormatInt(s.dim, 10), [3]int64{ceil(tokens, 64), heads, s.batch}, args...)
	l.Source, l.Block = "attention_tensor.cu", 128
	l.SharedBytes = tensorSharedBytes(name, s.dim)
}

// tensorSharedBytes: two tiles of 64 tokens forward, two of 32 keys and one of 64 queries for dq; for dk and dv two of 64 keys and two of 32
// queries with their statistics. Rows are 8 elements longer than a head, against bank conflicts.
func tensorSharedBytes(name string, dim int64) int64 {
	row := 2 * (dim + 8)
	switch name {
	case "_dq":
		return (2*32 + 64) * row
	case "_dkv":
		return (2*64+2*32)*row + 2*32*4
	}
	return 2 * 64 * row
}

func attention(b *binder) {
	s := b.attentionShape()
	b.attentionLaunch(s, "", s.n, s.heads, append([]any{"o", "lse", "q", "k", "v"}, s.args...))
}

func attentionGrad(b *binder) {
	s := b.attentionShape()
	rows := s.n * s.batch * s.heads
	delta := b.reserve(4 * rows)
	b.launch("attention_delta_"+b.types("q"), [3]int64{ceil(rows, 8), 1, 1}, delta, "do", "o", rows, s.dim)
	in := append([]any{"do", "q", "k", "v", "lse", delta}, s.args...)
	b.attentionLaunch(s, "_dkv", s.keys, s.kvHeads, append(append([]any{"dk", "dv"}, in...), b.int("accumulate")))
	b.attentionLaunch(s, "_dq", s.n, s.heads, append([]any{"dq"}, in...))
}
