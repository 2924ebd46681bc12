package e2e

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"
)

// coverLimit is how many cases the plain test run has time for: all pairs take a third of them or less, the rest go to triples.
const coverLimit = 60

// TestSchedulesAreEqual runs the covering set. Each case must equal, to the last bit, the same case on one stage with
// nothing offloaded (E1, E2), and within rounding the plain program of its model (E3). Every run checks E5.
func TestSchedulesAreEqual(t *testing.T) {
	rows, _, _ := cover(coverLimit)
	for _, r := range rows {
		c := r.toCase()
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			checkCase(t, c)
		})
	}
}

func checkCase(t *testing.T, c Case) {
	t.Helper()
	got := run(t, c)
	checkSame(t, "E1 and E2: against one stage without offload", got, run(t, c.unpiped()))
	checkClose(t, c, "E3: against the plain program", got, run(t, c.plain()))
}

// TestProduct takes cases at random from the full product for as long as SPPO_LONG says in minutes, 20 where it says
// just 1, without a repetition. The product has far more than anybody wants to wait for: the count is printed.
func TestProduct(t *testing.T) {
	minutes, _ := strconv.Atoi(os.Getenv("SPPO_LONG"))
	if minutes == 0 {
		t.Skip("SPPO_LONG is not set")
	}
	if minutes == 1 {
		minutes = 20
	}
	rows := fullProduct()
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv("SPPO_SEED"), 10, 64); err == nil {
		seed = s
	}
	t.Logf("SPPO_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	random.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
	end := time.Now().Add(time.Duration(minutes) * time.Minute)
	done := 0
	for ; done < len(rows) && time.Now().Before(end) && !t.Failed(); done++ {
		c := rows[done].toCase()
		t.Run(c.String(), func(t *testing.T) { checkCase(t, c) })
		forget(c, c.unpiped())
	}
	t.Logf("%d of %d cases", done, len(rows))
}

// fullProduct is every row that can be a spec.
func fullProduct() []row {
	rows := []row{{}}
	for _, s := range space {
		var longer []row
		for _, r := range rows {
			for value := range s.size {
				longer = append(longer, append(r[:len(r):len(r)], value))
			}
		}
		rows = longer
	}
	allowed := rows[:0]
	for _, r := range rows {
		if r.allowed() {
			allowed = append(allowed, r)
		}
	}
	return allowed
}
