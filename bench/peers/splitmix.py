"""Random numbers that are a pure function of a seed, a name and an index, as in internal/vm/random.go: SplitMix64 with random access."""

import numpy as np

np.seterr(over="ignore")  # products are modulo 2^64
GOLDEN = np.uint64(0x9e3779b97f4a7c15)


def finish(z):
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xbf58476d1ce4e5b9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94d049bb133111eb)
    return z ^ z >> np.uint64(31)


def stream(seed, name):
    """The key of the stream of a seed and a name."""
    key = finish(np.uint64(seed) + GOLDEN)
    for c in name.encode():
        key = finish(key ^ np.uint64(c))
    return key


def draw(key, i):
    """Value i of a stream."""
    return finish(key + (np.uint64(i) + np.uint64(1)) * GOLDEN)
