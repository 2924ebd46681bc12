package cuda

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"sppo.dev/internal/cuda/kernels"
	"sppo.dev/ir"
)

// tuned caches results of tuning on a card, in the folder of the compiled kernels. Each choice has a small
// file, whose name is derived from everything that the choice depends on. A file is written completely or not
// at all, so processes that tune at the same time merely measure twice.
type tuned struct {
	folder string
	about  string // the card, and the releases of the driver and the libraries
}

// remember makes each card cache its choices, if the machine tunes.
func (m *Machine) remember() error {
	folder := cacheFolder(m.options.CacheDir)
	if !m.options.Tune || folder == "" {
		return nil
	}
	version, err := m.api.Version()
	if err != nil {
		return err
	}
	blas := "none"
	if m.blas != nil {
		blas = m.blas.Version()
	}
	for _, g := range m.gpus {
		g.tuned = &tuned{folder, fmt.Sprintf("%s, architecture %d, driver %s, cuBLASLt %s", g.name, g.arch(), version, blas)}
		g.choices.Kept = g.tuned
	}
	return nil
}

func (t *tuned) file(key string) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %s\n%d %s", len(t.about), t.about, len(key), key))
	return filepath.Join(t.folder, "tuned-"+hex.EncodeToString(sum[:16]))
}

// Get implements cublas.Keeper.
func (t *tuned) Get(key string) ([]byte, bool) {
	value, err := os.ReadFile(t.file(key))
	return value, err == nil
}

// Put implements cublas.Keeper.
func (t *tuned) Put(key string, value []byte) { keep(t.file(key), value) }

// The ways to load the tiles of attention on Hopper, as cached.
const (
	byEngine  = "copy engine"
	byThreads = "threads"
)

// engine reports whether the copy engine loads the tiles of attention or of its gradient. By default it does;
// on a machine that tunes, it does if that is faster for this head width. Both ways give the same bits.
func (m *Machine) engine(g *gpu, op ir.Op, dim int64) (bool, error) {
	if m.options.ThreadsCopy || !m.options.Tune || m.trying {
		return !m.options.ThreadsCopy, nil
	}
	return m.engines.get(fmt.Sprint(g.name, " ", op, " ", dim), func() (bool, error) {
		key := fmt.Sprintf("%s of heads of %d, %s", ir.Ops[op].Name, dim, kernels.Digest())
		if g.tuned != nil {
			if value, ok := g.tuned.Get(key); ok && (string(value) == byEngine || string(value) == byThreads) {
				return string(value) == byEngine, nil
			}
		}
		var took [2]time.Duration
		for i := range took {
			again := m.alone(g)
			again.options.ThreadsCopy = i == 1
			if err := m.aside(func() (err error) {
				took[i], err = again.timeAttention(op, dim)
				return err
			}); err != nil {
				return false, err
			}
		}
		way := byEngine
		if took[1] < took[0] {
			way = byThreads
		}
		if g.tuned != nil {
			g.tuned.Put(key, []byte(way))
		}
		return way == byEngine, nil
	})
}

// timedShape is the shape on which both ways are timed, for heads of every width.
var timedShape = attentionShape{n: 8192, heads: 16, kvHeads: 16}

// timeAttention returns the duration of attention or its gradient, the shortest of several runs.
func (m *Machine) timeAttention(op ir.Op, dim int64) (best time.Duration, err error) {
	shape := m.timed
	shape.dim = int64(dim)
	p, inputs := attentionProgram(shape)
	code := &p.Codes[0]
	code.Sections[ir.SectionStep] = slices.DeleteFunc(code.Sections[ir.SectionStep], func(in ir.Instr) bool { return in.Op != op })
	err = m.runAlone(p, inputs, shape.prefix, func(d *Device) error {
		for i := range 4 {
			began := time.Now()
			if err := d.Begin(ir.SectionStep, 1); err != nil {
				return err
			}
			d.Launch(0)
			if err := d.Join(); err != nil {
				return err
			}
			if took := time.Since(began); i > 0 && (best == 0 || took < best) {
				best = took
			}
		}
		return nil
	})
	return best, err
}
