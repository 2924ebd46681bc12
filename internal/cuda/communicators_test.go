package cuda

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"sppo.dev/internal/cuda/emu"
	"sppo.dev/internal/vm"
	"sppo.dev/ir"
)

// sharedRoutes returns the communicators of a program that consists of routes only.
func sharedRoutes(routes []route, perNode int) *layout {
	l := &layout{groups: map[string]int{}, routes: map[route]int{}}
	for _, k := range routes {
		l.routes[k] = -1
	}
	l.share(perNode)
	return l
}

// TestSharedCommunicators checks the communicators of ranks that send each other arbitrary messages. Each rank
// uses a communicator for one direction of one channel, and therefore on one stream. A rank is only in
// communicators that carry its messages. It is in at most 2*log2(n) of them for each channel and kind of
// neighbour, and never in more than it would be if each peer and direction had a separate communicator.
func TestSharedCommunicators(t *testing.T) {
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 1))
		ranks, perNode := 2+rng.IntN(24), 1+rng.IntN(24)
		dense := rng.Float64()
		var routes []route
		for from := range ranks {
			for to := range ranks {
				for channel := range vm.Channel(3) {
					if from != to && rng.Float64() < dense {
						routes = append(routes, route{int32(from), int32(to), channel})
					}
				}
			}
		}
		l := sharedRoutes(routes, perNode)
		type use struct {
			at   int
			rank int32
		}
		uses := map[use]string{}
		alone := make([]int, ranks)
		for _, k := range routes {
			at := l.routes[k]
			for rank, how := range map[int32]string{k.from: "sends", k.to: "receives"} {
				how := fmt.Sprint(how, " on channel ", k.channel)
				if known, ok := uses[use{at, rank}]; ok && known != how {
					t.Fatalf("seed %d: rank %d %s and %s by one communicator", seed, rank, known, how)
				}
				uses[use{at, rank}] = how
				alone[rank]++
			}
		}
		for i, p := range l.places {
			for _, m := range p.members {
				if _, used := uses[use{i, m}]; !used {
					t.Fatalf("seed %d: rank %d has no message by %s", seed, m, p.name)
				}
			}
		}
		for r, n := range l.count(ranks) {
			if most := 3 * 2 * 2 * bits.Len(uint(ranks-1)); n > most || n > alone[r] {
				t.Fatalf("seed %d: rank %d is in %d communicators; %d routes, at most %d", seed, r, n, alone[r], most)
			}
		}
	}
}

// jobsOfManyRanks lists layouts of typical jobs, with tiny models, because the communicators depend only on the
// layout.
var jobsOfManyRanks = []struct {
	name      string
	ranks     int
	requests  string
	perRank   int // maximum number of communicators of a rank
	inAll     int
	unshared  int     // like perRank, but with a separate communicator for each peer and direction
	gigabytes float64 // estimated size of NCCL's buffers
	slow      bool    // slow to compile
}{
	{"one group of 8", 8, "pp=1 sp=8 dp=1", 1, 1, 1, 1.61, false},
	{"dp and sp", 16, "pp=1 sp=4 dp=4 zero=1", 3, 12, 3, 2.42, false},
	{"pipeline of 8", 8, "pp=8 sp=1 dp=1", 5, 17, 5, 1.21, false},
	{"pipeline of 8 stages of 16", 128, "pp=8 sp=16 dp=1", 6, 248, 6, 2.01, true},
	{"pipelines side by side", 64, "pp=4 sp=4 dp=4 zero=1", 8, 192, 8, 1.81, false},
	{"shared tasks, 4 stages", 8, "pp=4 sp=2 dp=1 mux=on subsequences=4", 12, 34, 14, 1.21, false},
	{"shared tasks, 8 stages", 8, "pp=8 sp=1 dp=1 mux=on subsequences=8", 17, 35, 29, 1.81, true},
	{"shared tasks, 16 stages", 16, "pp=16 sp=1 dp=1 mux=on subsequences=16", 33, 157, 61, 1.71, true},
}

