package codegen

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"sppo.dev/ir"
)

// peakVariants returns specs that use memory for different purposes.
func peakVariants(t *testing.T) [][]string {
	examples, err := filepath.Glob("../../examples/*.sppo")
	if err != nil || len(examples) < 3 {
		t.Fatalf("%v: %v", examples, err)
	}
	var out [][]string
	for _, file := range examples {
		for _, set := range []string{
			"schedule.offload=none", "schedule.offload=0.5", "schedule.offload=full", "schedule.recompute=full", "schedule.mux=left", "schedule.mux=right",
			"schedule.strategy=zb-h1", "schedule.strategy=gpipe", "schedule.strategy=seq1f1b", "schedule.keep=[]", "schedule.zero=3 schedule.dp=2 schedule.pp=1",
			"schedule.pp=1 schedule.order=layer", "schedule.sp_mode=ulysses", "schedule.sp_mode=ring", "model.dtype=bf16", "model.tied=true", "schedule.virtual_stages=2",
		} {
			out = append(out, append([]string{file}, strings.Fields(set)...))
		}
	}
	for _, file := range []string{"gpt-7b-512k", "gpt-13b-512k"} {
		out = append(out, []string{"../../examples/paper/" + file + ".sppo"}, []string{"../../examples/paper/" + file + ".sppo", "schedule.keep=[]"})
	}
	return out
}

// The parts of an arena add up to its peak, both with the lifetimes used in placement and with those derived
// from the instructions. Buffers that a checkpoint saves are counted in the part for their role, such as
// weights or optimizer.
func TestPartsAddUp(t *testing.T) {
	checked := 0
	for _, v := range peakVariants(t) {
		plan := tryPlan(v[0], v[1:]...)
		if plan == nil { // the example does not support the setting
			continue
		}
		p := buildOf(t, plan)
		for i := range p.Codes {
			code := &p.Codes[i]
			derived := code.Peaks(nil)
			for arena, peaks := range [ir.NumArenas][]ir.Peak{ir.Device: plan.Memory.Device, ir.Host: plan.Memory.Host} {
				for _, peak := range []*ir.Peak{&peaks[i], &derived[arena]} {
					checkPeak(t, strings.Join(v, " ")+" "+code.Name+" "+ir.Arena(arena).String(), code, ir.Arena(arena), peak)
				}
				if peaks[i].Parts[ir.PartGaps] > code.Arenas[arena]/4+4096 {
					t.Errorf("%v: %s: gaps of %s in %s", v, code.Name, peaks[i].Parts[ir.PartGaps], code.Arenas[arena])
				}
			}
			checked++
		}
	}
	if checked < 60 {
		t.Errorf("only %d codes were checked", checked)
	}
}

func checkPeak(t *testing.T, name string, code *ir.Code, arena ir.Arena, peak *ir.Peak) {
	t.Helper()
	var sum ir.Bytes
	for part, n := range peak.Parts {
		if sum += n; n < 0 {
			t.Errorf("%s: %s of %s", name, n, ir.Part(part))
		}
	}
	if sum != code.Arenas[arena] || peak.Bytes != sum {
		t.Errorf("%s: parts of %d bytes, a peak of %d, placed %d", name, sum, peak.Bytes, code.Arenas[arena])
	}
	var held [ir.NumParts]ir.Bytes
	for i, h := range peak.Largest {
		held[h.Part] += h.Bytes
		if i > 0 && h.Bytes > peak.Largest[i-1].Bytes || held[h.Part] > peak.Parts[h.Part] || h.Part == ir.PartGaps {
			t.Errorf("%s: %v among the largest", name, h)
		}
	}
	if len(peak.Largest) > 10 || len(peak.Largest) == 0 && peak.Bytes > 0 {
		t.Errorf("%s: %d largest", name, len(peak.Largest))
	}
	var states [ir.NumParts]ir.Bytes
	seen := map[uint32]bool{}
	for i := range code.States {
		s := &code.States[i]
		if b := s.View.Buffer; s.View.Present() && code.Buffers[b].Arena == arena && !seen[b] {
			seen[b] = true
			part := [...]ir.Part{ir.PartWeights, ir.PartOptimizer, ir.PartOptimizer, ir.PartOptimizer, ir.PartGradients}[s.Role]
			states[part] += code.Buffers[b].Size
		}
	}
	if peak.Parts[ir.PartWeights] < states[ir.PartWeights] || peak.Parts[ir.PartOptimizer] != states[ir.PartOptimizer] {
		t.Errorf("%s: %s of weights and %s of optimizer; the checkpoint has %s and %s", name,
			peak.Parts[ir.PartWeights], peak.Parts[ir.PartOptimizer], states[ir.PartWeights], states[ir.PartOptimizer])
	}
}

// On a stage of the plain pipeline, K and V of a sequence take as many bytes as their shapes need; their
// gradients have the same shapes in f32.
func TestPartsOfCaches(t *testing.T) {
	plan := planOf(t, "../../examples/paper/gpt-7b-512k.sppo")
	buildOf(t, plan)
	for stage, peak := range plan.Memory.Device {
		layers, m := ir.Bytes(len(plan.Layers(stage))), plan.Model
		kv := 2 * layers * ir.Bytes(plan.Train.Sequence) * ir.Bytes(m.KVHeads*m.HeadDim/plan.Parallel.SP) * 2
		if peak.Parts[ir.PartKV] != kv || peak.Parts[ir.PartKVGradients] != 2*kv {
			t.Errorf("stage %d: %s of K and V, %s of gradients; want %s and %s", stage, peak.Parts[ir.PartKV], peak.Parts[ir.PartKVGradients], kv, 2*kv)
		}
		saved := plan.Memory.Host[stage].Parts
		if saved[ir.PartSaved]+saved[ir.PartGaps] != plan.Memory.HostPeakBytes[stage] {
			t.Errorf("stage %d: the host holds %v", stage, saved)
		}
	}
	text, err := json.Marshal(plan.Memory.Device)
	if err != nil {
		t.Fatal(err)
	}
	var back []ir.Peak
	if err := json.Unmarshal(text, &back); err != nil || back[0].Parts != plan.Memory.Device[0].Parts {
		t.Errorf("JSON does not read back: %v", err)
	}
	if err := json.Unmarshal([]byte(`[{"parts":{"weight":1}}]`), &back); err == nil {
		t.Error("a part that does not exist was read")
	}
}
