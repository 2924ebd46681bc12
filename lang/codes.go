package lang

// Code says what kind of mistake a diagnostic is about. Codes never change their meaning.
type Code string

// Mistakes found by this package.
const (
	Syntax         Code = "syntax"
	BadImport      Code = "bad-import"
	UnknownBlock   Code = "unknown-block"
	UnknownKey     Code = "unknown-key"
	UnknownName    Code = "unknown-name"
	UnknownUnit    Code = "unknown-unit"
	BadArgument    Code = "bad-argument"
	Duplicate      Code = "duplicate"
	MissingBlock   Code = "missing-block"
	AmbiguousBlock Code = "ambiguous-block"
	MissingKey     Code = "missing-key"
	WrongDimension Code = "wrong-dimension"
	WrongType      Code = "wrong-type"
	OutOfRange     Code = "out-of-range"
	Indivisible    Code = "indivisible"
	TooFewLayers   Code = "too-few-layers"
	TooManyRanks   Code = "too-many-ranks"
	LengthsSum     Code = "lengths-sum"
	LengthOfList   Code = "length-of-list"
	BadAlign       Code = "bad-align"
	SmallVocab     Code = "small-vocab"
	Conflict       Code = "conflict"
)

// Mistakes found by later phases, at positions that the Spec remembers.
const (
	NotYet     Code = "not-yet"
	BadData    Code = "bad-data"
	Infeasible Code = "infeasible"
	DoesNotFit Code = "does-not-fit"
)
