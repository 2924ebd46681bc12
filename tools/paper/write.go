package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// Paths relative to the root of the repository.
const (
	page        = "docs/paper.md"
	plots       = "docs/paper"
	resultsFile = plots + "/results.json"
)

func readResults() (*results, error) {
	data, err := os.ReadFile(resultsFile)
	if err != nil {
		return nil, err
	}
	r := &results{}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("%s: %w", resultsFile, err)
	}
	return r, nil
}

// write writes the results, tables and charts to their files.
func (r *results) write() error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	files, err := r.render(string(text))
	if err != nil {
		return err
	}
	files[resultsFile] = string(data) + "\n"
	if err := os.MkdirAll(plots, 0o755); err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// render returns the page with new tables, and the charts, by file name.
func (r *results) render(text string) (map[string]string, error) {
	files := map[string]string{}
	for _, t := range tables {
		table, err := t.make(r)
		if err != nil {
			return nil, err
		}
		if text, err = replace(text, t.name, table); err != nil {
			return nil, err
		}
	}
	files[page] = text
	for _, f := range figures {
		for _, l := range looks {
			text, err := f.make(r).svg(l)
			if err != nil {
				return nil, fmt.Errorf("the figure %s: %w", f.name, err)
			}
			files[plots+"/"+f.name+l.suffix+".svg"] = text
		}
	}
	return files, nil
}

// replace inserts a table between its two markers.
func replace(text, name, table string) (string, error) {
	begin, end := fmt.Sprintf("<!-- %s: written by make paper -->\n", name), fmt.Sprintf("<!-- end of %s -->", name)
	before, rest, ok := strings.Cut(text, begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return "", fmt.Errorf("%s has no place for the table %s, between %q and %q", page, name, strings.TrimSpace(begin), end)
	}
	return before + begin + "\n" + table + "\n" + end + after, nil
}
