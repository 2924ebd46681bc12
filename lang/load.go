package lang

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/participle/v2/lexer"

	"sppo.dev/internal/infile"
)

// Options controls Load and Parse. The zero value reads from disk, has no shipped files and overrides nothing.
type Options struct {
	Set      []string                          // overrides as given to --set: "schedule.sp=4"; later ones win
	Shipped  fs.FS                             // files for imports that are not found on disk
	ReadFile func(name string) ([]byte, error) // nil: the function ReadFile
}

// Load reads and checks a specification. Errors in the spec are returned as Diagnostics. If a file
// cannot be read, it returns the read error.
func Load(file string, opts Options) (*Spec, error) {
	text, err := opts.readFile(file, MaxFileBytes)
	if err != nil {
		return nil, err
	}
	return Parse(file, text, opts)
}

// Parse is like Load for a given text; file is its name in diagnostics and the base of its imports.
func Parse(file string, text []byte, opts Options) (*Spec, error) {
	l := newLoader(file, text, opts)
	l.loadText(l.main, file, false, 0)
	l.readFlags()
	l.nameBlocks()
	l.needBlocks()
	for i := range Blocks {
		if b := &Blocks[i]; b.inText() {
			l.fillBlock(b)
		}
	}
	l.readTasks()
	if len(l.diags) == 0 {
		l.derive()
		check(l.spec, l.report)
	}
	if err := l.diags.Err(); err != nil {
		return nil, err
	}
	return l.spec, nil
}

// ParseModel reads and checks the keys of a model block without a spec: "family = llama layers = 2 ...".
func ParseModel(keys string) (Model, error) {
	l := newLoader("model", []byte("model model {\n"+keys+"\n}\n"), Options{})
	l.loadText(l.main, "model", false, 0)
	l.nameBlocks()
	l.fillBlock(findBlock(blockModel))
	if len(l.diags) == 0 {
		l.derive()
		(&checker{l.spec, l.report}).model()
	}
	return l.spec.Model, l.diags.Err()
}

func newLoader(file string, text []byte, opts Options) *loader {
	return &loader{
		opts:   opts,
		spec:   &Spec{File: file, source: &source{values: map[string]span{}, blocks: map[string]span{}, given: map[string]value{}, names: map[string]string{}}},
		global: &scope{names: map[string]*binding{}},
		loaded: map[string]bool{}, byFamily: map[*Key]bool{}, chosen: map[string]*blockRef{},
		main: &sourceText{name: file, text: string(text), dir: path.Dir(file)},
	}
}

func (o Options) readFile(name string, most int64) ([]byte, error) {
	if o.ReadFile != nil {
		return o.ReadFile(name)
	}
	return infile.Read(name, most)
}

type loader struct {
	opts   Options
	spec   *Spec
	diags  Diagnostics
	broken bool // part of the input could not be read; whatever seems to be missing may be in it

	limited bool // too many imports were found; no more are read

	main   *sourceText
	global *scope
	loaded map[string]bool // by path: true once the file has been read, false while its imports are followed
	blocks []*blockRef     // in the order in which they were read: imports before the importing file
	flags  []*flagRef
	chosen map[string]*blockRef // by kind: the blocks that overrides select

	byFamily map[*Key]bool // keys that have the default of the model's family
}

// blockRef is a block with its source text.
type blockRef struct {
	node  *blockNode
	src   *sourceText
	depth int // number of imports that lead to its file: 0 in the main file
}

func (b *blockRef) head() span { return tokenSpan(b.src, b.node.Tokens[0]) }

// flagRef is one --set flag. The last one for a key takes effect.
type flagRef struct {
	path string
	src  *sourceText
	node *entryNode
}

func (l *loader) report(d *Diagnostic) { l.diags = append(l.diags, d) }

func (l *loader) fail(code Code, at span, hint, format string, args ...any) {
	l.report(newDiagnostic(code, at, hint, format, args...))
}

// loadText parses one text, follows its imports, then binds its names.
func (l *loader) loadText(src *sourceText, key string, shipped bool, depth int) {
	before := len(l.diags)
	file := parseFile(src, l.report)
	l.broken = l.broken || len(l.diags) > before
	l.loadFile(src, file, key, shipped, depth)
}

