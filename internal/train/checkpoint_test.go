package train

import (
	"errors"
	"testing"

	"sppo.dev/internal/train/store"
)

// A checkpoint counts as damaged only if all processes find it damaged.
func TestProcessesAgreeOnDamage(t *testing.T) {
	found := &DamagedError{"dir/step-3", &store.Damage{File: "a", What: "is damaged: a has a wrong checksum"}}
	damage := finding{File: "a", What: "is damaged: a has a wrong checksum"}
	for _, c := range []struct {
		findings []finding
		want     string
		damaged  bool
	}{
		{[]finding{damage, damage}, found.Error(), true},
		{[]finding{damage, {}}, found.Error() + ", but process 1 finds no damage there: the processes see different files", false},
		{[]finding{{}, damage}, found.Error() + ", but process 0 finds no damage there: the processes see different files", false},
	} {
		err := concluded(found, c.findings)
		if err.Error() != c.want || errors.As(err, new(*DamagedError)) != c.damaged {
			t.Errorf("%v: %v, want %s", c.findings, err, c.want)
		}
	}
}
