package pass

import (
	"bytes"
	"regexp"
	"testing"
	"time"
)

// TestTimes checks that times of one pass add up, that passes are listed in the order in which they began, and that nil measures
// nothing.
func TestTimes(t *testing.T) {
	var none *Times
	none.Time("solve")()
	none.Write(nil)
	times := NewTimes()
	for range 2 {
		end := times.Time("solve")
		times.Time("lower")()
		time.Sleep(3 * time.Millisecond)
		end()
	}
	var b bytes.Buffer
	times.Write(&b)
	if times.spent["solve"] < 6*time.Millisecond || times.spent["solve"] > time.Since(times.start) {
		t.Errorf("solve took %s", times.spent["solve"])
	}
	if want := regexp.MustCompile(`^ *seconds +share +pass\n +\S+ +\S+% +solve\n +\S+ +\S+% +lower\n +\S+ +100.0% +total\n$`); !want.Match(b.Bytes()) {
		t.Errorf("the table is\n%s", &b)
	}
}
