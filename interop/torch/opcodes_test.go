package torch_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/ir"
)

// TestEveryOpcodeIsWritten checks, without torch, that the package has a function for every opcode, or, for the gradient of a
// differentiable one, that of the opcode. Its machine handles data, messages, collectives and events itself.
func TestEveryOpcodeIsWritten(t *testing.T) {
	files, err := filepath.Glob("sppo_torch/ops/*.py")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, name := range files {
		part, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(part)
	}
	for op, info := range ir.Ops {
		if ir.Op(op).Collective() != nil || info.Class == ir.ClassSync || op == int(ir.LoadTokens) || op == int(ir.Send) || op == int(ir.Recv) {
			continue
		}
		forward := strings.TrimSuffix(info.Name, "_grad")
		if !strings.Contains(text.String(), "@opcode\ndef "+info.Name+"(") && !strings.Contains(text.String(), "@differentiable\ndef "+forward+"(") {
			t.Errorf("no function for %s", info.Name)
		}
	}
}
