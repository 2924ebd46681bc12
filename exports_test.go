package sppo_test

import (
	"go/ast"
	"go/types"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// mostExports is the number of types, functions and methods that all packages for users may export together. Each of
// them is a promise to the programs that use it.
const mostExports = 260

// importable are the packages for users. Everything else is internal or a command.
var importable = []string{".", "ir", "lang"}

func TestExports(t *testing.T) {
	methods := map[string]int{} // by folder and type: exported methods
	all := sources(t)
	for _, s := range all {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && !s.test && f.Recv != nil && f.Name.IsExported() {
				methods[s.folder+"."+receiver(f)]++
			}
		}
	}
	exports := map[string]int{} // by folder
	for _, s := range all {
		if s.test || s.file.Name.Name == "main" || slices.Contains(strings.Split(s.folder, "/"), "internal") || isHelper(s.folder) {
			continue
		}
		if !slices.Contains(importable, s.folder) {
			t.Errorf("%s: programs can import the package: move it to internal, or list it here", s.path)
		}
		for _, d := range s.file.Decls {
			exports[s.folder] += exported(s, d, methods)
		}
	}
	total := 0
	for _, folder := range importable {
		total += exports[folder]
	}
	if total > mostExports || total < mostExports/4 {
		t.Errorf("the packages %v export %d types, functions and methods, at most %d are allowed: %v", importable, total, mostExports, exports)
	}
}

// exported counts the exported types and functions that a declaration adds, and the methods of the types. A type
// with another name has the methods of the type that it stands for.
func exported(s source, d ast.Decl, methods map[string]int) (n int) {
	if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.IsExported() {
		return 1
	}
	g, ok := d.(*ast.GenDecl)
	if !ok {
		return 0
	}
	for _, spec := range g.Specs {
		if spec, ok := spec.(*ast.TypeSpec); ok && spec.Name.IsExported() {
			n += 1 + methods[s.folder+"."+spec.Name.Name]
			if target, ok := spec.Type.(*ast.SelectorExpr); ok && spec.Assign.IsValid() {
				n += methods[folderOf(s, types.ExprString(target.X))+"."+target.Sel.Name]
			}
		}
	}
	return n
}

// receiver returns the name of the type that a method belongs to.
func receiver(f *ast.FuncDecl) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(types.ExprString(f.Recv.List[0].Type), "*"), "[")
	return name
}

// folderOf returns the folder of the package of ours that a file calls by a name.
func folderOf(s source, name string) string {
	for _, spec := range s.file.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		if path.Base(imported) == name || spec.Name != nil && spec.Name.Name == name {
			return strings.TrimPrefix(imported, module)
		}
	}
	return ""
}
