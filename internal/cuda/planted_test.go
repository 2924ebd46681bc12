package cuda

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/internal/train/probe"
	"sppo.dev/internal/vm"
	"sppo.dev/internal/vm/cpu"
	"sppo.dev/ir"
)

// The tests in this file plant errors and require that the checks of bench/gpu see them. `make gpu-planted` prints
// what each check reports.

// told logs a row of the table that make gpu-planted prints: the stage of the check, the error, and the report.
func told(t *testing.T, stage, mistake, report string) {
	t.Helper()
	report, _, _ = strings.Cut(report, "; errors in blocks")
	t.Logf("PLANTED| %s | %s | %s |", stage, mistake, strings.ReplaceAll(report, "\n", " "))
}

// mistake is an error in a source: after some text, one expression stands for another.
type mistake struct{ name, source, after, right, wrong string }

// planted lists errors in the kernels for Hopper. The operation, head dimension and way to load tiles are those of a
// trial that must report the error as described.
var planted = []struct {
	mistake
	op      ir.Op
	dim     int64
	threads bool
	want    string
}{
	{mistake{"another head size", "attention_hopper.cu", "const float scale = SOFTCAP ? LOG2E : LOG2E / sqrtf(", "(float)DIM", "64.0f"},
		ir.Attention, 96, false, "o of attention_bulk_96_f"},
	{mistake{"parity of a reused slot", "attention_hopper.cu", "barrier_wait(barriers + KEYS_HERE + tile % 2, ", "tile / 2 & 1", "tile / 2 & 1 & (tile < 4)"},
		ir.Attention, 64, false, "o of attention_bulk_64_f"},
	{mistake{"no fence between proxies", "attention_hopper.cu", "METHOD void soon(int tile) const {\n        ", "copies_done()", "copies_here()"},
		ir.Attention, 64, true, "o of attention_hopper_64_f"},
	{mistake{"stride of a descriptor", "attention_hopper.cu", "gather<DIM>(sum, p[s], ", "by_columns<DIM, KEYS>(values, 16 * s)", "by_columns<DIM, 64>(values, 16 * s)"},
		ir.Attention, 128, false, "o of attention_bulk_128_f"},
	{mistake{"factor of dk", "attention_hopper_grad.cu", "add_pair(dk + at, ", "sum_k[c][2 * half] * factor", "sum_k[c][2 * half]"},
		ir.AttentionGrad, 64, false, "dk of attention_bulk_dkv_64"},
	{mistake{"slot of a pair", "attention_hopper_grad.cu", "const u32 pair = ", "pairs + tile % x.slots * UNITS(PAIR(64))", "pairs + tile % 2 * UNITS(PAIR(64))"},
		ir.AttentionGrad, 128, true, "dk of attention_hopper_dkv_128"},
	{mistake{"parity of a reused pair", "attention_hopper_grad.cu", "barrier_wait(barriers + PAIR_HERE + tile % slots, ", "tile / slots & 1", "tile / slots & 1 & (tile < 6)"},
		ir.AttentionGrad, 64, false, "d. of attention_bulk_d"},
}

// plantedVariable, if set, selects the first mistake of a library when a process opens it, and the one of the stand-in for
// NCCL.
const plantedVariable = "SPPO_PLANTED"