// TestCommunicatorsOfJobs checks the number of communicators of jobs on nodes of 8 GPUs, and the estimated
// memory.
func TestCommunicatorsOfJobs(t *testing.T) {
	for _, c := range jobsOfManyRanks {
		t.Run(c.name, func(t *testing.T) {
			if c.slow && os.Getenv("SPPO_LONG") == "" {
				t.Skip("SPPO_LONG is not set")
			}
			p := manyRanks(t, c.ranks, c.requests)
			l, err := layoutOf(p)
			if err != nil {
				t.Fatal(err)
			}
			unshared := make([]int, c.ranks)
			for _, i := range l.groups {
				for _, m := range l.places[i].members {
					unshared[m]++
				}
			}
			for k := range l.routes {
				unshared[k.from]++
				unshared[k.to]++
			}
			memory := 0.0
			for r := range c.ranks {
				memory = max(memory, float64(l.buffers(r))/1e9)
			}
			perRank, alone := slices.Max(l.count(c.ranks)), slices.Max(unshared)
			t.Logf("%d streams, %d channels", l.streams, l.channels)
			if perRank != c.perRank || len(l.places) != c.inAll || alone != c.unshared || math.Abs(memory-c.gigabytes) > 0.006 {
				t.Errorf("%d communicators a rank (%d unshared), %d in all, %.2f GB; want %d (%d), %d, %.2f",
					perRank, alone, len(l.places), memory, c.perRank, c.unshared, c.inAll, c.gigabytes)
			}
		})
	}
}

// manyRanks compiles a small model for the given number of ranks.
func manyRanks(t *testing.T, ranks int, requests string) *ir.Program {
	t.Helper()
	text := strings.NewReplacer("FAMILY", "gpt", "DTYPE", "f32", "layers = 2", "layers = 16", "heads  = 4", "heads  = 16",
		"sequence = 48", "sequence = 1024", "batch    = 2", "batch    = 4", "ranks = 4", fmt.Sprintf("ranks = %d", ranks)).Replace(trainingSpec)
	set := []string{fmt.Sprintf("cluster.nodes=%d", max(1, ranks/8)), fmt.Sprintf("cluster.gpus_per_node=%d", min(8, ranks)),
		"cluster.nvlink_bandwidth=450GB/s", "schedule.offload=none", "schedule.microbatch=1"}
	if !strings.Contains(requests, "mux") {
		set = append(set, "schedule.mux=off")
	}
	for r := range strings.FieldsSeq(requests) {
		set = append(set, "schedule."+r)
	}
	p, err := compiled(text, set...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// A program that needs more communicators than a rank may have is refused before anything is allocated. The
// compiler generates no such program, so the test makes up its list of communicators.
func TestTooManyCommunicators(t *testing.T) {
	p := manyRanks(t, 8, "pp=8 sp=1 dp=1")
	fake := useFake(t)
	fake.reset(8, 1<<30, 100)
	m := fake.open(t, Options{NCCL: true, OwnProducts: true})
	if err := m.Check(p); err != nil {
		t.Errorf("a pipeline of eight: %v", err)
	}
	want := "GPU 7 has 1006 MiB in addition to what the program needs, but NCCL's buffers may need an estimated 1.12 GiB"
	if notes := m.Notes(); len(notes) != 1 || !strings.HasPrefix(notes[0], want) {
		t.Errorf("the notes are %q, want %q", notes, want)
	}
	l := sharedRoutes(nil, 1)
	for i := range mostPlaces + 1 {
		l.places = append(l.places, place{fmt.Sprint(i), []int32{0, 3}})
	}
	crowded := *p
	_, _ = m.collect.layouts.get(&crowded, func() (*layout, error) { return l, l.check(len(p.Ranks)) })
	err := m.Check(&crowded)
	if want := "rank 0 needs 65 NCCL communicators, but a rank can have at most 64"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q", err, want)
	}
}

// TestTrainingByNCCL checks that a pipeline whose ranks share tasks reaches the losses of the cpu device when
// it trains over the stand-in for NCCL. The stand-in refuses a second stream on a communicator, and makes a
// message wait for its receiver.
func TestTrainingByNCCL(t *testing.T) {
	if testing.Short() {
		t.Skip("left out of -short: kernels on the processor take their time")
	}
	fake, kernels := useFake(t), emu.Need(t)
	dir := wordsFolder(t)
	long := os.Getenv("SPPO_LONG") != ""
	for _, requests := range [][]string{{"mux=on", "pp=4", "sp=1", "subsequences=4"}, {"pp=2", "sp=2", "mux=off"}} {
		if !long && len(requests) == 3 {
			continue
		}
		set := []string{"model.layers=4"}
		for _, r := range requests {
			set = append(set, "schedule."+r)
		}
		p, err := compiled(strings.NewReplacer("FAMILY", "gpt", "DTYPE", "f32").Replace(trainingSpec), set...)
		if err != nil {
			t.Fatal(err)
		}
		p.Run.Steps = 1
		if long {
			p.Run.Steps = 3
		}
		fake.reset(4, 1<<30, 100)
		m := fake.open(t, Options{NCCL: true, OwnProducts: true})
		m.code = fixedCode(kernels.Path)
		checkTraining(t, m, p, dir, false)
		if n, c := fake.live(), fake.comms(); n != 0 || c != 0 {
			t.Errorf("%d things and %d communicators were not given back", n, c)
		}
	}
}
