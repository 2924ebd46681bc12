package walk

// Work counts what a search has done, in visits of a layer by a task: those of simulations and of memory footprints, where
// most time goes, and for bounds as many as take as long. A nil *work counts nothing.
type Work int64

// Spend adds visits of a layer to the work done.
func (w *Work) Spend(visits int) {
	if w != nil {
		*w += Work(visits)
	}
}
