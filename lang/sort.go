package lang

import (
	"cmp"
	"maps"
	"slices"

	"sppo.dev/internal/near"
)

func nearest(word string, candidates []string) string { return near.Word(word, candidates) }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func distinct(words []string) []string {
	slices.Sort(words)
	return slices.Compact(words)
}

func sortBy[T any, K cmp.Ordered](s []T, key func(T) K) {
	slices.SortStableFunc(s, func(a, b T) int { return cmp.Compare(key(a), key(b)) })
}
