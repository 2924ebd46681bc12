package ir

import (
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
)

// notOfRecipe lists the keys of Run that a continued run may change without changing its steps, and those that a checkpoint
// compares or stores elsewhere.
var notOfRecipe = []string{"eval_sequences", "eval_batch", "eval_every", "seed", "vocab", "max_skipped", "rotations", "sums"}

// Recipe returns a copy without what describes the model or the division among ranks.
func (r *Run) Recipe() *Run {
	out := *r
	out.Rotations, out.Sums = nil, nil
	return &out
}

// Changes lists the settings in which the steps of a run differ from those of an earlier run of the same model, each as the
// earlier and the present setting. The number of steps counts only if the learning rate depends on it.
func (r *Run) Changes(before *Run) (list [][2]string) {
	if constant := []string{"", LRSchedules[0]}; slices.Contains(constant, r.LRSchedule) && slices.Contains(constant, before.LRSchedule) {
		same := *before
		same.Steps, same.LRSchedule = r.Steps, r.LRSchedule
		before = &same
	}
	list = changes(reflect.ValueOf(*before), reflect.ValueOf(*r))
	if r.DataOptions != nil && before.DataOptions != nil {
		list = append(list, changes(reflect.ValueOf(*before.DataOptions), reflect.ValueOf(*r.DataOptions))...)
	}
	return list
}

// changes compares the fields of two structs, except those that point to others.
func changes(before, now reflect.Value) (list [][2]string) {
	for i := range now.NumField() {
		key := jsonKey(now.Type().Field(i))
		if slices.Contains(notOfRecipe, key) || now.Field(i).Kind() == reflect.Pointer {
			continue
		}
		if was, is := setting(key, before.Field(i)), setting(key, now.Field(i)); was != is {
			list = append(list, [2]string{was, is})
		}
	}
	return list
}

func setting(key string, v reflect.Value) string {
	if (v.Kind() == reflect.Slice || v.Kind() == reflect.String) && v.Len() == 0 {
		return "no " + key
	}
	if v.CanFloat() {
		return key + " = " + strconv.FormatFloat(v.Float(), 'g', 6, 64)
	}
	text, err := json.Marshal(v.Interface())
	if err != nil {
		panic("internal: " + err.Error())
	}
	return key + " = " + string(text)
}
