package codegen

import (
	"fmt"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

// TestOutlines compares the order of work in four programs with golden files. For each task and layer, the
// files contain the operations in the order in which a rank issues them, with the buffers that copies, messages
// and collectives move. For each rank, they contain its peaks and its numbers of buffers and events. Addresses,
// shapes and events follow from that order; the verifier checks them.
func TestOutlines(t *testing.T) {
	for _, name := range []string{"two-stages", "groups", "layer-order", "stream"} {
		p := buildOf(t, planOf(t, "testdata/"+name+".sppo"))
		if err := ir.Verify(p); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		irtest.Golden(t, "testdata/"+name+".want", []byte(outline(p)))
	}
}

func outline(p *ir.Program) string {
	var b strings.Builder
	for i := range p.Codes {
		c := &p.Codes[i]
		fmt.Fprintf(&b, "%s: %d buffers, peak %d bytes of device memory, %d of host memory\n", c.Name, len(c.Buffers), c.Arenas[ir.Device], c.Arenas[ir.Host])
		for section := range ir.NumSections {
			list := c.Sections[section]
			fmt.Fprintf(&b, "  %s: %d events\n", section, c.Events[section])
			for first := 0; first < len(list); {
				end := first
				var words []string
				for ; end < len(list) && sameWork(&list[end], &list[first]); end++ {
					if in := &list[end]; in.Op != ir.Record && in.Op != ir.Wait {
						words = append(words, inOutline(c, in))
					}
				}
				if len(words) > 0 {
					writeWork(&b, &list[first].Prov, words)
				}
				first = end
			}
		}
	}
	return b.String()
}

// sameWork reports whether two instructions belong to the same layer of a task.
func sameWork(a, b *ir.Instr) bool {
	p, q := a.Prov, b.Prov
	return p.Phase == q.Phase && p.Microbatch == q.Microbatch && p.Subsequence == q.Subsequence && p.Layer == q.Layer && p.Stage == q.Stage
}

// inOutline names an operation and, unless it is on the compute stream, its first buffer.
func inOutline(c *ir.Code, in *ir.Instr) string {
	name := ir.Ops[in.Op].Name
	if in.Stream == ir.Compute {
		return name
	}
	for _, v := range in.Args {
		if v.Present() && v.Buffer != ir.NoBuffer {
			return fmt.Sprintf("%s(%s)", name, c.Buffers[v.Buffer].Name)
		}
	}
	return name
}

// writeWork writes the operations of a layer of a task, in lines that fit on a screen.
func writeWork(b *strings.Builder, p *ir.Provenance, words []string) {
	const width = 110
	line := fmt.Sprintf("    %s m%d s%d stage %d layer %d:", p.Phase, p.Microbatch, p.Subsequence, p.Stage, p.Layer)
	for i := 0; i < len(words); {
		w, first := words[i], i
		for i < len(words) && words[i] == w {
			i++
		}
		if n := i - first; n > 1 {
			w = fmt.Sprintf("%d*%s", n, w)
		}
		if len(line)+1+len(w) > width {
			b.WriteString(line + "\n")
			line = "       "
		}
		line += " " + w
	}
	b.WriteString(line + "\n")
}
