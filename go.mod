module sppo.dev

go 1.26.0

require (
	github.com/alecthomas/participle/v2 v2.1.4
	github.com/ebitengine/purego v0.11.3
	github.com/google/go-cmp v0.7.0
	github.com/spf13/pflag v1.0.10
	golang.org/x/sys v0.49.0
)
