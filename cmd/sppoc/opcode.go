package main

import (
	"sppo/ir"
)

// irExplain is the reference entry of an opcode, or "" where there is none of that name.
func irExplain(word string) string {
	for i := range ir.Ops {
		if ir.Ops[i].Name == word {
			return "opcode " + word + "\n\n" + ir.Ops[i].Doc
		}
	}
	return ""
}
