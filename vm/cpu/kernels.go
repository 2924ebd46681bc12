package cpu

import "sppo.dev/ir"

// kernels binds the opcodes that compute; actions binds those that move bytes, exchange messages or read the data
// set. All collectives share one action. The stream handles record and wait itself.
var (
	kernels = [ir.NumOps]func(*binder) func(){
		ir.InitNormal:        initNormal,
		ir.Fill:              fill,
		ir.Embed:             embed,
		ir.EmbedGrad:         embedGrad,
		ir.PositionEmbed:     positionEmbed,
		ir.PositionEmbedGrad: positionEmbedGrad,
		ir.LayerNorm:         layerNorm,
		ir.LayerNormGrad:     layerNormGrad,
		ir.RMSNorm:           rmsNorm,
		ir.RMSNormGrad:       rmsNormGrad,
		ir.Matmul:            matmul,
		ir.BiasGrad:          biasGrad,
		ir.Rope:              rope,
		ir.Attention:         attention,
		ir.AttentionGrad:     attentionGrad,
		ir.AttentionMerge:    attentionMerge,
		ir.AttentionDelta:    attentionDelta,
		ir.Activation:        activation,
		ir.ActivationGrad:    activationGrad,
		ir.GLU:               glu,
		ir.GLUGrad:           gluGrad,
		ir.Add:               add,
		ir.Cast:              cast,
		ir.CrossEntropyStats: crossEntropyStats,
		ir.CrossEntropy:      crossEntropy,
		ir.CrossEntropyGrad:  crossEntropyGrad,
		ir.SumSq:             sumSq,
		ir.GradNorm:          gradNorm,
		ir.AdamW:             adamW,
		ir.SGD:               sgd,
		ir.Nesterov:          nesterov,
		ir.Axpby:             axpby,
		ir.Normalize:         normalize,
		ir.Dropout:           dropout,
	}
	actions = [ir.NumOps]func(*binder) func() error{
		ir.LoadTokens: loadTokens,
		ir.CopyD2H:    copyBytes,
		ir.CopyH2D:    copyBytes,
		ir.CopyD2D:    copyBytes,
		ir.Send:       send,
		ir.Recv:       recv,
	}
)