// plant compiles sources and headers with all mistakes. The function that it returns selects one by its number, counted
// from 1, or none.
func plant(t *testing.T, names []string, mistakes []mistake) (library *emu.Library, choose func(number int)) {
	t.Helper()
	texts := kernels.Headers()
	for _, name := range names {
		texts[name] = "extern int planted;\n" + kernels.Text(name)
	}
	for i, m := range mistakes {
		before, after, found := strings.Cut(texts[m.source], m.after+m.right)
		if !found {
			t.Fatalf("%s: %s has no %q", m.name, m.source, m.after+m.right)
		}
		texts[m.source] = fmt.Sprintf("%s%s(planted == %d ? %s : %s)%s", before, m.after, i+1, m.wrong, m.right, after)
	}
	texts["choice.cu"] = "#include <cstdlib>\nint planted = getenv(\"" + plantedVariable + "\") != nullptr;\nKERNEL(choose, (long long number)) { planted = (int)number; }\n"
	folder, err := emu.Folder()
	if err != nil {
		t.Fatal(err)
	}
	if library, err = emu.BuildSources(folder, texts); errors.Is(err, emu.ErrNoCompiler) {
		t.Skip("SKIPPED: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return library, func(number int) {
		if err := library.Launch("choose", [3]int64{1, 1, 1}, 32, 0, []uint64{uint64(number)}, 0); err != nil {
			t.Fatal(err)
		}
	}
}

// buildPlanted compiles the attention kernels with all planted errors.
func buildPlanted(t *testing.T) (library *emu.Library, choose func(number int)) {
	t.Helper()
	var mistakes []mistake
	for _, p := range planted {
		mistakes = append(mistakes, p.mistake)
	}
	return plant(t, []string{"attention.cu", "attention_tensor.cu", "attention_hopper.cu", "attention_hopper_grad.cu"}, mistakes)
}

// The trial reports each planted error, with the kernel, the operand and the first wrong block.
func TestPlantedTrial(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake := useFake(t)
	broken, choose := buildPlanted(t)
	for i, p := range planted {
		fake.reset(1, 1<<30, 0) // a kernel that faults leaves the driver unusable
		m, err := open(Options{OwnProducts: true}, fixedCode(broken.Path))
		if err != nil {
			t.Fatal(err)
		}
		shape := m.tried
		shape.dim = p.dim
		choose(i + 1)
		text, err := m.try(m.gpus[0], kernels.Card{Hopper: true, CopyEngine: !p.threads}, p.op, shape)
		choose(0)
		if err != nil {
			text = fmt.Sprintf("the trial of %s of heads of %d failed: %v", ir.Ops[p.op].Name, p.dim, err)
		}
		if err == nil && (!regexp.MustCompile("^"+p.want).MatchString(text) || !strings.Contains(text, "the first wrong block begins at row")) {
			t.Errorf("%s: %q", p.name, text)
			continue
		}
		told(t, "first, trial", fmt.Sprintf("%s, heads of %d", p.name, p.dim), text)
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// plantedPrimitives lists errors in the building blocks, and the start of the report.
var plantedPrimitives = []struct {
	mistake
	want string
}{
	{mistake{"stride of a descriptor", "hopper.cuh", "const u32 upper = ", "UNITS(8 * ROW_BYTES)", "UNITS(4 * ROW_BYTES)"}, "d of primitive_rows_64_64 "},
	{mistake{"offset between panels", "hopper.cuh", "descriptor<DIM>(tile, token * ROW_BYTES, ", "ROWS * ROW_BYTES", "8 * ROW_BYTES"}, "d of primitive_columns_80_64 "},
	{mistake{"swizzle of 128 bytes", "hopper.cuh", "return PANEL == 64 ? ", "(c ^ r) & 7", "(c ^ r) & 3"}, "y of primitive_threads_64 "},
	{mistake{"swizzle of 32 bytes", "hopper.cuh", " : ", "(c ^ r >> 2) & 1", "(c ^ r >> 1) & 1"}, "y of primitive_threads_80 "},
	{mistake{"swizzle of 64 bytes", "hopper.cuh", " : PANEL == 32 ? ", "(c ^ r >> 1) & 3", "(c ^ r) & 3"}, "y of primitive_threads_96 "},
	{mistake{"half of an operand in registers", "hopper.cuh", "const int r = row + (threadIdx.x & 15), half = ", "threadIdx.x >> 4 & 1", "threadIdx.x >> 3 & 1"},
		"d of primitive_own_64_64 "},
	{mistake{"no fence between proxies", "primitives_hopper.cu", "fetch<DIM, COLUMNS, 256>(right, b, 0, COLUMNS, 0, 1, 0, 1);\n    ", "copies_done()", "copies_here()"},
		"d of primitive_rows_64_64 "},
	{mistake{"bytes that a barrier expects", "primitives_hopper.cu", "map_ready(map);\n        barrier_expect(here, ", "TILE_BYTES(128)", "TILE_BYTES(64)"}, "primitive_engine_64: "},
	{mistake{"one arrival too few", "primitives_hopper.cu", "barrier_init(barriers + i, i < PAIR_USED ? ", "2", "1"}, "primitive_pairs: "},
	{mistake{"parity of a reused slot", "primitives_hopper.cu", "barrier_wait(barriers + PAIR_HERE + tile % 3, ", "tile / 3 & 1", "tile / 3 & 1 & (tile < 3)"}, "primitive_pairs: "},
	{mistake{"a turn out of turn", "primitives_hopper.cu", "turn_wait(", "group", "group ^ 1"}, "primitive_turns: "},
	{mistake{"operand of mma.sync", "common.cuh", "ldmatrix(r, tile + (column + ", "(lane >> 4) * 8", "(lane >> 3 & 1) * 8"}, "d of primitive_fragments "},
	{mistake{"slot of a ring", "primitives.cu", "const int at = (int)", "(tile % 2)", "(0 * tile)"}, "y of primitive_ring "},
}

// Exact results of the building blocks are those of the emulator, in several orders of lanes, copies and products. Each
// planted error is reported.
func TestPlantedPrimitives(t *testing.T) {
	fake := useFake(t)
	var mistakes []mistake
	for _, p := range plantedPrimitives {
		mistakes = append(mistakes, p.mistake)
	}
	library, choose := plant(t, []string{kernels.Primitives, kernels.HopperPrimitives}, mistakes)
	for seed := range uint64(4) {
		if err := wrongPrimitive(t, fake, library, seed); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
	}
	for i, p := range plantedPrimitives {
		choose(i + 1)
		err := wrongPrimitive(t, fake, library, 0)
		choose(0)
		if err == nil || !strings.HasPrefix(err.Error(), p.want) {
			t.Errorf("%s: %v", p.name, err)
			continue
		}
		told(t, "primitives", p.name, err.Error())
	}
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// wrongPrimitive returns the report on the first building block that is wrong with the kernels of a library.
func wrongPrimitive(t *testing.T, fake *fake, library *emu.Library, seed uint64) error {
	t.Helper()
	fake.reset(1, 1<<30, 0) // a kernel that faults leaves the driver unusable
	fake.seed(seed)
	m, err := open(Options{OwnProducts: true}, fixedCode(library.Path))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range primitives() {
		if err := p.check(m); err != nil {
			return err
		}
	}
	return nil
}

// plantedCopies lists errors that the stand-in driver makes: those of fake.c, in their order.
var plantedCopies = []string{"stale pinned memory: copies to it have no effect the second time", "copies that are not waited for"}

// A training check that streams activations, keys and values from the host sees wrong copies.
func TestPlantedCopies(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, emulated, dir := useFake(t), emu.Need(t), wordsFolder(t)
	at := slices.IndexFunc(trainings, func(c training) bool { return c.name == "K and V from the host" })
	c := trainings[at]
	p := trainingProgram(t, c.family, c.dtype, c.requests...)
	p.Run.Steps = emulatedSteps
	want, err := losses(p, dir, func(int) vm.Device { return cpu.New(nil) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range append([]string{""}, plantedCopies...) {
		fake.reset(1, 1<<30, 0)
		fake.plant(int32(i))
		m := fake.open(t, Options{OwnProducts: true})
		m.code = fixedCode(emulated.Path)
		within(t, func() {
			got, err := losses(p, dir, m.New, m)
			if err == nil {
				_, err = probe.SameTraining(got, want, false)
			}
			if (err != nil) != (i > 0) {
				t.Errorf("%q: %v", name, err)
			} else if i > 0 {
				told(t, "training", name, c.name+": "+err.Error())
			}
		})
	}
	fake.reset(1, 1<<30, 0)
	if n := fake.live(); n != 0 {
		t.Errorf("%d things were not given back", n)
	}
}

// The conformance stage reports a wrong kernel by its opcode. It runs in a process of its own, as in the check.
func TestPlantedConformance(t *testing.T) {
	useFake(t)
	m := mistake{"epsilon of layernorm left out", "norm.cu", "1.0f / sqrtf(block_sum(squares) / (float)cols + ", "eps", "0.0f"}
	library, _ := plant(t, []string{"norm.cu", "columns.cu"}, []mistake{m})
	kernelsFolder := t.TempDir()
	image := func(string, []string) ([]byte, error) { return []byte(library.Path), nil }
	if err := KeepKernels(kernelsFolder, []string{"90", "90a"}, image); err != nil {
		t.Fatal(err)
	}
	for _, chosen := range []string{"", "1"} {
		cmd := exec.Command(os.Args[0], "-test.v", "-test.run", "^TestGPUConformance$/^own_products$/^layernorm$")
		cmd.Env = append(os.Environ(), KernelsVariable+"="+kernelsFolder)
		if chosen != "" {
			cmd.Env = append(cmd.Env, plantedVariable+"="+chosen)
		}
		out, err := cmd.CombinedOutput()
		report := regexp.MustCompile(`(?m)/(layernorm/f32)\n +cases\.go:\d+: (.*)$`).FindStringSubmatch(string(out))
		if (err != nil) != (chosen != "") || err != nil && report == nil {
			t.Errorf("planted %q: %v\n%s", chosen, err, out)
		} else if err != nil {
			told(t, "conformance", m.name, report[1]+": "+report[2])
		}
	}
}

// The stage for NCCL reports a gather that leaves out bytes. It runs in a process of its own, as in the check.
func TestPlantedNCCL(t *testing.T) {
	fake, kernelsFolder := useFake(t), t.TempDir()
	image := func(string, []string) ([]byte, error) { return []byte(fake.stubs), nil }
	if err := KeepKernels(kernelsFolder, []string{"90", "90a"}, image); err != nil {
		t.Fatal(err)
	}
	for _, chosen := range []string{"", "1"} {
		cmd := exec.Command(os.Args[0], "-test.v", "-test.run", "^TestGPUNCCL$")
		cmd.Env = append(os.Environ(), KernelsVariable+"="+kernelsFolder)
		if chosen != "" {
			cmd.Env = append(cmd.Env, plantedVariable+"="+chosen)
		}
		out, err := cmd.CombinedOutput()
		report := regexp.MustCompile(`(?m)^ +nccl_test\.go:\d+: (step 1: buffer 1 .*)$`).FindStringSubmatch(string(out))
		if (err != nil) != (chosen != "") || (report != nil) != (chosen != "") || strings.Contains(string(out), "SKIP") {
			t.Errorf("planted %q: %v\n%s", chosen, err, out)
		} else if err != nil {
			told(t, "nccl", "a gather without the last bytes of each rank", report[1])
		}
	}
}
