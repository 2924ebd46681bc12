package plan

import (
	"fmt"
	"slices"
	"strings"

	"sppo.dev/internal/graph"
	"sppo.dev/lang"
)

// This file describes the trained part of a model.

// Tuned reports whether part of the model is not trained.
func (p *Plan) Tuned() bool { return p.Model.Adapter != "" || len(p.Train.Freeze) > 0 }

// trained returns the number of initial layers that have no backward pass, and the numbers of trained and
// frozen parameters.
func (p *Plan) trained() (untrained int, n Parameters) {
	g := graph.NewTuned(p.Model, p.Train.Freeze, graph.Split{SP: 1}, p.Train.Sequence)
	n.Trained, n.Frozen = g.Parameters()
	if p.Model.Experts > 0 {
		n.Active = g.Active()
	}
	return g.Untrained, n
}

// FreezeProblems reports patterns of train.freeze that match no tensor (a tied head is not a tensor), and a
// request that leaves no tensor to train.
func (p *Plan) FreezeProblems() (found []Problem) {
	if len(p.Train.Freeze) == 0 {
		return nil
	}
	g := graph.NewTuned(p.Model, p.Train.Freeze, graph.Split{SP: 1}, p.Train.Sequence)
	groups := map[string]bool{}
	var names []string
	g.EachTensor(func(name string, param *graph.Param) {
		names, groups[param.Group()] = append(names, name), true
	})
	for i, pattern := range p.Train.Freeze {
		if slices.Contains(lang.TensorGroups, pattern) && pattern != lang.GroupHead {
			continue // a group may be empty
		}
		if means := func() bool {
			matched := false
			g.EachTensor(func(name string, param *graph.Param) {
				matched = matched || lang.Freezes(&p.Model, []string{pattern}, name, param.Group())
			})
			return matched
		}; !means() {
			found = append(found, Fault(fmt.Sprintf("train.freeze[%d]", i), lang.Conflict, "its tensors are "+someNames(names, groups),
				"no tensor of the model is called %s", pattern))
		}
	}
	if trained, _ := g.Parameters(); trained == 0 && len(found) == 0 {
		found = append(found, Fault("train.freeze", lang.Conflict, "remove a group or pattern from freeze", "every tensor of the model is frozen, so no tensor is trained"))
	}
	return found
}

// someNames lists the groups of tensors that a model has, and the names of tensors in its first layer.
func someNames(names []string, groups map[string]bool) string {
	var words []string
	for _, group := range lang.TensorGroups {
		if groups[group] {
			words = append(words, group)
		}
	}
	for _, name := range names {
		if layer, other := strings.CutPrefix(name, "layer."); !other || strings.HasPrefix(layer, "0.") {
			words = append(words, name)
		}
	}
	return strings.Join(words, ", ")
}