func (l *loader) loadFile(src *sourceText, file *fileNode, key string, shipped bool, depth int) {
	l.loaded[key] = false
	for _, item := range file.Items {
		switch {
		case item.Import != nil:
			l.follow(src, item.Import, shipped, depth)
		case item.Let != nil:
			l.bind(src, l.global, item.Let.Tokens[1], item.Let.Value)
		case item.Block != nil:
			l.blocks = append(l.blocks, &blockRef{item.Block, src, depth})
		}
	}
	l.loaded[key] = true
}

// Limits on the depth of imports and on their number. Each file is read only once, but links can
// give a file many names.
const (
	maxImports = 32
	maxFiles   = 256
)

func (l *loader) follow(src *sourceText, n *importNode, shipped bool, depth int) {
	at := tokenSpan(src, n.Tokens[1])
	name, err := strconv.Unquote(n.Path)
	if err != nil || name == "" {
		l.broken = true
		l.fail(BadImport, at, "", "an import needs a path in quotes")
		return
	}
	if l.limited {
		return
	}
	if depth >= maxImports || len(l.loaded) > maxFiles {
		l.broken, l.limited = true, true
		l.fail(BadImport, at, "", "imports are nested more than %d deep, or there are more than %d of them", maxImports, maxFiles)
		return
	}
	text, fullName, fromShipped, err := l.readNamed(src, name, shipped, MaxFileBytes)
	if err != nil {
		l.broken = true
		l.fail(BadImport, at, l.shippedHint(name, "*/*.sppo"), "cannot import %q: %v", name, plainError(err))
		return
	}
	if done, seen := l.loaded[fullName]; seen {
		if !done {
			l.broken = true
			l.fail(BadImport, at, "", "%q imports itself, directly or through other files", name)
		}
		return
	}
	imported := &sourceText{name: fullName, text: string(text), dir: path.Dir(strings.TrimPrefix(fullName, ShippedPrefix))}
	if fromShipped || l.isInside(fullName) {
		l.loadText(imported, fullName, fromShipped, depth+1)
		return
	}
	imported.hidden = true
	file, line := parseHidden(imported)
	if file == nil {
		l.broken = true
		l.fail(BadImport, at, "sppoc check "+fullName+" shows its errors", "cannot import %q: line %d is not valid in a spec", name, line)
		return
	}
	l.loadFile(imported, file, fullName, false, depth+1)
}

// isInside follows links, and reports whether a file is in or below the folder of the spec. A spec from another
// source may import any file that its user can read, so error messages must not show lines of files elsewhere.
func (l *loader) isInside(name string) bool {
	relative, err := filepath.Rel(target(l.main.dir), target(name))
	return err == nil && filepath.IsLocal(relative)
}

// target returns the absolute path that a name resolves to, or the name itself if it does not resolve.
func target(name string) string {
	if absolute, err := filepath.Abs(name); err == nil {
		name = absolute
	}
	if behind, err := filepath.EvalSymlinks(name); err == nil {
		name = behind
	}
	return name
}

// parseHidden parses a file whose contents must not be printed. If it is not a spec, it returns nil and the
// line of the first error: a syntax error, or a block of an unknown kind.
func parseHidden(src *sourceText) (file *fileNode, line int) {
	var wrong []*Diagnostic
	file = parseFile(src, func(d *Diagnostic) { wrong = append(wrong, d) })
	if len(wrong) > 0 {
		return nil, wrong[0].Pos.Line
	}
	for _, item := range file.Items {
		if b := item.Block; b != nil && (findBlock(b.Kind) == nil || !findBlock(b.Kind).inText()) {
			return nil, b.Tokens[0].Pos.Line
		}
	}
	return file, 0
}

// ShippedPrefix marks the names of shipped files in diagnostics, because they are not on disk.
const ShippedPrefix = "shipped:"

