"""The compiled loops and arguments that do not fit: an error, never a crash; and they let other threads work."""

import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ram_trl.arithmetic import kernels


if kernels.compiled is None:
    pytest.skip("the loops are not compiled here", allow_module_level=True)

FUZZ = Path(__file__).with_name("run_kernel_fuzz.py")
SOURCE = Path(kernels.__file__).with_name("_kernels.c")
BFLOAT16, FLOAT16, FLOAT32 = range(3)


def room(nbytes):
    return np.zeros(nbytes, np.uint8)


def encode(numel, base=None, agent=None, dtype=BFLOAT16, threshold=1e-5, **rooms):
    """Encode with buffers that fit, but for those that are given."""
    base = room(2 * numel) if base is None else base
    agent = room(2 * numel) if agent is None else agent
    fitting = {"masks": (numel + 7) // 8, "codes": numel + 64, "escapes": 2 * numel}
    pairs = [rooms.get(name, (room(size), room(size))) for name, size in fitting.items()]
    return kernels.compiled.encode(base, agent, dtype, threshold, *pairs)


def merge(agents, numel=10, base_dtype=BFLOAT16, out=None, key=None):
    width = 4 if base_dtype == FLOAT32 else 2
    out = room(2 * numel) if out is None else out
    return kernels.compiled.merge(out, BFLOAT16, room(width * numel), base_dtype, agents, 1e-5, key)


# mask and payload of 10 elements that do not fit each other
DAMAGED = {
    "short mask": ("01", "01"),
    "long mask": ("01 00 00", "01"),
    "no mask": ("", ""),
    "bit beyond the last element": ("01 04", "01 01"),
    "every bit set": ("ff ff", "01" * 16),
    "no codes": ("01 00", ""),
    "too few codes": ("ff 00", "01" * 7),
    "too many codes": ("03 00", "01" * 3),
    "codes without a mask": ("00 00", "01"),
    "no escape": ("01 00", "00"),
    "half an escape": ("01 00", "00 01"),
    "escape that no code asks for": ("01 00", "01 01 01"),
    "two escapes for one": ("01 00", "00 01 01 01 01"),
    "one escape for two": ("03 00", "00 00 01 01"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layers_are_refused_and_change_nothing(case):
    mask, payload = map(bytes.fromhex, DAMAGED[case])
    values = np.full(10, 7, np.int16)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.compiled.apply(values, mask, payload)
    assert (values == 7).all()
    with pytest.raises(ValueError, match="do not fit"):
        merge([(True, b"\x01\x00", b"\x01", 0.0, 1.0), (True, mask, payload, 0.0, 1.0)])


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_second_layer_is_refused(case):
    mask, payload = map(bytes.fromhex, DAMAGED[case])
    with pytest.raises(ValueError, match="do not fit"):
        merge([(True, b"\x01\x00", b"\x01", 0.0, 1.0, mask, payload)])
    with pytest.raises(ValueError, match="do not fit"):
        kernels.compiled.update(room(20), BFLOAT16, room(40), room(40), b"\x01\x00", b"\x01", mask, payload)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.compiled.update(room(20), BFLOAT16, room(40), room(40), mask, payload)


@pytest.mark.parametrize(("values", "deltas"), [(39, 40), (40, 39), (40, 44), (0, 0), (20, 20)])
def test_values_and_deltas_of_another_length_are_refused(values, deltas):
    with pytest.raises(ValueError):
        merge([(False, room(values), room(deltas), 0.0, 1.0)])


def test_differences_from_float32_are_refused():
    with pytest.raises(ValueError):
        merge([(True, b"\x01\x00", b"\x01", 0.0, 1.0)], base_dtype=FLOAT32)


@pytest.mark.parametrize("nbytes", [0, 19, 21, 40])
def test_result_of_another_length_is_refused(nbytes):
    with pytest.raises(AssertionError):
        merge([], out=room(nbytes))


@pytest.mark.parametrize("name", ["masks", "codes", "escapes"])
def test_too_little_room_for_differences_is_refused(name):
    for numel in (1, 8, 9, 1024):
        fitting = {"masks": (numel + 7) // 8, "codes": numel + 64, "escapes": 2 * numel}[name]
        for sizes in ((fitting - 1, fitting), (fitting, fitting - 1), (0, 0)):
            with pytest.raises(AssertionError):
                encode(numel, **{name: tuple(room(size) for size in sizes)})


@pytest.mark.parametrize("options", [{"agent": room(18)}, {"agent": room(22)}, {"base": room(21)}, {"dtype": FLOAT32}])
def test_tiles_that_do_not_fit_are_refused(options):
    with pytest.raises(AssertionError):
        encode(10, **options)


def test_threshold_below_0_is_refused():
    # room for what it writes beyond the escapes of 9 elements, the bits behind the last of them
    escapes = tuple(room(100) for _ in range(2))
    with pytest.raises((ValueError, AssertionError)):
        encode(9, threshold=-1.0, escapes=escapes)


def test_masks_of_different_lengths_and_too_many_of_them_are_refused():
    with pytest.raises(AssertionError):
        kernels.compiled.count([room(8), room(9)])
    with pytest.raises(AssertionError):
        kernels.compiled.count([b""] * 2**16)


def test_counts_that_do_not_fit_are_refused():
    for values, counts in ((room(3), room(8 * 65536)), (room(4), room(8 * 65536 - 8)), (room(4), room(4 * 65536))):
        with pytest.raises(AssertionError):
            kernels.compiled.histogram(values, -1, counts)


def test_updates_and_masks_that_do_not_fit_are_refused():
    for base, dtype, values, deltas in ((19, BFLOAT16, 36, 36), (20, FLOAT32, 40, 40), (20, FLOAT16, 40, 36)):
        with pytest.raises(AssertionError):
            kernels.compiled.update(room(base), dtype, room(values), room(deltas), b"\x01\x00", b"\x01")
    for applied, deltas, mask in ((40, 36, 10), (40, 40, 9), (41, 41, 10)):
        with pytest.raises(AssertionError):
            kernels.compiled.magnitudes(room(applied), [(room(deltas), room(mask))])


def test_gaps_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError):
        kernels.compiled.pack_gaps(b"\x03", room(1))
    with pytest.raises(AssertionError):
        kernels.compiled.pack_gaps(bytes(100) + b"\x01", room(3))
    for gaps in (b"\x08", b"\x07\x00", b"\xff\x00", bytes(9)):
        with pytest.raises(ValueError):
            kernels.compiled.unpack_gaps(gaps, room(1))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("apply", (bytes(2), b"\x01", b"\x01")),  # not to be written to
        ("apply", (room(2), None, b"\x01")),
        ("apply", (room(2), "text", b"\x01")),
        ("apply", (np.zeros((4, 4), np.int16)[:, 0], b"\x01", b"\x01")),  # not contiguous
        ("apply", ()),
        ("merge", (room(2), 0, room(2), 0, None, 0.0, None)),
        ("merge", (room(2), 0, room(2), 0, 5, 0.0, None)),
        ("merge", (room(2), 0, room(2), 0, [(True, b"\x01")], 0.0, None)),
        ("merge", (room(2), 0, room(2), 0, [(True, b"\x01", b"\x01", "1", 1.0)], 0.0, None)),
        ("merge", (room(2), 0, room(2), 0, [(True, b"\x01", b"\x01", 0.0, 1.0, b"\x00")], 0.0, None)),
        ("merge", (room(2), 0, room(2), 0, [], 0.0, 1.5)),
        ("merge", (room(2), "BF16", room(2), 0, [], 0.0, None)),
        ("update", (room(2), 0, room(4), room(4), b"\x01", b"\x01", b"\x01")),
        ("update", (room(2), 0, room(4), room(4), b"\x01")),
        ("magnitudes", (room(4), [[room(4), room(1)]])),
        ("magnitudes", (room(4), [(room(4),)])),
        ("uniform", (bytes(4), 0)),
        ("uniform", (room(4), 0.5)),
        ("histogram", (room(4), "upper", room(8 * 65536))),
        ("histogram", (room(4), -1, bytes(8 * 65536))),
        ("count", ([b"\x01", None],)),
        ("count", (7,)),
        ("pack_gaps", (b"\x01", bytes(9))),
        ("unpack_gaps", (b"\x01", bytes(9))),
        ("encode", (room(2), room(2), 0, 0.0, (room(1),) * 2, (room(9),) * 2, (room(2),))),
        ("use_level", ("v5",)),
        ("use_level", (None,)),
    ],
)
def test_arguments_of_another_kind_are_refused(name, arguments):
    with pytest.raises((TypeError, ValueError)):
        getattr(kernels.compiled, name)(*arguments)


def test_agents_that_are_no_tuples_are_refused():
    with pytest.raises(TypeError):
        merge([[True, b"\x01\x00", b"\x01", 0.0, 1.0]])


def test_refused_calls_keep_no_buffer():
    values, mask, payload = bytearray(20), bytearray(2), bytearray(1)
    for call in (
        lambda: kernels.compiled.apply(values, mask, payload),
        lambda: merge([(True, mask, payload, 0.0, 1.0)], out=values),
        lambda: merge([(True, mask, payload, 0.0, 1.0), (True, mask, None, 0.0, 1.0)], out=values),
        lambda: merge([], out=values, key="text"),
        lambda: kernels.compiled.count([values, mask]),
        lambda: encode(10, base=values, agent=mask),
    ):
        with pytest.raises((ValueError, AssertionError, TypeError)):
            call()
        for buffer in (values, mask, payload):
            # a BufferError if someone still reads it
            buffer.append(0)
            buffer.pop()


def fuzz(library, seed, calls, **environment):
    command = [sys.executable, "-X", "faulthandler", str(FUZZ), str(library), str(seed), str(calls)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("seed", range(2))
def test_no_arguments_crash_the_process(seed):
    result = fuzz(kernels.compiled.__file__, seed, 4000)
    assert result.returncode == 0, result.stdout + result.stderr


def library_of_gcc(name):
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if Path(path).is_absolute() else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """A build that checks every access to memory and every operation, and the library that it needs first."""
    try:
        sanitizer = library_of_gcc("libasan.so")
    except OSError:
        sanitizer = None
    headers = sysconfig.get_paths()["include"]
    if sanitizer is None or not Path(headers, "Python.h").exists():
        pytest.skip("no gcc with the address sanitizer, or no headers of Python")
    library = tmp_path_factory.mktemp("sanitized") / "_kernels.so"
    options = ["-O1", "-g", "-shared", "-fPIC", "-ffp-contract=off", f"-I{headers}"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["gcc", *options, *checks, str(SOURCE), "-o", str(library), "-lm"]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip("gcc lacks a library for the sanitizers")
    assert built.returncode == 0, built.stderr
    # Python's own allocator would hide what lies between the buffers
    return library, {"LD_PRELOAD": sanitizer, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}


@pytest.mark.parametrize("seed", range(2, 4))
def test_no_arguments_reach_beyond_the_buffers(sanitized, seed):
    library, environment = sanitized
    result = fuzz(library, seed, 4000, **environment)
    assert result.returncode == 0, result.stdout + result.stderr


def long_calls():
    """Calls that take some hundredths of a second or more."""
    numel = 1 << 24
    mask, codes, values = np.full(numel // 8, 0xFF, np.uint8), np.ones(numel, np.int8), np.zeros(numel, np.int16)
    pairs = [(np.empty(size, np.uint8), np.empty(size, np.uint8)) for size in (numel // 8, numel + 64, 2 * numel)]
    tile = 1 << 21
    agents = [(True, mask[: tile // 8], codes[:tile], 0.1, 1.0)]
    yield "merge", (values[:tile], BFLOAT16, values[tile : 2 * tile].copy(), BFLOAT16, agents, 1e-5, 1)
    yield "encode", (values, values + np.arange(numel).astype(np.int16), BFLOAT16, 1e-5, *pairs)
    yield "apply", (values, mask, codes)
    yield "count", ([mask] * 30,)
    yield "update", (values, BFLOAT16, np.empty(numel, np.float32), np.empty(numel, np.float32), mask, codes)
    deltas = np.ones(numel, np.float32)
    yield "magnitudes", (deltas, [(deltas, codes)] * 3)
    yield "uniform", (np.empty(numel, np.float32), 5)
    yield "histogram", (np.arange(numel, dtype=np.float32), -1, np.zeros(65536, np.int64))
    yield "pack_gaps", (mask, np.empty(numel, np.uint8))
    yield "unpack_gaps", (np.zeros(numel, np.uint8), mask)


def goes_on_during(function, arguments):
    """Whether this thread does something in the middle of a call by another."""
    bounds, moments = [], []

    def call():
        bounds.append(time.perf_counter())
        function(*arguments)
        bounds.append(time.perf_counter())

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        moments.append(time.perf_counter())
    begin, end = bounds
    quarter = (end - begin) / 4
    return any(begin + quarter < moment < end - quarter for moment in moments)


@pytest.fixture
def slowest_level():
    kernels.compiled.use_level(kernels.compiled.LEVELS[0])
    yield
    kernels.compiled.use_level(kernels.compiled.LEVELS[-1])


def test_other_threads_go_on_meanwhile(slowest_level):
    for name, arguments in long_calls():
        # on a busy machine this thread may have to wait for a processor
        assert any(goes_on_during(getattr(kernels.compiled, name), arguments) for _ in range(10)), name
