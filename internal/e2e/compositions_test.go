package e2e

import (
	"bytes"
	"cmp"
	"errors"
	"regexp"
	"strings"
	"testing"

	"sppo.dev/internal/meaning"
	"sppo.dev/ir"
)

// compositions lists errors that occur where ways to divide a job are combined: those of github.com/NVIDIA/Megatron-LM/issues/7452, by
// their numbers there, and others of the kinds that users of several systems reported. Each is an edit of the text of a program.
//
// Some of that list need what sppo's models lack. Their causes are here, in what there is: for label smoothing (1), shards of the
// vocabulary that are not put together; for heads that predict further tokens (3), labels counted by each replica; for images (7), the
// embeddings of tokens; for the counts of a router (10), a sum that is taken again; for names in a checkpoint (12), names when weights
// are drawn. Its numbers 5 and 6 are not here.
var compositions = []struct {
	name     string
	packed   bool   // the program with packed documents
	find     string // lines of the program, as a regular expression
	replace  string // empty: they are left out
	verified bool   // the verifier cannot see it
	section  string // init, eval, or else step
	op       ir.Op  // of the first instruction at which meaning is lost; unused at the end of a section
	problem  string
}{
	{name: "1: ranks exchange statistics of the vocabulary with ranks that have the same part",
		find: `all_gather( .*ce\.stats.*)@sp`, replace: "all_gather${1}@dp", verified: true, op: ir.CrossEntropy, problem: "different rows"},
	{name: "2: all ranks have the same part of the vocabulary",
		find: `(cross_entropy_stats .*)first=\$vocab_first`, replace: "${1}first=0", op: ir.CrossEntropyStats, problem: "entries of the vocabulary from 0 on"},
	{name: "3: each replica counts its own labels",
		find: `scale=0.005208333333333333`, replace: "scale=0.010416666666666666", verified: true, op: ir.CrossEntropy, problem: "multiplies the loss of each token by"},
	{name: "4: what is recomputed is gathered from another group",
		find: `all_gather( .*ln1\.gathered\.again.*)@sp`, replace: "all_gather${1}@dp", op: ir.Attention, problem: "keys of other sequences"},
	{name: "7: embeddings are scattered in another group",
		find: `reduce_scatter( .*embed\.sum.*)@sp`, replace: "reduce_scatter${1}@dp", verified: true, op: ir.ReduceScatter, problem: "adds different places"},
	{name: "8: the sinks of some heads are left out of the norm",
		find: `(sumsq .*\.sinks\.grad.*)weight=\$first_replica`, replace: "${1}weight=$$first_replica.sp_owner", verified: true, op: ir.GradNorm, problem: "layer.0.sinks"},
	{name: "9: labels that do not count divide the loss", packed: true,
		find: `(cross_entropy.*), (?:eval_)?weight:f32\[1\](.*)scale=1`, replace: "${1}${2}scale=0.005208333333333333", verified: true, op: ir.CrossEntropy, problem: "multiplies the loss of each token by"},
	{name: "10: a sum over ranks is taken again",
		find: `(.*all_reduce .*ln1\.gamma\.grad.*@sp.*)`, replace: "$1\n$1", op: ir.SumSq, problem: "no sumsq of these operands"},
	{name: "11: a norm's gradient is not summed over ranks that have other tokens",
		find: `all_reduce .*ln1\.gamma\.grad.*@sp`, op: ir.SumSq, problem: "incomplete: layer.1.ln1.gamma.grad"},
	{name: "12: a stage takes its layers' names for the model's",
		find: `(init_normal +layer\.)1(.*tensor=layer\.)1`, replace: "${1}1${2}0", verified: true, section: "init", problem: "the weight of layer.1.wq should be the initial layer.1.wq"},
	{name: "a validation has the loss of one replica",
		find: `all_reduce +eval_loss.*@dp`, section: "eval", problem: "the result eval_loss"},
	{name: "a bias's gradient is not summed over replicas",
		find: `all_reduce .*\.bq\.grad.*@dp`, op: ir.SumSq, problem: "incomplete: layer.1.bq.grad"},
	{name: "the gradient of tied embeddings has only one of its two parts",
		find: `all_reduce .*embed\.grad.*@tied`, op: ir.SumSq, problem: "no sumsq of these operands"},
	{name: "padding of a gradient is counted in the norm",
		find: `(fill .*embed\.grad.*)value=0`, replace: "${1}value=1", verified: true, op: ir.SumSq, problem: "filled with a number"},
	{name: "the norm is summed over another group",
		find: `all_gather( +norm\.replicas.*)@dp`, replace: "all_gather${1}@sp", verified: true, op: ir.GradNorm, problem: "squares of the gradient of embed"},
	{name: "the norm is that of a stage",
		find: `all_reduce +norm\.sums.*@pp`, verified: true, op: ir.GradNorm, problem: "a tensor is left out"},
	{name: "a microbatch replaces the gradient of another one",
		find: `(matmul +layer\.0\.wq\.grad.*m1\..*) accumulate`, replace: "$1", op: ir.SumSq, problem: "incomplete: layer.0.wq.grad"},
	{name: "a microbatch is used twice",
		find: `load_tokens( .*)first=1 `, replace: "load_tokens${1}first=0 ", verified: true, op: ir.SumSq, problem: "2 times"},
	{name: "replicas use the same sequences",
		find: `(load_tokens .*)replica=\$replica`, replace: "${1}replica=0", verified: true, op: ir.SumSq, problem: "2 times"},
}