// readNamed reads a file of at most that many bytes. It looks next to the file that names it first, then among the shipped files.
func (l *loader) readNamed(src *sourceText, name string, shipped bool, most int64) (text []byte, fullName string, fromShipped bool, err error) {
	if !shipped {
		fullName = name
		if !path.IsAbs(name) {
			fullName = path.Join(src.dir, name)
		}
		text, err = l.opts.readFile(fullName, most)
		if !errors.Is(err, fs.ErrNotExist) {
			return text, fullName, false, err
		}
	}
	if l.opts.Shipped == nil {
		return nil, "", false, orErr(err, fs.ErrNotExist)
	}
	inShipped := path.Clean(name)
	if shipped {
		inShipped = path.Join(src.dir, name)
	}
	text, err = fs.ReadFile(l.opts.Shipped, inShipped)
	if shipped && err != nil {
		inShipped = path.Clean(name)
		text, err = fs.ReadFile(l.opts.Shipped, inShipped)
	}
	return text, ShippedPrefix + inShipped, true, err
}

func orErr(err, otherwise error) error {
	if err == nil {
		return otherwise
	}
	return err
}

func plainError(err error) string {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrInvalid) {
		return "no such file"
	}
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err.Error()
	}
	return err.Error()
}

// shippedHint suggests the most similar shipped file of a pattern, or lists all of them.
func (l *loader) shippedHint(name, pattern string) string {
	if l.opts.Shipped == nil {
		return ""
	}
	files, _ := fs.Glob(l.opts.Shipped, pattern)
	if near := nearest(name, files); near != "" {
		return fmt.Sprintf("did you mean %q?", near)
	}
	if len(files) == 0 {
		return ""
	}
	return "shipped are " + strings.Join(files, ", ")
}

// bind assigns a value to a name; name is the token that defines it.
func (l *loader) bind(src *sourceText, sc *scope, name lexer.Token, n *exprNode) {
	at := tokenSpan(src, name)
	if old := sc.names[name.Value]; old != nil {
		l.fail(Duplicate, at, "", "`%s` is already defined at %s", name.Value, old.at.pos())
		return
	}
	e := &evaluator{src: src, scope: sc, report: l.report}
	v, ok := e.expr(n)
	if !ok {
		l.broken = true
		v = value{}
	}
	sc.names[name.Value] = &binding{value: v, at: at, bad: !ok}
}

// flagName is the name of overrides in diagnostics.
const flagName = "--set"

// readFlags parses the overrides and checks that they name keys or, as in "cluster=h100(nodes = 2)", kinds of blocks.
func (l *loader) readFlags() {
	for _, flag := range l.opts.Set {
		src := &sourceText{name: flagName, text: flag}
		n := parseFlag(src, l.report)
		if n == nil {
			l.broken = true
			continue
		}
		at := tokenSpan(src, n.Tokens[0])
		if !n.Let && shippedFolders[n.Key] != "" {
			l.selectBlock(src, n)
			continue
		}
		if n.Let || FindKey(n.Key) == nil {
			l.fail(UnknownKey, at, pathHint(n.Key), "unknown key `%s`", n.Key)
			continue
		}
		l.flags = append(l.flags, &flagRef{n.Key, src, n})
	}
}

// selectBlock makes a block with another name the spec's block of its kind: one that the spec defines or imports, or else a
// shipped one.
func (l *loader) selectBlock(src *sourceText, n *entryNode) {
	node := &blockNode{Tokens: n.Tokens, Kind: n.Key, Value: n.Value}
	if call := n.Value.asCall(); call != nil {
		node.Name = call.Name
		if !slices.Contains(l.namesOf(n.Key), call.Name) && slices.Contains(Shipped(l.opts.Shipped, n.Key), call.Name) {
			dir := shippedFolders[n.Key]
			if text, err := fs.ReadFile(l.opts.Shipped, dir+"/"+call.Name+".sppo"); err == nil {
				name := ShippedPrefix + dir + "/" + call.Name + ".sppo"
				l.loadText(&sourceText{name: name, text: string(text), dir: dir}, name, true, 1)
			}
		}
	}
	l.chosen[n.Key] = &blockRef{node, src, 0}
}

