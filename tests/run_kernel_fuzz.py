"""Calls of the compiled loops with arguments that fit and arguments that do not; a crash is for the caller to see.

`test_kernels_safety.py` runs it in a process of its own, also with a build that checks every access to memory.

python run_kernel_fuzz.py LIBRARY SEED CALLS
"""

import importlib.util
import random
import sys
from array import array


BFLOAT16, FLOAT16, FLOAT32 = range(3)
REFUSED = (ValueError, TypeError, AssertionError, OverflowError)


def load(path):
    spec = importlib.util.spec_from_file_location("_kernels", path)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    return kernels


class Fuzz:
    """Makes arguments; all memory is of exactly the asked size, so that a byte beyond it is noticed."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.buffers = []

    def buffer(self, data):
        # repeated once, because only then it has no spare room
        view = memoryview(array("B", data) * 1)
        self.buffers.append(view)
        return view

    def room(self, nbytes):
        return self.buffer(bytes(nbytes))

    def length(self):
        return self.rng.choice([0, 1, 2, 7, 8, 9, 15, 16, 17, 33, 1023, 1024, 1025, self.rng.randrange(2200)])

    def mask(self, numel):
        density = self.rng.choice([0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
        bits = sum(1 << i for i in range(numel) if self.rng.random() < density)
        return bits.to_bytes((numel + 7) // 8, "little")

    def codes(self, mask):
        escaped = self.rng.choice([0.0, 0.01, 0.5, 1.0])
        number = int.from_bytes(mask, "little").bit_count()
        codes = bytes(0 if self.rng.random() < escaped else self.rng.randrange(1, 256) for _ in range(number))
        return codes + self.rng.randbytes(2 * codes.count(0))

    def number(self):
        return self.rng.choice([0.0, 1e-5, 1.0, 1.5, 1e-45, 3e38, float("inf"), float("nan")])

    def merge(self):
        numel, base, out = self.length(), self.rng.randrange(3), self.rng.randrange(3)
        agents = []
        for _ in range(self.rng.randrange(5)):
            is_packed = base != FLOAT32 and self.rng.random() < 0.6
            layers = [(mask, self.codes(mask)) for mask in (self.mask(numel), self.mask(numel))]
            parts = layers[0] if is_packed else (self.rng.randbytes(4 * numel) for _ in range(2))
            second = layers[1] if is_packed and self.rng.random() < 0.5 else ()
            numbers = self.number(), self.number()
            agents.append((is_packed, *map(self.buffer, parts), *numbers, *map(self.buffer, second)))
        tile = self.buffer(self.rng.randbytes(numel * (4 if base == FLOAT32 else 2)))
        key = self.rng.choice([None, 0, -1, self.rng.getrandbits(70)])
        merged, is_sum = self.room(numel * (4 if out == FLOAT32 else 2)), self.rng.random() < 0.5
        return [merged, out, tile, base, agents, self.number(), key, is_sum]

    def encode(self):
        numel = self.length()
        base = self.rng.randbytes(2 * numel)
        agent = self.rng.choice([base, self.rng.randbytes(2 * numel)])
        sizes = ((numel + 7) // 8, numel + 64, 2 * numel)
        rooms = [(self.room(size), self.room(size)) for size in sizes]
        return [self.buffer(base), self.buffer(agent), self.rng.randrange(2), self.number(), *rooms]

    def apply(self):
        numel = self.length()
        mask = self.mask(numel)
        return [self.buffer(self.rng.randbytes(2 * numel)), self.buffer(mask), self.buffer(self.codes(mask))]

    def count(self):
        numel = self.length()
        return [[self.buffer(self.mask(numel)) for _ in range(self.rng.choice([0, 1, 3, 8, 33]))]]

    def pack_gaps(self):
        mask = self.mask(self.length())
        return [self.buffer(mask), self.room(self.rng.choice([9 * len(mask) + 1, self.rng.randrange(9)]))]

    def unpack_gaps(self):
        gaps = bytes(self.rng.choice([0, 1, 30, 254, 255]) for _ in range(self.rng.randrange(300)))
        return [self.buffer(gaps), self.room(self.rng.choice([8000, self.length()]))]

    def update(self):
        numel = self.length()
        layers = [(mask, self.codes(mask)) for mask in (self.mask(numel), self.mask(numel))]
        chosen = layers[: self.rng.randrange(1, 3)]
        rooms = self.room(4 * numel), self.room(4 * numel)
        base = self.buffer(self.rng.randbytes(2 * numel))
        return [base, self.rng.randrange(2), *rooms, *(self.buffer(part) for layer in chosen for part in layer)]

    def magnitudes(self):
        numel = self.length()
        deltas = [self.buffer(self.rng.randbytes(4 * numel)) for _ in range(self.rng.randrange(5))]
        agents = [(delta, self.buffer(self.rng.randbytes(numel))) for delta in deltas]
        return [self.buffer(self.rng.randbytes(4 * numel)), agents]

    def uniform(self):
        return [self.room(4 * self.length()), self.rng.choice([0, -1, self.rng.getrandbits(70)])]

    def histogram(self):
        values = self.buffer(self.rng.randbytes(4 * self.length()))
        return [values, self.rng.choice([-1, 0, 0x3C00, 0x7FFF, 2**31 - 1]), self.room(8 * 65536)]

    def mutate(self, arguments):
        """Something else in one place, at any depth."""
        at = self.rng.randrange(len(arguments))
        value = arguments[at]
        if isinstance(value, (list, tuple)) and value and self.rng.random() < 0.8:
            inner = list(value)
            self.mutate(inner)
            arguments[at] = type(value)(inner)
        elif isinstance(value, memoryview) and self.rng.random() < 0.8:
            data = bytearray(value)
            if data and self.rng.random() < 0.5:
                data[self.rng.choice([0, -1, self.rng.randrange(len(data))])] ^= 1 << self.rng.randrange(8)
            else:
                size = self.rng.choice([0, len(data) - 1, len(data) + 1, len(data) // 2, len(data) + 8])
                data = data[: max(0, size)].ljust(size, b"\xff")
            arguments[at] = self.buffer(bytes(data))
        else:
            junk = [None, "text", 3, -1, 10**30, 0.5, b"", b"\xff" * 9, [], (), [b"\xff"], (1, b"", b"", 1.0, 1.0)]
            arguments[at] = self.rng.choice([*junk, float("nan"), object(), self.buffer(b"\x00\xff")])


def main(path, seed, calls):
    kernels, fuzz = load(path), Fuzz(seed)
    names = ["merge", "encode", "apply", "count", "pack_gaps", "unpack_gaps"]
    names += ["update", "magnitudes", "uniform", "histogram"]
    done = dict.fromkeys(names, 0)
    refused = dict(done)
    for _ in range(calls):
        name = fuzz.rng.choice(list(done))
        arguments = getattr(fuzz, name)()
        for _ in range(fuzz.rng.choice([0, 0, 1, 1, 2])):
            fuzz.mutate(arguments)
        kernels.use_level(fuzz.rng.choice(kernels.LEVELS))
        try:
            getattr(kernels, name)(*arguments)
            done[name] += 1
        except REFUSED:
            refused[name] += 1
        # refuses as long as the loops hold on to a buffer
        for view in fuzz.buffers:
            view.release()
        fuzz.buffers.clear()
    assert all(done.values()) and all(refused.values()), (done, refused)
    print(done, refused)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
