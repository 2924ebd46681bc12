package main

import (
	"testing"

	"sppo.dev/cmd/internal/clitest"
	"sppo.dev/internal/irtest"
)

func TestTranscripts(t *testing.T) {
	clitest.Run(t, "testdata/transcripts/*.txt", "testdata/base", &app, irtest.Update())
}
