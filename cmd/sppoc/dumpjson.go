package main

import (
	"encoding/json"
	"io"

	"sppo.dev/ir"
)

// The format of dump --format json has names instead of indexes, and addresses instead of offsets in buffers.
type (
	jsonProgram struct {
		Name    string      `json:"name"`
		Run     ir.Run      `json:"run"`
		Model   ir.Model    `json:"model"`
		Machine ir.Machine  `json:"machine"`
		Tensors []ir.Tensor `json:"tensors"`
		Codes   []jsonCode  `json:"codes"`
		Ranks   []jsonRank  `json:"ranks"`
	}
	jsonCode struct {
		Name     string                 `json:"name"`
		Arenas   map[string]ir.Bytes    `json:"arenas"`
		Sections map[string][]jsonInstr `json:"sections"`
	}
	jsonInstr struct {
		PC          int                 `json:"pc"`
		Stream      string              `json:"stream"`
		Op          string              `json:"op"`
		Args        map[string]jsonView `json:"args,omitempty"`
		Attrs       map[string]any      `json:"attrs,omitempty"`
		Phase       string              `json:"phase"`
		Stage       int16               `json:"stage"`
		Microbatch  *int32              `json:"microbatch,omitempty"`
		Subsequence *int32              `json:"subsequence,omitempty"`
		Layer       *int32              `json:"layer,omitempty"`
		Pass        string              `json:"pass,omitempty"`
		Line        string              `json:"line,omitempty"`
	}
	jsonView struct {
		Buffer  string   `json:"buffer"`
		Arena   string   `json:"arena"`
		Address ir.Bytes `json:"address"`
		DType   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
	}
	jsonRank struct {
		Rank   int                `json:"rank"`
		Code   string             `json:"code"`
		DP     int32              `json:"dp"`
		PP     int32              `json:"pp"`
		SP     int32              `json:"sp"`
		Consts map[string]int64   `json:"consts"`
		Groups map[string][]int32 `json:"groups"`
	}
)

// dumpJSON writes the program, or one rank's part with its constants filled in.
func dumpJSON(w io.Writer, p *ir.Program, rank int) error {
	out := jsonProgram{Name: p.Name, Run: p.Run, Model: p.Model, Machine: p.Machine, Tensors: p.Tensors}
	codes, ranks := span(len(p.Codes)), span(len(p.Ranks))
	var consts []int64
	if rank >= 0 {
		codes, ranks, consts = []int{int(p.Ranks[rank].Code)}, []int{rank}, p.Ranks[rank].Consts
	}
	for _, c := range codes {
		out.Codes = append(out.Codes, codeJSON(p, &p.Codes[c], consts))
	}
	for _, r := range ranks {
		out.Ranks = append(out.Ranks, rankJSON(p, r))
	}
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(out)
}

func span(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

func codeJSON(p *ir.Program, c *ir.Code, consts []int64) jsonCode {
	out := jsonCode{Name: c.Name, Arenas: map[string]ir.Bytes{}, Sections: map[string][]jsonInstr{}}
	for a := range ir.NumArenas {
		out.Arenas[a.String()] = c.Arenas[a]
	}
	for s := range ir.NumSections {
		for pc := range c.Sections[s] {
			out.Sections[s.String()] = append(out.Sections[s.String()], instrJSON(p, c, pc, &c.Sections[s][pc], consts))
		}
	}
	return out
}

func instrJSON(p *ir.Program, c *ir.Code, pc int, in *ir.Instr, consts []int64) jsonInstr {
	info := in.Info()
	out := jsonInstr{
		PC: pc, Stream: in.Stream.String(), Op: info.Name, Phase: in.Prov.Phase.String(), Stage: in.Prov.Stage,
		Microbatch: known(in.Prov.Microbatch), Subsequence: known(in.Prov.Subsequence), Layer: known(in.Prov.Layer),
		Args: map[string]jsonView{}, Attrs: map[string]any{},
	}
	if int(in.Prov.Pass) < len(p.Passes) {
		out.Pass = p.Passes[in.Prov.Pass]
	}
	if int(in.Prov.Line) < len(p.Lines) {
		out.Line = p.Lines[in.Prov.Line]
	}
	for i, v := range in.Args {
		if v.Present() {
			b := &c.Buffers[v.Buffer]
			out.Args[info.Operands[i].Name] = jsonView{b.Name, b.Arena.String(), b.Offset + v.Offset, v.DType.String(), v.Dims()}
		}
	}
	for i, a := range in.Attrs {
		if kind := info.Attrs[i].Kind; kind != ir.KindBool && kind.MayBeLeftOut() && a == ir.Int(0) {
			continue
		}
		out.Attrs[info.Attrs[i].Name] = attrJSON(p, info.Attrs[i].Kind, a, consts)
	}
	return out
}

// attrJSON resolves indexes to names; if no rank is chosen, a constant whose value depends on the rank is shown
// as "$name".
func attrJSON(p *ir.Program, kind ir.AttrKind, a ir.Attr, consts []int64) any {
	if a.Const != 0 && consts == nil {
		return "$" + p.Consts[a.Const-1]
	}
	switch kind {
	case ir.KindFloat, ir.KindFactor:
		return a.Float(consts)
	case ir.KindBool:
		return a.Int(consts) != 0
	case ir.KindFunction:
		return ir.Functions[a.Int(consts)]
	case ir.KindTensor:
		return p.Tensors[a.Int(consts)].Name
	case ir.KindGroup:
		return p.Groups[a.Int(consts)]
	}
	return a.Int(consts)
}

func known(v int32) *int32 {
	if v == ir.None {
		return nil
	}
	return &v
}

func rankJSON(p *ir.Program, r int) jsonRank {
	rank := &p.Ranks[r]
	out := jsonRank{
		Rank: r, Code: p.Codes[rank.Code].Name, DP: rank.DP, PP: rank.PP, SP: rank.SP,
		Consts: map[string]int64{}, Groups: map[string][]int32{},
	}
	for i, name := range p.Consts {
		out.Consts[name] = rank.Consts[i]
	}
	for i, name := range p.Groups {
		out.Groups[name] = rank.Groups[i]
	}
	return out
}
