package tokenizer

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"sppo.dev/internal/infile"
)

// Limits on input; real tokenizers stay far below them.
const (
	maxFile  = 256 << 20 // bytes
	maxID    = 1 << 24
	maxAdded = 1 << 20
)

// names lists the names that a tokenizer's file may have in a folder; the first that exists is used.
var names = []string{"tokenizer.json", "tokenizer.model"}

// IsIn reports whether Open would read a tokenizer in a folder.
func IsIn(folder string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		_, err := os.Stat(filepath.Join(folder, name))
		return err == nil
	})
}

// Open reads the tokenizer in a file, or in a model folder: tokenizer.json, otherwise tokenizer.model.
// In a folder, tokenizer_config.json names the end-of-sequence token.
func Open(path string) (*Tokenizer, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		return openFile(path)
	}
	for _, name := range names {
		t, err := openFile(filepath.Join(path, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = t.readConfig(filepath.Join(path, "tokenizer_config.json"))
		}
		if err != nil {
			return nil, err
		}
		return t, nil
	}
	return nil, fmt.Errorf("%s: it contains no tokenizer.json or tokenizer.model", path)
}

func openFile(path string) (*Tokenizer, error) {
	data, err := infile.Read(path, maxFile)
	if err != nil {
		return nil, err
	}
	read := Read
	if !bytes.HasPrefix(bytes.TrimLeft(data, " \t\r\n"), []byte("{")) {
		read = ReadSentencePiece
	}
	t, err := read(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// readConfig takes the end-of-sequence token from a tokenizer_config.json, if there is one.
func (t *Tokenizer) readConfig(path string) error {
	data, err := infile.Read(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var config struct {
		EOS json.RawMessage `json:"eos_token"`
	}
	if err := unmarshal(data, &config, "it"); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	var token struct{ Content string }
	if json.Unmarshal(config.EOS, &token.Content) != nil && json.Unmarshal(config.EOS, &token) != nil || token.Content == "" {
		return nil
	}
	id, ok := t.ID(token.Content)
	if !ok {
		return fmt.Errorf("%s: eos_token is %.40q, which is not a token", path, token.Content)
	}
	t.eos = int64(id)
	return nil
}

// fileJSON is a tokenizer.json.
type fileJSON struct {
	Version       string          `json:"version"`
	Added         []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         json.RawMessage `json:"model"`
}

// Read reads a tokenizer.json. Its errors name the place in the file.
func Read(data []byte) (*Tokenizer, error) {
	var f fileJSON
	if len(data) > maxFile {
		return nil, fmt.Errorf("%d bytes; the limit for a tokenizer is %d", len(data), maxFile)
	}
	if err := unmarshal(data, &f, "it"); err != nil {
		return nil, err
	}
	if f.Version != "" && f.Version != "1.0" {
		return nil, fmt.Errorf("version is %.40q, but only 1.0 is supported", f.Version)
	}
	t := &Tokenizer{joined: " ", eos: -1, hash: hashOf(data)}
	m, err := readModel(f.Model)
	if err != nil {
		return nil, err
	}
	t.model = m
	t.tokens, t.names = m.vocab, make(map[uint32]string, len(m.vocab))
	for name, id := range m.vocab {
		if other, ok := t.names[id]; !ok || name < other {
			t.names[id] = name
		}
	}
	if t.normalize, err = readNormalizer(nil, f.Normalizer, "normalizer", 0); err != nil {
		return nil, err
	}
	if err := t.readPreTokenizer(f.PreTokenizer, m); err != nil {
		return nil, err
	}
	if t.firsts && (len(t.split) > 1 || moves(f.Normalizer)) {
		return nil, errors.New("pre_tokenizer: prepend_scheme = first is supported for a single pre-tokenizer, " +
			"after normalizers that keep the start of a text")
	}
	if t.decode, err = readDecoder(nil, f.Decoder, "decoder", 0); err != nil {
		return nil, err
	}
	if err := t.addTokens(f.Added); err != nil {
		return nil, err
	}
	if t.before, t.after, err = t.readPostProcessor(f.PostProcessor, "post_processor", 0); err != nil {
		return nil, err
	}
	t.measure()
	return t, nil
}

// measure sets the size of the vocabulary.
func (t *Tokenizer) measure() {
	for id := range t.names {
		t.size = max(t.size, int(id)+1)
	}
}

func hashOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func (t *Tokenizer) readPreTokenizer(raw json.RawMessage, m *bpe) error {
	all, err := readPreTokenizer(nil, raw, "pre_tokenizer", 0)
	if err != nil {
		return err
	}
	for i, p := range all {
		t.firsts = t.firsts || p.first
		t.split = append(t.split, p.steps...)
		switch {
		case !p.byteLevel:
		case i == len(all)-1 && !m.falls():
			t.tokens = copied(m.vocab)
			m.byteLevel()
		default:
			t.split = append(t.split, preTokenizer{func(_ *encoder, out []piece, p piece) ([]piece, error) {
				p.text = mapBytes(p.text)
				return append(out, p), nil
			}, crossBytes})
		}
	}
	if m.missing != "" && (!m.level || slices.Min(m.bytes[:]) < 0) {
		return fmt.Errorf("model: unk_token is %.40q, which is not in vocab", m.missing)
	}
	return nil
}

// moves reports whether a normalizer might remove the start of a text.
func moves(normalizer json.RawMessage) bool {
	return bytes.Contains(normalizer, []byte(`"Strip"`)) || bytes.Contains(normalizer, []byte(`"Replace"`))
}

func copied(m map[string]uint32) map[string]uint32 {
	out := make(map[string]uint32, len(m))
	for k, v := range m {
		out[k] = v
	}
	return out
}

// addTokens assigns IDs to the added tokens, as the reference does: the ID in the model's vocabulary, otherwise the
// next free one. The reference ignores the IDs in the file; here, an ID in the file that differs from the
// assigned one is an error.
func (t *Tokenizer) addTokens(all []addedToken) error {
	if len(all) > maxAdded {
		return fmt.Errorf("added_tokens has %d items; the limit is %d", len(all), maxAdded)
	}
	t.added.special, t.added.decoded = map[string]bool{}, map[uint32]string{}
	tokens, next := t.tokens, uint32(len(t.tokens))
	if bpe, ok := t.model.(*bpe); ok && !bpe.level {
		tokens = copied(t.tokens) // the model must not see added tokens
	}
	for i, a := range all {
		if a.Content == "" {
			continue
		}
		id, ok := tokens[a.Content]
		if !ok {
			id = next
			next++
		}
		if id != a.ID {
			return fmt.Errorf("added_tokens[%d]: %.40q has id %d in the file, but %d by its position", i, a.Content, a.ID, id)
		}
		tokens[a.Content], t.names[id] = id, a.Content
		t.added.special[a.Content] = t.added.special[a.Content] || a.Special
		if !a.Normalized {
			t.added.raw.add(a.Content, a)
			continue
		}
		text := a.Content
		for _, n := range t.normalize {
			var err error
			if text, err = n.rewrite(&encoder{}, text); err != nil {
				return fmt.Errorf("added_tokens[%d]: %w", i, err)
			}
		}
		if text == "" {
			return fmt.Errorf("added_tokens[%d]: nothing is left of %.40q when it is normalized", i, a.Content)
		}
		if text != a.Content {
			t.added.decoded[id] = text
		}
		t.added.normalized.add(text, a)
	}
	t.tokens = tokens
	return nil
}

// modelJSON is a BPE model.
type modelJSON struct {
	Type         string            `json:"type"`
	Dropout      *float64          `json:"dropout"`
	Unknown      *string           `json:"unk_token"`
	Prefix       *string           `json:"continuing_subword_prefix"`
	Suffix       *string           `json:"end_of_word_suffix"`
	FuseUnknown  *bool             `json:"fuse_unk"`
	ByteFallback *bool             `json:"byte_fallback"`
	IgnoreMerges *bool             `json:"ignore_merges"`
	Vocab        map[string]uint32 `json:"vocab"`
	Merges       mergesJSON        `json:"merges"`
}

// mergesJSON is a list of pairs of tokens. In JSON, each pair is a list of two texts, or one text in
// which a space separates the tokens.
type mergesJSON [][2]string

func (m *mergesJSON) UnmarshalJSON(data []byte) error {
	var pairs [][]string
	if json.Unmarshal(data, &pairs) == nil {
		*m = make(mergesJSON, 0, len(pairs))
		for i, p := range pairs {
			if len(p) != 2 {
				return fmt.Errorf("merges[%d] has %d parts instead of 2", i, len(p))
			}
			*m = append(*m, [2]string{p[0], p[1]})
		}
		return nil
	}
	var lines []string
	if err := json.Unmarshal(data, &lines); err != nil {
		return fmt.Errorf("merges is neither a list of pairs nor a list of strings: %w", err)
	}
	*m = make(mergesJSON, 0, len(lines))
	for i, line := range lines {
		if strings.HasPrefix(line, "#version") {
			continue
		}
		a, b, ok := strings.Cut(line, " ")
		if !ok || strings.Contains(b, " ") {
			return fmt.Errorf("merges[%d] is %.80q, which does not have exactly one space", i, line)
		}
		*m = append(*m, [2]string{a, b})
	}
	return nil
}

func readModel(raw json.RawMessage) (*bpe, error) {
	var kind struct{ Type *string }
	if isNull(raw) {
		return nil, errors.New("it has no model")
	}
	if err := unmarshal(raw, &kind, "model"); err != nil {
		return nil, err
	}
	if kind.Type != nil && *kind.Type != "BPE" {
		return nil, unsupported("model", *kind.Type, "BPE models")
	}
	var f modelJSON
	if err := unmarshal(raw, &f, "model"); err != nil {
		return nil, err
	}
	text := func(s *string) string { return *cmp.Or(s, new(string)) }
	switch {
	case f.Vocab == nil || f.Merges == nil:
		return nil, errors.New("model: it has no vocab, or no merges")
	case f.Dropout != nil && *f.Dropout != 0:
		return nil, fmt.Errorf("model: dropout = %g makes IDs random, and is not supported", *f.Dropout)
	case text(f.Prefix) != "" || text(f.Suffix) != "":
		return nil, errors.New("model: continuing_subword_prefix and end_of_word_suffix are not supported")
	}
	for name, id := range f.Vocab {
		if id >= maxID {
			return nil, fmt.Errorf("model: vocab gives %.40q the id %d, but ids must be below %d", name, id, maxID)
		}
	}
	m, err := newBPE(f.Vocab, f.Merges)
	if err != nil {
		return nil, fmt.Errorf("model: %w", err)
	}
	flag := func(b *bool) bool { return b != nil && *b }
	m.fuse, m.whole = flag(f.FuseUnknown), flag(f.IgnoreMerges)
	if f.Unknown != nil {
		if id, ok := f.Vocab[*f.Unknown]; ok {
			m.unknown = int64(id)
		} else {
			m.missing = *f.Unknown
		}
	}
	for b := range 256 {
		if id, ok := f.Vocab[fmt.Sprintf("<0x%02X>", b)]; ok && flag(f.ByteFallback) {
			m.fallback[b] = int64(id)
		}
	}
	return m, nil
}

// falls reports whether the model has tokens for byte fallback.
func (m *bpe) falls() bool {
	for _, id := range m.fallback {
		if id >= 0 {
			return true
		}
	}
	return false
}

// readPostProcessor returns the special tokens that are added before and after a text.
func (t *Tokenizer) readPostProcessor(raw json.RawMessage, where string, depth int) (before, after []uint32, err error) {
	type special struct {
		ID  string
		IDs []uint32 `json:"ids"`
	}
	type part struct {
		Special  *special `json:"SpecialToken"`
		Sequence *special `json:"Sequence"`
	}
	var p struct {
		Type       string
		Processors []json.RawMessage
		Single     []part
		Tokens     map[string]special `json:"special_tokens"`
		CLS, SEP   []any
	}
	if isNull(raw) {
		return nil, nil, nil
	}
	if err := unmarshal(raw, &p, where); err != nil {
		return nil, nil, err
	}
	switch p.Type {
	case "ByteLevel": // changes offsets only
	case "Sequence":
		_, err = readSequence(nil, p.Processors, where+".processors", depth,
			func(none []struct{}, raw json.RawMessage, where string, depth int) ([]struct{}, error) {
				first, last, err := t.readPostProcessor(raw, where, depth)
				before, after = append(first, before...), append(after, last...)
				return none, err
			})
	case "TemplateProcessing":
		out, seen := &before, false
		for i, x := range p.Single {
			switch {
			case x.Special != nil:
				token, ok := p.Tokens[x.Special.ID]
				if !ok {
					return nil, nil, fmt.Errorf("%s: single[%d] names %.40q, which is not in special_tokens", where, i, x.Special.ID)
				}
				for _, id := range token.IDs {
					if _, ok := t.names[id]; !ok {
						return nil, nil, fmt.Errorf("%s: special_tokens gives %.40q the id %d, which is not a token", where, x.Special.ID, id)
					}
				}
				*out = append(*out, token.IDs...)
			case seen || x.Sequence == nil || x.Sequence.ID != "A":
				return nil, nil, fmt.Errorf("%s: single has a sequence other than a single A", where)
			default:
				out, seen = &after, true
			}
		}
		if !seen {
			return nil, nil, fmt.Errorf("%s: single omits the text", where)
		}
	default:
		err = unsupported(where, p.Type, "ByteLevel, TemplateProcessing and Sequence")
	}
	return before, after, err
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// unmarshal is like json.Unmarshal, but its error names the place.
func unmarshal(data []byte, to any, where string) error {
	if err := json.Unmarshal(data, to); err != nil {
		return fmt.Errorf("%s is not valid in a tokenizer file: %w", where, err)
	}
	return nil
}
