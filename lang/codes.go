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

// CodeInfo documents a code.
type CodeInfo struct {
	Code    Code
	Doc     string
	Example string // a text that fails with it, or passes this package where Later is set
	Later   bool   // raised by a later phase
}

// exampleBase is the file that examples of codes import, as "base.sppo"; what they say themselves goes before it.
const exampleBase = `model small {
  family = gpt
  layers = 4
  hidden = 64
  heads  = 8
  vocab  = 256
  dtype  = f32
}

cluster four(ranks = 4) {
  nodes         = 1
  gpus_per_node = ranks
  device_memory = 1GiB
  host_memory   = 8GiB

  peak_bf16         = 50GFLOPS
  peak_f32          = 100GFLOPS
  memory_bandwidth  = 10GB/s
  d2h_bandwidth     = 5GB/s
  h2d_bandwidth     = 5GB/s
  nvlink_bandwidth  = 5GB/s
  node_network_bandwidth = 5GB/s
  nvlink_latency    = 5us
  network_latency   = 50us
  kernel_latency    = 1us

  matmul_efficiency         = 0.7
  attention_efficiency      = 0.4
  attention_grad_efficiency = 0.4
  copy_efficiency           = 0.7
  collective_efficiency     = 0.7
}

train {
  sequence = 1K
  batch    = 4
  data     = random()
}
`

// Codes is the table of codes.
var Codes = []CodeInfo{
	{Code: Syntax, Doc: "The text does not follow the grammar (GRAMMAR.md). The statement is skipped, and reading goes on behind it.",
		Example: "train {\n  sequence =\n}\n"},
	{Code: BadImport, Doc: "An import names no file, neither beside the importing one nor among the shipped ones, or leads back to itself.",
		Example: "import \"clusters/a100.sppo\"\n"},
	{Code: UnknownBlock, Doc: "There is no block of this kind.",
		Example: "import \"base.sppo\"\n\nshedule s {\n  sp = 2\n}\n"},
	{Code: UnknownKey, Doc: "The block, the call or the override names a key that is not in the table (KEYS.md).",
		Example: "import \"base.sppo\"\n\nschedule s {\n  offlod = full\n}\n"},
	{Code: UnknownName, Doc: "A name is none of those that the key takes, and no `let` or parameter defines it.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  partition = flop\n}\n"},
	{Code: UnknownUnit, Doc: "The letters behind a number are no unit.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1Mi\n  data     = random()\n}\n"},
	{Code: BadArgument, Doc: "A call or a parameterised block gets an argument that it does not take, or lacks one.",
		Example: "import \"base.sppo\"\n\ncluster mine = four(gpus = 2)\n"},
	{Code: Duplicate, Doc: "Something is said twice.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = 2\n  sp = 4\n}\n"},
	{Code: MissingBlock, Doc: "A spec needs a model, a cluster and a train block, its own or imported ones.",
		Example: "schedule s {\n  sp = 2\n}\n"},
	{Code: AmbiguousBlock, Doc: "It is open which of two blocks counts: of each kind there is one in the file itself, or else one in all that it imports, where blocks with parameters count only when there is no other.",
		Example: "import \"base.sppo\"\n\nschedule a {\n  sp = 2\n}\n\nschedule b {\n  sp = 4\n}\n"},
	{Code: MissingKey, Doc: "A key without default is left out. The diagnostic points at its block.",
		Example: "import \"base.sppo\"\n\ntrain {\n  batch = 4\n}\n"},
	{Code: WrongDimension, Doc: "A value is in another dimension than its key: a time for a rate, bytes for tokens, a number without its unit.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1MiB\n  data     = random()\n}\n"},
	{Code: WrongType, Doc: "A value is of another type than its key takes: a list for a number, a string for a name.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = [2]\n}\n"},
	{Code: OutOfRange, Doc: "A number is outside of what its key takes.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  offload = 1.5\n}\n"},
	{Code: Indivisible, Doc: "A number does not divide another as it must: heads over SP ranks, sequences over replicas. The hint names the nearest values that do.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = 3\n}\n"},
	{Code: TooFewLayers, Doc: "There are more pipeline stages than layers.",
		Example: "import \"base.sppo\"\n\ncluster mine = four(ranks = 16)\n\nschedule s {\n  pp = 8\n}\n"},
	{Code: TooManyRanks, Doc: "sp * pp * dp is more than the cluster has devices.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = 4\n  pp = 2\n}\n"},
	{Code: LengthsSum, Doc: "The lengths of subsequences do not sum to the sequence.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = [512, 256, 128]\n}\n"},
	{Code: LengthOfList, Doc: "A list that has one entry for each subsequence has another number of them.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = 4\n  offload      = [1, 0.5, 0]\n}\n"},
	{Code: BadAlign, Doc: "The grid of subsequence borders does not go with the lengths or with SP, or subsequences are shorter than it allows.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = 16\n  align        = 128\n}\n"},
	{Code: SmallVocab, Doc: "The vocabulary does not hold all tokens that the data has.",
		Example: "import \"base.sppo\"\n\nmodel m {\n  family = gpt\n  layers = 4\n  hidden = 64\n  heads  = 8\n  vocab  = 128\n  dtype  = f32\n}\n\ntrain {\n  sequence = 1K\n  data     = text(\"base.sppo\")\n}\n"},
	{Code: Conflict, Doc: "Two keys exclude each other as they stand.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1K\n  steps    = 10\n  warmup   = 20\n  data     = random()\n}\n"},

	{Code: NotYet, Later: true, Doc: "The value is part of the language, and the compiler cannot do it yet.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp           = 2\n  sp_mode      = ring\n  subsequences = 4\n  keep         = []\n}\n"},
	{Code: BadData, Later: true, Doc: "A data file cannot be read, or is shorter than one sequence.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1K\n  data     = text(\"nowhere.txt\")\n}\n"},
	{Code: Infeasible, Later: true, Doc: "No plan can do what is pinned, for example because so many subsequences cannot be cut on so coarse a grid.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = 8\n  align        = 128\n  partition    = flops\n}\n"},
	{Code: DoesNotFit, Later: true, Doc: "The plan needs more memory than the cluster has.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 64M\n  data     = random()\n}\n"},
}
