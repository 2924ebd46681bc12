package main

import (
	"slices"
	"strings"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/shipped"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// languagePage describes specs, passes and opcodes, from the tables that sppoc explain uses.
var languagePage = cli.Page{Name: "sppo", Section: 5, Doc: "specifications of training jobs", Write: writeLanguage}

func writeLanguage(m *cli.Manual) {
	m.Heading("description")
	m.Text("A spec is a text file that consists of blocks of keys. An \"import\" line includes another file, and # begins a comment.")
	for _, b := range lang.Blocks {
		m.Heading(b.Name)
		m.Text(b.Doc)
		for _, k := range lang.Keys {
			if k.Block != b.Name {
				continue
			}
			m.Term(k.Path(), k.Doc)
			text, err := lang.Explain(k.Path())
			if err != nil {
				panic("internal: " + err.Error())
			}
			_, facts, _ := strings.Cut(text, "\n\n")
			facts, _, _ = strings.Cut(facts, "\n\n") // the keys of a call have separate entries
			m.Literal(facts)
		}
	}
	m.Heading("diagnostics")
	for _, c := range lang.Codes {
		m.Term(string(c.Code), c.Doc)
	}
	m.Heading("passes")
	for i := range passes.Passes {
		m.Term(passes.Passes[i].Name, passes.Passes[i].Doc)
	}
	m.Heading("opcodes")
	for i := range ir.Ops {
		m.Term(ir.Ops[i].Name, ir.Ops[i].Doc)
	}
	m.Heading("see also")
	m.Text("sppoc(1), sppovm(1)")
}

// explained lists the words that sppoc explain knows.
func explained() []string {
	var words []string
	for _, k := range lang.Keys {
		words = append(words, k.Name, k.Path())
	}
	for _, c := range lang.Codes {
		words = append(words, string(c.Code))
	}
	for _, b := range lang.Blocks {
		words = append(words, b.Name)
	}
	for _, t := range lang.Terms {
		words = append(words, t.Name)
	}
	return slices.Concat(words, cli.Clusters(), lang.Shipped(shipped.Files, "schedule"), passes.Names(), ir.Opcodes())
}
