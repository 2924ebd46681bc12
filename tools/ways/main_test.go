package main

import (
	"os"
	"strings"
	"testing"
)

// RATIONALE.md has the table that the command prints.
func TestTable(t *testing.T) {
	page, err := os.ReadFile("../../RATIONALE.md")
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	if err := run(&table); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), table.String()) {
		t.Errorf("RATIONALE.md has another table; go run ./tools/ways prints:\n%s", table.String())
	}
}
