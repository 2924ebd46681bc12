package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"testing"
)

// sequencesOf runs sequences and returns the numbers of a file: tokens, labels and positions of every sequence.
func sequencesOf(t *testing.T, file string, sequences, length int, args ...string) (out [3][][]int32) {
	t.Helper()
	sppovm(t, t.Context(), append([]string{"sequences", "tiny.sppo", "-o", "out"}, args...)...)
	data, err := os.ReadFile("out/" + file)
	if err != nil {
		t.Fatal(err)
	}
	header := fmt.Sprintf("{'descr': '<i4', 'fortran_order': False, 'shape': (3, %d, %d), }", sequences, length)
	want := fmt.Sprintf("\x93NUMPY\x01\x00\x76\x00%-117s\n", header)
	if !bytes.HasPrefix(data, []byte(want)) || len(data) != len(want)+4*3*sequences*length {
		t.Fatalf("%s has %d bytes and begins with %q", file, len(data), data[:min(len(data), len(want))])
	}
	data = data[len(want):]
	for kind := range out {
		for range sequences {
			row := make([]int32, length)
			n, err := binary.Decode(data, binary.LittleEndian, row)
			if err != nil {
				t.Fatal(err)
			}
			out[kind], data = append(out[kind], row), data[n:]
		}
	}
	return out
}

// Sequence g of token files that are not shuffled begins at token 64 g of those that are not held out. With documents, positions begin anew after token 9,
// and the first token of a document is no label.
func TestSequencesOfTokens(t *testing.T) {
	inBase(t)
	var tokens []uint16
	var data []byte
	for i := range 2000 {
		tokens = append(tokens, uint16(i*i%23))
		data = binary.LittleEndian.AppendUint16(data, tokens[i])
	}
	if err := os.WriteFile("tokens.bin", data, 0o666); err != nil {
		t.Fatal(err)
	}
	const steps = "--steps=2"
	plain := sequencesOf(t, "step-3.npy", 2, 65, "--first=2", steps, "--set", `train.data=tokens("tokens.bin", shuffle = off)`)
	for i, row := range plain[0] {
		for p, token := range row {
			if want := int32(tokens[64*(2*2+i)+p]); token != want || p > 0 && plain[1][i][p] != want || plain[2][i][p] != int32(p) {
				t.Fatalf("sequence %d, token %d: %d, label %d, position %d; the file has %d", i, p, token, plain[1][i][p], plain[2][i][p], want)
			}
		}
	}
	for _, name := range []string{"step-1.npy", "step-4.npy"} {
		if _, err := os.Stat("out/" + name); err == nil {
			t.Errorf("%s was not asked for", name)
		}
	}
	documents := sequencesOf(t, "step-3.npy", 2, 65, "--first=2", steps, "--set", `train.data=tokens("tokens.bin", shuffle = off, documents = 9)`)
	for _, row := range plain[0] { // their order may be another
		i := slices.IndexFunc(documents[0], func(other []int32) bool { return slices.Equal(other, row) })
		if i < 0 {
			t.Fatalf("no sequence is %v", row)
		}
		position := int32(0)
		for p, token := range row {
			label := token
			if p > 0 && row[p-1] == 9 {
				position, label = 0, -1
			}
			if documents[2][i][p] != position || p > 0 && documents[1][i][p] != label {
				t.Errorf("token %d has position %d and label %d, not %d and %d", p, documents[2][i][p], documents[1][i][p], position, label)
			}
			position++
		}
	}
	held := sequencesOf(t, "validation.npy", 2, 65, steps, "--set", `train.data=tokens("tokens.bin")`)
	for _, row := range held[0] {
		if !contains(tokens[1600:], row) {
			t.Errorf("a sequence of a validation is not among the tokens that are held out: %v", row)
		}
	}
}

// Sequences of a text begin at random places, which depend on the seed alone.
func TestSequencesOfText(t *testing.T) {
	inBase(t)
	text, err := os.ReadFile("words.txt")
	if err != nil {
		t.Fatal(err)
	}
	first := sequencesOf(t, "step-1.npy", 2, 65)
	for _, row := range first[0] {
		if !contains(text[:len(text)*8/10+1], row) {
			t.Errorf("a sequence is not among the text that is not held out: %v", row)
		}
	}
	again, other := sequencesOf(t, "step-1.npy", 2, 65, "--seed=1"), sequencesOf(t, "step-1.npy", 2, 65, "--seed=2")
	if !slices.EqualFunc(first[0], again[0], slices.Equal) || slices.EqualFunc(first[0], other[0], slices.Equal) {
		t.Errorf("sequences %v; with the same seed %v; with another %v", first[0], again[0], other[0])
	}
}

// contains reports whether a row is a range of the numbers.
func contains[T byte | uint16](all []T, row []int32) bool {
	for i := range len(all) - len(row) + 1 {
		if slices.EqualFunc(all[i:i+len(row)], row, func(a T, b int32) bool { return int32(a) == b }) {
			return true
		}
	}
	return false
}