// namesOf lists the names of the spec's blocks of a kind.
func (l *loader) namesOf(kind string) (names []string) {
	for _, b := range l.blocks {
		if b.node.Kind == kind && b.node.Name != "" {
			names = append(names, b.node.Name)
		}
	}
	return names
}

// Shipped lists the shipped blocks of a kind, such as "cluster". Each is in a file with its name.
func Shipped(files fs.FS, kind string) (names []string) {
	if files == nil || shippedFolders[kind] == "" {
		return nil
	}
	list, _ := fs.Glob(files, shippedFolders[kind]+"/*.sppo")
	for _, file := range list {
		names = append(names, strings.TrimSuffix(path.Base(file), ".sppo"))
	}
	return names
}

// ShippedAuto lists the shipped blocks of a kind that leave all sizes to the compiler: those whose parameters are all
// `auto` by default.
func ShippedAuto(files fs.FS, kind string) (names []string) {
	fixed := func(p *argNode) bool {
		_, fallback := p.parameter()
		return fallback == nil || fallback.asCall() == nil || fallback.asCall().Name != "auto"
	}
	for _, name := range Shipped(files, kind) {
		text, err := fs.ReadFile(files, shippedFolders[kind]+"/"+name+".sppo")
		if err != nil {
			continue
		}
		for _, item := range parseFile(&sourceText{name: name, text: string(text)}, func(*Diagnostic) {}).Items {
			b := item.Block
			if b != nil && b.Kind == kind && b.Name == name && (b.Params == nil || !slices.ContainsFunc(b.Params.Args, fixed)) {
				names = append(names, name)
			}
		}
	}
	return names
}

// pathHint suggests the key that the user may have meant by a wrong path: the same name in another
// block, or a similar path.
func pathHint(wrong string) string {
	var paths, same []string
	for _, k := range Keys {
		paths = append(paths, k.Path())
		if k.Name == wrong[strings.LastIndexByte(wrong, '.')+1:] {
			same = append(same, k.Path())
		}
	}
	if len(same) > 0 {
		return "did you mean " + orList(same) + "?"
	}
	if near := nearest(wrong, paths); near != "" {
		return "did you mean `" + near + "`?"
	}
	if !strings.Contains(wrong, ".") {
		return "write block.key=value, as in schedule.sp=4"
	}
	return ""
}

func (l *loader) flag(path string) *flagRef {
	for _, f := range slices.Backward(l.flags) {
		if f.path == path {
			return f
		}
	}
	return nil
}

// nameBlocks checks every block, used or not: its kind, its name, the names of its keys.
func (l *loader) nameBlocks() {
	seen := map[string]span{}
	for _, b := range l.blocks {
		kind := findBlock(b.node.Kind)
		if kind == nil || !kind.inText() {
			l.fail(UnknownBlock, b.head(), blockHint(b.node.Kind), "unknown block `%s`", b.node.Kind)
			l.broken = true
			continue
		}
		id := b.node.Kind + " " + b.node.Name
		if old, ok := seen[id]; ok && b.node.Name != "" {
			l.fail(Duplicate, b.head(), "", "`%s` is already defined at %s", id, old.pos())
		}
		seen[id] = b.head()
		if b.node.Body == nil {
			continue
		}
		for _, entry := range b.node.Body.Entries {
			if !entry.Let && FindKey(b.node.Kind+"."+entry.Key) == nil {
				l.fail(UnknownKey, tokenSpan(b.src, entry.Tokens[0]), keyHint(b.node.Kind, entry.Key),
					"`%s` has no key `%s`", b.node.Kind, entry.Key)
			}
		}
	}
}

func blockHint(wrong string) string {
	var kinds []string
	for _, b := range Blocks {
		if b.inText() {
			kinds = append(kinds, b.Name)
		}
	}
	if near := nearest(wrong, append(kinds, "import", "let")); near != "" {
		return "did you mean `" + near + "`?"
	}
	return "blocks are " + strings.Join(quoted(kinds), ", ")
}

