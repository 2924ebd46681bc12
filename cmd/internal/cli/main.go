package cli

import (
	"context"
	"os"
	"os/signal"
	"sync/atomic"
)

// Run runs an app with the command line of the process, and ends the process. The first of the given signals asks the
// command to stop; later ones have their default effect.
func Run(a *App, stopping ...os.Signal) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var interrupted atomic.Bool
	signals := make(chan os.Signal, 1)
	if len(stopping) > 0 { // otherwise Notify would catch every signal
		signal.Notify(signals, stopping...)
	}
	go func() {
		interrupted.Store(<-signals == os.Interrupt)
		signal.Stop(signals)
		cancel()
	}()
	code := a.Main(&Env{Context: ctx, Stdout: os.Stdout, Stderr: os.Stderr}, os.Args[1:])
	if interrupted.Load() && (code == Done || code == NoFit) { // the result is only what there was so far
		code = Interrupted
	}
	os.Exit(code)
}
