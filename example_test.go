package sppo_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"sppo.dev"
	"sppo.dev/ir"
)

// Compile a spec with one key changed, and train the model on the CPU.
func Example() {
	ctx := context.Background()
	spec, err := sppo.Load("examples/tiny.sppo", "train.steps=20")
	if err != nil {
		log.Fatal(err)
	}
	program, err := sppo.Compile(ctx, spec, sppo.Options{})
	if err != nil {
		log.Fatal(err)
	}
	job, err := sppo.Open(program, sppo.CPU(0))
	if err != nil {
		log.Fatal(err)
	}
	defer job.Close()
	var losses []float64
	for step, err := range job.Train(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		losses = append(losses, step.Loss)
	}
	fmt.Printf("%d ranks, %d steps, loss falls: %t\n", len(program.Ranks), len(losses), losses[19] < losses[0])
	// Output: 4 ranks, 20 steps, loss falls: true
}

// Stop training after five steps, save a checkpoint, and go on from it.
func ExampleJob_Train() {
	ctx := context.Background()
	spec, err := sppo.Load("examples/tiny.sppo", "train.steps=10")
	if err != nil {
		log.Fatal(err)
	}
	program, err := sppo.Compile(ctx, spec, sppo.Options{})
	if err != nil {
		log.Fatal(err)
	}
	folder, err := os.MkdirTemp("", "checkpoints")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(folder)
	for range 2 {
		job, err := sppo.Open(program, sppo.CPU(0))
		if err != nil {
			log.Fatal(err)
		}
		defer job.Close()
		if checkpoints, _ := os.ReadDir(folder); len(checkpoints) > 0 {
			if err := job.Restore(ctx, folder); err != nil {
				log.Fatal(err)
			}
		}
		fmt.Println("begin after step", job.Steps())
		for step, err := range job.Train(ctx) {
			if err != nil {
				log.Fatal(err)
			}
			if step.Step == 5 {
				break
			}
		}
		if err := job.Save(folder); err != nil {
			log.Fatal(err)
		}
		fmt.Println("saved after step", job.Steps())
	}
	// Output:
	// begin after step 0
	// saved after step 5
	// begin after step 5
	// saved after step 10
}

// Print why a plan is as it is, and save it.
func ExampleNewPlan() {
	spec, err := sppo.Load("examples/tiny.sppo")
	if err != nil {
		log.Fatal(err)
	}
	plan, err := sppo.NewPlan(context.Background(), spec, sppo.Options{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("fits: %t, %.0f tokens/s, estimated\n", plan.Memory.Fits, plan.TokensPerSecond)
	for _, d := range plan.Decisions {
		if d.Pass == "offload" {
			fmt.Printf("%s = %s: %s\n", d.What, d.Value, d.Why)
		}
	}
	var text bytes.Buffer
	if err := plan.WriteJSON(&text); err != nil {
		log.Fatal(err)
	}
	again, err := sppo.ReadPlan(&text)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(again.Step == plan.Step)
	// Output:
	// fits: true, 26802 tokens/s, estimated
	// policy = full: everything is offloaded, including the last subsequence
	// ahead = 1 of 2 layers: a reload is issued this many layers in advance; more would hold its bytes longer, fewer would lengthen the step
	// true
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
	ctx := context.Background()
	for _, offload := range []string{"none", "full"} {
		spec, err := sppo.Load("examples/tiny.sppo", "schedule.offload="+offload)
		if err != nil {
			log.Fatal(err)
		}
		plan, err := sppo.NewPlan(ctx, spec, sppo.Options{})
		if err != nil {
			log.Fatal(err)
		}
		program, err := plan.Build(ctx)
		if err != nil {
			log.Fatal(err)
		}
		step, err := sppo.Simulate(ctx, program)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("offload = %s: %v of device memory, %v a step, simulated\n",
			offload, plan.Memory.DevicePeaks[0], step.Step)
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
	_, err = sppo.Compile(context.Background(), spec, sppo.Options{})
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

	job, err := sppo.Open(program, sppo.CPU(1))
	if err != nil {
		log.Fatal(err)
	}
	defer job.Close()
	for step, err := range job.Train(context.Background()) {
		fmt.Println("loss", step.Loss, err)
	}
	program.Codes[0].Sections[ir.SectionStep] = append(step[:8:8], step[9]) // without the last wait
	_, err = sppo.Open(program, sppo.CPU(1))
	fmt.Println(err)
	// Output:
	// loss 36 <nil>
	// the program failed verification: 1 finding
	// race: code only, step 8: reads x.back (bytes 0x100 to 0x110) while step 6 on stream h2d may not yet have written it: no event orders them
	//     step 8: compute sumsq loss:f32[1] = x.back:f32[4] weight=1
	//         from by hand
	//     step 6: h2d h2d x.back:f32[4] = x.host:f32[4]
	//         from by hand
}