// keyHint suggests a similar key of the block, or the same name in another block.
func keyHint(block, wrong string) string {
	var inBlock []string
	for _, k := range KeysOf(block) {
		inBlock = append(inBlock, k.Name)
	}
	if near := nearest(wrong, inBlock); near != "" {
		return "did you mean `" + near + "`?"
	}
	for _, k := range Keys {
		if k.Name == wrong {
			return "`" + wrong + "` belongs in `" + k.Block + "`"
		}
	}
	return "its keys are " + strings.Join(quoted(inBlock), ", ")
}

// hint returns the argument that the user may have meant by a wrong name.
func (c *callType) hint(wrong string) string {
	args := c.arguments()
	if near := nearest(wrong, args); near != "" {
		return "did you mean `" + near + "`?"
	}
	return "it takes " + strings.Join(quoted(args), ", ")
}

// needBlocks reports missing blocks, with the start of the file as their position.
func (l *loader) needBlocks() {
	var missing []string
	for _, kind := range Blocks {
		if kind.Required && l.chosen[kind.Name] == nil && !slices.ContainsFunc(l.blocks, func(b *blockRef) bool { return b.node.Kind == kind.Name }) {
			missing = append(missing, kind.Name)
		}
	}
	if len(missing) == 0 || l.broken {
		return
	}
	start := lexer.Position{Line: 1, Column: 1}
	l.fail(MissingBlock, span{l.main, start, start}, "write "+missing[0]+" { ... }, or import it",
		"the spec has no %s", strings.Join(quoted(missing), ", "))
}

// choose returns the block to use for a kind: the one that an override selects, if any. The file's own blocks take precedence over imported ones, and a
// block with parameters is used only if there is no other.
func (l *loader) choose(kind *Block) *blockRef {
	if ref := l.chosen[kind.Name]; ref != nil {
		return ref
	}
	var own, imported []*blockRef
	for _, b := range l.blocks {
		switch {
		case b.node.Kind != kind.Name:
		case b.depth == 0:
			own = append(own, b)
		default:
			imported = append(imported, b)
		}
	}
	for _, level := range [][]*blockRef{own, imported} {
		plain := slices.DeleteFunc(slices.Clone(level), func(b *blockRef) bool { return b.node.Params != nil })
		if len(plain) == 0 {
			plain = level
		}
		if len(plain) > 1 {
			l.fail(AmbiguousBlock, plain[1].head(), "keep one, or move the other to a separate file",
				"it is unclear which `%s` block to use; the other is at %s", kind.Name, plain[0].head().pos())
		}
		if len(plain) > 0 {
			return plain[0]
		}
	}
	return nil
}

// fillBlock evaluates the selected block and puts its values into the spec.
func (l *loader) fillBlock(kind *Block) {
	ref := l.choose(kind)
	if ref == nil {
		l.fillKeys(kind.Name, span{}, nil, allKeys)
		return
	}
	l.spec.source.blocks[kind.Name] = ref.head()
	l.setBlockName(kind.Name, ref.node.Name)
	values, ok := l.valuesOf(ref, nil, nil, nil)
	if !ok {
		l.broken = true
	}
	l.fillKeys(kind.Name, ref.head(), values, allKeys)
}

func (l *loader) setBlockName(kind, name string) {
	l.spec.source.names[kind] = name
	switch kind {
	case blockModel:
		l.spec.Model.Name = name
	case blockCluster:
		l.spec.Cluster.Name = name
	}
}

