package main

import (
	"os"
	"testing"

	"sppo.dev/cmd/internal/clitest"
)

// Inputs that are devices, pipes, folders, or binary or huge files cause an error.
func TestHostileFiles(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.WriteFile("good.txt", []byte("some text\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("outer.sppo", []byte("import \"x.sppo\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	clitest.Hostile(t, &app, "x.sppo", []string{"folder"}, // a folder is read as a model folder
		"sppoc check x.sppo", "sppoc fmt x.sppo", "sppoc plan x.sppo", "sppoc build x.sppo -o y.sppb", "sppoc view x.sppo -o y.html", "sppoc check outer.sppo")
	clitest.Hostile(t, &app, "x.json", nil, "sppoc plan x.json", "sppoc build x.json -o y.sppb", "sppoc compare x.json")
	clitest.Hostile(t, &app, "x.sppb", nil, "sppoc verify x.sppb", "sppoc dump x.sppb", "sppoc asm x.sppb -o y.sppir", "sppoc diff x.sppb x.sppb")
	clitest.Hostile(t, &app, "x.sppir", nil, "sppoc verify x.sppir")
	clitest.Hostile(t, &app, "hub/config.json", nil, "sppoc import hub", "sppoc plan hub --cluster h100 --nodes 1 --sequence 1M")
	clitest.Hostile(t, &app, "tokenizer.json", nil, "sppoc tokenize good.txt -o tokens --tokenizer tokenizer.json")
}
