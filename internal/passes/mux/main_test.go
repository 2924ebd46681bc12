package mux_test

import _ "sppo.dev/internal/passes/plantest/wired"