// TestCompositions edits programs such that their results over finite fields differ. The proof must refuse them where meaning is lost.
func TestCompositions(t *testing.T) {
	programs, texts, results := map[bool]*ir.Program{}, map[bool]string{}, map[bool][]float64{}
	for packed, c := range map[bool]Case{
		false: {Family: "gpt", Positions: "learned", KVHeads: 4, Tied: true, Batch: 4, PP: 2, SP: 2, DP: 2, N: 1, Recompute: "full", Offload: "none", Traits: "attn_sinks = true"},
		true:  {Family: "llama", Positions: "rope", KVHeads: 4, Batch: 4, DP: 2, SP: 2, N: 1},
	} {
		var text bytes.Buffer
		programs[packed] = smallProgram(t, c, packed)
		if err := ir.Print(&text, programs[packed]); err != nil {
			t.Fatal(err)
		}
		texts[packed] = text.String()
		var err error
		if results[packed], err = outcomeOver(t, programs[packed]); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range compositions {
		t.Run(c.name, func(t *testing.T) {
			line := c.find
			if c.replace == "" {
				line = `(?m)^.*` + c.find + `.*\n`
			}
			edited := regexp.MustCompile(line).ReplaceAllString(texts[c.packed], c.replace)
			p, err := ir.ParseText("edited", []byte(edited))
			if err != nil || edited == texts[c.packed] {
				t.Fatalf("nothing is edited, or wrongly: %v", err)
			}
			if got, err := outcomeOver(t, p); err == nil && sameNumbers(got, results[c.packed]) {
				t.Error("the results are the same")
			}
			if err := ir.Verify(p); (err == nil) != c.verified {
				t.Errorf("the verifier says %v", err)
			}
			_, err = meaning.Prove(p)
			var refused *meaning.Refusal
			if !errors.As(err, &refused) || refused.Unknown || refused.Section.String() != cmp.Or(c.section, "step") || !strings.Contains(refused.Problem, c.problem) {
				t.Fatalf("the proof says %v", err)
			}
			if in := &p.Codes[p.Ranks[refused.Rank].Code].Sections[refused.Section][refused.Index]; refused.Text != "" && in.Op != c.op {
				t.Errorf("refused at %s: %v", in.Info().Name, err)
			}
		})
	}
}
