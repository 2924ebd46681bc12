package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"sppo.dev/internal/data/corpus"
)

// Check reads all of a corpus: tokens in any format that runs read, or documents in any format that Job reads, whose
// names say so. The error is that of a corpus that cannot be opened; damage is listed in the result.
func Check(ctx context.Context, name string, o corpus.Options, vocab int) (*corpus.Checked, error) {
	if !slices.ContainsFunc([]string{".jsonl", ".ndjson", ".txt", ".md", ".gz", ".zst", ".parquet"}, func(ending string) bool { return strings.HasSuffix(name, ending) }) {
		return corpus.Check(ctx, name, o, vocab)
	}
	inputs, err := Inputs([]string{name})
	if err != nil {
		return nil, err
	}
	out := &corpus.Checked{}
	for i := range inputs {
		in := &inputs[i]
		out.Files++
		err := in.each(corpus.Fields{Text: o.Field}, func(text []byte) int { return len(text) }, func(d corpus.Document, _ int64) error {
			if d.Ends {
				out.Documents++
			}
			return ctx.Err()
		})
		var system syscall.Errno // a damaged file can cause other errors of its path, such as a negative offset
		switch {
		case ctx.Err() != nil || errors.As(err, &system):
			return nil, err
		case err != nil:
			out.Damage = append(out.Damage, fmt.Errorf("%s: %w", in.Name, err))
		}
	}
	return out, nil
}
