package walk

// Work counts the work of a search. The unit is one visit of a layer by a task in a simulation or a
// memory footprint, where most time is spent; work on bounds is converted to this unit. A nil *Work
// counts nothing.
type Work int64

// Spend adds a number of layer visits to the work done.
func (w *Work) Spend(visits int) {
	if w != nil {
		*w += Work(visits)
	}
}
