"""Hit ratios of LRU, FIFO, S3-FIFO and Belady by libCacheSim, on the trace of `crates/cache/tests/hit_ratio.rs`
(the same generator), as an oracle for the references that the test computes itself. Needs numpy and libcachesim
(`pip install libcachesim`).
"""

import libcachesim as lcs
import numpy as np

CAPACITY, KEYS, WARM, COUNTED = 16_384, 200_000, 400_000, 600_000


def trace(exponent):
    """The test's keys: SplitMix64 from 42, by the cumulated weights of the ranks."""
    cumulated = np.cumsum(1.0 / np.arange(1, KEYS + 1, dtype=np.float64) ** exponent)
    state = np.uint64(42) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, WARM + COUNTED + 1, dtype=np.uint64)
    z = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    unit = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return np.searchsorted(cumulated, unit * cumulated[-1], side="left")


def ratio(cache, keys, following=None):
    """Share of the counted requests that hit."""
    hits = 0
    for n, key in enumerate(keys):
        request = lcs.Request(obj_id=int(key), obj_size=1)
        if following is not None:
            request.next_access_vtime = int(following[n])
        request.clock_time = n
        found = cache.get(request)
        hits += found and n >= WARM
    return hits / COUNTED


def next_access(keys):
    """When each request's key is asked for again."""
    last, following = {}, np.full(len(keys), np.iinfo(np.int64).max, dtype=np.int64)
    for n in range(len(keys) - 1, -1, -1):
        following[n] = last.get(keys[n], np.iinfo(np.int64).max)
        last[keys[n]] = n
    return following


def main():
    for exponent in (0.8, 1.0):
        keys = trace(exponent).tolist()
        print(f"zipf {exponent:g}, libCacheSim")
        for name in ("Belady", "S3FIFO", "LRU", "FIFO"):
            cache = getattr(lcs, name)(cache_size=CAPACITY)
            following = next_access(keys) if name == "Belady" else None
            print(f"  {name:<8} {ratio(cache, keys, following):.4f}", flush=True)


if __name__ == "__main__":
    main()
