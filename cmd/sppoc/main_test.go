package main

import (
	"flag"
	"testing"

	"sppo.dev/cmd/internal/clitest"
)

var update = flag.Bool("update", false, "rewrite the transcripts")

func TestTranscripts(t *testing.T) {
	clitest.Run(t, "testdata/transcripts/*.txt", "testdata/base", &app, *update)
}