// valuesOf evaluates the entries of a block. For `cluster a = b(nodes = 4)` these are the entries of b, with
// args as its arguments and a as the block `from`; seen lists the blocks visited, to detect one that is defined
// in terms of itself.
func (l *loader) valuesOf(ref *blockRef, args *argsNode, from *blockRef, seen []*blockRef) (map[string]namedValue, bool) {
	sc, ok := l.parameters(ref, args, from)
	if ref.node.Value != nil {
		base, baseArgs := l.base(ref)
		if base == nil {
			return nil, false
		}
		if slices.Contains(seen, base) || base == ref {
			l.fail(AmbiguousBlock, ref.head(), "", "`%s` is defined in terms of itself", ref.node.Name)
			return nil, false
		}
		values, baseOK := l.valuesOf(base, baseArgs, ref, append(seen, ref))
		return values, ok && baseOK
	}
	values := map[string]namedValue{}
	for _, entry := range ref.node.Body.Entries {
		if entry.Let {
			l.bind(ref.src, sc, entry.Tokens[1], entry.Value)
			continue
		}
		at := tokenSpan(ref.src, entry.Tokens[0])
		if old, dup := values[entry.Key]; dup {
			l.fail(Duplicate, at, "", "`%s` is already set at %s", entry.Key, old.nameAt.pos())
			continue
		}
		k := FindKey(ref.node.Kind + "." + entry.Key)
		if k == nil { // reported by nameBlocks
			continue
		}
		v, good := l.evaluator(ref.src, sc, k).expr(entry.Value)
		ok = ok && good
		values[entry.Key] = namedValue{entry.Key, at, v}
		if !good {
			values[entry.Key] = namedValue{entry.Key, at, value{kind: isBad}}
		}
	}
	return values, ok
}

// evaluator returns an evaluator of values of a key; nil means that the text does not say which key has the value.
func (l *loader) evaluator(src *sourceText, sc *scope, k *Key) *evaluator {
	e := &evaluator{src: src, scope: sc, report: l.report}
	if k != nil {
		e.calls, e.enum, e.takes = k.takes.calls, k.takes.allNames(), k.takes.number
	}
	return e
}

// shippedFolders are the folders of shipped blocks, by kind.
var shippedFolders = map[string]string{blockCluster: "clusters", blockSchedule: "baselines"}

// base returns the block that `= name(...)` refers to.
func (l *loader) base(ref *blockRef) (*blockRef, *argsNode) {
	at := nodeSpan(ref.src, ref.node.Value.Tokens)
	call := ref.node.Value.asCall()
	if call == nil {
		l.fail(WrongType, at, "", "`%s %s =` needs the name of another %s, with its parameters", ref.node.Kind, ref.node.Name, ref.node.Kind)
		return nil, nil
	}
	for _, b := range l.blocks {
		if b.node.Kind == ref.node.Kind && b.node.Name == call.Name {
			return b, call.Args
		}
	}
	others := slices.DeleteFunc(l.namesOf(ref.node.Kind), func(name string) bool { return name == ref.node.Name })
	shipped, hint := Shipped(l.opts.Shipped, ref.node.Kind), ""
	list := distinct(append(slices.Clone(others), shipped...))
	near := nearest(call.Name, others)
	if l.chosen[ref.node.Kind] == ref {
		near = sameStart(call.Name, list)
	}
	if near != "" {
		hint = "did you mean `" + near + "`?"
	} else if slices.Contains(shipped, call.Name) {
		hint = fmt.Sprintf("import the shipped one with import \"%s/%s.sppo\"", shippedFolders[ref.node.Kind], call.Name)
	} else if len(list) > 0 {
		hint = fmt.Sprintf("the %ss are %s", ref.node.Kind, strings.Join(quoted(list), ", "))
	}
	if !l.broken {
		l.fail(UnknownName, at, hint, "there is no %s `%s`", ref.node.Kind, call.Name)
	}
	return nil, nil
}

// sameStart returns the only candidate that, whatever the case, begins with the word or with which the word begins, or "". Machines
// whose names differ otherwise, such as a100 and h100, are not misspelt.
func sameStart(word string, candidates []string) string {
	word = strings.ToLower(word)
	alike := slices.DeleteFunc(slices.Clone(candidates), func(c string) bool {
		return !strings.HasPrefix(strings.ToLower(c), word) && !strings.HasPrefix(word, strings.ToLower(c))
	})
	if len(alike) != 1 {
		return ""
	}
	return alike[0]
}

