// Package shipped holds the specifications that ship with the commands, and that any spec can import regardless of
// the working directory.
package shipped

import "embed"

// Files holds clusters, such as "clusters/a100-80g.sppo", and, for comparison, the schedules of other systems, such as
// "baselines/megatron.sppo". The orders of tasks, such as "schedules/v-half-8x32.csv" for 8 pipeline ranks and 32
// microbatches, are for strategy = csv(...); schedules/make.py writes others.
//
//go:embed clusters/*.sppo baselines/*.sppo schedules/*.csv
var Files embed.FS
