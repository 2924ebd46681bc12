package sppo_test

import (
	"go/ast"
	"go/token"
	"go/types"
	"os"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// limits holds what functions of the compiler's middle may be. A file belongs to the first row that contains its
// folder. A limit of 0 is none.
var limits = []limit{
	{folder: "internal/schedule", paths: 15, glossary: true},
	{folder: "internal/passes/search", paths: 15, glossary: true},
	{folder: "internal/passes/strategy", paths: 15},
	{folder: "internal/passes", paths: 15, glossary: true},
	{folder: "internal/codegen", paths: 15, glossary: true},
	{folder: "internal/graph", paths: 15, glossary: true},
}

type limit struct {
	folder   string
	paths    int  // cyclomatic complexity of a function, as gocyclo counts it
	glossary bool // whether the words of identifiers are checked
}

// limited calls check for each file that limits apply to, except tests and their helpers.
func limited(t *testing.T, check func(source, limit)) {
	t.Helper()
	for _, l := range limits {
		if _, err := os.Stat(l.folder); err != nil {
			t.Errorf("the table of limits names %s: %v", l.folder, err)
		}
	}
	for _, s := range sources(t) {
		if s.test || isHelper(s.folder) {
			continue
		}
		for _, l := range limits {
			if within(s.folder, l.folder) {
				check(s, l)
				break
			}
		}
	}
}

func TestComplexity(t *testing.T) {
	limited(t, func(s source, l limit) {
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if n := paths(d); ok && n > l.paths && l.paths > 0 {
				t.Errorf("%s: %s has a cyclomatic complexity of %d, at most %d is allowed", s.set.Position(f.Pos()), f.Name.Name, n, l.paths)
			}
		}
	})
}

// paths returns the cyclomatic complexity of a function, including the function literals in it.
func paths(f ast.Node) int {
	n := 1
	ast.Inspect(f, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if node.List != nil {
				n++
			}
		case *ast.BinaryExpr:
			if node.Op == token.LAND || node.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}

// large lists structs that tend to grow, with the most fields that they may have. Fields of embedded structs count.
var large = []struct {
	name   string
	fields int
}{
	{"codegen.lowering", 20},
	{"memory.tracker", 20},
	{"offload.chooser", 20},
	{"search.node", 20},
}

func TestFields(t *testing.T) {
	structs := map[string]*ast.StructType{}
	for _, s := range sources(t) {
		ast.Inspect(s.file, func(node ast.Node) bool {
			if spec, ok := node.(*ast.TypeSpec); ok && !s.test {
				if st, ok := spec.Type.(*ast.StructType); ok {
					structs[s.file.Name.Name+"."+spec.Name.Name] = st
				}
			}
			return true
		})
	}
	for _, l := range large {
		if n := fields(structs, l.name); n == 0 || n > l.fields {
			t.Errorf("%s has %d fields, at most %d are allowed", l.name, n, l.fields)
		}
	}
}

// fields returns the number of fields of a struct, given all structs by package and name.
func fields(structs map[string]*ast.StructType, name string) (n int) {
	st := structs[name]
	if st == nil {
		return 0
	}
	for _, f := range st.Fields.List {
		embedded := strings.TrimPrefix(types.ExprString(f.Type), "*")
		if !strings.Contains(embedded, ".") {
			embedded = name[:strings.Index(name, ".")+1] + embedded
		}
		if len(f.Names) > 0 || structs[embedded] == nil {
			n += max(1, len(f.Names))
		} else {
			n += fields(structs, embedded)
		}
	}
	return n
}

// glossary lists words that identifiers must not contain, and what to write instead: what the documents say.
var glossary = []struct{ words, instead string }{
	{"again remake remakes remade remaking", "recompute"},
	{"turn turns turning", "change (of a placement), step (of a ring), group (of pieces)"},
	{"apart", "unit by unit"},
	{"woven", "interleaved"},
	{"rim rims", "border"},
	{"cache caches caching", "kv where K and V are meant; estimate.Cache is one"},
	{"lean bare strip tight tightest unfit", "what is meant, such as short of memory"},
}

// unnamed lists identifiers for which the glossary does not hold: first those that package search reads, then a cache
// of estimates.
var unnamed = []string{"Remakes", "Cache", "CacheGrad", "Caches", "NewCache", "cache"}

func TestGlossary(t *testing.T) {
	instead := map[string]string{}
	for _, row := range glossary {
		for _, word := range strings.Fields(row.words) {
			instead[word] = row.instead
		}
	}
	limited(t, func(s source, l limit) {
		if !l.glossary {
			return
		}
		elsewhere := map[*ast.Ident]bool{} // identifiers that may be declared in another package
		ast.Inspect(s.file, func(node ast.Node) bool {
			switch node := node.(type) {
			case *ast.SelectorExpr:
				elsewhere[node.Sel] = true
			case *ast.KeyValueExpr:
				if key, ok := node.Key.(*ast.Ident); ok {
					elsewhere[key] = true
				}
			case *ast.Ident:
				for _, word := range words(node.Name) {
					if instead[word] != "" && !elsewhere[node] && !slices.Contains(unnamed, node.Name) {
						t.Errorf("%s: %s: write %s instead of %q", s.set.Position(node.Pos()), node.Name, instead[word], word)
					}
				}
			}
			return true
		})
	})
}

// words splits an identifier into its words, in lower case.
func words(identifier string) (list []string) {
	runes, begin := []rune(identifier), 0
	for i := range runes {
		last := i+1 == len(runes)
		if last || unicode.IsUpper(runes[i+1]) && (unicode.IsLower(runes[i]) || i+2 < len(runes) && unicode.IsLower(runes[i+2])) {
			list = append(list, strings.ToLower(string(runes[begin:i+1])))
			begin = i + 1
		}
	}
	return list
}
