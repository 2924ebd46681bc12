// Package examples holds specifications that ship with the commands: clusters that any spec can import, and examples.
// It knows nothing but its files.
package examples

import "embed"

// Shipped holds the cluster files, found by imports such as "clusters/a100-80g.sppo" wherever a command runs.
//
//go:embed clusters/*.sppo
var Shipped embed.FS