// parameters binds each parameter of a block to the override of the key with the same name, if there is one, or
// else to its argument, or else to its default.
func (l *loader) parameters(ref *blockRef, args *argsNode, from *blockRef) (*scope, bool) {
	sc := &scope{names: map[string]*binding{}, outer: l.global}
	var params, given []*argNode
	if ref.node.Params != nil {
		params = ref.node.Params.Args
	}
	if args != nil {
		given = args.Args
	}
	ok := true
	arguments := map[string]*binding{}
	for i, arg := range given {
		name, at := arg.Name, nodeSpan(from.src, arg.Tokens)
		if name == "" && i < len(params) {
			name, _ = params[i].parameter()
		}
		v, good := l.evaluator(from.src, l.global, FindKey(ref.node.Kind+"."+name)).expr(arg.Value)
		ok = ok && good
		if arguments[name] != nil {
			l.fail(Duplicate, at, "", "parameter `%s` is given twice", name)
			ok = false
		}
		if !slices.ContainsFunc(params, func(p *argNode) bool { n, _ := p.parameter(); return n == name }) {
			l.fail(BadArgument, at, parameterHint(params, name), "`%s` has no such parameter", ref.node.Name)
			ok = false
		}
		arguments[name] = &binding{value: v, given: true, at: at, bad: !good}
	}
	for _, p := range params {
		name, fallback := p.parameter()
		ok = l.parameter(ref, sc, p, name, fallback, arguments[name], from) && ok
	}
	return sc, ok
}

func (l *loader) parameter(ref *blockRef, sc *scope, p *argNode, name string, fallback *exprNode, arg *binding, from *blockRef) bool {
	at := nodeSpan(ref.src, p.Tokens)
	key := ref.node.Kind + "." + name
	flag := l.flag(key)
	switch {
	case name == "":
		l.fail(BadArgument, at, "write `name` or `name = default`", "a parameter must be a name")
		return false
	case sc.names[name] != nil:
		l.fail(Duplicate, at, "", "parameter `%s` is given twice", name)
		return false
	case flag != nil:
		v, ok := l.evaluator(flag.src, l.global, FindKey(key)).expr(flag.node.Value)
		sc.names[name] = &binding{value: v, given: true, at: at, bad: !ok}
	case arg != nil:
		sc.names[name] = arg
	case fallback != nil: // may use the parameters before it
		e := &evaluator{src: ref.src, scope: sc, report: l.report}
		v, ok := e.expr(fallback)
		sc.names[name] = &binding{value: v, at: at, bad: !ok}
	default:
		where := ref.head()
		if from != nil {
			where = nodeSpan(from.src, from.node.Value.Tokens)
		}
		l.fail(BadArgument, where, fmt.Sprintf("write %s(%s = ...)", ref.node.Name, name), "parameter `%s` of `%s` is not given", name, ref.node.Name)
		sc.names[name] = &binding{at: at, bad: true}
		return false
	}
	return true
}

func parameterHint(params []*argNode, wrong string) string {
	var names []string
	for _, p := range params {
		name, _ := p.parameter()
		names = append(names, name)
	}
	if near := nearest(wrong, names); near != "" {
		return "did you mean `" + near + "`?"
	}
	if len(names) == 0 {
		return "it has none"
	}
	return "it has " + strings.Join(quoted(names), ", ")
}

// parameter reads an argument node as a parameter: its name, and its default if it has one.
func (n *argNode) parameter() (name string, fallback *exprNode) {
	if n.Name != "" {
		return n.Name, n.Value
	}
	if call := n.Value.asCall(); call != nil && call.Args == nil {
		return call.Name, nil
	}
	return "", nil
}

// asCall returns the name or call that makes up an expression, or nil.
func (n *exprNode) asCall() *callNode {
	f := n.First.First
	if len(n.Rest) > 0 || len(n.First.Rest) > 0 || f.Negative {
		return nil
	}
	return f.Call
}

