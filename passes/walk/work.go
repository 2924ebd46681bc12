package walk

// Work measures the work of a search in visits of a layer by a task, in simulations and memory
// footprints, where most time goes, and the equivalent for bounds. A nil *Work counts nothing.
type Work int64

// Spend adds visits of a layer to the work done.
func (w *Work) Spend(visits int) {
	if w != nil {
		*w += Work(visits)
	}
}
