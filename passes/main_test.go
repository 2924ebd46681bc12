package passes_test

import (
	"testing"

	"sppo.dev/codegen"
	"sppo.dev/passes"
)

// TestMain hands tests what places plans: codegen imports the package, whose own tests cannot import it.
func TestMain(m *testing.M) {
	passes.Place = codegen.Measure
	m.Run()
}
