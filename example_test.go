package sppo_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"sppo.dev"
	"sppo.dev/internal/train"
	"sppo.dev/ir"
)

// Compile a spec with one key changed, and train the model on the CPU.
func Example() {
	spec, err := sppo.Load("examples/tiny.sppo", "train.steps=20")
	if err != nil {
		log.Fatal(err)
	}
	program, err := sppo.Compile(spec)
	if err != nil {
		log.Fatal(err)
	}
	var losses []float64
	err = sppo.Run(context.Background(), program, func(r train.StepResult) { losses = append(losses, r.Loss) })
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d ranks, %d steps, loss falls: %t\n", len(program.Ranks), len(losses), losses[19] < losses[0])
	// Output: 4 ranks, 20 steps, loss falls: true
}

// A spec can come from memory. Errors in it are reported as diagnostics with positions.
func ExampleParse() {
	_, err := sppo.Parse("job.sppo", []byte("import \"clusters/local.sppo\"\nschedule s {\n  subsequence = 4\n}\n"))
	fmt.Println(err)
	// Output:
	// job.sppo:1:1: error: the spec has no `model`, `train` [missing-block]
	//     import "clusters/local.sppo"
	//     ^
	//     hint: write model { ... }, or import it
	// job.sppo:3:3: error: `schedule` has no key `subsequence` [unknown-key]
	//       subsequence = 4
	//       ^^^^^^^^^^^
	//     hint: did you mean `subsequences`?
}

// Compare the memory and the simulated time of a job with and without offload.
func ExampleSimulate() {
	for _, offload := range []string{"none", "full"} {
		spec, err := sppo.Load("examples/tiny.sppo", "schedule.offload="+offload)
		if err != nil {
			log.Fatal(err)
		}
		plan, err := sppo.Plan(spec)
		if err != nil {
			log.Fatal(err)
		}
		program, err := sppo.Build(plan)
		if err != nil {
			log.Fatal(err)
		}
		timeline, err := sppo.Simulate(program)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("offload = %s: %v of device memory, %v a step, simulated\n",
			offload, plan.Memory.DevicePeakBytes[0], timeline.Makespan)
	}
	// Output:
	// offload = none: 263 KiB of device memory, 4.18 ms a step, simulated
	// offload = full: 231 KiB of device memory, 4.24 ms a step, simulated
}

// The error for a job that does not fit states how much memory the job needs.
func ExampleCompile_doesNotFit() {
	spec, err := sppo.Load("examples/tiny.sppo", "train.sequence=1M")
	if err != nil {
		log.Fatal(err)
	}
	_, err = sppo.Compile(spec)
	var fit *sppo.FitError
	fmt.Println(errors.As(err, &fit))
	fmt.Println(err)
	// Output:
	// true
	// the job does not fit: a rank of stage 0 needs 1.16 GiB of device memory but has 1.00 GiB
}

// A program written by hand: four numbers travel to the host and back on separate streams, and their sum of
// squares is the loss. Events order the streams. Without them, the verifier rejects the program, because a
// stream could read what another has not yet written.
func ExampleOpen_programByHand() {
	const x, host, back, loss = 0, 1, 2, 3 // indices of buffers
	f32 := func(buffer uint32, n int64) ir.View {
		return ir.View{Buffer: buffer, Shape: [ir.MaxDims]int64{n}, DType: ir.F32}
	}
	instr := func(s ir.Stream, op ir.Op, args []ir.View, attrs ...ir.Attr) ir.Instr {
		return ir.Instr{Stream: s, Op: op, Args: args, Attrs: attrs}
	}
	event := func(s ir.Stream, op ir.Op, e int64) ir.Instr { return instr(s, op, nil, ir.Int(e)) }
	step := []ir.Instr{
		instr(ir.Compute, ir.Fill, []ir.View{f32(x, 4)}, ir.Float(3)),
		event(ir.Compute, ir.Record, 0),
		event(ir.D2H, ir.Wait, 0),
		instr(ir.D2H, ir.CopyD2H, []ir.View{f32(host, 4), f32(x, 4)}),
		event(ir.D2H, ir.Record, 1),
		event(ir.H2D, ir.Wait, 1),
		instr(ir.H2D, ir.CopyH2D, []ir.View{f32(back, 4), f32(host, 4)}),
		event(ir.H2D, ir.Record, 2),
		event(ir.Compute, ir.Wait, 2),
		instr(ir.Compute, ir.SumSq, []ir.View{f32(loss, 1), f32(back, 4)}, ir.Float(1)),
	}
	code := ir.Code{
		Name: "only",
		Buffers: []ir.Buffer{
			x:    {Name: "x", Arena: ir.Device, Offset: 0, Size: 16},
			host: {Name: "x.host", Arena: ir.Host, Offset: 0, Size: 16},
			back: {Name: "x.back", Arena: ir.Device, Offset: 1 * ir.Alignment, Size: 16},
			loss: {Name: "loss", Arena: ir.Device, Offset: 2 * ir.Alignment, Size: 4},
		},
		Arenas:  [ir.NumArenas]ir.Bytes{ir.Device: 2*ir.Alignment + 4, ir.Host: 16},
		Results: []ir.Result{{Name: ir.ResultLoss, View: f32(loss, 1)}},
	}
	code.Sections[ir.SectionStep], code.Events[ir.SectionStep] = step, 3
	program := &ir.Program{Name: "by hand", Lines: []string{"by hand"}, Passes: []string{"hand"},
		Run: ir.Run{Steps: 1, Batch: 1, Sequence: 4}, Codes: []ir.Code{code}, Ranks: []ir.Rank{{}}}

	err := sppo.Run(context.Background(), program, func(r train.StepResult) { fmt.Println("loss", r.Loss) })
	if err != nil {
		log.Fatal(err)
	}
	program.Codes[0].Sections[ir.SectionStep] = append(step[:8:8], step[9]) // without the last wait
	fmt.Println(sppo.Run(context.Background(), program, nil))
	// Output:
	// loss 36
	// the program failed verification: 1 finding
	// race: code only, step 8: reads x.back (bytes 0x100 to 0x110) while step 6 on stream h2d may not yet have written it: no event orders them
	//     step 8: compute sumsq loss:f32[1] = x.back:f32[4] weight=1
	//         from by hand
	//     step 6: h2d h2d x.back:f32[4] = x.host:f32[4]
	//         from by hand
}
