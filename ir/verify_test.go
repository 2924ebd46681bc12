package ir_test

import (
	"testing"

	"sppo/ir"
	"sppo/ir/irtest"
)

func TestRandomProgramsVerify(t *testing.T) {
	for seed := range uint64(200) {
		p := irtest.Random(seed, 50+int(seed)*5)
		if err := ir.Verify(p); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}
