package lang

// Code identifies the kind of error in a diagnostic. The meaning of a code never changes.
type Code string

// Errors found by this package.
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
	LayersSum      Code = "layers-sum"
	LengthOfList   Code = "length-of-list"
	BadAlign       Code = "bad-align"
	SmallVocab     Code = "small-vocab"
	BadSchedule    Code = "bad-schedule"
	Conflict       Code = "conflict"
)

// Errors found by later phases, at positions recorded in the Spec.
const (
	BadData    Code = "bad-data"
	Infeasible Code = "infeasible"
	DoesNotFit Code = "does-not-fit"
)

// CodeInfo documents a code.
type CodeInfo struct {
	Code    Code
	Doc     string
	Example string // a spec that fails with this code or, if Later is set, is accepted by this package
	Later   bool   // reported by a later phase
}

// exampleBase is the text of "base.sppo", which the examples of codes import. Blocks in an example take
// precedence over imported ones.
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
	{Code: Syntax, Doc: "The text does not follow the grammar (GRAMMAR.md). The statement is skipped, and reading continues after it.",
		Example: "train {\n  sequence =\n}\n"},
	{Code: BadImport, Doc: "An imported file was found neither relative to the importing file nor among the files that ship with sppo, or a file imports itself.",
		Example: "import \"clusters/a100.sppo\"\n"},
	{Code: UnknownBlock, Doc: "The spec language has no block of this kind.",
		Example: "import \"base.sppo\"\n\nshedule s {\n  sp = 2\n}\n"},
	{Code: UnknownKey, Doc: "The block, the call or the override names a key that does not exist (KEYS.md).",
		Example: "import \"base.sppo\"\n\nschedule s {\n  offlod = full\n}\n"},
	{Code: UnknownName, Doc: "The key does not accept this name, and no `let` or parameter defines it.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  partition = flop\n}\n"},
	{Code: UnknownUnit, Doc: "The letters after a number are not a unit.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1Mi\n  data     = random()\n}\n"},
	{Code: BadArgument, Doc: "An argument to a call, or to a block with parameters, is missing or unknown.",
		Example: "import \"base.sppo\"\n\ncluster mine = four(gpus = 2)\n"},
	{Code: Duplicate, Doc: "A block, a key or another name is defined twice.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = 2\n  sp = 4\n}\n"},
	{Code: MissingBlock, Doc: "A spec needs a model, a cluster and a train block, either in the file itself or imported.",
		Example: "schedule s {\n  sp = 2\n}\n"},
	{Code: AmbiguousBlock, Doc: "There are several blocks of the same kind, and it is unclear which one to use. Blocks in " +
		"the file itself take precedence over imported ones, and blocks with parameters are used only if there are no others.",
		Example: "import \"base.sppo\"\n\nschedule a {\n  sp = 2\n}\n\nschedule b {\n  sp = 4\n}\n"},
	{Code: MissingKey, Doc: "A key without a default is missing. The diagnostic points to the block.",
		Example: "import \"base.sppo\"\n\ntrain {\n  batch = 4\n}\n"},
	{Code: WrongDimension, Doc: "The dimension of a value does not match its key: for example, a time instead of a " +
		"rate, bytes instead of tokens, or a number without its unit.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1MiB\n  data     = random()\n}\n"},
	{Code: WrongType, Doc: "The type of a value does not match its key: for example, a list instead of a number, or a string instead of a name.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  pp = [2]\n}\n"},
	{Code: OutOfRange, Doc: "A number is outside the range that its key allows.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  offload = 1.5\n}\n"},
	{Code: Indivisible, Doc: "A number is not divisible by another, for example heads by SP ranks or sequences by replicas. The hint names the nearest values that work.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = 3\n}\n"},
	{Code: TooFewLayers, Doc: "There are more pipeline stages than layers. With virtual stages, the embedding and the head also count as layers.",
		Example: "import \"base.sppo\"\n\ncluster mine = four(ranks = 16)\n\nschedule s {\n  pp = 8\n}\n"},
	{Code: TooManyRanks, Doc: "sp * pp * dp is more than the number of devices in the cluster.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  sp = 4\n  pp = 2\n}\n"},
	{Code: LengthsSum, Doc: "The lengths of the subsequences do not add up to the length of the sequence.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = [512, 256, 128]\n}\n"},
	{Code: LayersSum, Doc: "The layers of the stages do not add up to those of the model.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  pp               = 2\n  layers_per_stage = [1, 1]\n}\n"},
	{Code: LengthOfList, Doc: "A list does not have one entry for each subsequence or stage.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = 4\n  offload      = [1, 0.5, 0]\n}\n"},
	{Code: BadAlign, Doc: "`align`, the grid for boundaries between subsequences, does not match the lengths or `sp`, or is larger than a subsequence.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = 16\n  align        = 128\n}\n"},
	{Code: SmallVocab, Doc: "The vocabulary is too small for the tokens of the data.",
		Example: "import \"base.sppo\"\n\nmodel m {\n  family = gpt\n  layers = 4\n  hidden = 64\n  heads  = 8\n  vocab  = 128\n  dtype  = f32\n}\n\ntrain {\n  sequence = 1K\n  data     = text(\"base.sppo\")\n}\n"},
	{Code: BadSchedule, Doc: "A file that states the order of tasks cannot be read, or a task in it is not where it can run. The diagnostic points to the cell: its line is that of a pipeline rank.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  strategy = csv(\"nowhere.csv\")\n}\n"},
	{Code: Conflict, Doc: "Two keys contradict each other.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1K\n  steps    = 10\n  warmup   = 20\n  data     = random()\n}\n"},

	{Code: BadData, Later: true, Doc: "A data file cannot be read, or is shorter than one sequence.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 1K\n  data     = text(\"nowhere.txt\")\n}\n"},
	{Code: Infeasible, Later: true, Doc: "No plan satisfies the pinned values, for example because a grid is too coarse for that many subsequences.",
		Example: "import \"base.sppo\"\n\nschedule s {\n  subsequences = 8\n  align        = 128\n  partition    = flops\n}\n"},
	{Code: DoesNotFit, Later: true, Doc: "The plan needs more memory than the cluster has.",
		Example: "import \"base.sppo\"\n\ntrain {\n  sequence = 64M\n  data     = random()\n}\n"},
}
