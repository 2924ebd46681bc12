package e2e

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"sppo.dev/internal/codegen"
	"sppo.dev/internal/passes"
	"sppo.dev/internal/passes/plan"
	"sppo.dev/internal/shipped"
	"sppo.dev/internal/train"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/internal/vm/cpu/simd"
	"sppo.dev/ir"
	"sppo.dev/lang"
)

// compile turns a spec's text into a plan and a program.
func compile(text string, set ...string) (*plan.Plan, *ir.Program, error) {
	spec, err := parse(text, set...)
	if err != nil {
		return nil, nil, err
	}
	return build(spec)
}

func build(spec *lang.Spec) (*plan.Plan, *ir.Program, error) {
	plan := plan.New(spec)
	if err := passes.Run(spec, plan, passes.Options{}); err != nil {
		return nil, nil, fmt.Errorf("planning: %w", err)
	}
	program, err := codegen.Build(plan)
	if err != nil {
		return nil, nil, fmt.Errorf("building: %w", err)
	}
	return plan, program, nil
}

func parse(text string, set ...string) (*lang.Spec, error) {
	spec, err := lang.Parse("case.sppo", []byte(text), lang.Options{Shipped: shipped.Files, Set: set})
	if err != nil {
		return nil, fmt.Errorf("loading: %w", err)
	}
	return spec, nil
}

// mustCompile compiles a case, and checks what is guaranteed for every program: the verifier accepts it, and
// both file formats restore it.
func mustCompile(t testing.TB, c Case) (*plan.Plan, *ir.Program) {
	t.Helper()
	plan, program, err := compile(c.Spec())
	if err != nil {
		t.Fatalf("%v: %v\n%s", c, err, c.Spec())
	}
	if err := ir.Verify(program); err != nil {
		t.Fatalf("%v: the verifier refuses it: %v", c, err)
	}
	if numbers {
		checkForms(t, c, program)
	}
	return plan, program
}

// checkForms converts a program to the binary and the text format and back, and compares the results in the
// binary format.
func checkForms(t testing.TB, c Case, p *ir.Program) {
	t.Helper()
	binary := encode(t, p)
	decoded, err := ir.Decode(binary)
	if err != nil {
		t.Fatalf("%v: decoding: %v", c, err)
	}
	if !bytes.Equal(encode(t, decoded), binary) {
		t.Fatalf("%v: the binary form changes the program", c)
	}
	var text bytes.Buffer
	if err := ir.Print(&text, p); err != nil {
		t.Fatalf("%v: printing: %v", c, err)
	}
	parsed, err := ir.ParseText("case.sppir", text.Bytes())
	if err != nil {
		t.Fatalf("%v: parsing what was printed: %v", c, err)
	}
	if !bytes.Equal(encode(t, parsed), binary) {
		t.Fatalf("%v: the text form changes the program", c)
	}
}

func encode(t testing.TB, p *ir.Program) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := ir.Encode(&b, p); err != nil {
		t.Fatalf("encoding: %v", err)
	}
	return b.Bytes()
}

// open loads a program onto cpu devices whose kernels share a pool of threads. If traces is not nil, it
// receives one trace for each rank.
func open(t testing.TB, p *ir.Program, threads int, traces *[]*vm.Trace) *train.Job {
	t.Helper()
	var pool *simd.Pool
	if threads > 1 {
		pool = simd.NewPool(threads)
		t.Cleanup(pool.Close)
	}
	if traces == nil {
		return openOn(t, p, func(int) vm.Device { return cpu.New(pool) })
	}
	*traces = make([]*vm.Trace, len(p.Ranks))
	return openOn(t, p, func(rank int) vm.Device {
		(*traces)[rank] = vm.NewTrace(cpu.New(pool))
		return (*traces)[rank]
	})
}

