package ir_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/irtest"
	"sppo.dev/ir"
)

func TestRandomProgramsVerify(t *testing.T) {
	for seed := range uint64(200) {
		p := irtest.Random(seed, 50+int(seed)*5)
		if err := (ir.VerifyOptions{AllowUnread: true}).Verify(p); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func small(t testing.TB) string {
	t.Helper()
	src, err := os.ReadFile("testdata/small.sppir")
	if err != nil {
		t.Fatal(err)
	}
	return string(src)
}

// verifyText parses and verifies a program. It returns nil if the program is correct.
func verifyText(t testing.TB, src string) *ir.VerifyError {
	t.Helper()
	p, err := ir.ParseText("small.sppir", []byte(src))
	if err != nil {
		t.Fatalf("%v\n%s", err, err.(*ir.SyntaxError).Source)
	}
	err = ir.Verify(p)
	var found *ir.VerifyError
	if err != nil && !errors.As(err, &found) {
		t.Fatalf("%T is no *VerifyError: %v", err, err)
	}
	return found
}

func TestSmallProgramVerifies(t *testing.T) {
	if err := verifyText(t, small(t)); err != nil {
		t.Fatal(err)
	}
}

// Removing any single wait causes exactly one race.
func TestEveryWaitIsNeeded(t *testing.T) {
	lines := strings.SplitAfter(small(t), "\n")
	removed := 0
	for i, line := range lines {
		if !strings.Contains(line, " wait e") {
			continue
		}
		removed++
		found := verifyText(t, strings.Join(lines[:i], "")+strings.Join(lines[i+1:], ""))
		switch {
		case found == nil:
			t.Errorf("without line %d the program verifies: %s", i+1, line)
		case len(found.Findings) != 1 || found.Findings[0].Kind != ir.FindRace || found.Findings[0].Other == nil:
			t.Errorf("without line %d (%s): %v", i+1, line, found)
		}
	}
	if removed < 10 {
		t.Errorf("only %d waits", removed)
	}
}

// mutations break the small program in one way each. The part of a name before the first dash is the kind of
// finding that is expected.
var mutations = []struct {
	name  string
	edits []string // alternately old and new text
}{
	{"bounds-view", []string{"embed x:f32[4,4] =", "embed x+4:f32[4,4] ="}},
	{"bounds-misaligned", []string{"part:f32[1] = dw", "part+2:f32[1] = dw"}},
	{"bounds-buffer", []string{"buffer aside  device 0x244 8", "buffer aside  device 0x244 12"}},
	{"bounds-arena", []string{"arena device 588", "arena device 592"}},
	{"bounds-state", []string{"state w moment1 m:f32[4,4]", "state w moment1 m:f32[4,5]"}},
	{"bounds-result", []string{"result step step:f32[3]", "result step step+4:f32[3]"}},
	{"bounds-state-row", []string{"moment1 m:f32[4,4] row=$first", "moment1 m:f32[4,4] row=-4"}},
	{"bounds-tokens", []string{"position=0", "position=6"}},
	{"bounds-sequence", []string{"first=0 replica=0", "first=0 replica=1"}},
	{"bounds-rectangle", []string{"tensor=w row=$first", "tensor=w row=-1"}},
	{"bounds-view-wraps", []string{"embed x:f32[4,4] =", "embed x:f32[4611686018427387904,4] ="}},
	{"bounds-view-wraps-to-size", []string{"fill t:f32[4,4]", "fill t:f32[4294967296,4294967296,4,4]"}},
	{"bounds-view-wraps-with-offset", []string{"embed x:f32[4,4] =", "embed x+9223372036854775804:f32[4,4] ="}},
	{"bounds-copy-wraps", []string{"d2h h.x:f32[16] = x:f32[16]", "d2h h.x:f32[4611686018427387920] = x:f32[4611686018427387920]"}},
	{"bounds-state-wraps", []string{"moment1 m:f32[4,4]", "moment1 m:f32[4611686018427387908,4]"}},
	{"bounds-result-wraps", []string{"step step:f32[3]", "step step:f32[4611686018427387907]"}},
	{"bounds-position-wraps", []string{"position=0", "position=9223372036854775807"}},
	{"bounds-replica-wraps", []string{"first=0 replica=0", "first=9223372036854775807 replica=1"}},
	{"bounds-rectangle-wraps", []string{"init_normal w:f32[4,4] tensor=w row=$first", "init_normal w:f32[4,4] tensor=w row=9223372036854775805"}},
	{"bounds-state-row-wraps", []string{"moment1 m:f32[4,4] row=$first", "moment1 m:f32[4,4] row=9223372036854775806"}},
	{"bounds-entry", []string{"w:f32[4,4] first=$first", "w:f32[4,4] first=4294967296"}},
	{"shape-batch-wraps", []string{"position=0 batch=1", "position=0 batch=4611686018427387905"}},
	{"header-sequence", []string{"sequence = 8", "sequence = -8"}},
	{"header-vocab", []string{"batch = 1\n", "batch = 1\n  vocab = 4294967296\n"}},
	{"header-eval-batch", []string{"eval_sequences = 1", "eval_sequences = 1\n  eval_batch = -1"}},
	{"header-eval-sequences", []string{"eval_sequences = 1", "eval_batch = 4"}},
	{"header-holdout", []string{"batch = 1\n", "batch = 1\n  holdout = 1\n"}},
	{"header-beta", []string{"batch = 1\n", "batch = 1\n  beta2 = 1\n"}},
	{"header-schedule", []string{"batch = 1\n", "batch = 1\n  lr_schedule = \"lineer\"\n"}},
	{"header-data", []string{"batch = 1\n", "batch = 1\n  data_kind = \"images\"\n"}},
	{"header-machine", []string{"host_memory = 1024", "host_memory = 1024\n  peak_f32 = -1"}},
	{"header-duplex", []string{"host_memory = 1024", "host_memory = 1024\n  copy_duplex = \"both\""}},
	{"header-tensor", []string{"tensor w [8,4]", "tensor w [0,4]"}},
	{"header-tensor-wraps", []string{"tensor w [8,4]", "tensor w [4611686018427387904,4]"}},
	{"header-coordinates", []string{"dp=0 pp=0 sp=1", "dp=0 pp=1 sp=0"}},
	{"header-coordinates-negative", []string{"dp=0 pp=0 sp=1", "dp=-1 pp=0 sp=1"}},
	{"header-loss", []string{"  result loss loss:f32[1]\n", ""}},
	{"header-step", []string{"  result step step:f32[3]\n", "", "fill v:f32[4,4] value=0\n", "fill v:f32[4,4] value=0\n compute I fill step:f32[3] value=0\n"}},
	{"header-eval-loss", []string{"  result eval_loss loss:f32[1]\n", "", "eval_sequences = 1", "eval_sequences = 1\n  eval_batch = 1"}},
	{"header-state-missing", []string{"  state w weight w:f32[4,4] row=$first col=0\n", ""}},
	{"header-state-part", []string{"moment1 m:f32[4,4] row=$first", "moment1 m:f32[4,4] row=0"}},
	{"header-state-overlap", []string{"moment1 m:f32[4,4] row=$first", "moment1 m:f32[4,4] row=$prev", "sp=0 $next=2 $prev=-1", "sp=0 $next=2 $prev=0", "sp=1 $next=3 $prev=-1", "sp=1 $next=3 $prev=2"}},
	{"header-state-twice", []string{"  state w grad", "  state w moment1 m:f32[4,4] row=$first col=0\n  state w grad"}},
	{"shape-dimension", []string{"tokens:i32[4], w", "tokens:i32[3], w"}},
	{"shape-rank", []string{"fill m:f32[4,4] value=0\n", "activation m:f32[16] = w:f32[16] function=gelu_tanh\n"}},
	{"shape-type", []string{"activation y:f32[4,4] = y:f32[4,4]", "activation y:f32[4,4] = y:bf16[4,4]"}},
	{"shape-rule", []string{"matmul y:f32[4,4] = x:f32[4,4], w", "matmul y:f32[4,4] = x:f32[8,2], w"}},
	{"shape-attribute", []string{"position=0 batch=1", "position=0 batch=$next"}},
	{"shape-attribute-zero", []string{"position=0 batch=1", "position=0 batch=0"}},
	{"shape-boolean", []string{"dy:f32[4,4] trans_a accumulate", "dy:f32[4,4] trans_a accumulate=2"}},
	{"shape-result", []string{"result loss loss", "result lost loss"}},
	{"shape-result-size", []string{"result eval_loss loss:f32[1]", "result eval_loss norm:f32[2]"}},
	{"shape-copy", []string{"d2h h.x:f32[16] = x:f32[16]", "d2h h.x:f32[16] = x:bf16[16]"}},
	{"place-arena", []string{"d2h h.x:f32[16] =", "d2h t:f32[16] ="}},
	{"place-stream", []string{"coll      O all_reduce", "d2h       O all_reduce"}},
	{"overlap", []string{"matmul y:f32[4,4] = x", "matmul x:f32[4,4] = x"}},
	{"overlap-in-place", []string{"activation y:f32[4,4] = y:f32[4,4]", "activation y:f32[3,4] = y+16:f32[3,4]"}},
	{"event-twice", []string{"    recv_prev F m0 s0 l1 p1 record e0 !sync:0\n", "    recv_prev F record e0\n    recv_prev F m0 s0 l1 p1 record e0 !sync:0\n"}},
	{"event-never", []string{"compute   O adamw", "compute O wait e8\n compute O adamw", "events=8", "events=9"}},
	{"uninitialised-bytes", []string{"fill t:f32[4,4]", "fill t:f32[2,4]"}},
	{"uninitialised-other-life", []string{"= t:f32[4,4], dy", "= x:f32[4,4], dy"}},
	{"uninitialised-init", []string{"    compute I fill v:f32[4,4] value=0\n", ""}},
	{"uninitialised-before-init", []string{"fill norm:f32[2] value=1", "add norm:f32[1,2] = part:f32[1,2], part:f32[1,2]"}},
	{"uninitialised-from-step", []string{"= w:f32[4,4], w:f32[4,4]\n    compute E activation", "= dw:f32[4,4], w:f32[4,4]\n    compute E activation"}},
	{"uninitialised-eval-overwrites", []string{"buffer eval   device 0x200 64", "buffer eval   device 0x1c0 64"}},
	{"uninitialised-result", []string{"result eval_loss loss:f32[1]", "result eval_loss aside:f32[1]"}},
	{"uninitialised-gradient", []string{"grad dw:", "grad x:"}},
	{"uninitialised-checkpoint", []string{"moment1 m:", "moment1 xr:"}},
	{"life-again", []string{"h.x:f32[16] = x:f32[16] !offload:1\n", "h.x:f32[16] = x:f32[16] !offload:1\n d2h F d2h h.x:f32[16] = w:f32[16]\n"}},
	{"life-change-after-read", []string{"compute   O record e7", "compute O cross_entropy part:f32[1] = w:f32[1,5,3] scale=1\n compute O matmul dw:f32[4,4] = t:f32[4,4], t:f32[4,4] accumulate\n compute O record e7"}},
	{"life-read-after-change", []string{"norm:f32[2] beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1\n", "norm:f32[2] beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1\n compute O fill aside:f32[1] value=0\n compute O cross_entropy aside:f32[1] = w:f32[1,5,3] scale=1\n"}},
	{"life-replaced", []string{"compute   O adamw", "compute O fill m:f32[4,4] value=0\n compute O adamw"}},
	{"life-ended", []string{"compute   O adamw", "compute O fill x:f32[4,4] value=0\n compute O adamw"}},
	{"dead-overwritten", []string{"compute E activation eval", "compute E fill aside:f32[1] value=0\n compute E activation eval"}},
	{"dead-change", []string{"compute   O adamw", "compute O fill aside:f32[1] value=0\n compute O cross_entropy aside:f32[1] = dw:f32[1,5,3] scale=1\n compute O adamw"}},
	{"dead-message", []string{"send y:f32[4,4] peer=$prev\n", "send y:f32[4,4] peer=$prev\n send_prev B send y:f32[4,4] peer=$prev\n",
		"recv_next B m0 s0 l0 p0 recv dy:f32[4,4] peer=$next\n", "recv_next B m0 s0 l0 p0 recv dy:f32[4,4] peer=$next\n recv_next B recv eval:f32[4,4] peer=$next\n"}},
	{"dead-init", []string{"compute I fill norm:f32[2] value=1\n", "compute I fill norm:f32[2] value=1\n compute I fill aside:f32[2] value=0\n"}},
	{"state-twice", []string{"    compute   O adamw", "    compute O sgd w:f32[4,4], m:f32[4,4] = dw:f32[4,4], step:f32[3] momentum=0.9 weight_decay=0 scale=1\n compute O adamw"}},
	{"state-part", []string{"adamw w:f32[4,4], m:f32[4,4], v:f32[4,4] = dw:f32[4,4]", "adamw w:f32[2,4], m:f32[2,4], v:f32[2,4] = dw:f32[2,4]"}},
	{"state-not-updated", []string{"adamw w:f32[4,4], m:f32[4,4], v:f32[4,4] = dw:f32[4,4], step:f32[3], norm:f32[2] beta1=0.9 beta2=0.95 eps=1e-08 weight_decay=0.1", "sgd w:f32[4,4], m:f32[4,4] = dw:f32[4,4], step:f32[3], norm:f32[2] momentum=0.9 weight_decay=0 scale=1"}},
	{"state-moment", []string{"  state w moment2 v:f32[4,4] row=$first col=0\n", ""}},
	{"state-loss", []string{"    compute E fill loss:f32[1] value=0\n", "", "fill norm:f32[2] value=1\n", "fill norm:f32[2] value=1\n compute I fill loss:f32[1] value=0\n"}},
	{"life-stale", []string{"compute   B m0 s0 l0 p0 wait e3 !sync:1\n", "compute B wait e3\n compute B matmul xr:f32[4,4] = t:f32[4,4], t:f32[4,4] accumulate\n" +
		" compute B record e8\n h2d B wait e8\n h2d B h2d aside:f32[2] = h.x:f32[2]\n", "events=8", "events=9"}},
	{"message-missing", []string{
		"recv_next B m0 s0 l0 p0 recv dy:f32[4,4] peer=$next", "compute B wait e1",
		"recv_next B m0 s0 l0 p0 record e4", "compute B fill dy:f32[4,4] value=0 ",
		"compute   B m0 s0 l0 p0 wait e4", "compute   B wait e1",
	}},
	{"message-extra", []string{"recv_prev F m0 s0 l1 p1 record e0", "recv_prev F recv extra:f32[4,4] peer=$prev\n recv_prev F record e0",
		"buffer loss device 0x40 4", "buffer loss device 0x40 4\n buffer extra device 0x44 64", "arena device 68", "arena device 132"}},
	{"message-size", []string{"send y:f32[4,4] peer=$next", "send y:f32[2,4] peer=$next"}},
	{"message-type", []string{"send y:f32[4,4] peer=$next", "send y:bf16[16] peer=$next"}},
	{"message-peer", []string{"send y:f32[4,4] peer=$next", "send y:f32[4,4] peer=7"}},
	{"collective-member", []string{"sp=1 $next=3 $prev=-1 $first=4 @sp=[0,1]", "sp=1 $next=3 $prev=-1 $first=4 @sp=[1]"}},
	{"collective-stranger", []string{"$first=0 @sp=[0,1]", "$first=0 @sp=[0,1] @dp=[1]"}},
	{"collective-twice", []string{"$first=0 @sp=[0,1]", "$first=0 @sp=[0,1] @dp=[0,0]"}},
	{"collective-no-group", []string{"part:f32[1] @sp", "part:f32[1] @dp"}},
	{"collective-ratio", []string{"all_gather parts:f32[2] = part:f32[1]", "all_gather parts:f32[3] = part:f32[1]"}},
	{"collective-exchange-ratio", []string{"coll      O all_gather parts:f32[2] = part:f32[1] @sp", "coll O all_to_all parts:f32[3,1] = dw:f32[1,3] @sp copies=1"}},
	{"shape-exchange", []string{"coll      O all_gather parts:f32[2] = part:f32[1] @sp", "coll O all_to_all t:f32[1,4] = x:f32[2,4] @sp copies=1 inverse"}},
	{"collective-opcode", []string{
		"send y:f32[4,4] peer=$prev\n", "send y:f32[4,4] peer=$prev\n coll O all_reduce loss:f32[1] @dp\n",
		"value=0\n    compute   B m0 s0 l1 p1 activation", "value=0\n compute F record e2\n coll O wait e2\n compute B activation",
		"events=2", "events=3",
		"coll      O all_gather", "coll O all_gather eval:f32[4] = norm:f32[2] @dp\n coll O all_gather",
		"@sp=[0,1]", "@sp=[0,1] @dp=[0,2]", "@sp=[2,3]", "@sp=[2,3] @dp=[0,2]",
		"@sp=[0,1]\n", "@sp=[0,1] @dp=[1,3]\n", "@sp=[2,3]\n", "@sp=[2,3] @dp=[1,3]\n",
	}},
	{"collective-count", []string{
		"coll      O all_gather", "coll O all_reduce eval:f32[1] @dp\n coll O all_gather",
		"@sp=[0,1]", "@sp=[0,1] @dp=[0,2]", "@sp=[2,3]", "@sp=[2,3] @dp=[0,2]",
		"@sp=[0,1]\n", "@sp=[0,1] @dp=[1,3]\n", "@sp=[2,3]\n", "@sp=[2,3] @dp=[1,3]\n",
		"send_next F m0 s0 l0 p0 send", "compute F fill eval:f32[1] value=0\n compute F record e8\n coll F wait e8\n send_next F send",
		"events=8", "events=9",
	}},
	{"deadlock", []string{
		"recv_prev F m0 s0 l1 p1 recv y:f32[4,4] peer=$prev", "compute F fill y:f32[4,4] value=1",
		"recv_prev F m0 s0 l1 p1 record e0", "compute F record e0",
		"send y:f32[4,4] peer=$prev\n", "send y:f32[4,4] peer=$prev\n send_prev B record e2\n recv_prev B wait e2\n recv_prev B recv extra:f32[4,4] peer=$prev\n",
		"events=2", "events=3",
		"buffer loss device 0x40 4", "buffer loss device 0x40 4\n buffer extra device 0x44 64", "arena device 68", "arena device 132",
	}},
	{"capacity", []string{"device_memory = 1024", "device_memory = 512"}},
	{"capacity-host", []string{"host_memory = 1024", "host_memory = 252"}},
}

// A gradient with as many elements as its weight has no other rows.
func TestRowOfGradient(t *testing.T) {
	update := "    compute   O adamw"
	sgd := "    compute   O sgd w:f32[4,4], m:f32[4,4] = dw:f32[4,4], step:f32[3] momentum=0.9 weight_decay=0 scale=1 row=1\n" + update
	found := verifyText(t, strings.Replace(small(t), update, sgd, 1))
	if found == nil || !slices.ContainsFunc(found.Findings, func(f ir.Finding) bool { return f.Kind == ir.FindBounds }) {
		t.Errorf("no finding of kind bounds: %v", found)
	}
}

func TestVerifierNamesTheBrokenPromise(t *testing.T) {
	src := small(t)
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			broken := src
			for i := 0; i < len(m.edits); i += 2 {
				if !strings.Contains(broken, m.edits[i]) {
					t.Fatalf("no %q to replace", m.edits[i])
				}
				broken = strings.Replace(broken, m.edits[i], m.edits[i+1], 1)
			}
			found := verifyText(t, broken)
			kind, _, _ := strings.Cut(m.name, "-")
			if found == nil || len(found.Findings) != 1 || string(found.Findings[0].Kind) != kind {
				t.Fatalf("not one finding of kind %s: %v", kind, found)
			}
			irtest.Golden(t, filepath.Join("testdata", "verify", m.name+".want"), []byte(found.Error()+"\n"))
		})
	}
}