// fillKeys gives each applicable key of a block its value: from a flag, from the text, or by default.
func (l *loader) fillKeys(block string, head span, values map[string]namedValue, applies func(name string) bool) {
	var missing []string
	for _, k := range KeysOf(block) {
		if !applies(k.Name) {
			continue
		}
		v, written := l.written(k, values)
		switch {
		case written && v.kind == isBad:
		case written:
			l.fillKey(k, v)
		case l.spec.familyDefault(k) != "":
			l.byFamily[k] = true
			k.set(l.spec, k.valueOf(l.spec.familyDefault(k)))
		case k.Default != "":
			k.set(l.spec, k.valueOf(k.Default))
			if v := k.valueOf(k.Default); v.kind == isCall {
				l.fillArguments(k, v)
			}
		case k.Required():
			missing = append(missing, k.Name)
		}
	}
	if len(missing) > 0 && !l.broken && head.src != nil {
		l.fail(MissingKey, head, fmt.Sprintf("add %s = %s", missing[0], FindKey(block+"."+missing[0]).Example),
			"`%s` is missing %s", block, strings.Join(quoted(missing), ", "))
	}
}

func allKeys(string) bool { return true }

// written returns the value that the user gave a key; flags take precedence.
func (l *loader) written(k *Key, values map[string]namedValue) (value, bool) {
	if f := l.flag(k.Path()); f != nil {
		e := l.evaluator(f.src, l.global, k)
		v, ok := e.expr(f.node.Value)
		if !ok {
			v = value{kind: isBad}
		}
		return v, true
	}
	nv, ok := values[k.Name]
	return nv.value, ok
}

func (l *loader) fillKey(k *Key, v value) {
	fitted, ok := k.takes.fit(k.Name, v, l.report)
	if !ok {
		return
	}
	l.spec.source.values[k.Path()] = fitted.at
	l.spec.source.given[k.Path()] = fitted
	for i, item := range fitted.list {
		l.spec.source.values[fmt.Sprintf("%s[%d]", k.Path(), i)] = item.at
	}
	k.set(l.spec, fitted)
	if fitted.kind == isCall {
		l.fillArguments(k, fitted)
	}
}

// fillArguments treats the named arguments of a call as keys of the call's block.
func (l *loader) fillArguments(k *Key, v value) {
	call := k.takes.call(v.name)
	block := call.block
	for _, other := range k.takes.calls {
		if other.block == block {
			continue
		}
		for _, arg := range KeysOf(other.block) {
			if f := l.flag(arg.Path()); f != nil {
				l.fail(UnknownKey, tokenSpan(f.src, f.node.Tokens[0]), fmt.Sprintf("it is an argument of `%s`", other.name),
					"`%s` has no argument `%s`", v.name, arg.Name)
			}
		}
	}
	if block == "" {
		return
	}
	values := map[string]namedValue{}
	for _, arg := range v.named {
		if _, dup := values[arg.name]; dup {
			l.fail(Duplicate, arg.nameAt, "", "`%s` is given twice", arg.name)
			continue
		}
		if !call.has(arg.name) {
			l.fail(UnknownKey, arg.nameAt, call.hint(arg.name), "`%s` has no argument `%s`", v.name, arg.name)
			continue
		}
		values[arg.name] = arg
	}
	for _, arg := range KeysOf(block) {
		if f := l.flag(arg.Path()); f != nil && !call.has(arg.Name) {
			l.fail(UnknownKey, tokenSpan(f.src, f.node.Tokens[0]), call.hint(arg.Name), "`%s` has no argument `%s`", v.name, arg.Name)
		}
	}
	l.fillKeys(block, v.at, values, call.has)
}

// valueOf evaluates a default value written as in a spec.
func (k *Key) valueOf(text string) value {
	src := &sourceText{name: k.Path(), text: text}
	fail := func(d *Diagnostic) { panic("internal: default of " + k.Path() + ": " + d.Error()) }
	n, bad := parseTokens(exprParser, lex(src))
	if bad >= 0 {
		panic("internal: default of " + k.Path() + " does not parse")
	}
	e := &evaluator{src: src, calls: k.takes.calls, enum: k.takes.allNames(), takes: k.takes.number, report: fail}
	v, _ := e.expr(n)
	v, _ = k.takes.fit(k.Name, v, fail)
	return v
}

// derive computes the omitted keys whose defaults depend on other keys.
func (l *loader) derive() {
	for _, k := range Keys {
		if k.derive != nil && !l.byFamily[k] && !l.spec.Written(k.Path()) {
			k.derive(l.spec)
		}
	}
}
