package offload_test

import (
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/offload"
	_ "sppo.dev/internal/passes/plantest/wired"
)

func init() { offload.RunWith = passes.Run }
