package passes

import (
	"bytes"
	"testing"

	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/passes/plantest"
)

// FuzzReadJSON checks that reading or verifying a plan file never panics, and that a plan that is written, read back
// and written again is unchanged.
func FuzzReadJSON(f *testing.F) {
	for _, set := range []string{"schedule.offload=full", "schedule.offload=0.5", "schedule.virtual_stages=1"} {
		var b bytes.Buffer
		if err := plantest.Plan(f, "tiny.sppo", set).WriteJSON(&b); err != nil {
			f.Fatal(err)
		}
		f.Add(b.Bytes())
	}
	f.Add([]byte(`{"name":"x"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := plan.ReadJSON(bytes.NewReader(data))
		if err != nil {
			return
		}
		_ = Verify(p) // an error is fine
		var first, second bytes.Buffer
		if err := p.WriteJSON(&first); err != nil {
			t.Fatal(err)
		}
		again, err := plan.ReadJSON(bytes.NewReader(first.Bytes()))
		if err != nil {
			t.Fatalf("what was written does not read: %v", err)
		}
		if err := again.WriteJSON(&second); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(first.Bytes(), second.Bytes()) {
			t.Fatal("writing, reading and writing changed the plan")
		}
	})
}
