package vm

import (
	"errors"
	"testing"
)

// A checkpoint counts as damaged only if all processes find it damaged.
func TestProcessesAgreeOnDamage(t *testing.T) {
	found := &DamagedError{"dir/step-3", errors.New("is damaged: a has a wrong checksum")}
	damage := finding{"is damaged: a has a wrong checksum", true}
	for _, c := range []struct {
		findings []finding
		want     string
		damaged  bool
	}{
		{[]finding{damage, damage}, found.Error(), true},
		{[]finding{damage, {}}, found.Error() + ", but process 1 finds no damage: the processes see different files", false},
		{[]finding{damage, {"open a: permission denied", false}}, "checkpoint dir/step-3: process 1: open a: permission denied", false},
	} {
		err := concluded(found, c.findings)
		if err.Error() != c.want || errors.As(err, new(*DamagedError)) != c.damaged {
			t.Errorf("%v: %v, want %s", c.findings, err, c.want)
		}
	}
}
