package watch

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Fields of the messages in an event file: tensorflow/core/util/event.proto and framework/summary.proto.
const (
	eventWallTime    protowire.Number = 1 // double
	eventStep        protowire.Number = 2 // int64
	eventFileVersion protowire.Number = 3 // string
	eventSummary     protowire.Number = 5 // Summary
	eventSessionLog  protowire.Number = 7 // SessionLog

	summaryValue     protowire.Number = 1 // repeated Value
	valueTag         protowire.Number = 1 // string
	valueSimple      protowire.Number = 2 // float
	sessionLogStatus protowire.Number = 1 // enum
	sessionStart                      = 1
)

// TensorBoard writes an event file for TensorBoard, which Weights & Biases can import.
type TensorBoard struct {
	file *os.File
	now  func() time.Time
}

// NewTensorBoard creates an event file in a folder, which it creates if necessary. A resumed run gets a new file.
// The start record of that file makes readers discard the steps in older files that the run repeats.
func NewTensorBoard(dir string) (*TensorBoard, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	began := time.Now()
	// Readers read the files in a folder in name order.
	name := fmt.Sprintf("events.out.tfevents.%d.%s.%d.%09d", began.Unix(), filepath.Base(host), os.Getpid(), began.Nanosecond())
	file, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	t := &TensorBoard{file, time.Now}
	version := protowire.AppendString(protowire.AppendTag(nil, eventFileVersion, protowire.BytesType), "brain.Event:2")
	return t, t.write(0, version)
}

// Close implements Observer.
func (t *TensorBoard) Close() error { return t.file.Close() }

// scalar is a value of a curve.
type scalar struct {
	tag   string
	value float64
}

// Observe implements Observer.
func (t *TensorBoard) Observe(r Record) error {
	switch r := r.(type) {
	case *Run:
		return t.begin(r)
	case *Step:
		return t.scalars(r.Step, stepScalars(r))
	case *Validation:
		values := []scalar{{"loss/validation", float64(r.Loss)}}
		for _, b := range r.ByPosition {
			values = append(values, scalar{"loss_by_position/" + b.Name(), float64(b.Loss)})
		}
		return t.scalars(r.Step, values)
	}
	return nil
}

// Name returns the range of positions as text.
func (b Bucket) Name() string { return fmt.Sprintf("%d-%d", b.First, b.Last) }

func (t *TensorBoard) begin(r *Run) error {
	first := r.First
	if first > 0 {
		first++ // the preceding step is in an older file
	}
	status := protowire.AppendVarint(protowire.AppendTag(nil, sessionLogStatus, protowire.VarintType), sessionStart)
	if err := t.write(first, protowire.AppendBytes(protowire.AppendTag(nil, eventSessionLog, protowire.BytesType), status)); err != nil {
		return err
	}
	if r.Predicted == nil {
		return nil
	}
	values := []scalar{{"predicted/step_s", float64(r.Predicted.Seconds)}}
	for _, p := range r.Predicted.Split.Parts() {
		values = append(values, scalar{"predicted/" + p.Key, p.Share})
	}
	return t.scalars(first, values)
}

func stepScalars(r *Step) []scalar {
	values := []scalar{
		{"loss/train", float64(r.Loss)}, {"train/grad_norm", float64(r.GradNorm)}, {"train/lr", float64(r.LR)},
		{"speed/tokens_per_s", float64(r.TokensPerSecond)}, {"speed/step_s", float64(r.Seconds)},
	}
	if r.Skipped {
		values = append(values, scalar{"train/skipped", 1})
	}
	if r.Split != nil {
		for _, p := range r.Split.Parts() {
			values = append(values, scalar{"time/" + p.Key, p.Share})
		}
	}
	for _, layer := range layers(r.GradNorms) {
		values = append(values, scalar{"grad_norm/" + layer, float64(r.GradNorms[layer])})
	}
	for _, layer := range layers(r.ExpertLoad) {
		values = append(values, scalar{"expert_load/" + layer, float64(r.ExpertLoad[layer])})
	}
	return values
}

// layers returns the keys in the order of the model's layers.
func layers(norms map[string]Number) []string {
	var names []string
	for name := range norms {
		names = append(names, name)
	}
	slices.SortFunc(names, compareLayers)
	return names
}

func (t *TensorBoard) scalars(step int, values []scalar) error {
	var summary []byte
	for _, v := range values {
		var value []byte
		value = protowire.AppendString(protowire.AppendTag(value, valueTag, protowire.BytesType), v.tag)
		value = protowire.AppendFixed32(protowire.AppendTag(value, valueSimple, protowire.Fixed32Type), math.Float32bits(float32(v.value)))
		summary = protowire.AppendBytes(protowire.AppendTag(summary, summaryValue, protowire.BytesType), value)
	}
	return t.write(step, protowire.AppendBytes(protowire.AppendTag(nil, eventSummary, protowire.BytesType), summary))
}

// write appends an event to the file in one call, so that an incomplete event is visible only briefly.
func (t *TensorBoard) write(step int, body []byte) error {
	var event []byte
	event = protowire.AppendFixed64(protowire.AppendTag(event, eventWallTime, protowire.Fixed64Type), math.Float64bits(float64(t.now().UnixNano())/1e9))
	event = protowire.AppendVarint(protowire.AppendTag(event, eventStep, protowire.VarintType), uint64(step))
	_, err := t.file.Write(frame(append(event, body...)))
	return err
}

// frame wraps an event in TFRecord format: its length, a checksum of the length, the event, and a checksum of the
// event.
func frame(event []byte) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(event)))
	out = binary.LittleEndian.AppendUint32(out, masked(out))
	out = append(out, event...)
	return binary.LittleEndian.AppendUint32(out, masked(event))
}

// masked returns the masked CRC-32C of bytes. TFRecord masks checksums because computing the checksum of data
// that contains checksums is problematic.
func masked(b []byte) uint32 {
	sum := crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
	return (sum>>15 | sum<<17) + 0xa282ead8
}
