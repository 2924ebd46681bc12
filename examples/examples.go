// Package examples holds the specifications that ship with the commands: clusters and schedules that any spec
// can import, and examples. The package contains nothing else.
package examples

import "embed"

// Shipped holds files that imports find regardless of the working directory: clusters, such as
// "clusters/a100-80g.sppo", and, for comparison, the schedules of other systems, such as
// "baselines/megatron.sppo".
//
//go:embed clusters/*.sppo baselines/*.sppo
var Shipped embed.FS
