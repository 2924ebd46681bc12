// Package shipped holds the specifications that ship with the commands, and that any spec can import regardless of
// the working directory.
package shipped

import "embed"

// Files holds clusters, such as "clusters/a100-80g.sppo", and, for comparison, the schedules of other systems, such as
// "baselines/megatron.sppo".
//
//go:embed clusters/*.sppo baselines/*.sppo
var Files embed.FS