// openOn loads a program onto the devices that a function creates for its ranks. The job is closed at the end
// of the test.
func openOn(t testing.TB, p *ir.Program, device func(rank int) vm.Device) *train.Job {
	t.Helper()
	job, err := train.Open(p, func(rank int) (vm.Device, error) { return device(rank), nil }, train.Options{})
	if err != nil {
		t.Fatalf("opening: %v", err)
	}
	t.Cleanup(func() {
		if err := job.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return job
}

// Result holds everything that is compared between runs.
type Result struct {
	Names    []string             // names of the tensors, in the program's order
	Losses   []float64            // loss of every step
	Norms    []float64            // gradient norm of every step, before clipping
	EvalLoss float64              // after the last step
	Grads    map[string][]float32 // gradients of step 1
	Weights  map[string][]float32 // f32 masters, after the last step
	Rounded  map[string][]float32 // weights as the forward pass reads them
	Sums     []string             // order of sums; only for random programs

	TokenLosses []float32 // of the validation's last section; only over finite fields
}

// holds reports whether any rank holds a tensor in a role. Frozen tensors have no gradient.
func holds(p *ir.Program, tensor string, role ir.Role) bool {
	return slices.ContainsFunc(p.Codes, func(c ir.Code) bool {
		return slices.ContainsFunc(c.States, func(s ir.State) bool { return p.Tensors[s.Tensor].Name == tensor && s.Role == role })
	})
}

// raiseAdapters sets the second matrices of adapters, which start as 0, to other values, so that gradients
// reach the first matrices.
func raiseAdapters(t testing.TB, p *ir.Program, job *train.Job) {
	t.Helper()
	for _, tensor := range p.Tensors {
		if !strings.HasSuffix(tensor.Name, ".lora_b") {
			continue
		}
		r, values := rand.New(rand.NewPCG(1, uint64(len(tensor.Name)))), make([]float32, tensor.Shape[0]*tensor.Shape[1])
		for i := range values {
			values[i] = vm.FromBF16(vm.BF16(float32(0.1 * r.NormFloat64())))
		}
		if err := job.SetTensor(tensor.Name, ir.RoleMaster, values); err != nil {
			t.Fatalf("raising an adapter: %v", err)
		}
	}
}

// tensors reads all tensors in one role; for gradients, it leaves out frozen tensors.
func tensors(t testing.TB, p *ir.Program, job *train.Job, role ir.Role) map[string][]float32 {
	t.Helper()
	all := map[string][]float32{}
	for _, tensor := range p.Tensors {
		if role == ir.RoleGrad && !holds(p, tensor.Name, role) {
			continue
		}
		values, _, err := job.Tensor(tensor.Name, role)
		if err != nil {
			t.Fatalf("reading a tensor: %v", err)
		}
		all[tensor.Name] = values
	}
	return all
}

// trained runs all steps of a program and then a validation. It calls `after` at the end of each step and of the
// validation.
func trained(t testing.TB, p *ir.Program, job *train.Job, after func()) *Result {
	t.Helper()
	if err := job.Init(t.Context()); err != nil {
		t.Fatalf("init: %v", err)
	}
	raiseAdapters(t, p, job)
	r := &Result{}
	for _, tensor := range p.Tensors {
		r.Names = append(r.Names, tensor.Name)
	}
	for range p.Run.Steps {
		step, err := job.Step(t.Context())
		if err != nil {
			t.Fatalf("step: %v", err)
		}
		r.Losses, r.Norms = append(r.Losses, step.Loss), append(r.Norms, step.GradNorm)
		if step.Step == 1 {
			r.Grads = tensors(t, p, job, ir.RoleGrad)
		}
		after()
	}
	loss, err := job.Eval(t.Context())
	if err != nil {
		t.Fatalf("validation: %v", err)
	}
	r.EvalLoss = loss
	after()
	r.Weights, r.Rounded = tensors(t, p, job, ir.RoleMaster), tensors(t, p, job, ir.RoleWeight)
	return r
}

// results caches results by case: many schedules share a plain program, which runs only once.
var results sync.Map // Case -> *outcome

type outcome struct {
	once   sync.Once
	result *Result // nil if the run failed
}

// run returns the result of a case. It also checks E5: the bytes that devices touched in their arenas, and
// the order of their work.
func run(t testing.TB, c Case) *Result {
	t.Helper()
	stored, _ := results.LoadOrStore(c, new(outcome))
	o := stored.(*outcome)
	o.once.Do(func() {
		plan, p := mustCompile(t, c)
		var traces []*vm.Trace
		job := open(t, p, threadsOf(c), &traces)
		o.result = trained(t, p, job, func() { checkOrder(t, c, p, traces) })
		checkPeaks(t, c, plan, p, job)
		checkSimulated(t, c, p)
	})
	if o.result == nil {
		t.Fatalf("%v failed before", c)
	}
	return o.result
}

// forget drops results, except those of plain programs, which many cases share.
func forget(cases ...Case) {
	for _, c := range cases {
		if c != c.plain() {
			results.Delete(c)
		}
	}
}

// threadsOf varies the number of threads, which must not affect any result.
func threadsOf(c Case) int { return 1 + (c.PP+c.SP+c.N)%2 }
