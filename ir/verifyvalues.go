package ir

import "fmt"

// This file checks the values of attributes on each rank, with constants filled in.

// verifyConstants checks, for every rank, the values of attributes and the positions of states.
func verifyConstants(p *Program, all *findings) {
	sites := make([][]valueSite, len(p.Codes))
	for c := range p.Codes {
		sites[c] = valueSites(&p.Codes[c])
	}
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		c := &p.Codes[rank.Code]
		for _, u := range sites[rank.Code] {
			if !u.constant && r > 0 && rank.Code == p.Ranks[r-1].Code {
				continue
			}
			kind, err := checkValues(p, r, u.section, &c.Sections[u.section][u.i])
			if err != nil {
				f := Finding{Kind: kind, At: siteOf(p, c, u.section, u.i), Msg: err.Error()}
				f.At.Rank = r
				all.addOnce(f)
			}
		}
		for i := range c.States {
			s := &c.States[i]
			rows, cols := s.extent()
			if err := checkCorner(s.Row0.Int(rank.Consts), s.Col0.Int(rank.Consts), rows, cols, s.End.Int(rank.Consts)); err != nil {
				all.addOnce(rankFinding(FindBounds, r, "state %d of %s %v", i, p.Tensors[s.Tensor].Name, err))
			}
		}
	}
}

// valueSite is an instruction whose attributes have limits beyond those that shapes impose.
type valueSite struct {
	section  Section
	i        int
	constant bool // whether the check may have different outcomes on the ranks of a code
}

func valueSites(c *Code) []valueSite {
	var sites []valueSite
	for s := range NumSections {
		for i := range c.Sections[s] {
			in := &c.Sections[s][i]
			if !in.limitsValues() {
				continue
			}
			site := valueSite{section: s, i: i, constant: in.Op == Send || in.Op == Recv}
			for j := range in.Attrs {
				site.constant = site.constant || in.Attrs[j].Const != 0
			}
			sites = append(sites, site)
		}
	}
	return sites
}

// checkValues applies the limits of an instruction for a rank: for example, a peer must be another rank,
// and the tokens to be loaded must be in the sequence.
func checkValues(p *Program, r int, s Section, in *Instr) (FindingKind, error) {
	consts := p.Ranks[r].Consts
	if i := in.Info().findAttr(KindRank); i >= 0 {
		if peer := in.Attrs[i].Int(consts); peer < 0 || peer >= int64(len(p.Ranks)) || peer == int64(r) {
			return FindMessage, fmt.Errorf("peer %d is not another of the %d ranks", peer, len(p.Ranks))
		}
	}
	return FindBounds, in.CheckValues(&p.Run, s, consts)
}
