// Package lang reads specifications (.sppo): it parses, resolves, checks, formats and explains them.
//
// grammar.go defines the grammar; parse.go turns text into a tree and recovers from syntax errors. load.go
// follows imports, binds names and selects the blocks to use. eval.go computes values with their dimensions.
// keys.go is the table of keys, by which values are checked, documented, completed and stored in the Spec.
// check.go has the rules that involve several keys. Every error in a spec is a Diagnostic (diag.go, codes.go).
// format.go defines the standard style; explain.go describes keys, values and terms.
//
// The package defines which specs are well formed. It does not know what a schedule does, which values the
// compiler supports, or whether a plan fits. Of this module's packages, it imports only ir and infile.
package lang

import (
	"github.com/alecthomas/participle/v2"
	"github.com/alecthomas/participle/v2/lexer"
)

// A name may contain `-` and `.` directly between name characters (gpt-7b, a100-80g, gpt-1.3b), so subtraction
// needs a space on at least one side of its sign. A name may start with a digit only in the form digits,
// letter, digits, letter (1f1b). A unit directly follows its number (80GiB, 32GB/s): otherwise `5 s = 3` would
// be ambiguous.
var tokenRules = []lexer.SimpleRule{
	{Name: "Comment", Pattern: `#[^\n]*`},
	{Name: "NL", Pattern: `\n`},
	{Name: "Space", Pattern: `[ \t\r\x{FEFF}]+`},
	{Name: "String", Pattern: `"(\\[^\n]|[^"\\\n])*"`},
	{Name: "OpenString", Pattern: `"[^\n]*`}, // an unterminated string, which no grammar rule accepts
	{Name: "Name", Pattern: `([A-Za-z_]|[0-9]+[a-df-z][0-9]+[a-z])[A-Za-z0-9_]*([-.][A-Za-z0-9_]+)*`},
	{Name: "Number", Pattern: `[0-9][0-9_]*(\.[0-9]+)?([eE][+-]?[0-9]+)?([A-Za-zµ][A-Za-z0-9]*(/s\b)?)?`},
	{Name: "Punct", Pattern: `[{}()\[\],=+\-*/]`},
	{Name: "Stray", Pattern: `(?s:.)`}, // a character that starts no token, which no grammar rule accepts
}

var tokens = lexer.MustSimple(tokenRules)

var (
	tokComment    = tokens.Symbols()["Comment"]
	tokNL         = tokens.Symbols()["NL"]
	tokSpace      = tokens.Symbols()["Space"]
	tokString     = tokens.Symbols()["String"]
	tokOpenString = tokens.Symbols()["OpenString"]
	tokName       = tokens.Symbols()["Name"]
	tokPunct      = tokens.Symbols()["Punct"]
	tokNumber     = tokens.Symbols()["Number"]
	tokStray      = tokens.Symbols()["Stray"]
)

// A line break ends a value, except inside ( ) and [ ], where the parser does not see line breaks (parse.go).
type (
	fileNode struct {
		Items []*itemNode `parser:"NL* (@@ NL*)*"`
	}

	itemNode struct {
		Import *importNode `parser:"  @@"`
		Let    *letNode    `parser:"| @@"`
		Block  *blockNode  `parser:"| @@"`
	}

	importNode struct {
		Tokens []lexer.Token
		Path   string `parser:"'import' @String"`
	}

	letNode struct {
		Tokens []lexer.Token
		Name   string    `parser:"'let' @Name '='"`
		Value  *exprNode `parser:"@@"`
	}

	blockNode struct {
		Tokens []lexer.Token
		Kind   string     `parser:"@Name"`
		Name   string     `parser:"@Name?"`
		Params *argsNode  `parser:"@@?"`
		Value  *exprNode  `parser:"( '=' @@"`
		Body   *blockBody `parser:"| @@ )"`
	}

	blockBody struct {
		Entries []*entryNode `parser:"'{' NL* (@@ NL*)* '}'"`
	}

	entryNode struct {
		Tokens []lexer.Token
		Let    bool      `parser:"@'let'?"`
		Key    string    `parser:"@Name '='"`
		Value  *exprNode `parser:"@@"`
	}

	exprNode struct {
		Tokens []lexer.Token
		First  *termNode  `parser:"@@"`
		Rest   []*sumNode `parser:"@@*"`
	}

	sumNode struct {
		Op    string    `parser:"@('+' | '-')"`
		Value *termNode `parser:"@@"`
	}

	termNode struct {
		Tokens []lexer.Token
		First  *factorNode  `parser:"@@"`
		Rest   []*scaleNode `parser:"@@*"`
	}

	scaleNode struct {
		Op    string      `parser:"@('*' | '/')"`
		Value *factorNode `parser:"@@"`
	}

	factorNode struct {
		Tokens   []lexer.Token
		Negative bool      `parser:"@'-'?"`
		Number   string    `parser:"( @Number"`
		Text     string    `parser:"| @String"`
		Call     *callNode `parser:"| @@"`
		List     *listNode `parser:"| @@"`
		Group    *exprNode `parser:"| '(' @@ ')' )"`
	}

	// callNode is a bare name when Args is nil.
	callNode struct {
		Tokens []lexer.Token
		Name   string    `parser:"@Name"`
		Args   *argsNode `parser:"@@?"`
	}

	argsNode struct {
		Args []*argNode `parser:"'(' (@@ ((?! ',' ')') ',' @@)* ','?)? ')'"`
	}

	// argNode is an argument of a call or a parameter of a block. A parameter without a default has no Name:
	// its Value is the name.
	argNode struct {
		Tokens []lexer.Token
		Name   string    `parser:"((?= Name '=') @Name '=')?"`
		Value  *exprNode `parser:"@@"`
	}

	listNode struct {
		Items []*exprNode `parser:"'[' (@@ ((?! ',' ']') ',' @@)* ','?)? ']'"`
	}
)

// The parser looks ahead only where a rule asks for it, so that errors are reported at the first
// wrong token rather than at the start of a rule.
var (
	fileParser  = participle.MustBuild[fileNode](participle.Lexer(tokens), participle.UseLookahead(0))
	entryParser = participle.MustBuild[entryNode](participle.Lexer(tokens), participle.UseLookahead(0))
	exprParser  = participle.MustBuild[exprNode](participle.Lexer(tokens), participle.UseLookahead(0))
)
