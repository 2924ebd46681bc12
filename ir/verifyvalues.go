package ir

import (
	"encoding/binary"
	"fmt"
)

// This file checks the values of attributes on each rank, with constants filled in.

// verifyConstants checks, for every rank, the values of attributes and the positions of states. Those that do not depend on constants are
// checked for the first rank of each code.
func verifyConstants(p *Program, all *findings) {
	type limited struct {
		sites  []valueSite
		places []placed
		first  bool
	}
	codes := make([]limited, len(p.Codes))
	for c := range p.Codes {
		codes[c] = limited{valueSites(&p.Codes[c]), placesOf(&p.Codes[c]), true}
	}
	for r := range p.Ranks {
		rank := &p.Ranks[r]
		c, list := &p.Codes[rank.Code], &codes[rank.Code]
		for _, u := range list.sites {
			if !u.constant && !list.first {
				continue
			}
			kind, err := checkValues(p, r, u.section, &c.Sections[u.section][u.i])
			if err != nil {
				f := Finding{Kind: kind, At: siteOf(p, c, u.section, u.i), Msg: err.Error()}
				f.At.Rank = r
				all.addOnce(f)
			}
		}
		for _, s := range list.places {
			if err := checkCorner(s.row0.Int(rank.Consts), s.col0.Int(rank.Consts), s.rows, s.cols, s.end.Int(rank.Consts)); err != nil {
				all.addOnce(rankFinding(FindBounds, r, "state %d of %s %v", s.state, p.Tensors[c.States[s.state].Tensor].Name, err))
			}
		}
		list.first = false
	}
}

// placed is a share of a tensor, and the first state of a code that holds such a share.
type placed struct {
	share
	state int
}

// placesOf returns the different shares that the states of a code hold.
func placesOf(c *Code) (list []placed) {
	seen := map[share]bool{}
	for i := range c.States {
		if s := c.States[i].share(); !seen[s] {
			seen[s] = true
			list = append(list, placed{s, i})
		}
	}
	return list
}

// valueSite is an instruction whose attributes have limits beyond those that shapes impose.
type valueSite struct {
	section  Section
	i        int
	constant bool // whether the check may have different outcomes on the ranks of a code
}

// valueSites returns the instructions of a code with limits. If several instructions that depend on constants have the same limits, it
// returns the first of them.
func valueSites(c *Code) []valueSite {
	var sites []valueSite
	seen := map[string]bool{}
	var key []byte
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
			if site.constant {
				if key = in.limits(append(key[:0], byte(s))); seen[string(key)] {
					continue
				}
				seen[string(key)] = true
			}
			sites = append(sites, site)
		}
	}
	return sites
}

// limits appends the properties of an instruction on which its limits depend.
func (in *Instr) limits(key []byte) []byte {
	key = append(key, byte(in.Op))
	for _, a := range in.Attrs {
		key = binary.LittleEndian.AppendUint64(key, a.Bits)
		key = binary.LittleEndian.AppendUint32(key, uint32(a.Const))
	}
	for _, v := range in.Args {
		for _, n := range v.Shape {
			key = binary.LittleEndian.AppendUint64(key, uint64(n))
		}
	}
	return key
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
	return FindBounds, in.checkValues(&p.Run, s, consts)
}
